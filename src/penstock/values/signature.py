"""Which arguments a module takes by name."""

from __future__ import annotations

import inspect

from torch import nn

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def named_arguments(module: nn.Module) -> tuple[str, ...]:
    """The arguments that a module's forward names, in its order.

    A module that leads arguments on to others says so itself, by an attribute ``takes``; one that wraps
    another, as ``DistributedDataParallel`` and ``torch.compile`` do, takes what that one takes.
    """
    takes = getattr(module, "takes", None)
    if isinstance(takes, tuple):
        return takes
    parameters = inspect.signature(module.forward).parameters.values()
    inner = dict(module.named_children())
    if any(found.kind is inspect.Parameter.VAR_KEYWORD for found in parameters):
        for wrapped in inner.keys() & {"module", "_orig_mod"}:
            return named_arguments(inner[wrapped])
    return tuple(found.name for found in parameters if found.kind in _NAMED)
