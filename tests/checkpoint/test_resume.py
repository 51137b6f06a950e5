"""A run goes on from a checkpoint as if it had not stopped: in the same layout, and in any other."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.testing import WorkerPool
from tests.checkpoint.runs import resumed, saved

PLAIN = ("plain", 1)
PAIRS = [
    (PLAIN, PLAIN),
    (("ZB-V", 2), ("ZB-V", 2)),
    (PLAIN, ("1F1B", 4)),
    (("1F1B", 4), ("Interleaved1F1B", 2)),
    (("Interleaved1F1B", 2), ("ZB-V", 1)),
    (("ZB-V", 1), PLAIN),
]
LIMIT = 2e-6
"""Of losses about 4: 1e-6 of them would be twice that."""


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_in_one_process(tmp_path: Path, source: tuple[str, int], target: tuple[str, int]) -> None:
    """From a layout to itself, bit by bit, and to another one."""
    expected = saved(tmp_path, *source)
    losses = resumed(tmp_path, *target)
    assert losses == (expected if source == target else pytest.approx(expected, abs=LIMIT))


@pytest.mark.parametrize(("schedule", "ranks"), [("1F1B", 2), ("ZB-V", 4)])
def test_between_processes(workers: WorkerPool, tmp_path: Path, schedule: str, ranks: int) -> None:
    """Processes go on from their own and from one process's, and one process from theirs."""
    sources = [(schedule, ranks), ("ZB-V", 4 // ranks)]
    folders = [tmp_path / f"{of}-{count}" for of, count in sources]
    here = [saved(folder, *source) for folder, source in zip(folders, sources, strict=True)]
    answers = workers.run(
        "tests.checkpoint.runs:in_processes",
        ranks,
        folder=str(tmp_path / "processes"),
        schedule=schedule,
        ranks_of=ranks,
        sources=[*map(str, folders)],
    )
    after, (own, alike, other) = answers[0]
    assert all(answer == answers[0] for answer in answers)
    # A layout of processes is one of one process, bit by bit.
    assert (own, alike) == (after, here[0])
    assert other == pytest.approx(after, abs=LIMIT)
    assert resumed(tmp_path / "processes", *PLAIN) == pytest.approx(after, abs=LIMIT)
