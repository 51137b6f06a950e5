"""What stages and schedules show their users: run with either import."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.pipelining.peers.seats import CHUNKS, Seat, batch, one_each, sum_loss


def after_a_step(group: Any, package: str) -> dict[str, Any]:
    seat = Seat(package, group, one_each(group))
    stage = seat.stages[0]
    made = seat.names.ScheduleGPipe(stage, CHUNKS, loss_fn=sum_loss)
    before = len(stage.output_chunks)
    output, _ = seat.step(made)
    found = {
        "graph": output is not None and output.requires_grad,
        "before": before,
        "outputs": len(stage.output_chunks),
        "forwards": len(stage.fwd_cache),
        "chunks": stage.chunks,
        "ranks": stage.stage_index_to_group_rank,
        "prefix": stage.log_prefix,
        "backward": stage.has_backward,
        "place": (stage.group_rank, stage.group_size, stage.is_first, stage.is_last),
        "group": stage.group is group,
        "parameters": sorted(dict(stage.submod.named_parameters())),
    }
    stage.clear_runtime_states()
    return {**found, "cleared": len(stage.output_chunks)}


def without_outputs(group: Any, package: str, schedule: str) -> dict[str, Any]:
    seat = Seat(package, group, one_each(group))
    made = seat.names.get_schedule_class(schedule)(
        seat.stages[0], CHUNKS, loss_fn=sum_loss, scale_grads=False
    )
    output, losses = seat.step(made, return_outputs=False)
    return {
        "none": output is None,
        "losses": len(losses),
        "kept": len(seat.stages[0].output_chunks),
    }


def evaluated(group: Any, package: str, schedule: str) -> dict[str, Any]:
    """Gradients are disabled on one rank alone; training goes on afterwards."""
    ranks = dist.get_world_size(group)
    single = schedule in ("GPipe", "1F1B")
    held = one_each(group) if single else {r: [r, r + ranks] for r in range(ranks)}
    seat = Seat(package, group, held)
    made = seat.names.get_schedule_class(schedule)(
        seat.stages[0] if single else seat.stages, CHUNKS, loss_fn=sum_loss, scale_grads=False
    )
    if seat.rank == 0:
        with torch.no_grad():
            _, losses = seat.step(made, "eval")
    else:
        _, losses = seat.step(made, "eval")
    none = all(p.grad is None for module in seat.modules for p in module.parameters())
    seat.check(*seat.step(made))
    return {"none": none, "losses": len(losses)}


def round_and_round(group: Any, package: str) -> float:
    """Inference whose output goes back to the first rank as the next input, by the same group."""
    seat = Seat(package, group, one_each(group))
    made = seat.names._ScheduleForwardOnly(seat.stages[0], CHUNKS, scale_grads=False)
    x, _ = batch()
    last = dist.get_global_rank(group, seat.ranks - 1)
    first = dist.get_global_rank(group, 0)
    with torch.no_grad():
        for _ in range(5):
            if seat.rank == 0:
                made.step(x)
                dist.recv(x, src=last, group=group)
            elif seat.rank == seat.ranks - 1:
                out = made.step()
                dist.send(out, dst=first, group=group)
            else:
                made.step()
        expected, _ = batch()
        for _ in range(5):
            expected = seat.reference(expected)
    if seat.rank == 0:
        torch.testing.assert_close(x, expected)
    return 0.0


def recounted(group: Any, package: str, schedule: str) -> list[int]:
    """A schedule that is told another number of microbatches between steps."""
    seat = Seat(package, group, one_each(group))
    made = seat.names.get_schedule_class(schedule)(
        seat.stages[0], CHUNKS, loss_fn=sum_loss, scale_grads=False
    )
    counts = []
    for count in (CHUNKS, 2, 8):
        made._n_microbatches = count
        # One of the packages finds shapes once.
        made._stage_forward_initialized = made._stage_backward_initialized = False
        seat.zero()
        output, losses = seat.step(made)
        seat.check(output, losses)
        counts.append(len(losses))
    return counts


def refused(group: Any, package: str) -> list[str]:
    """One rank alone is given something wrong; every rank hears of it, and the next step works."""
    seat = Seat(package, group, one_each(group))
    made = seat.names.Schedule1F1B(seat.stages[0], CHUNKS, loss_fn=sum_loss, scale_grads=False)
    told = []
    for samples, losses in [(CHUNKS - 1, None), (CHUNKS - 1, None), (None, ())]:
        x, y = batch()
        try:
            if seat.rank == 0:
                made.step(x[:samples])
            else:
                made.step(target=y, losses=losses)
        except (ValueError, TypeError, RuntimeError) as error:
            told.append(f"{type(error).__name__}: {error}")
        seat.zero()
        seat.check(*seat.step(made))
    return told
