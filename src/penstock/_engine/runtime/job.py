"""What the pipelines of a job agree on before a step: that all begin it, and that it is the same."""

from __future__ import annotations

import torch

from penstock._engine.runtime.learning import Learning
from penstock._engine.transport import Transport
from penstock.errors import AgreementError, PenstockError, error_named, public_name


def refusal_in_job(
    transport: Transport | None,
    refusal: PenstockError | None,
    step: int,
    learning: Learning | None = None,
    *,
    whole: bool,
) -> PenstockError | None:
    """The error with which every rank of the job refuses a call, if any of them does.

    Without this exchange, replicas that go on would average their gradients with those of the next step of
    the replica that refused.

    Args:
        transport: this rank's end; None if all ranks share this process.
        refusal: the error with which this pipeline refuses, the same on all of its ranks.
        step: the number of the step that this pipeline begins.
        learning: which weights of this pipeline learn.
        whole: whether the other pipelines of the job make the same call.
    """
    if transport is None or not whole or transport.beside.size == 1:
        return refusal
    beside, what = transport.beside, f"the digest before step {step}"
    row = torch.tensor(
        [refusal is not None, step, *([0, 0] if learning is None else learning.row)], device="cpu"
    )
    rows = beside.gather(row, what)
    refused, steps = rows[:, 0], rows[:, 1]
    if refused.any():
        reason = None if refusal is None else [public_name(type(refusal)), str(refusal)]
        reasons = beside.exchange(reason)
        if refusal is not None:
            return refusal
        first = next(replica for replica, reason in enumerate(reasons) if reason is not None)
        name, text = reasons[first]
        return error_named(name)(f"replica {first}: {text}")
    if len({*steps.tolist()}) > 1:
        listed = ", ".join(f"replica {index} step {n}" for index, n in enumerate(steps.tolist()))
        return AgreementError(
            f"the replicas begin different steps: {listed}; call step as often on every replica"
        )
    return None if learning is None else learning.check(rows[:, 2:].tolist())
