"""Seeds in a traced graph, before what draws: the place in the model that it stands at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx, nn

from penstock.errors import PartitionError
from penstock.rng import Place, Streams, can_draw, has_drawn, noticed

torch.library.define("penstock::draw", "(str address, bool after, int draws) -> ()")


@torch.library.impl("penstock::draw", "CompositeExplicitAutograd")
def _draw(address: str, after: bool, draws: int) -> None:
    Streams.go_to(address, draws, after=after)


@contextmanager
def seeded(model: nn.Module, modules: Mapping[nn.Module, tuple[str, ...]]) -> Iterator[None]:
    """Note in the graph where the calls of modules that may draw begin and end.

    Args:
        model: what is traced.
        modules: those, with their paths.

    Raises:
        PartitionError: the model draws in a way that no graph shows.
    """
    notes = _Notes()
    with ExitStack() as hooks:
        hooks.enter_context(noticed(notes.drew))
        for module, paths in {model: (), **modules}.items():
            before, after = notes.hooks(paths)
            # After the marks of cuts: what is drawn from a border on belongs to the later stage.
            hooks.callback(module.register_forward_pre_hook(before).remove)
            hooks.callback(module.register_forward_hook(after).remove)
        yield
    if notes.unseen:
        raise PartitionError(
            f"the {type(model).__name__} {notes.unseen} in its forward, which torch.export would drop; "
            'cut it by module calls instead, with how="calls"'
        )


class _Notes:
    """The module calls that are open while a model is traced."""

    def __init__(self) -> None:
        self._open = [Place()]
        self._state = 0
        self.unseen = ""

    def hooks(self, paths: tuple[str, ...]) -> tuple[Any, Any]:
        """What to call before and after a module that has these paths, or none where it is the model."""

        def before(*_: Any) -> None:
            self._open.append(self._open[-1].next(paths) if paths else Place())
            self._note(after=False)

        def after(*_: Any) -> None:
            self._note(after=True)
            self._open.pop()

        return before, after

    def _note(self, *, after: bool) -> None:
        torch.ops.penstock.draw(self._open[-1].address, after, 0)
        if not torch.compiler.is_dynamo_compiling():
            self._set_state()

    def _set_state(self) -> None:
        self._state += 1
        torch.default_generator.manual_seed(self._state)

    def drew(self, generator: torch.Generator | None) -> None:
        """See who draws. While tracing, nobody changes the state by that."""
        if generator is not None:
            self.unseen = "draws from a torch.Generator of its own"
        elif torch.default_generator.initial_seed() != self._state:
            self.unseen = "sets the state of torch's random numbers"
        self._set_state()


def place_seeds(module: fx.GraphModule) -> None:
    """Put a seed before each node that draws, instead of the notes at the module calls."""
    _place_seeds(module, ("", False, 0))


def _place_seeds(module: fx.GraphModule, place: tuple[str, bool, int]) -> tuple[str, bool, int]:
    graph = module.graph
    for node in list(graph.nodes):
        regions = _regions(module, node)
        if _is_note(node):
            place = node.args
            graph.erase_node(node)
        elif regions:
            for region in regions:
                place = _place_seeds(region, place)
        elif _draws(node):
            with graph.inserting_before(node):
                graph.call_function(torch.ops.penstock.draw.default, place)
            if node.target.overloadpacket is torch.ops.aten.randint_like:
                _detach_argument(node)
            address, after, draws = place
            place = address, after, draws + 1
    module.recompile()
    return place


def _detach_argument(node: fx.Node) -> None:
    """Take its shape alone: in a graph autograd would ask this operation for a derivative."""
    given = node.args[0]
    assert isinstance(given, fx.Node)
    with node.graph.inserting_before(node):
        plain = node.graph.call_function(torch.ops.aten.detach.default, (given,))
    plain.meta.update(given.meta)
    node.update_arg(0, plain)


def _is_note(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is torch.ops.penstock.draw.default


def _regions(module: fx.GraphModule, node: fx.Node) -> list[fx.GraphModule]:
    """The graphs that a node runs, such as what is under ``torch.no_grad()``."""
    if node.op != "call_function":
        return []
    used = [
        getattr(module, str(n.target), None) for n in node.all_input_nodes if n.op == "get_attr"
    ]
    return [found for found in used if isinstance(found, fx.GraphModule)]


def _draws(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    return can_draw(node.target) and has_drawn(node.target, node.args, node.kwargs)
