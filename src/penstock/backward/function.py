"""A custom autograd function that offers its two halves of backward separately."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from penstock import compiled
from penstock.backward.operations import Gradients
from penstock.backward.store import Use, WeightGradStore


class SplitFunction(ABC):
    """A custom function whose weights' gradients can wait; use it like ``torch.autograd.Function``.

    A subclass says with ``weights`` which arguments are weights, by position, and defines three
    static methods. Forward's ``ctx`` is autograd's, without ``needs_input_grad``; that of the halves
    has ``saved_tensors`` and what forward has set on it, other than ``split``. Where the weights' half does
    not wait, both halves run one after the other::

        class Scale(SplitFunction):
            weights = (1,)

            @staticmethod
            def forward(ctx, x, scale):
                ctx.save_for_backward(x, scale)
                return x * scale

            @staticmethod
            def backward_input(ctx, grad):
                return grad * ctx.saved_tensors[1], None

            @staticmethod
            def backward_weight(ctx, grad):
                return ((grad * ctx.saved_tensors[0]).sum(0),)

        y = Scale.apply(x, scale)
    """

    weights: ClassVar[tuple[int, ...]]

    @staticmethod
    @abstractmethod
    def forward(ctx: Any, *args: Any) -> Any:
        """Returns the output; saves for backward as usual."""

    @staticmethod
    @abstractmethod
    def backward_input(ctx: Any, *grads: Any) -> Sequence[Tensor | None]:
        """Returns a gradient or None for each argument of forward; None for the weights."""

    @staticmethod
    @abstractmethod
    def backward_weight(ctx: Any, *grads: Any) -> Sequence[Tensor | None]:
        """Returns a gradient or None for each weight, in the order of ``weights``."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Runs forward on positional arguments."""
        return cast("Any", _Split).apply(cls, *args)


class _Split(torch.autograd.Function):
    """Both halves one after the other, unless the weights' is left to a use."""

    @staticmethod
    def forward(ctx: Any, kind: type[SplitFunction], *args: Any) -> Any:
        ctx.split = SimpleNamespace(kind=kind, places=_places(kind, args), use=None)
        return kind.forward(ctx, *args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        split, kept = ctx.split, _kept(ctx)
        found = list(split.kind.backward_input(kept, *grads))
        if split.use is not None:
            split.use.keep(partial(split.kind.backward_weight, kept, *grads))
        elif any(ctx.needs_input_grad[1 + position] for position in split.kind.weights):
            of_weights = split.kind.backward_weight(kept, *grads)
            for position, grad in zip(split.kind.weights, of_weights, strict=True):
                found[position] = grad
        return None, *found


SPLIT: type = _Split._backward_cls
"""The type of the nodes of such functions."""


class FunctionUse(Use):
    """A call of a `SplitFunction` or of a compiled function.

    Args:
        positions: Which gradients of the weights' half go to the edges; None for all, in their order.
        place: As of `Use`.
    """

    __slots__ = ("_compute", "_positions", "_store")

    def __init__(self, positions: Sequence[int] | None, *place: Any) -> None:
        super().__init__(*place)
        self._positions = positions

    def watch(self, store: WeightGradStore) -> None:
        """Gets into ``store`` once a gradient arrives at the node."""
        self._store = store
        self.node.split.use = self

    def keep(self, compute: Callable[[], Gradients]) -> None:
        """Leaves the weights' half of the function to the store."""
        self._store.uses.append(self)
        self.node.split.use = None
        self._compute = compute
        del self._store, self.node

    def gradients(self) -> Gradients:
        """Computes a gradient or None for each edge, and forgets what it was computed from."""
        found = self._compute()
        del self._compute
        return found if self._positions is None else [found[p] for p in self._positions]


def compiled_weights_of(node: Any) -> Sequence[int]:
    """Returns which edges lead to weights in a node of a compiled function, where that can be split too."""
    return _places_in()(node) if type(node).__name__ == _COMPILED else ()


@cache
def _places_in() -> Callable[[Any], Sequence[int]]:
    # Most programs compile nothing, and it takes seconds to import.
    return compiled.places_in


_COMPILED = "CompiledFunctionBackward"


def weights_of(node: Any) -> dict[int, int]:
    """Returns which of a function's weights have which of the node's edges."""
    edges = node.next_functions
    places = enumerate(node.split.places)
    return {index: place for index, place in places if place is not None and edges[place][0]}


def _places(kind: type[SplitFunction], args: Sequence[Any]) -> list[int | None]:
    """Returns for each weight its place among the arguments that are tensors, which have edges."""
    tensors = [position for position, value in enumerate(args) if isinstance(value, Tensor)]
    return [tensors.index(p) if p in tensors else None for p in kind.weights]


def _kept(ctx: Any) -> SimpleNamespace:
    """Returns what both halves may use: a checkpoint lets saved tensors be taken once only."""
    names = {name: value for name, value in vars(ctx).items() if name != "split"}
    return SimpleNamespace(**names, saved_tensors=ctx.saved_tensors)
