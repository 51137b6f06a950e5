"""The same body with torch's package and with ours: the same outputs, losses and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.testing import WorkerPool
from tests.pipelining.bodies import IN_A_V, MULTI, SINGLE

RANKS = 2
WAYS = ["plain", "static", "kwargs", "sum", "merge", "eval", "without_loss"]
CRASH_IN_TORCH = {("eval", name) for name in IN_A_V} | {("without_loss", name) for name in IN_A_V}
"""torch 2.13 runs their backwards too, although it was told not to."""


def run(workers: WorkerPool, package: str, way: str, **options: Any) -> list[dict[str, Any]]:
    task = f"tests.pipelining.bodies:run_{way}"
    answers: list[dict[str, Any]] = workers.run(task, RANKS, 60.0, package=package, **options)
    return answers


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("schedule", [*SINGLE, *MULTI])
def test_either_import_gives_the_same(workers: WorkerPool, schedule: str, way: str) -> None:
    ours = run(workers, "penstock", way, schedule=schedule)
    other = "GPipe" if (way, schedule) in CRASH_IN_TORCH else schedule
    if other != schedule:
        # Another placement: what the whole model gives is the same.
        assert_same(whole(ours), whole(run(workers, "penstock", way, schedule="LoopedBFS")))
        return
    theirs = run(workers, "torch", way, schedule=schedule)
    for mine, peer in zip(ours, theirs, strict=True):
        assert_same(mine, peer)


def whole(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """The output and the losses, wherever the last stage is."""
    last = next(answer for answer in answers if answer["output"] != [None])
    return {"output": last["output"], "losses": last["losses"]}


def assert_same(mine: dict[str, Any], peer: dict[str, Any]) -> None:
    assert mine.keys() == peer.keys()
    for key in mine:
        assert flat(mine[key]) == pytest.approx(flat(peer[key]), abs=1e-6, rel=1e-5), key


def flat(value: Any) -> list[float]:
    """The numbers in nested lists; nothing is a number of its own."""
    if value is None:
        return [1234.5]
    if isinstance(value, list):
        return [len(value), *(number for item in value for number in flat(item))]
    return [float(value)]


OTHER_ORDER = {"LoopedBFS"}
"""torch adds these microbatches' gradients from the last to the first."""


@pytest.mark.parametrize("schedule", sorted({*SINGLE, *MULTI} - OTHER_ORDER))
def test_bits_are_equal_where_sums_have_one_order(workers: WorkerPool, schedule: str) -> None:
    """With the loss added up, no gradient is scaled after it was made."""
    ours = run(workers, "penstock", "sum", schedule=schedule)
    assert ours == run(workers, "torch", "sum", schedule=schedule)


@pytest.mark.parametrize("format", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("schedule", MULTI)
def test_schedules_from_files(
    workers: WorkerPool, tmp_path: Path, schedule: str, format: str
) -> None:
    plain = run(workers, "penstock", "plain", schedule=schedule)
    path = str(tmp_path / "schedule")
    assert run(workers, "penstock", "csv", schedule=schedule, path=path, format=format) == plain
