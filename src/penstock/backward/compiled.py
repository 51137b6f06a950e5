"""Which modules run as they are: no weight gradient inside them can wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

# Classes by name, since most of them live in parts of torch that this one does not import.
_REASONS = {
    "OptimizedModule": "it is compiled",
    "ScriptModule": "it is a TorchScript module",
    "FSDPModule": "FSDP reduces its gradients in the inputs' half",
    "FullyShardedDataParallel": "FSDP reduces its gradients in the inputs' half",
}


def opaque_modules(root: nn.Module) -> tuple[set[nn.Module], str | None]:
    """Returns the modules to leave alone, with all inside them, and why the first of them is."""
    opaque: set[nn.Module] = set()
    first = None
    for name, module in root.named_modules():
        reason = _reason(module)
        if reason is not None:
            opaque.update(module.modules())
            first = first or f"{name or type(module).__name__}: {reason}"
    return opaque, first


def _reason(module: nn.Module) -> str | None:
    for kind in type(module).__mro__:
        if kind.__name__ in _REASONS:
            return _REASONS[kind.__name__]
    if module._compiled_call_impl is not None or _is_compiled(vars(module).get("forward")):
        return "it is compiled"
    if _is_searching(module):
        return "DistributedDataParallel searches the graph for its parameters"
    return None


def _is_compiled(forward: Callable[..., Any] | None) -> bool:
    return hasattr(forward, "_torchdynamo_orig_callable")


def _is_searching(module: Any) -> bool:
    if type(module).__name__ != "DistributedDataParallel":
        return False
    return bool(module.find_unused_parameters or module.static_graph)
