"""The numbers of a step that ranks must have in common: the weights before it, the results after it."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from penstock.errors import AgreementError, PenstockError, StageError
from penstock.runtime.calls import ModelCall
from penstock.runtime.driver import Task, Wait
from penstock.step import Loss, Numbers, Scale, Sums, Weights
from penstock.transport import Transport

Names = tuple[str, ...]
"""Of losses that stages added in some step, sorted; the same on every rank."""
_ROUNDING = 1e-12
"""How far squares of the ranks' weights may be apart, which differ at most in the order of a sum."""


def agree_weights(
    transport: Transport,
    loss: Loss,
    call: ModelCall,
    targets: Sequence[Any] | None,
    scale: Scale | None,
) -> Task[Weights]:
    """How much each microbatch counts.

    Where that depends on the targets and some rank has none, the first rank that has them tells it.

    Raises:
        StageError: the user's function raised.
    """
    if not callable(loss.weight) or all(call.targets):
        return loss.weights(_counts(transport.rank, loss, call.samples, targets), scale)
    mine = [0.0] * call.count
    if call.targets.index(True) == transport.rank:
        mine = _counts(transport.rank, loss, call.samples, targets)
    ticket = transport.sum(torch.tensor(mine, dtype=torch.float64))
    yield Wait(ticket, transport.rank, "waits for the weights of the microbatches")
    return loss.weights(ticket.take().tolist(), scale)


def _counts(
    rank: int, loss: Loss, samples: Sequence[int], targets: Sequence[Any] | None
) -> list[float]:
    try:
        return loss.counts(samples, targets or ())
    except PenstockError:
        raise
    except Exception as error:
        raise StageError(
            f"rank {rank}, before microbatch 0, loss_weight: {type(error).__name__}: {error}"
        ) from error


def share_numbers(
    transport: Transport,
    loss: Loss | None,
    sums: Sums,
    weights: Weights,
    names: Names,
    *,
    ill: bool = False,
) -> Task[tuple[Numbers, Names, bool]]:
    """Add up what the ranks found, and check that they weighed it alike.

    One sum does it, unless a stage added a loss under a name that is new.

    Args:
        transport: the rank's end.
        loss: what was computed, where it was.
        sums: of this rank.
        weights: of the microbatches.
        names: known so far.
        ill: whether something here is not finite.

    Returns:
        The numbers, the names known now, and whether something is not finite on any rank.

    Raises:
        AgreementError: the ranks were told, or found, other weights.
    """
    new = sorted(sums.names.difference(names))
    mark = weights.mark
    own = torch.tensor([ill, len(new), mark, mark * mark], dtype=torch.float64)
    total = yield from _sum(transport, torch.cat([sums.row(names), own]))
    row, (bad, unknown, once, squared) = total[:-4], total[-4:].tolist()
    ill = bool(bad)
    if _differ(transport.ranks, once, squared):
        yield from _refuse(transport, weights)
    if unknown:
        ticket = transport.agree(new)
        yield Wait(ticket, transport.rank, "waits for the names of the losses")
        names = tuple(sorted({*names, *(name for told in ticket.take() for name in told)}))
        row = yield from _sum(transport, sums.row(names))
    if loss is not None:
        row = loss.replicas.added(row)
    numbers = sums.read(row.tolist(), names, weights.whole)
    return numbers, names, ill or not isfinite(numbers.loss)


def _differ(ranks: int, total: float, squared: float) -> bool:
    """Whether numbers differ by more than rounding, from their sum and that of their squares."""
    return ranks * squared - total * total > _ROUNDING * total * total


def _refuse(transport: Transport, weights: Weights) -> Task[None]:
    factor = max(weights.seeds, default=0.0)
    ticket = transport.agree(f"in all {weights.whole:g}, gradients times up to {factor:g}")
    yield Wait(ticket, transport.rank, "waits for the weights of every rank")
    told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(ticket.take()))
    raise AgreementError(
        f"ranks differ in the weights of the loss: {told}; give every rank the same loss_weight, "
        "total_weight, accumulate and scaler, and the same targets where it is given any; the gradients of "
        "this step are no use"
    )


def _sum(transport: Transport, values: Tensor) -> Task[Tensor]:
    ticket = transport.sum(values)
    yield Wait(ticket, transport.rank, "waits for a sum over the ranks")
    found: Tensor = ticket.take()
    return found
