"""Every schedule of the library trains, and all of them give the same bits."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.pipelining import schedules as peer
from torch.distributed.pipelining.stage import PipelineStage

from penstock import schedule as ps
from penstock.errors import ScheduleError
from penstock.schedule import Action, Op, Schedule
from penstock.testing import WorkerPool, compare
from tests.pipeline.cases import MODELS, deep_case, run_bits

TRAINING = tuple(name for name in ps.names() if name != "forward-only")
RANKS = (1, 2, 3, 4)
MICROBATCHES = (2, 3, 8)


def built(name: str, ranks: int, microbatches: int) -> Schedule:
    try:
        return ps.build(name, ranks=ranks, microbatches=microbatches)
    except ScheduleError as refusal:
        pytest.skip(str(refusal))


def digest(
    schedule: str | Path | Schedule, stages: int, ranks: int, microbatches: int
) -> dict[str, str]:
    case = deep_case(torch.float32)
    return compare(
        case, schedule=schedule, stages=stages, ranks=ranks, microbatches=microbatches
    ).digest()


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches"), list(product(TRAINING, RANKS, MICROBATCHES))
)
def test_gradients_in_process(name: str, ranks: int, microbatches: int) -> None:
    schedule = built(name, ranks, microbatches)
    compare(deep_case(), schedule=schedule).check(1e-12)


@pytest.mark.parametrize(("name", "ranks"), list(product(TRAINING, (2, 3, 4))))
def test_gradients_on_gloo(workers: WorkerPool, name: str, ranks: int) -> None:
    schedule = built(name, ranks, 8)
    answers = workers.run(
        "tests.pipeline.cases:run_deep",
        ranks,
        schedule=name,
        stages=schedule.stages,
        microbatches=8,
    )
    assert max(gap for answer in answers for gap in answer["differences"].values()) < 1e-12
    bits = {name: text for answer in answers for name, text in answer["digest"].items()}
    assert bits == digest("1F1B", schedule.stages, schedule.stages, 8)


def test_values_may_be_used_in_another_order_than_they_were_sent(
    workers: WorkerPool, tmp_path: Path
) -> None:
    path = tmp_path / "own.csv"
    path.write_text("0F1,0F0,0F2,0B2,0B0,0B1\n1F0,1F2,1F1,1B1,1B0,1B2\n")
    work = "tests.pipeline.cases:run_deep"
    answers = workers.run(work, 2, schedule=str(path), stages=2, microbatches=3)
    assert max(gap for answer in answers for gap in answer["differences"].values()) < 1e-12


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize(
    "name", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
def test_a_file_that_torch_wrote_trains(name: str, form: str, tmp_path: Path) -> None:
    path = tmp_path / "torch.csv"
    peer_schedule(name, 2, 8)._dump_csv(path, form)
    assert digest(path, 4, 2, 8) == digest("GPipe", 4, 4, 8)


def peer_schedule(name: str, ranks: int, microbatches: int) -> Any:
    stages = [mock.create_autospec(PipelineStage, instance=True) for _ in range(2)]
    for stage in stages:
        stage.num_stages, stage.group_size, stage.group_rank = 2 * ranks, ranks, 0
        stage.submod = None
    return peer.get_schedule_class(name)(stages, microbatches)


def shuffled(ranks: int, microbatches: int, seed: int) -> Schedule:
    """A valid order of F, I, W and B drawn at random: each rank picks any action that may start."""
    draw = random.Random(seed)
    full = {m for m in range(microbatches) if draw.random() < 0.5}
    programs = [list[Action]() for _ in range(ranks)]
    done: set[Action] = set()
    todo = [a for r in range(ranks) for m in range(microbatches) for a in lane(r, m, m in full)]
    while todo:
        ready = [a for a in todo if done.issuperset(needs(a, ranks, full))]
        chosen = draw.choice(ready)
        todo.remove(chosen)
        done.add(chosen)
        programs[chosen.stage].append(chosen)
    return Schedule("shuffled", ps.looped(ranks), microbatches, tuple(map(tuple, programs)))


def lane(stage: int, microbatch: int, full: bool) -> list[Action]:
    ops = (Op.F, Op.B) if full else (Op.F, Op.I, Op.W)
    return [Action(stage, op, microbatch) for op in ops]


def needs(action: Action, stages: int, full: set[int]) -> list[Action]:
    stage, op, microbatch, _ = action
    gradient = Op.B if microbatch in full else Op.I
    if op is Op.F:
        return [Action(stage - 1, Op.F, microbatch)] if stage else []
    if op is Op.W:
        return [Action(stage, Op.I, microbatch)]
    behind = [Action(stage + 1, gradient, microbatch)] if stage + 1 < stages else []
    return [Action(stage, Op.F, microbatch), *behind]


@pytest.mark.parametrize("seed", range(6))
def test_any_valid_order_trains(seed: int) -> None:
    """Weights may get their gradients in another order, so the last digits may differ."""
    compare(deep_case(torch.float32), schedule=shuffled(3, 5, seed)).check(1e-5)
    compare(deep_case(), schedule=shuffled(3, 5, seed)).check(1e-12)


# ---- bits


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", TRAINING)
def test_the_bits_are_those_of_gpipe(workers: WorkerPool, name: str, model: str) -> None:
    """In one process and on gloo, for losses and gradients."""
    stages = ps.build(name, ranks=2, microbatches=4).stages
    expected = run_bits(schedule="GPipe", model=model, stages=stages, ranks=stages)
    assert run_bits(schedule=name, model=model, stages=stages, ranks=2) == expected
    answers = workers.run(
        "tests.pipeline.cases:run_bits", 2, schedule=name, model=model, stages=stages
    )
    assert answers[0] | answers[1] == expected
