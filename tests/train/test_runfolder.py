"""The run folder: made once, written by one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.errors import UsageError
from penstock.schedule import Action, Op
from penstock.schedule.simulation import Span, Timeline
from penstock.train.runfolder import METRICS, RunFolder, create_folder

TIMELINE = Timeline((Span(0, Action(0, Op.F, 0), 0.0, 1.0),), ranks=1)


def test_the_default_is_named_after_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = create_folder(None)
    assert path.parent == Path("runs")
    assert path.is_dir()


def test_a_folder_that_is_there_may_be_used_once(tmp_path: Path) -> None:
    create_folder(str(tmp_path))
    with pytest.raises(UsageError, match="holds a run already; choose another folder"):
        create_folder(str(tmp_path))


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file; choose a folder"):
        create_folder(str(tmp_path / "file"))


def test_a_place_without_permission(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"Not a directory; choose a folder to write to"):
        create_folder(str(tmp_path / "file" / "below"))


def test_metrics_are_lines_of_json(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, writes=True)
    folder.log({"step": 1})
    folder.log({"step": 2})
    lines = (tmp_path / METRICS).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_a_timeline_is_kept_as_trace_and_drawing(tmp_path: Path) -> None:
    RunFolder(tmp_path, writes=True).write_timeline(TIMELINE, title="a title", note="a note")
    assert json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    svg = (tmp_path / "timeline.svg").read_text()
    assert "a title" in svg
    assert "a note" in svg


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, writes=False)
    folder.log({"step": 1})
    folder.write_config("steps = 1")
    folder.write_timeline(TIMELINE, title="", note="")
    assert list(tmp_path.iterdir()) == []
