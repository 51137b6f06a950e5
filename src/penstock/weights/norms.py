"""The norm of all gradients of a pipeline, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from penstock.errors import NonFiniteError, UsageError
from penstock.parallel import global_norms
from penstock.weights.ranks import Ranks


def all_norms(ranks: Ranks, counted: Mapping[int, Sequence[Tensor]], order: float) -> Tensor:
    """The norms of the gradients of all ranks, in float64 on the CPU, in the order of the stages.

    Args:
        ranks: how this process reaches the others.
        counted: for each stage here, the parameters to count there. DTensors among them are in the same
            order on every process of their mesh.
        order: as for :func:`torch.linalg.vector_norm`.
    """
    by_stage = [
        [stage, global_norms([p.grad for p in of if p.grad is not None], order).tolist()]
        for stage, of in sorted(counted.items())
    ]
    stages = sorted(pair for of_rank in ranks.gather(by_stage) for pair in of_rank)
    return torch.tensor(
        [norm for _, norms in stages for norm in norms], dtype=torch.float64, device="cpu"
    )


def total_norm(norms: Tensor, order: float, *, error_if_nonfinite: bool, steps: int) -> float:
    """The total norm of gradients whose partial norms are ``norms``.

    Raises:
        NonFiniteError: the norm is infinite or ``nan``, and ``error_if_nonfinite`` is true.
    """
    total = (
        torch.linalg.vector_norm(norms, order) if norms.numel() else torch.zeros((), device="cpu")
    )
    if error_if_nonfinite and not total.isfinite():
        raise NonFiniteError(
            f"after step {steps}: the gradients' norm of order {order} is {float(total)}, so they cannot be "
            "clipped; look for the first loss or gradient that is not finite, or pass "
            "error_if_nonfinite=False"
        )
    return float(total)


def scale_gradients(parameters: Iterable[Tensor], norm: float, largest: float) -> None:
    """Scale gradients whose total norm is ``norm`` so that it becomes at most ``largest``.

    If the norm is ``nan``, all gradients become ``nan``, as with torch's own clipping.

    Raises:
        UsageError: ``largest`` is ``nan``, or below 0, which would reverse the gradients.
    """
    if not largest >= 0:
        raise UsageError(f"max_norm={largest}: must be at least 0")
    factor = largest / (norm + 1e-6)
    # torch's own clip_grads_with_norm_ refuses DTensors mixed with plain tensors.
    for parameter in parameters if not factor >= 1.0 else ():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
