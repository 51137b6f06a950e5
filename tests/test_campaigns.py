"""The driver of campaigns: a row for each case, also for one that hangs, dies or breaks, and a verdict."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Generator, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from campaigns import mutants
from campaigns.__main__ import NAMES, main
from campaigns.run import Campaign, Rows, run
from campaigns.table import Row
from campaigns.zoo.judging import judge
from tests.catalogue.models import MODELS


def good() -> Iterator[Row]:
    yield Row("good", "right", ("a | b",))


def wrong() -> Iterator[Row]:
    yield Row("wrong", "silent", (0.5,))


def hangs() -> Iterator[Row]:
    time.sleep(600)
    yield from ()


def dies() -> Iterator[Row]:
    os._exit(3)
    yield from ()


def breaks() -> Iterator[Row]:
    yield Row("breaks", "right")
    raise ValueError("half way")


def cases(_: Namespace) -> Generator[tuple[str, Rows]]:
    for rows in (good, wrong, hangs, dies, breaks):
        yield rows.__name__, rows


@pytest.mark.filterwarnings("ignore")  # newer Pythons warn of forks beside threads
def test_each_case_has_a_row_and_the_bad_ones_fail_the_campaign(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    module = ModuleType("planted")
    module.CAMPAIGN = Campaign(cases, columns=("what",), bad=("silent",), limit=5.0)  # type: ignore[attr-defined]
    table = tmp_path / "table.md"
    assert run("planted", module, ["--to", str(table), "--only", "good"]) == 0
    assert run("planted", module, ["--to", str(table)]) == 1
    rows = [line.split(" | ")[:3] for line in table.read_text(encoding="utf-8").splitlines()[2:]]
    assert rows == [
        ["| good", "right", "a / b"],
        ["| wrong", "silent", "0.5"],
        ["| hangs", "lost", "took longer than 5 s"],
        ["| dies", "lost", "its process died with status 3"],
        ["| breaks", "right", rows[4][2]],
        ["| breaks", "broke", "ValueError: half way"],
    ]
    assert "4 bad" in capsys.readouterr().out


def test_a_campaign_is_listed_with_what_it_is_about(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == [*NAMES]
    assert all(line.endswith(".") for line in lines)
    assert main(["no such campaign"]) == 1


def test_each_mutant_has_its_place_and_its_tests() -> None:
    listed = mutants.listed()
    assert mutants.outdated(listed) == []
    assert len({mutant["what"] for mutant in listed}) == len(listed)
    tests = "tests/no_such_file.py tests/test_campaigns.py::test_that_is_gone"
    assert len(mutants.outdated([{**listed[0], "old": "no such text", "tests": tests}])) == 3


@pytest.mark.parametrize(
    ("new", "verdict"),
    [("2", "caught"), ("1 * 1", "survived"), ("__import__('time').sleep(60)", "timed out")],
)
def test_a_mutant_is_caught_by_tests_that_fail_and_not_by_time(
    tmp_path: Path, new: str, verdict: str
) -> None:
    test = tmp_path / "test_one.py"
    test.write_text("def test_one():\n    assert ONE == 1\n\n\nONE = 1\n", encoding="utf-8")
    mutant = {"file": test.name, "old": "ONE = 1\n", "new": f"ONE = {new}\n", "tests": test.name}
    limit = 0.5 if verdict == "timed out" else 60.0
    (row,) = mutants.planted("one", mutant, tmp_path, limit)
    assert row.verdict == verdict
    assert "ONE = 1\n" in test.read_text(encoding="utf-8")


def test_the_zoo_judges_a_model_by_its_plain_loop() -> None:
    (row,) = judge("U-Net", MODELS["U-Net"], ["1F1B"])
    assert (row.kind, row.text) == ("right", "")
    assert 0.25 <= row.share < 1
