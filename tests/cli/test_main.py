"""The command as a whole: what it lists, what it imports for that, and its version."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import penstock
from penstock.cli.main import main
from penstock.train import TrainConfig

ROOT = Path(__file__).parents[2]

LIGHT = """
import sys
from penstock.cli.main import main
status = main(sys.argv[1:])
print("torch" in sys.modules, file=sys.stderr)
sys.exit(status)
"""


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("--help", 0),
        ("--version", 0),
        ("schedule show ZB-V", 0),
        ("train --help", 0),
        ("train --microbatches 17", 2),
        ("plan --help", 0),
        ("checkpoint --help", 0),
    ],
)
def test_torch_is_not_imported_until_a_command_needs_it(command: str, status: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, *command.split()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status
    assert done.stderr.splitlines()[-1] == "False"


def test_a_flag_for_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    flags = {f"--{name.replace('_', '-')}" for name in TrainConfig.model_fields}
    assert set(re.findall(r"--(?!no-)[a-z-]+", shown)) >= flags | {"--config"}
    assert all(group in shown for group in ("Pipeline", "Model", "Checkpoints"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["run", "--processes", "2", "script.py", "--lr", "3"],
            "torchrun --standalone --nproc-per-node 2 script.py --lr 3",
        ),
        (
            ["run", "-n", "3", "-m", "package.module"],
            "torchrun --standalone --nproc-per-node 3 -m package.module",
        ),
        (["run"], "torchrun --standalone --nproc-per-node 4 script.py"),
        (
            ["train", "--processes", "4"],
            "torchrun --standalone --nproc-per-node 4 -m penstock train",
        ),
    ],
    ids=["script", "module", "bare", "train"],
)
def test_our_own_launcher_was_withdrawn(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert "was withdrawn" in shown
    assert said in shown
    assert main(["--help"]) == 0
    assert "│ run " not in capsys.readouterr().out


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"penstock {penstock.__version__}, torch 2.")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["hatch"]["version"]["path"] == "src/penstock/__init__.py"


def test_a_command_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "Did you mean 'train'?" in capsys.readouterr().err
    assert main([]) == 2
    assert "see --help" in capsys.readouterr().err
    assert main(["schedule"]) == 2
    assert "Usage: penstock schedule" in capsys.readouterr().out


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
