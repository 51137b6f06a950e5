"""Each program of the catalogue is what the plain model is, or is refused as it says, in each way.

``python -m tests.test_catalogue [WORD]`` prints the table: program by way, right or refused, of how many.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter

import pytest
import torch

from penstock.testing import WorkerPool
from tests.catalogue.programs import BETWEEN, PROGRAMS, TOLERANCE, WAYS, run

pytestmark = pytest.mark.filterwarnings("ignore")
BATCH = 12
"""How many programs a test runs between processes."""
NAMES = [*PROGRAMS]
ARCHITECTURES = [name for name in BETWEEN if name.startswith("architecture: ")]
BY_DAY = [*ARCHITECTURES[::3], *(name for name in BETWEEN if name not in ARCHITECTURES)]
"""Of what units are and how they are called, one process shows most; messages differ less."""
OTHERS = [name for name in ARCHITECTURES if name not in BY_DAY]


def batches(names: list[str]) -> list[list[str]]:
    return [names[at : at + BATCH] for at in range(0, len(names), BATCH)]


def outcome(name: str, group: object = None) -> str:
    """``right`` or ``refused``, where that is expected; else what is wrong."""
    try:
        verdict = run(name, group)
        verdict.check(TOLERANCE)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "right" if verdict.refusal is None else "refused"


def outcomes(group: object, names: list[str]) -> list[str]:
    """A worker's task."""
    warnings.simplefilter("ignore")
    return [outcome(name, group) for name in names]


@pytest.mark.whole
@pytest.mark.parametrize("name", NAMES)
def test_in_one_process(name: str) -> None:
    assert outcome(name) in ("right", "refused")


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize(
    "names",
    [
        *batches(BY_DAY),
        *(pytest.param(names, marks=pytest.mark.nightly) for names in batches(OTHERS)),
    ],
    ids=lambda names: names[0],
)
def test_in_two_processes(workers: WorkerPool, names: list[str]) -> None:
    answers = workers.run(f"{__name__}:outcomes", 2, 100.0, names=names)
    for name, *texts in zip(names, *answers, strict=True):
        assert texts in (["right"] * 2, ["refused"] * 2), name


def main(word: str = "") -> None:
    """Print the table of the programs whose name has a word."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    names = [name for name in NAMES if word in name]
    there = [name for name in names if name in BETWEEN]
    with WorkerPool(2) as pool:
        found = pool.run("tests.test_catalogue:outcomes", 2, 600.0, names=there)[0] if there else []
    between = dict(zip(there, found, strict=True))
    columns = {
        "one process": [outcome(name) for name in names],
        "two processes": [between.get(name, "not run") for name in names],
    }
    for name, *cells in zip(names, *columns.values(), strict=True):
        print(f"| {name} | {' | '.join(cell[:300] for cell in cells)} |")
    for way in WAYS:
        kinds = Counter(cell.partition(":")[0] for cell in columns[way])
        print(f"{way}: {', '.join(f'{n} {kind}' for kind, n in kinds.items())} of {len(names)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
