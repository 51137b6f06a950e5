"""Seeds in a traced graph, at the places where the calls of modules began and ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx, nn

from penstock.draws import Streams, named, visible

torch.library.define("penstock::draw", "(str path, int call, bool after) -> ()")


@torch.library.impl("penstock::draw", "CompositeExplicitAutograd")
def _draw(path: str, call: int, after: bool) -> None:
    Streams.seed_as(path, call, after=after)


@contextmanager
def seeded(model: nn.Module, training: bool) -> Iterator[None]:
    """Note in the graph of a training call where each module's calls begin and end."""
    with ExitStack() as hooks:
        for module, paths in visible(model).items() if training else ():
            before, after = _hooks(paths)
            # After the marks of cuts: what is drawn from a border on belongs to the later stage.
            hooks.callback(module.register_forward_pre_hook(before).remove)
            hooks.callback(module.register_forward_hook(after).remove)
        yield


def _hooks(paths: tuple[str, ...]) -> tuple[Any, Any]:
    open_calls: list[int] = []
    calls: Counter[str] = Counter()

    def before(module: nn.Module, args: Any) -> None:
        del module, args
        open_calls.append(calls[""])
        calls[""] += 1
        torch.ops.penstock.draw(*named(paths, open_calls[-1]), False)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        del module, args, output
        torch.ops.penstock.draw(*named(paths, open_calls.pop()), True)

    return before, after


def drop_idle_seeds(graph: fx.Graph) -> None:
    """Keep only the notes after which something is drawn."""
    idle: fx.Node | None = None
    for node in list(graph.nodes):
        if _is_seed(node):
            if idle is not None:
                graph.erase_node(idle)
            idle = node
        elif _may_draw(node):
            idle = None
    if idle is not None:
        graph.erase_node(idle)


def _is_seed(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is torch.ops.penstock.draw.default


def _may_draw(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        # A region with a graph of its own may do anything.
        return any(used.op == "get_attr" and used.target for used in node.all_input_nodes)
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return True
    return any("dropout" in argument.name for argument in node.target._schema.arguments)
