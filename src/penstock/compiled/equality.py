"""When two captured graphs are the same, so that what one was compiled to does for both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from penstock.compiled.names import global_state, is_wrapper, storage_of

_CONSTANTS: set[Any] = {bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype}
_CONSTANTS |= {torch.device, torch.layout, torch.memory_format, torch.Size}


class _UnlikeError(Exception):
    """Something that cannot be compared."""


def key_of(graph: GraphModule, inputs: Sequence[Any]) -> str | None:
    """Returns a text that two graphs share if they compute the same of inputs that are alike.

    None says that it holds for this graph alone: sizes are open, inputs share memory, or it has constants.
    """
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    if len(tensors) < len(inputs) or any(map(is_wrapper, tensors)):
        return None
    if len(set(map(storage_of, tensors))) < len(tensors):
        return None
    try:
        return "\n".join([global_state(), *map(_input, tensors), *_lines(graph)])
    except _UnlikeError:
        return None


def _input(value: Tensor) -> str:
    shape = (*value.shape, *value.stride(), value.storage_offset())
    if not all(type(size) is int for size in shape):
        raise _UnlikeError
    kind = "weight" if isinstance(value, nn.Parameter) else "value"
    told = value.dtype, value.device, value.requires_grad, value.is_conj(), value.is_neg()
    return f"{kind} {shape} {told}"


def _lines(graph: GraphModule) -> Iterable[str]:
    places: dict[Node, str] = {}
    for node in graph.graph.nodes:
        places[node] = f"v{len(places)}"
        inner = node.target if isinstance(node.target, str) else None
        if node.op == "placeholder":
            yield places[node]
        elif node.op in {"get_attr", "call_module"}:
            yield from _attribute(graph, str(inner))
        target = inner if node.op == "call_method" else _function(node.target)
        yield f"{node.op} {target} {_text(node.args, places)} {_text(node.kwargs, places)}"


def _attribute(graph: GraphModule, name: str) -> Iterable[str]:
    value: Any = graph
    for part in name.split("."):
        value = getattr(value, part)
    if not isinstance(value, GraphModule):
        raise _UnlikeError
    yield from _lines(value)


def _function(target: Any) -> str:
    # Functions are told apart by where they are: two of one name may do different things.
    return "" if isinstance(target, str) else f"{target} {id(target)}"


def _text(value: Any, places: dict[Node, str]) -> str:
    if isinstance(value, Node):
        return places[value]
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(_text(each, places) for each in value)})"
    if isinstance(value, dict):
        return ", ".join(f"{key!r}: {_text(each, places)}" for key, each in value.items())
    if isinstance(value, slice):
        return f"slice{_text((value.start, value.stop, value.step), places)}"
    if type(value) not in _CONSTANTS:
        raise _UnlikeError
    return repr(value)
