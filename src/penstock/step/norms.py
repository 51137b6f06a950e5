"""The norm of all gradients of a pipeline, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from penstock.errors import UsageError


def squared_norms(parameters: Sequence[Tensor]) -> Tensor:
    """The squared 2-norm of each parameter's gradient, 0 where there is none: float64 on the CPU."""
    norms = [
        torch.linalg.vector_norm(p.grad) if p.grad is not None else torch.zeros(())
        for p in parameters
    ]
    if not norms:
        return torch.zeros(0, dtype=torch.float64)
    return torch.stack([norm.cpu().double() for norm in norms]).square()


def scale_gradients(parameters: Iterable[Tensor], norm: float, largest: float) -> None:
    """Scale gradients so that a total norm of ``norm`` becomes at most ``largest``.

    Of a norm that is no number all gradients become none, as with torch's own clipping.

    Raises:
        UsageError: ``largest`` is below 0, which would turn gradients round, or no number.
    """
    if not largest >= 0:
        raise UsageError(f"max_norm={largest}: must be at least 0")
    factor = largest / (norm + 1e-6)
    if not factor >= 1.0:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
