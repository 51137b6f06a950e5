"""DDP, FSDP2 and tensor parallelism inside stages: equal to one process, and reduced once a step."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.testing import WorkerPool
from tests.parallel.bodies import IN_A_V, SCHEDULES

PROCESSES = 4
REDUCES = {"ddp": "allreduce", "fsdp": "reduce_scatter"}


def run(workers: WorkerPool, task: str, **arguments: Any) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = workers.run(
        f"tests.parallel.bodies:{task}", PROCESSES, 100.0, **arguments
    )
    return answers


@pytest.mark.parametrize("how", sorted(REDUCES))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_replicas_equal_one_process(workers: WorkerPool, schedule: str, how: str) -> None:
    for answer in run(workers, "run_replicas", schedule=schedule, how=how):
        assert answer["gap"] < 1e-12
        reductions = sum(n for op, n in answer["counts"].items() if REDUCES[how] in op)
        assert reductions == answer["stages"], answer["counts"]


def test_a_mesh_that_nothing_crosses_needs_no_names(workers: WorkerPool) -> None:
    answers = run(workers, "run_replicas", schedule="1F1B", how="nameless fsdp")
    assert max(answer["gap"] for answer in answers) < 1e-12


@pytest.mark.parametrize("how", sorted(REDUCES))
def test_replicas_of_traced_stages_equal_one_process(workers: WorkerPool, how: str) -> None:
    answers = run(workers, "run_traced_replicas", how=how)
    assert max(answer["gap"] for answer in answers) < 1e-12


@pytest.mark.parametrize("crossing", [False, True], ids=["tensors", "DTensors"])
@pytest.mark.parametrize("schedule", SCHEDULES[1:])
def test_tensor_parallel_stages_equal_one_process(
    workers: WorkerPool, schedule: str, crossing: bool
) -> None:
    answers = run(workers, "run_tensor_parallel", schedule=schedule, crossing=crossing)
    assert max(answer["gap"] for answer in answers) < 1e-12


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", *IN_A_V])
def test_what_leaves_a_stage_may_still_be_arriving(workers: WorkerPool, schedule: str) -> None:
    for answer in run(workers, "run_ending", schedule=schedule):
        assert {name: max(gaps.values()) < 1e-12 for name, gaps in answer.items()} == dict.fromkeys(
            ("tensors", "replicated", "sharded"), True
        ), answer


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "ZBVZeroBubble"])
def test_sums_stay_pending_as_in_a_plain_loop(workers: WorkerPool, schedule: str) -> None:
    pending = []
    answers: Any = run(workers, "run_pending", schedule=schedule)
    for piped, plain in answers:
        pending += [place for place in piped["placed"] if "Partial" in place]
        assert piped["placed"] == plain["placed"]
        for mine, expected in zip(piped["values"], plain["values"], strict=True):
            assert mine == pytest.approx(expected, abs=1e-12)
    assert pending
