"""The backward of a compiled graph in halves, found where a walk over autograd's graph comes to its node.

AOT autograd makes of a compiled graph one node, whose backward is a graph as well, and keeps that. When a
node of a kind is seen for the first time, the graph is cut in two and both halves are compiled; from then on
all nodes of the kind run them one after the other, or leave the second to whoever asks for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from time import perf_counter
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule

from penstock.compiled import names
from penstock.compiled.cut import CutError, Halves, Policy, cut
from penstock.compiled.plain import Function
from penstock.errors import StageError

log = logging.getLogger("penstock")


def places_in(node: Any) -> Sequence[int]:
    """Returns which edges of a compiled node lead to weights whose gradients can wait; none if it is not cut.

    The node has what its backward looks for then: ``node.split.use``, which may be set to what keeps the
    weights' half.
    """
    kind = type(node)
    if not hasattr(kind, _CUT):
        setattr(kind, _CUT, _cut(node))
    backward: Backward | None = getattr(kind, _CUT)
    if backward is None:
        return ()
    node.split = SimpleNamespace(use=None)
    return backward.places


_CUT = "cut_by_penstock"


def _cut(node: Any) -> Backward | None:
    """Cuts the backward of a kind of nodes; says so if that is not possible."""
    weights = dict(_weights_of(node))
    if not weights:
        return None
    started = perf_counter()
    try:
        later = names.backward_of(node)
        make = partial(_backward, weights=weights, later=later)
        backward: Backward | None = later.compiled(make)
    except Exception as error:
        told = str(error) if isinstance(error, _EXPECTED) else f"{type(error).__name__}: {error}"
        log.warning("weight gradients do not wait in a compiled part of a stage: %s", told)
        return None
    if backward is not None:
        later.run_instead(backward)
        done, count = perf_counter() - started, len(backward.places)
        log.info(
            "compiled a backward pass in two halves in %.1f s; weights that wait: %d", done, count
        )
    return backward


_EXPECTED = names.UnknownError, CutError


def _weights_of(node: Any) -> Iterator[tuple[int, int]]:
    """Yields of each weight its place among the arguments of forward, and among the node's edges."""
    asked = (place for place, needed in enumerate(node.needs_input_grad) if needed)
    # Only tensors have edges, and those that need no gradient lead nowhere.
    edges = enumerate(node.next_functions)
    for place, (edge, (below, _)) in zip(asked, ((e, to) for e, to in edges if to[0]), strict=True):
        if isinstance(getattr(below, "variable", None), nn.Parameter):
            yield place, edge


def _backward(
    graph: GraphModule,
    inputs: Sequence[Any],
    compile_: Callable[..., Any],
    weights: dict[int, int],
    later: names.Later,
) -> Backward | None:
    """Compiles a backward graph in halves, or returns None if nothing of it can wait.

    Args:
        graph: The graph.
        inputs: Its inputs, without data.
        compile_: Compiles a graph.
        weights: As of `_weights_of`.
        later: Where the graph comes from.
    """
    names.propagate(graph, inputs)
    policy = later.noted or Policy(fused=later.is_fused)
    # So AOT autograd calls the arguments of forward where it has saved them for backward.
    free = {f"primals_{place + 1}" for place in weights}
    halves = cut(graph, list(weights), policy, free)
    if not halves.left:
        return None
    first, second = (
        _boxed(compile_(half, _values(half))) for half in (halves.inputs, halves.weights)
    )
    places = tuple(weights[place] for place in halves.left)
    return Backward(halves, first, second, later.whole(), places)


def _values(graph: GraphModule) -> list[Any]:
    return [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]


def _boxed(function: Any) -> Function:
    if hasattr(function, "_boxed_call"):
        return function  # type: ignore[no-any-return]
    return lambda args: function(*args)


class Backward:
    """The backward pass of a kind of compiled nodes, as AOT autograd calls it.

    Args:
        halves: How it is cut.
        inputs: The inputs' half, compiled.
        weights: The weights' half, compiled.
        whole: Both as one.
        places: Which of a node's edges lead to the weights that may wait.
    """

    def __init__(
        self,
        halves: Halves,
        inputs: Function,
        weights: Function,
        whole: Function,
        places: Sequence[int],
    ) -> None:
        self.places = places
        self._halves, self._given = halves, len(halves.given)
        self._hold, self._take = _picking(halves.held), _picking(halves.taken)
        # Of the gradients that are given, with None behind them.
        of = {place: index for index, place in enumerate(halves.given)}
        self._spread = _picking([of.get(place, len(of)) for place in range(halves.count)])
        self._inputs, self._weights, self._whole = inputs, weights, whole
        # So AOT autograd calls it with a list that it may empty.
        self._boxed_call = True

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Returns a gradient or None for each argument of forward; leaves those of weights to a use."""
        split = getattr(names.running_node(), "split", None)
        if split is None or split.use is None:
            found: Sequence[Any] = self._whole(args)
            return found
        held, taken = self._hold(args), [*self._take(args)]
        args.clear()
        made = self._inputs(taken)
        kept = self._halves.in_order(held, made[self._given :])
        split.use.keep(partial(self._later, kept, _versions(kept)))
        return self._spread([*made[: self._given], None])

    def _later(self, kept: list[Any], versions: list[int]) -> Sequence[Tensor | None]:
        if _versions(kept) != versions:
            now = zip(kept, _versions(kept), versions, strict=True)
            changed = next(value for value, found, before in now if found != before)
            raise StageError(
                "an input of a compiled module was changed in place between the inputs' half "
                f"and the weights' half of backward; its shape is {tuple(changed.shape)}"
            )
        with names.autocast_disabled():
            found: Sequence[Tensor | None] = self._weights(kept)
        return found


def _picking(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Returns what picks the values at some places, in one call of C where there are several."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda values: [values[place] for place in places]


def _versions(values: list[Any]) -> list[int]:
    try:
        return [*map(_version, values)]
    except AttributeError:
        # Sizes are among them, as numbers.
        return [getattr(value, "_version", 0) for value in values]


_version = attrgetter("_version")
