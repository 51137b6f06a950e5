"""Whole training programs, and what stages hand to each other, with torch's package and with ours."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.testing import WorkerPool
from tests.pipelining.peers.training import plainly
from tests.pipelining.peers.values import KINDS

PROGRAMS = [
    ("1F1B", "fsdp"),
    ("1F1B", "ddp"),
    ("Interleaved1F1B", "mixed"),
    ("InterleavedZeroBubble", "fsdp"),
    ("ZBVZeroBubble", "replicate"),
    ("DualPipeV", "fsdp"),
]
REFUSED_BY_TORCH = {"a turned view", "an expanded view", "a dict"}


def run(workers: WorkerPool, package: str, task: str, processes: int, **options: Any) -> list[Any]:
    module = f"tests.pipelining.peers.{task}"
    answers: list[Any] = workers.run(module, processes, 60.0, package=package, **options)
    return answers


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


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_a_batch_by_name(workers: WorkerPool, schedule: str) -> None:
    theirs = run(workers, "torch", "values:by_name", 3, schedule=schedule)
    for mine, peer in zip(
        run(workers, "penstock", "values:by_name", 3, schedule=schedule), theirs, strict=True
    ):
        assert mine == pytest.approx(peer, rel=1e-4)
