"""Orders of work that people write down: run with either import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.pipelining.peers.seats import CHUNKS, Seat, names_of, sum_loss


def by_hand(group: Any, package: str, which: str) -> str:
    """Orders that people write down, through each of the ways in."""
    names = names_of(package)
    rows, stages = ORDERS[which]
    order = {rank: row(names, text) for rank, text in enumerate(rows)}
    held = dict(enumerate(stages))
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
        mapping = {stage: rank for rank, here in held.items() for stage in here}
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


def row(names: Any, text: str) -> list[Any]:
    """Actions from text; a dash is an idle step."""
    return [None if part == "-" else names._Action.from_str(part) for part in text.split()]


ORDERS: dict[str, tuple[list[str], list[list[int]]]] = {
    "subclass": (
        ["0F0 0F1 2F0 2F1 - 2B0 - 2B1 0B0 - 0B1", "- 1F0 1F1 3F0 3B0 3F1 3B1 1B0 - 1B1 -"],
        [[0, 2], [1, 3]],
    ),
    "v": (
        ["0F0 0F1 - 3F0 3B0 3F1 3B1 0B0 - 0B1", "- 1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1 -"],
        [[0, 3], [1, 2]],
    ),
    "unbalanced": (
        [
            "0F0 0F1 1F0 1F1 - 4F0 4B0 4F1 4B1 1B0 1B1 0B0 0B1",
            "- 2F0 3F0 2F1 3F1 3B0 2B0 3B1 2B1",
        ],
        [[0, 1, 4], [2, 3]],
    ),
    "messages": (
        [
            "0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1",
            "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1B1 1SEND_B0 1SEND_B1",
        ],
        [[0], [1]],
    ),
}
ORDERS["attribute"] = ORDERS["messages"]


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
