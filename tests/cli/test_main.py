"""The command as a whole: what it lists, what it imports for that, and its version."""

from __future__ import annotations

import re
import sys

import pytest

import penstock
from penstock.cli.main import main
from penstock.train import TrainConfig
from tests.processes import run_program

LIGHT = """
import sys
from penstock.cli.main import main
for command, status in (
    ("--help", 0), ("--version", 0), ("schedule show ZB-V", 0), ("train --help", 0),
    ("train --microbatches 17", 2), ("plan --help", 0), ("checkpoint --help", 0),
):
    assert main(command.split()) == status, command
    assert "torch" not in sys.modules, command
"""


def test_torch_is_not_imported_until_a_command_needs_it() -> None:
    ended = run_program(sys.executable, "-c", LIGHT)
    assert ended.status == 0, ended


def test_a_flag_for_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    flags = {f"--{name.replace('_', '-')}" for name in TrainConfig.model_fields}
    assert set(re.findall(r"--(?!no-)[a-z-]+", shown)) >= flags | {"--config"}
    assert all(group in shown for group in ("Pipeline", "Model", "Checkpoints"))


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"penstock-pipeline {penstock.__version__}, torch 2.")


def test_an_unknown_command_or_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "Did you mean 'train'?" in capsys.readouterr().err
    assert main([]) == 2
    assert "see --help" in capsys.readouterr().err
    assert main(["schedule"]) == 2
    assert "Usage: penstock schedule" in capsys.readouterr().out


def test_shells_complete_commands_and_schedules(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_PENSTOCK_COMPLETE", "complete_bash")
    for words, completions in (
        ("penstock s", ["schedule"]),
        ("penstock schedule co", ["convert", "compare"]),
        ("penstock schedule show ZB-", ["ZB-H1", "ZB-H2", "ZB-V"]),
    ):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
        with pytest.raises(SystemExit):
            main([])
        assert capsys.readouterr().out.split() == completions
