"""``penstock schedule``: what it prints and writes, and one clear line for each mistake."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from penstock.cli.main import main
from penstock.schedule import load, names, validate

Capture = pytest.CaptureFixture[str]


def run(*arguments: str) -> int:
    return main(["schedule", *arguments])


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")


def test_list_names_every_schedule(capsys: Capture) -> None:
    assert run("list") == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*names(), "ZBVZeroBubble"))


def test_show_fits_the_terminal(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
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
    terminal: bool, unwanted: str, painted: bool, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", unwanted)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    assert run("show", "1F1B") == 0
    assert ("\x1b[" in capsys.readouterr().out) is painted


def test_commands_take_a_number_of_slices(capsys: Capture, tmp_path: Path) -> None:
    size = ("-p", "2", "-m", "3", "--slices", "4")
    assert run("simulate", "seq1f1b", *size) == 0
    first, makespan, *_ = capsys.readouterr().out.splitlines()
    assert first == "Seq1F1B: 2 ranks, 2 stages, 3 microbatches of 4 slices"
    assert makespan.split() == ["makespan", "9.75"]
    file = tmp_path / "a.csv"
    assert run("convert", "seq1f1b", str(file), *size, "--pass", "communication") == 0
    assert run("validate", str(file)) == 0
    assert run("show", str(file)) == 0
    assert "B2.3" in capsys.readouterr().out


def test_show_writes_svg_and_trace(tmp_path: Path) -> None:
    svg, trace = tmp_path / "a.svg", tmp_path / "a.json"
    assert run("show", "V-Half", "--svg", str(svg), "--trace", str(trace)) == 0
    ElementTree.fromstring(svg.read_text())
    assert len(json.loads(trace.read_text())["traceEvents"]) == 4 + 6 * 8 * 4


def test_validate_reports_and_cuts_long_reports_short(capsys: Capture, tmp_path: Path) -> None:
    assert run("validate", "Interleaved1F1B", "-v", "3") == 0
    assert "valid" in capsys.readouterr().out
    bad = tmp_path / "bad.csv"
    bad.write_text("0B0,0F0\n1F0,1B0\n")
    assert run("validate", str(bad)) == 65
    assert "rank 0, position 0, 0B0: needs 0F0" in capsys.readouterr().out
    bad.write_text("0F0,0F40\n")
    assert run("validate", str(bad)) == 65
    assert "  and 19 more" in capsys.readouterr().out


def test_simulate_prints_the_measures(capsys: Capture) -> None:
    """With costs for all stages or one for each."""
    assert run("simulate", "1F1B", "-p", "2", "-m", "4", "--latency", "0.5", "--weight", "2") == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].split() == ["makespan", "22"]
    assert printed[-2].split()[1:4] == ["16", "6", "2"]
    assert printed[-2].rstrip().endswith("before 0B0, for 1B0")
    assert run("simulate", "gpipe", "-p", "2", "-m", "1", "--forward", "1,5", "--backward=2") == 0
    assert "makespan              10" in capsys.readouterr().out


def test_convert_applies_passes_and_writes(tmp_path: Path) -> None:
    path, bad = tmp_path / "out.json", tmp_path / "bad.csv"
    passes = ("merge-backward", "prefetch", "reduce-gradients", "communication")
    assert run("convert", "ZB-H1", str(path), *(f"--pass={name}" for name in passes)) == 0
    written = load(path)
    assert validate(written).ok
    assert {op.value for op in written.ops} >= {"B", "UNSHARD", "REDUCE_GRAD", "SEND_F"}
    assert run("convert", str(path), str(tmp_path / "plain.csv"), "--pass", "compute-only") == 0
    assert not load(tmp_path / "plain.csv").communicates
    bad.write_text("0B0,0F0\n")
    assert run("convert", str(bad), str(tmp_path / "none.json")) == 65
    assert not (tmp_path / "none.json").exists()


@pytest.mark.parametrize("width", ["60", "160"])
def test_compare_is_for_the_same_model(
    width: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row for each schedule that trains, with its whole name; those that refuse say why."""
    monkeypatch.setenv("COLUMNS", width)
    assert run("compare", "-p", "4", "-m", "8") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = {line[0]: line[1:] for line in lines}
    assert rows.keys() >= set(names()) - {"forward-only"}
    if width == "160":
        assert (rows["1F1B"][1], rows["1F1B"][6]) == ("33", "4")
        assert (rows["Interleaved1F1B"][1], rows["ZB-V"][6]) == ("28.5", "4")
    assert run("compare", "-p", "4", "-m", "3") == 0
    assert "DualPipeV is left out: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "line"),
    [
        ("show 1F2B", 2, "unknown schedule '1F2B'; did you mean '1F1B'?"),
        ("show gpipe -p x", 2, "Invalid value for '--ranks'"),
        ("show gpipe -p 0", 2, "ranks=0: must be at least 1"),
        ("show gpipe -v 2", 2, "GPipe has one stage on each rank, not stages_per_rank=2"),
        ("show gpipe -m 1000000000", 2, "more than 10000000 actions; try smaller"),
        ("show /etc/passwd", 2, "the name of a schedule file ends in .csv or .json"),
        ("show none.csv", 65, "none.csv: cannot be read: No such file"),
        ("show none.csv -p 2", 2, "--ranks is only for a named schedule"),
        ("show gpipe --svg /none/a.svg", 2, "/none/a.svg: cannot be written: No such"),
        ("simulate gpipe --forward a", 2, "--forward=a: must be a number"),
        ("simulate gpipe --forward 1,2", 2, "forward has 2 numbers for 4 stages"),
        ("simulate gpipe --forward -1", 2, "forward=-1.0: must be a finite number"),
        ("convert gpipe a.txt", 2, "a.txt: the name of a schedule file ends in .csv or .json"),
        ("convert gpipe a.csv --pass magic", 2, "--pass=magic: must be one of compute-only, "),
    ],
)
def test_a_mistake_is_told_in_one_line(
    arguments: str, status: int, line: str, capsys: Capture
) -> None:
    assert run(*arguments.split()) == status
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert line in shown


@pytest.mark.parametrize(
    ("content", "gist"), [("0B0,0F0\n", "0B0: needs 0F0"), ("0F0,=cmd()\n", "row 1, column 2")]
)
def test_a_file_that_cannot_run_is_the_files_fault(
    content: str, gist: str, capsys: Capture, tmp_path: Path
) -> None:
    (tmp_path / "bad.csv").write_text(content)
    for command in ("show", "simulate"):
        assert run(command, str(tmp_path / "bad.csv")) == 65
        assert gist in capsys.readouterr().err
