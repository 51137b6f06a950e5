"""What ranks share before and after a call: weights of microbatches, sums, and the last stage's outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from penstock.errors import AgreementError, PenstockError, SpecError, StageError, UsageError
from penstock.runtime.agreement import ModelCall
from penstock.runtime.describing import OUTPUT
from penstock.runtime.driver import Task, Wait
from penstock.runtime.exchange import Specs
from penstock.step import Loss, Scale, StepResult, Sums, Weights
from penstock.transport import Transport
from penstock.values import Batch, ValueSpec, flatten

# ---- the numbers of a step: the microbatches' weights before it, the sums after it


Names = tuple[str, ...]
"""The names of all losses that stages have added so far, sorted; the same on every rank."""
_ROUNDING = 1e-12
"""The relative difference allowed between ranks' weights, which may differ by rounding only."""


def own_counts(loss: Loss | None, batch: Batch) -> list[float] | None:
    """The weight of each microbatch, if this process can tell it from what it was given.

    Raises:
        UsageError: a weight is not a valid number.
        StageError: the user's function raised.
    """
    known = batch.targets if loss is not None and callable(loss.weight) else batch.samples
    if loss is None or known is None:
        return None
    try:
        return loss.counts(batch.samples or (), batch.targets or ())
    except PenstockError:
        raise
    except Exception as error:
        raise StageError(
            f"loss_weight, called with a target, raised {type(error).__name__}: {error}"
        ) from error


def agree_weights(
    transport: Transport,
    loss: Loss,
    model_call: ModelCall,
    counts: Sequence[float] | None,
    scale: Scale | None,
) -> Task[Weights]:
    """How much each microbatch counts, the same on every rank.

    If that depends on the targets and some ranks have none, the first rank that has them tells the others.

    Args:
        transport: the rank's end.
        loss: whose weights.
        model_call: what all ranks were given.
        counts: what :func:`own_counts` found.
        scale: what else gradients are scaled by.

    Raises:
        UsageError: no rank has the targets that the weights depend on.
    """
    if not callable(loss.weight):
        return loss.weights(loss.counts(model_call.samples, ()), scale)
    if not any(model_call.targets):
        raise UsageError(
            "loss_weight is a function of the target, but the step was given no target="
        )
    if all(model_call.targets) and counts is not None:
        return loss.weights(counts, scale)
    mine = (
        counts
        if counts and model_call.targets.index(True) == transport.rank
        else [0.0] * model_call.count
    )
    ticket = transport.sum(torch.tensor(mine, dtype=torch.float64))
    yield Wait(ticket, transport.rank, "waits for the weights of the microbatches")
    return loss.weights(ticket.take().tolist(), scale)


def share_numbers(
    transport: Transport,
    loss: Loss | None,
    sums: Sums,
    weights: Weights,
    names: Names,
    *,
    ill: bool = False,
) -> Task[tuple[StepResult, Names, bool]]:
    """Add up what the ranks found, and check that they used the same weights.

    One sum over the ranks is enough, unless a stage has added a loss under a new name.

    Args:
        transport: the rank's end.
        loss: the loss, if one was computed.
        sums: of this rank.
        weights: of the microbatches.
        names: of added losses, as far as they are known to all ranks.
        ill: whether something on this rank is not finite.

    Returns:
        The numbers, the names known now, and whether something is not finite on any rank.

    Raises:
        AgreementError: the ranks were given, or computed, different weights.
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
    """Whether numbers differ by more than rounding, from their sum and the sum of their squares."""
    return ranks * squared - total * total > _ROUNDING * total * total


def _refuse(transport: Transport, weights: Weights) -> Task[None]:
    factor = max(weights.seeds, default=0.0)
    ticket = transport.agree(f"in all {weights.whole:g}, gradients times up to {factor:g}")
    yield Wait(ticket, transport.rank, "waits for the weights of every rank")
    told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(ticket.take()))
    raise AgreementError(
        f"ranks differ in the weights of the loss: {told}; give every rank the same loss_weight, "
        "total_weight, accumulate and scaler, and the same targets where "
        "it is given any; discard the gradients "
        "of this step"
    )


def _sum(transport: Transport, values: Tensor) -> Task[Tensor]:
    ticket = transport.sum(values)
    yield Wait(ticket, transport.rank, "waits for a sum over the ranks")
    found: Tensor = ticket.take()
    return found


# ---- outputs of the last stage, for every rank


def check_outputs(specs: Sequence[Specs]) -> None:
    """Check, before a call begins, that its outputs can be sent to every rank.

    Raises:
        SpecError: they hold something that cannot travel.
    """
    for agreed in specs:
        if OUTPUT not in agreed:
            raise SpecError(
                "the model's output cannot travel to other ranks: it holds something that cannot be "
                "described, such as a set; let the model leave it out (transformers' caches go with "
                "use_cache=False), or use step and eval without outputs"
            )
        agreed[OUTPUT].check_travels("the model's output")


def share_outputs(
    transport: Transport,
    source: int,
    outputs: Mapping[int, Any],
    specs: Sequence[Specs],
    device: torch.device,
) -> Task[list[Any]]:
    """The outputs of all microbatches, on every rank.

    Args:
        transport: the rank's end.
        source: the rank that has them.
        outputs: on that rank, by microbatch.
        specs: for each microbatch, the agreed specs of its values.
        device: where the others put them.

    Raises:
        SpecError: an output is not what was agreed.
    """
    found = []
    for microbatch, agreed in enumerate(specs):
        found.append(
            (yield from _share(transport, source, outputs.get(microbatch), agreed, device))
        )
    return found


def _share(
    transport: Transport, source: int, output: Any, specs: Specs, device: torch.device
) -> Task[Any]:
    spec = specs[OUTPUT]
    own = _checked(output, spec) if transport.rank == source else None
    shared = []
    for index, tensor_spec in enumerate(spec.tensors):
        tensor = own[index] if own is not None else tensor_spec.empty(device)
        ticket = transport.broadcast(tensor, source)
        yield Wait(ticket, transport.rank, "waits for the outputs of the last stage")
        shared.append(ticket.take())
    return spec.fill(shared)


def _checked(output: Any, spec: ValueSpec) -> list[Tensor]:
    """The tensors of the last stage's output, after a check against its spec: only tensors are sent."""
    tensors, structure = flatten(output)
    if not spec.fits(tensors, structure, gradients=False):
        gap = spec.difference(ValueSpec.of(output), gradients=False)
        raise SpecError(
            f"the model's output is not what was agreed: {gap}; values that are not tensors may depend "
            "only on shapes; return computed numbers as tensors"
        )
    return [tensor.detach() for tensor in tensors]
