"""The run folder: made once, written by one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.errors import UsageError
from penstock.train.runfolder import METRICS, RunFolder, create_folder


def test_the_default_is_named_after_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = create_folder(None)
    assert path.parent == Path("runs")
    assert path.is_dir()


def test_a_folder_is_used_once_and_a_file_is_none(tmp_path: Path) -> None:
    create_folder(str(tmp_path / "run"))
    with pytest.raises(UsageError, match="holds a run already; choose another folder"):
        create_folder(str(tmp_path / "run"))
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file; choose a folder"):
        create_folder(str(tmp_path / "file"))
    with pytest.raises(UsageError, match="Not a directory; choose a folder to write to"):
        create_folder(str(tmp_path / "file" / "below"))


def test_metrics_are_lines_of_json_and_rewound_to_a_step(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, writes=True)
    for step in (1, 2, 3):
        folder.log({"step": step})
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 1, "lo')
    folder.rewind(2)
    lines = (tmp_path / METRICS).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, writes=False)
    folder.log({"step": 1})
    folder.write("config.toml", "steps = 1")
    folder.rewind(0)
    assert list(tmp_path.iterdir()) == []
