"""A run goes on from a checkpoint as if it had not stopped: in the same layout, and in any other."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from penstock.testing import WorkerPool
from tests.checkpoint.runs import SCHEDULES, resumed, saved

PLAIN = ("plain", 1)
IN_PROCESS = [PLAIN, *product(SCHEDULES, (1, 2, 4))]
LIMIT = 2e-6
"""Of losses about 4: 1e-6 of them would be twice that."""

_Layout = tuple[str, int]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[_Layout, tuple[Path, list[float]]]:
    """A checkpoint of each layout in one process, and the losses of the run that went on."""
    base = tmp_path_factory.mktemp("runs")
    found = {}
    for schedule, ranks in IN_PROCESS:
        folder = base / f"{schedule}-{ranks}"
        found[schedule, ranks] = folder, saved(folder, schedule, ranks)
    return found


def check(
    folders: dict[_Layout, tuple[Path, list[float]]], source: _Layout, target: _Layout
) -> None:
    folder, expected = folders[source]
    found = resumed(folder, *target)
    if source == target:
        assert found == expected
    else:
        assert found == pytest.approx(expected, abs=LIMIT)


@pytest.mark.parametrize(
    "number", range(len(IN_PROCESS)), ids=lambda n: "-".join(map(str, IN_PROCESS[n]))
)
def test_in_one_process(folders: dict[_Layout, tuple[Path, list[float]]], number: int) -> None:
    """From itself, from the unsplit model, to the unsplit model, and from another one."""
    target = IN_PROCESS[number]
    for source in {target, PLAIN, IN_PROCESS[(number + 4) % len(IN_PROCESS)]}:
        check(folders, source, target)
    check(folders, target, PLAIN)


@pytest.mark.slow
@pytest.mark.parametrize("source", IN_PROCESS)
def test_from_any_to_any(folders: dict[_Layout, tuple[Path, list[float]]], source: _Layout) -> None:
    for target in IN_PROCESS:
        check(folders, source, target)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_between_processes(
    folders: dict[_Layout, tuple[Path, list[float]]],
    workers: WorkerPool,
    tmp_path: Path,
    schedule: str,
    ranks: int,
) -> None:
    """Processes go on from their own, from one process's and the unsplit model's; one process from theirs."""
    sources = [(schedule, ranks), PLAIN, ("ZB-V", 4 // ranks)]
    answers = workers.run(
        "tests.checkpoint.runs:in_processes",
        ranks,
        folder=str(tmp_path),
        schedule=schedule,
        ranks_of=ranks,
        sources=[str(folders[source][0]) for source in sources],
    )
    own, found = answers[0]
    assert all(answer == answers[0] for answer in answers)
    assert found[0] == own
    # A layout of processes is one of one process, bit by bit.
    assert found[1] == folders[schedule, ranks][1]
    for losses in found[2:]:
        assert losses == pytest.approx(own, abs=LIMIT)
    for target in [(schedule, ranks), PLAIN, ("Interleaved1F1B", 2)]:
        assert resumed(tmp_path, *target) == pytest.approx(own, abs=LIMIT)
