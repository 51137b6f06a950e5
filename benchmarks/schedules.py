"""Set-up of a large schedule: its messages, its proof and a simulation, beside torch's functions for that."""

from __future__ import annotations

from typing import Any
from unittest import mock

from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as peer

from benchmarks.pairs import Ratios, take_turns
from penstock.schedule import add_communication, build, simulate, validate

RANKS, MICROBATCHES, EACH = 64, 128, 2
"""97,792 actions, two thirds of them messages."""
STAGES = RANKS * EACH


def ours() -> None:
    """Penstock's way."""
    made = build("Interleaved1F1B", ranks=RANKS, microbatches=MICROBATCHES, stages_per_rank=EACH)
    made = add_communication(made)
    validate(made).raise_if_bad()
    assert simulate(made).makespan == 3 * (EACH * MICROBATCHES + RANKS - 1)


def theirs() -> None:
    """The peer's way; its proof looks at the actions without messages."""
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.num_stages, stage.group_size, stage.group_rank, stage.submod = STAGES, RANKS, 0, None
    order = peer.ScheduleInterleaved1F1B([stage] * EACH, MICROBATCHES).pipeline_order
    peer._validate_schedule(order, RANKS, STAGES, MICROBATCHES)
    place = peer.generate_stage_to_rank_mapping(RANKS, STAGES).__getitem__
    work = {rank: [action for action in row if action] for rank, row in order.items()}
    made = peer._add_send_recv(work, stage_to_rank=place, num_stages=STAGES)
    peer._simulate_comms_compute(made, stage_to_rank=place, num_stages=STAGES)


def compare(rounds: int) -> dict[str, Any]:
    """The two ways, printed, and as JSON data."""
    times = take_turns({"ours": ours, "theirs": theirs}, max(2, rounds // 4), 1)
    ratios = Ratios(times["ours"].cpu, times["theirs"].cpu)
    title = f"{RANKS} ranks, {MICROBATCHES} microbatches, {EACH} stages each"
    print(f"set-up of Interleaved1F1B, {title}: {ratios.told('torch')}")
    return {title: ratios.to_json()}
