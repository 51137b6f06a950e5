"""Norms of the gradients of a pipeline, clipping by the total one, and other sums over all weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from penstock._engine.parallel import global_norms, whole
from penstock._engine.transport import Job
from penstock.errors import NonFiniteError, UsageError


def all_norms(
    job: Job,
    counted: Mapping[int, Mapping[str, Tensor]],
    stages: int,
    order: float,
    *,
    averaged: bool,
) -> Tensor:
    """The norms of the gradients of all stages that have some, in float64 on the CPU.

    Args:
        job: the ranks of the pipeline.
        counted: for each stage here, the parameters to count there, by name. DTensors among them are in the
            same order on every process of their mesh.
        stages: the number of stages.
        order: as for :func:`torch.linalg.vector_norm`.
        averaged: whether the gradients here are those of all replicas.

    Raises:
        UsageError: the gradients of some rank are those of one replica.
    """
    # In the last column, how many ranks have gradients that are still to be averaged.
    row = torch.zeros((2, stages + 1), dtype=torch.float64, device="cpu")
    row[0, -1] = not averaged
    for stage, of in sorted(counted.items()):
        norms = global_norms([*_gradients(of).values()], order)
        if norms.numel():
            row[:, stage] = torch.stack(
                [torch.linalg.vector_norm(norms, order), norms.new_ones(())]
            )
    total = job.pipeline.sum(row, "the norm of the gradients")
    _check_averaged(not total[0, -1])
    return total[0, total[1] > 0]


def _check_averaged(averaged: bool) -> None:
    if not averaged:
        raise UsageError(
            "the last step was inside pipe.no_sync(): its gradients, and so their norm, are those of one "
            "replica. Clip, measure and step the optimizer after a step outside of it, which averages the "
            "gradients of all steps since"
        )


def norms_by_name(
    job: Job, counted: Mapping[int, Mapping[str, Tensor]], order: float, *, averaged: bool
) -> dict[str, float]:
    """The norm of each gradient of all ranks, by name; for the arguments see :func:`all_norms`."""
    here = {name: grad for of in counted.values() for name, grad in _gradients(of).items()}
    norms = global_norms([*here.values()], order, apart=True).tolist()
    mine = dict(zip(here, norms, strict=True))
    rows = job.meet(lambda: [averaged, mine], among=job.pipeline)
    _check_averaged(all(averaged for averaged, _ in rows))
    return {name: norm for _, row in rows for name, norm in row.items()}


def sum_over(
    job: Job, counted: Mapping[int, Mapping[str, Tensor]], of: Mapping[Any, Any]
) -> Tensor:
    """The sum of what all ranks bring for their weights, in float64 on the CPU.

    Args:
        job: the ranks of the pipeline.
        counted: as for :func:`all_norms`.
        of: for weights here, a number or a tensor each, all of one shape.
    """
    by_stage: list[tuple[int, Any]] = []
    for stage, weights in sorted(counted.items()):
        here = [of[weight] for weight in weights.values() if weight in of]
        if here:
            tensors = [
                whole(value) if isinstance(value, Tensor) else torch.tensor(value, device="cpu")
                for value in here
            ]
            by_stage.append((stage, torch.stack(tensors).cpu().double().sum(0).tolist()))
    of_ranks = job.meet(lambda: by_stage, among=job.pipeline)
    stages = sorted(pair for of_rank in of_ranks for pair in of_rank)
    values = torch.tensor([value for _, value in stages], dtype=torch.float64, device="cpu")
    return values.sum(0)


def _gradients(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: p.grad for name, p in parameters.items() if p.grad is not None}


def total_norm(norms: Tensor, order: float, *, error_if_nonfinite: bool, steps: int) -> float:
    """The total norm of gradients whose partial norms are ``norms``.

    Raises:
        NonFiniteError: the norm is infinite or ``nan``, and ``error_if_nonfinite`` is true.
    """
    # Of order 0, the norm of a stage is a number of tensors.
    total = (
        torch.linalg.vector_norm(norms, order or 1.0)
        if norms.numel()
        else torch.zeros((), device="cpu")
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
