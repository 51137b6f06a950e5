"""What people write for several processes does the same with torch's package and with ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.testing import WorkerPool
from tests.pipelining.either import IN_A_V, MULTI, SINGLE
from tests.pipelining.peers.steps import ORDERS, WAYS
from tests.pipelining.peers.training import plainly
from tests.pipelining.peers.values import KINDS


def run(
    workers: WorkerPool, package: str, task: str, processes: int = 2, **options: Any
) -> list[Any]:
    module = f"tests.pipelining.peers.{task}"
    answers: list[Any] = workers.run(module, processes, 60.0, package=package, **options)
    return answers


def flat(value: Any) -> list[float]:
    """The numbers in nested lists; nothing is a number of its own."""
    if isinstance(value, list):
        return [len(value), *(number for item in value for number in flat(item))]
    return [1234.5 if value is None else float(value)]


CRASH_IN_TORCH = {(name, way) for way in ("no loss", "evaluated") for name in IN_A_V}
"""torch 2.13 runs their backwards too, although it was told not to."""
CASES = {(name, way) for name in (*SINGLE, *MULTI) for way in WAYS}


@pytest.mark.parametrize(("schedule", "way"), sorted(CASES - CRASH_IN_TORCH))
def test_either_import_gives_the_same(workers: WorkerPool, schedule: str, way: str) -> None:
    ours = run(workers, "penstock", "steps:asked", schedule=schedule, way=way)
    theirs = run(workers, "torch", "steps:asked", schedule=schedule, way=way)
    assert flat(ours) == pytest.approx(flat(theirs), abs=1e-6, rel=1e-5)
    # With the loss added up no gradient is scaled after it was made; LoopedBFS adds in another order.
    assert way != "summed" or schedule == "LoopedBFS" or ours == theirs


@pytest.mark.parametrize("schedule", IN_A_V)
def test_forwards_of_a_v(workers: WorkerPool, schedule: str) -> None:
    """Stages elsewhere give what those of another schedule give."""
    ours = run(workers, "penstock", "steps:asked", schedule=schedule, way="evaluated")
    other = run(workers, "penstock", "steps:asked", schedule="LoopedBFS", way="evaluated")
    assert flat(ours[0][:5]) == pytest.approx(flat(other[1][:5]), abs=1e-6)


@pytest.mark.parametrize("format", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("schedule", MULTI)
def test_schedules_from_files(
    workers: WorkerPool, tmp_path: Path, schedule: str, format: str
) -> None:
    path = str(tmp_path / "schedule")
    run(workers, "penstock", "steps:from_a_file", schedule=schedule, path=path, format=format)


SAME: list[tuple[str, dict[str, Any]]] = [
    ("steps:after_a_step", {}),
    ("steps:round_and_round", {}),
    *(("steps:recounted", {"schedule": name}) for name in SINGLE),
    *(("steps:by_hand", {"which": name, "how": "runtime"}) for name in ("loop", "unbalanced")),
    ("steps:by_hand", {"which": "loop", "how": "subclass"}),
    *(("steps:by_hand", {"which": "messages", "how": how}) for how in ("prepared", "attribute")),
    *(("steps:called_back", {"schedule": "DualPipeV", "threads": of}) for of in (False, True)),
    ("steps:called_back", {"schedule": "InterleavedZeroBubble", "threads": False}),
    *(("steps:deferred", {"schedule": name}) for name in ("1F1B", "InterleavedZeroBubble")),
    *(("loops:own_loop", {"kind": kind}) for kind in ("fills", "turns")),
]


@pytest.mark.parametrize(
    ("task", "options"), SAME, ids=[" ".join([t, *map(str, o.values())]) for t, o in SAME]
)
def test_either_import_does_the_same(
    workers: WorkerPool, task: str, options: dict[str, Any]
) -> None:
    theirs = run(workers, "torch", task, **options)
    assert run(workers, "penstock", task, **options) == theirs


def test_all_orders_are_run() -> None:
    assert {options.get("which") for _, options in SAME} - {None} == set(ORDERS)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["fills", "turns"])
def test_loops_over_replicas(workers: WorkerPool, kind: str, how: str) -> None:
    # torch's DDP does not reduce what the weights' half of a backward makes.
    for package in ["penstock"] if (kind, how) == ("turns", "ddp") else ["torch", "penstock"]:
        run(workers, package, "loops:sharded_loop", 4, kind=kind, how=how)


@pytest.mark.parametrize("package", ["torch", "penstock"])
@pytest.mark.parametrize("how", ["given whole", "computes alone"])
def test_orders_of_sharded_stages(workers: WorkerPool, package: str, how: str) -> None:
    run(workers, package, "loops:sharded_order", 4, how=how)


def test_every_rank_hears_what_is_wrong_on_one(workers: WorkerPool) -> None:
    first, second = run(workers, "penstock", "steps:refused")
    assert first[0] == second[0]
    assert "rank 0: " in first[0]
    assert second[1] == "TypeError: losses must be a list, not a tuple"
    assert first[1] == f"StageError: rank 1: before the first microbatch: {second[1]}"
    assert "rank 1: a forward-only schedule has no loss" in first[2]


# ---- whole programs, and what stages hand to each other

PROGRAMS = [
    *(("1F1B", "fsdp"), ("1F1B", "ddp"), ("Interleaved1F1B", "mixed")),
    *(("ZBVZeroBubble", "replicate"), ("DualPipeV", "fsdp")),
]
REFUSED_BY_TORCH = {"a turned view", "an expanded view", "a dict"}


@pytest.mark.parametrize(("schedule", "how"), PROGRAMS)
def test_a_training_program(workers: WorkerPool, schedule: str, how: str) -> None:
    theirs = run(workers, "torch", "training:trained", 4, schedule=schedule, how=how)
    ours = run(workers, "penstock", "training:trained", 4, schedule=schedule, how=how)
    for mine, peer in zip(ours, theirs, strict=True):
        assert mine["losses"] == pytest.approx(peer["losses"], rel=1e-5)
    if how != "mixed":
        seen = [answer["losses"] for answer in ours if answer["losses"]]
        for mine, expected in zip(seen, plainly(), strict=True):
            assert mine == pytest.approx(expected[: len(mine)], rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", ["1F1B", "fills", "turns"])
def test_values_between_stages(workers: WorkerPool, schedule: str, kind: str) -> None:
    """Outputs, losses and gradients are those of one process; the body asserts it."""
    packages = ["penstock"] if kind in REFUSED_BY_TORCH else ["torch", "penstock"]
    if (schedule, kind) == ("turns", "a frozen stage"):
        # Its split backward leaves out the weights' gradients where the input needs none.
        packages.remove("torch")
    for package in packages:
        run(workers, package, "values:handed", 3, schedule=schedule, kind=kind)
