"""A run goes on from a checkpoint as if it had not stopped: in the same layout, and in any other."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from penstock.testing import WorkerPool
from tests.checkpoint.runs import SCHEDULES, resumed, saved

PLAIN = ("plain", 1)
IN_PROCESS = [PLAIN, *product(SCHEDULES, (1, 2, 4))]
BY_DAY = {PLAIN, ("1F1B", 2), ("ZB-V", 4), ("Interleaved1F1B", 1)}
LIMIT = 2e-6
"""Of losses about 4: 1e-6 of them would be twice that."""

_Layout = tuple[str, int]


_Folders = Callable[[_Layout], tuple[Path, list[float]]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> _Folders:
    """A checkpoint of a layout in one process, and the losses of the run that went on."""
    base = tmp_path_factory.mktemp("runs")

    @cache
    def of(layout: _Layout) -> tuple[Path, list[float]]:
        folder = base / f"{layout[0]}-{layout[1]}"
        return folder, saved(folder, *layout)

    return of


@pytest.mark.parametrize("away", [0, 3, 7])
@pytest.mark.parametrize(
    "target",
    [
        pytest.param(layout, marks=() if layout in BY_DAY else pytest.mark.nightly)
        for layout in IN_PROCESS
    ],
)
def test_in_one_process(folders: _Folders, target: _Layout, away: int) -> None:
    """From itself, and from two others, so that each goes on from two and in two."""
    source = IN_PROCESS[(IN_PROCESS.index(target) + away) % len(IN_PROCESS)]
    folder, expected = folders(source)
    losses = resumed(folder, *target)
    assert losses == (expected if source == target else pytest.approx(expected, abs=LIMIT))


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.nightly), 2, 4])
@pytest.mark.parametrize(
    "schedule", ["1F1B", "ZB-V", pytest.param("Interleaved1F1B", marks=pytest.mark.nightly)]
)
def test_between_processes(
    folders: _Folders,
    workers: WorkerPool,
    tmp_path: Path,
    schedule: str,
    ranks: int,
) -> None:
    """Processes go on from their own and from one process's, and one process from theirs."""
    sources = [(schedule, ranks), ("ZB-V", 4 // ranks)]
    answers = workers.run(
        "tests.checkpoint.runs:in_processes",
        ranks,
        folder=str(tmp_path),
        schedule=schedule,
        ranks_of=ranks,
        sources=[str(folders(source)[0]) for source in sources],
    )
    after, from_each = answers[0]
    assert all(answer == answers[0] for answer in answers)
    assert from_each[0] == after
    # A layout of processes is one of one process, bit by bit.
    assert from_each[1] == folders((schedule, ranks))[1]
    for losses in from_each[2:]:
        assert losses == pytest.approx(after, abs=LIMIT)
    assert resumed(tmp_path, *PLAIN) == pytest.approx(after, abs=LIMIT)
