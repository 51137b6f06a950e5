"""The command as a whole: what it lists, what it imports for that, and its version."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import penstock
from penstock.cli.main import COMMANDS, loaded, main

ROOT = Path(__file__).parents[2]

LIGHT = """
import sys
from penstock.cli.main import main
status = main(sys.argv[1:])
heavy = {"torch", "numpy", "pydantic"} & set(sys.modules)
print("imported:", *sorted(heavy), file=sys.stderr)
sys.exit(status)
"""


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["--help"], ""),
        (["--version"], ""),
        (["schedule", "--help"], "pydantic"),  # typer's own
        (["schedule", "show", "ZB-V"], "numpy pydantic"),
        (["train", "--help"], "pydantic"),
        (["run", "--help"], "pydantic"),
    ],
    ids=" ".join,
)
def test_no_more_is_imported_than_a_command_needs(arguments: list[str], needed: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", LIGHT, *arguments], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0
    assert set(found.stderr.split()[1:]) <= set(needed.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_listed_as_it_describes_itself(name: str) -> None:
    command = loaded(name)
    assert command.name == name
    assert (command.help or "").splitlines()[0] == COMMANDS[name]


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"penstock {penstock.__version__}, torch 2.")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["hatch"]["version"]["path"] == "src/penstock/__init__.py"


def test_a_command_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "Did you mean 'train'?" in capsys.readouterr().err


def test_shells_complete_commands_and_schedules(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def completed(words: str) -> str:
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
        monkeypatch.setenv("_PENSTOCK_COMPLETE", "complete_bash")
        with pytest.raises(SystemExit):
            main([])
        return capsys.readouterr().out

    assert completed("penstock s").split() == ["schedule"]
    assert "compare" in completed("penstock schedule c").split()
    assert completed("penstock schedule show ZB-").split() == ["ZB-H1", "ZB-H2", "ZB-V"]
