"""Orders of work that people write down: run with either import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.pipelining.peers.seats import CHUNKS, Seat, names_of, sum_loss


def by_hand(group: Any, package: str, which: str) -> str:
    """Orders that people write down, through each of the ways in."""
    names = names_of(package)
    order, held = ORDERS[which](names)
    seat = Seat(package, group, held)
    kind = names.PipelineScheduleMulti if which == "subclass" else names._PipelineScheduleRuntime
    microbatches = 2

    def new() -> Any:
        return kind(seat.stages, microbatches, loss_fn=sum_loss, scale_grads=False)

    made = new()
    if which == "messages":
        made._prepare_schedule_with_comms(order, format="compute_comms")
    elif which == "attribute":
        made.pipeline_order_with_comms = order
        mapping = {stage: rank for rank, row in held.items() for stage in row}
        made.stage_index_to_group_rank = mapping
        for stage in seat.stages:
            stage.stage_index_to_group_rank = mapping
    else:
        made.pipeline_order = order
        made._validate_and_set_stage_mapping(order)
        if which != "subclass":
            made._prepare_schedule_with_comms(order)
    for _ in range(2):
        seat.zero()
        found = seat.step(made)
    seat.check(*found)
    return which


def _v(n: Any) -> Any:
    A, F, B = n._Action, n.F, n.B
    return {
        0: [
            A(0, F, 0),
            A(0, F, 1),
            None,
            A(3, F, 0),
            A(3, B, 0),
            A(3, F, 1),
            A(3, B, 1),
            A(0, B, 0),
            None,
            A(0, B, 1),
        ],
        1: [
            None,
            A(1, F, 0),
            A(2, F, 0),
            A(1, F, 1),
            A(2, F, 1),
            A(2, B, 0),
            A(1, B, 0),
            A(2, B, 1),
            A(1, B, 1),
            None,
        ],
    }, {0: [0, 3], 1: [1, 2]}


def _unbalanced(n: Any) -> Any:
    A, F, B = n._Action, n.F, n.B
    return {
        0: [
            A(0, F, 0),
            A(0, F, 1),
            A(1, F, 0),
            A(1, F, 1),
            None,
            A(4, F, 0),
            A(4, B, 0),
            A(4, F, 1),
            A(4, B, 1),
            A(1, B, 0),
            A(1, B, 1),
            A(0, B, 0),
            A(0, B, 1),
        ],
        1: [
            None,
            A(2, F, 0),
            A(3, F, 0),
            A(2, F, 1),
            A(3, F, 1),
            A(3, B, 0),
            A(2, B, 0),
            A(3, B, 1),
            A(2, B, 1),
        ],
    }, {0: [0, 1, 4], 1: [2, 3]}


def _messages(n: Any) -> Any:
    A, F, B = n._Action, n.F, n.B
    SF, RF, SB, RB = n.SEND_F, n.RECV_F, n.SEND_B, n.RECV_B
    return {
        0: [
            A(0, F, 0),
            A(0, F, 1),
            A(0, SF, 0),
            A(0, SF, 1),
            A(0, RB, 0),
            A(0, RB, 1),
            A(0, B, 0),
            A(0, B, 1),
        ],
        1: [
            A(1, RF, 0),
            A(1, RF, 1),
            A(1, F, 0),
            A(1, F, 1),
            A(1, B, 0),
            A(1, B, 1),
            A(1, SB, 0),
            A(1, SB, 1),
        ],
    }, {0: [0], 1: [1]}


def _looped(n: Any) -> Any:
    A, F, B = n._Action, n.F, n.B
    return {
        0: [
            A(0, F, 0),
            A(0, F, 1),
            A(2, F, 0),
            A(2, F, 1),
            None,
            A(2, B, 0),
            None,
            A(2, B, 1),
            A(0, B, 0),
            None,
            A(0, B, 1),
        ],
        1: [
            None,
            A(1, F, 0),
            A(1, F, 1),
            A(3, F, 0),
            A(3, B, 0),
            A(3, F, 1),
            A(3, B, 1),
            A(1, B, 0),
            None,
            A(1, B, 1),
            None,
        ],
    }, {0: [0, 2], 1: [1, 3]}


ORDERS = {
    "subclass": _looped,
    "v": _v,
    "unbalanced": _unbalanced,
    "messages": _messages,
    "attribute": _messages,
}


def through_files(group: Any, package: str, schedule: str, path: str) -> int:
    """A named schedule's order, given to the class that takes any, and round by way of a file."""
    ranks = dist.get_world_size(group)
    seat = Seat(package, group, {r: [r, r + ranks] for r in range(ranks)})
    runtime = seat.names._PipelineScheduleRuntime
    named = seat.names.get_schedule_class(schedule)(
        seat.stages, CHUNKS, loss_fn=sum_loss, scale_grads=False
    )
    again, read = (
        runtime(seat.stages, CHUNKS, loss_fn=sum_loss, scale_grads=False) for _ in range(2)
    )
    again._prepare_schedule_with_comms(named.pipeline_order)
    file = str(Path(path) / f"{seat.rank}.csv")
    again._dump_csv(file)
    read._load_csv(file, format="compute_comms")
    assert read.pipeline_order_with_comms == again.pipeline_order_with_comms
    seat.check(*seat.step(read))
    return len(read.pipeline_order_with_comms)
