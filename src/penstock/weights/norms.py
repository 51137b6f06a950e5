"""The norm of all gradients of a pipeline, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import NonFiniteError, UsageError
from penstock.parallel import global_norms
from penstock.runtime import Task, Wait
from penstock.transport import Transport


def gradient_norms(parameters: Sequence[Tensor], order: float = 2.0) -> Tensor:
    """The norm of each parameter's gradient, and 1 if it has a gradient or else 0.

    Args:
        parameters: if they are DTensors, in the same order on every process of their mesh.
        order: as for :func:`torch.linalg.vector_norm`.

    Returns:
        Two rows, in float64 on the CPU.
    """
    found = torch.zeros(2, len(parameters), dtype=torch.float64)
    present = [index for index, parameter in enumerate(parameters) if parameter.grad is not None]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if present:
        found[0, present] = global_norms(gradients, order)
        found[1, present] = 1.0
    return found


def all_norms(
    transport: Transport, counted: Mapping[int, Sequence[Tensor]], order: float
) -> Task[Tensor]:
    """The norms of all gradients of the pipeline, stage by stage, as from :func:`gradient_norms`.

    Their numbers are exchanged too, since parameters may come and go between steps.

    Args:
        transport: this rank's end.
        counted: for each stage of this rank, the parameters that count there.
        order: as for :func:`torch.linalg.vector_norm`.
    """
    stages = sorted(counted)
    own = gradient_norms([parameter for stage in stages for parameter in counted[stage]], order)
    split = own.split([len(counted[stage]) for stage in stages], dim=1)
    mine = [[stage, part.tolist()] for stage, part in zip(stages, split, strict=True)]
    ticket = transport.agree(mine)
    yield Wait(ticket, transport.rank, "waits for the norm of all gradients")
    told: list[list[Any]] = sorted(part for of in ticket.take() for part in of)
    parts = [torch.tensor(norms, dtype=torch.float64).reshape(2, -1) for _, norms in told]
    return torch.cat(parts, dim=1)


def total_norm(
    norms: Tensor, order: float = 2.0, *, error_if_nonfinite: bool = False, steps: int = 0
) -> float:
    """The norm of all gradients together.

    Args:
        norms: two rows, as from :func:`gradient_norms`.
        order: the same as there.
        error_if_nonfinite: whether a norm that is infinite or ``nan`` is an error.
        steps: the number of training steps so far, for the error.

    Raises:
        NonFiniteError: the norm is not finite.
    """
    each = norms[0, norms[1] > 0]
    found = float(torch.linalg.vector_norm(each, order)) if each.numel() else 0.0
    if error_if_nonfinite and not torch.tensor(found).isfinite():
        raise NonFiniteError(
            f"after step {steps}: the gradients' norm of order {order} is {found}, so they cannot be "
            "clipped; look for the first loss or gradient that is not finite, or pass "
            "error_if_nonfinite=False"
        )
    return found


def scale_gradients(parameters: Iterable[Tensor], norm: float, largest: float) -> None:
    """Scale gradients so that their total norm, which is ``norm``, becomes at most ``largest``.

    If the norm is ``nan``, all gradients become ``nan``, as with torch's own clipping.

    Raises:
        UsageError: ``largest`` is ``nan``, or below 0, which would reverse the gradients.
    """
    if not largest >= 0:
        raise UsageError(f"max_norm={largest}: must be at least 0")
    factor = largest / (norm + 1e-6)
    if not factor >= 1.0:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
