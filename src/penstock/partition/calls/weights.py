"""How heavy modules are."""

from __future__ import annotations

from torch import nn


def count_parameters(module: nn.Module) -> int:
    """How many numbers a module's parameters hold."""
    return sum(parameter.numel() for parameter in module.parameters())
