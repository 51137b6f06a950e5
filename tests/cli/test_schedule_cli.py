"""``penstock schedule``: what it prints and writes, and one clear line for each mistake."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from penstock.cli.main import guarded
from penstock.cli.schedule import app
from penstock.schedule import load, names, validate


def run(*arguments: str) -> int:
    return guarded(lambda: app(list(arguments), prog_name="schedule", standalone_mode=False))


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def test_list_names_every_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list") == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in names())
    assert "ZBVZeroBubble" in printed


def test_show_fits_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert run("show", "zb-h1", "-p", "3", "-m", "4") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ZB-H1: 3 ranks, 3 stages, 4 microbatches"
    assert {len(line) for line in lines[1:4]} == {64}  # three columns for each unit of time
    assert run("show", "zb-h1", "-p", "3", "-m", "4", "--width", "100") == 0
    assert {len(line) for line in capsys.readouterr().out.splitlines()[1:4]} == {92}


@pytest.mark.parametrize(
    ("terminal", "unwanted", "painted"), [(True, "", True), (True, "1", False), (False, "", False)]
)
def test_show_paints_for_a_terminal_whose_user_likes_it(
    terminal: bool,
    unwanted: str,
    painted: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_COLOR", unwanted)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    assert run("show", "1F1B") == 0
    assert ("\x1b[" in capsys.readouterr().out) is painted


def test_show_writes_svg_and_trace(tmp_path: Path) -> None:
    svg, trace = tmp_path / "a.svg", tmp_path / "a.json"
    assert run("show", "V-Half", "--svg", str(svg), "--trace", str(trace)) == 0
    ElementTree.fromstring(svg.read_text())
    assert len(json.loads(trace.read_text())["traceEvents"]) == 4 + 6 * 8 * 4


def test_validate_reports(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("validate", "Interleaved1F1B", "-v", "3") == 0
    assert "valid" in capsys.readouterr().out
    (tmp_path / "bad.csv").write_text("0B0,0F0\n1F0,1B0\n")
    assert run("validate", str(tmp_path / "bad.csv")) == 65
    assert "rank 0, position 0, 0B0: needs 0F0" in capsys.readouterr().out


def test_many_problems_are_cut_short(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text("0F0,0F40\n")
    assert run("validate", str(tmp_path / "bad.csv")) == 65
    assert "  and 19 more" in capsys.readouterr().out


def test_simulate_prints_the_measures(capsys: pytest.CaptureFixture[str]) -> None:
    flags = (
        "--forward",
        "18.5",
        "--input",
        "18.1",
        "--weight",
        "9.3",
        "--latency",
        "0.6",
        "--unit",
        "ms",
    )
    assert run("simulate", "1F1B", "-p", "8", "-m", "24", *flags) == 0
    printed = capsys.readouterr().out
    assert "makespan" in printed
    assert " ms" in printed
    assert "before 0B0, for 1B0" in printed


def test_costs_may_be_given_for_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run("simulate", "gpipe", "-p", "2", "-m", "1", "--forward", "1,5", "--backward", "2") == 0
    )
    assert "makespan              10" in capsys.readouterr().out


def test_convert_applies_passes_and_writes(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    flags = ("--communication", "--merge-backward", "--prefetch", "2", "--reduce-gradients")
    assert run("convert", "ZB-H1", str(path), *flags) == 0
    written = load(path)
    assert validate(written).ok
    assert {op.value for op in written.ops} >= {"B", "UNSHARD", "REDUCE_GRAD"}
    assert run("convert", str(path), str(tmp_path / "plain.csv"), "--compute-only") == 0
    assert not load(tmp_path / "plain.csv").communicates


def test_convert_refuses_what_cannot_complete(tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_text("0B0,0F0\n")
    assert run("convert", str(tmp_path / "bad.csv"), str(tmp_path / "out.json")) == 65
    assert not (tmp_path / "out.json").exists()


def test_compare_is_for_the_same_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    assert run("compare", "-p", "4", "-m", "8", "--csv", str(path)) == 0
    assert "longest-stage bubble" in capsys.readouterr().out
    with path.open(newline="") as file:
        table = {row["schedule"]: row for row in csv.DictReader(file)}
    assert (table["1F1B"]["makespan"], table["1F1B"]["peak memory"]) == ("33", "4")
    assert (table["Interleaved1F1B"]["makespan"], table["ZB-V"]["peak memory"]) == ("28.5", "4")


@pytest.mark.parametrize("width", [40, 60, 200])
def test_compare_never_shortens_a_name(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("compare", "--width", str(width)) == 0
    *rows, last = capsys.readouterr().out.splitlines()
    shown = [row.split()[0] for row in ([*rows, last] if width == 200 else rows)]
    assert shown == ["schedule", *(name for name in names() if name != "forward-only")]
    assert all(len(row) <= width for row in rows)
    assert last.startswith("Not shown, as a line has") is (width < 200)


def test_compare_goes_on_where_a_schedule_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("compare", "-p", "4", "-m", "3") == 0
    assert "refused: DualPipeV" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "line"),
    [
        (("show", "1F2B"), 2, "unknown schedule '1F2B'; did you mean '1F1B'?"),
        (("show", "gpipe", "-p", "x"), 2, "Invalid value for '--ranks'"),
        (("show", "gpipe", "-p", "0"), 2, "ranks=0: must be at least 1"),
        (
            ("show", "gpipe", "-v", "2"),
            2,
            "GPipe has one stage on each rank, not stages_per_rank=2",
        ),
        (("show", "gpipe", "-m", "1000000000"), 2, "more than 10000000 actions; try smaller"),
        (("show", "DualPipeV", "-m", "2"), 2, "needs microbatches=8 or more, not 2"),
        (("show", "none.csv"), 65, "none.csv: cannot be read: No such file"),
        (("show", "gpipe", "--svg", "/none/a.svg"), 2, "/none/a.svg: cannot be written: No such"),
        (("simulate", "gpipe", "--forward", "a"), 2, "--forward=a: must be a number"),
        (("simulate", "gpipe", "--forward", "1,2"), 2, "forward has 2 numbers for 4 stages"),
        (("simulate", "gpipe", "--forward", "-1"), 2, "forward=-1.0: must be a finite number"),
        (("simulate", "gpipe", "--unit", "h"), 2, "--unit=h: must be s, ms or us"),
        (
            ("convert", "gpipe", "a.txt"),
            2,
            "a.txt: the name of a schedule file ends in .csv or .json",
        ),
        (("convert", "gpipe", "a.csv", "--prefetch", "0"), 2, "unsharded=0: must be at least 1"),
        (("compare", "nope"), 2, "unknown schedule 'nope'"),
    ],
)
def test_mistakes_are_told_in_one_line(
    arguments: tuple[str, ...], status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == status
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert line in told[0]


@pytest.mark.parametrize("command", ["show", "simulate"])
def test_a_file_that_cannot_run_is_the_files_fault(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("0B0,0F0\n")
    assert run(command, str(path)) == 65
    assert "0B0: needs 0F0" in capsys.readouterr().err
    path.write_text("0F0,=cmd()\n")
    assert run(command, str(path)) == 65
    assert "row 1, column 2: '=cmd()'" in capsys.readouterr().err
    assert run(command, str(path), "-p", "2") == 2
    assert "--ranks is only for a named schedule" in capsys.readouterr().err
