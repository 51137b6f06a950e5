"""``penstock train`` as a user meets it, in one process and in several."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock import read_weights
from penstock.cli.main import main
from tests.processes import run_script
from tests.train.runs import flags, losses, records

Capture = pytest.CaptureFixture[str]
NUMBERS = ("loss", "gradient_norm", "held_out_loss")


def numbers(folder: Path) -> list[float]:
    return [record[name] for record in records(folder) for name in NUMBERS if name in record]


def test_a_run_is_repeated_from_its_config_file(text: Path, tmp_path: Path) -> None:
    assert main(flags(text, tmp_path / "run", steps=2)) == 0
    again = ["train", "--config", str(tmp_path / "run" / "config.toml")]
    assert main([*again, "--out", str(tmp_path / "again")]) == 0
    assert numbers(tmp_path / "run") == numbers(tmp_path / "again")
    assert len(losses(tmp_path / "again")) == 2


@pytest.mark.parametrize(
    ("arguments", "status", "parts"),
    [
        (["--data", "/no/such/text"], 2, ("data='/no/such/text'", "give the path")),
        (["--schedule", "1F2B"], 2, ("'1F2B'", "did you mean '1F1B'")),
        (["--steps", "0xff"], 2, ("'--steps'", "valid integer", "see --help")),
        (["--steps", "9" * 30], 2, (f"steps={'9' * 30}: ", "1000000000")),
        (["--learning-rate", "inf"], 2, ("learning_rate=inf: ", "finite")),
        (["--stepps", "1"], 2, ("No such option: --stepps", "see --help")),
        (["text"], 2, ("unexpected extra argument", "see --help")),
        (["--config", __file__], 65, ("test_command.py: not TOML",)),
        (["--ranks", "2", "--replicas", "2"], 2, ("need 4 processes, not 2",)),
    ],
)
def test_a_mistake_is_told_in_one_line(
    arguments: list[str],
    status: int,
    parts: tuple[str, ...],
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", *arguments]) == status
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert all(part in shown for part in parts), shown


def test_a_rate_that_makes_the_loss_infinite(text: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(flags(text, tmp_path, learning_rate=1e30, steps=20)) == 76
    shown = capsys.readouterr().err
    assert shown.startswith("penstock: learning_rate=1e+30: ")
    assert shown.endswith("use a lower learning rate\n")


# ---- several processes


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_processes_give_the_numbers_of_one(text: Path, tmp_path: Path) -> None:
    """Bit for bit; `test_resuming.py` has shards."""
    command = flags(text, tmp_path / "many", steps=4, log_every=2)
    many = run_script("-m", "penstock", *command, processes=2)
    assert [rank.status for rank in many] == [0, 0], many
    printed = "".join(rank.out for rank in many)
    assert printed.count("step 4/4") == 1
    assert "measured on the clocks of the ranks" in printed
    assert main(flags(text, tmp_path / "one", steps=4)) == 0
    assert numbers(tmp_path / "many") == numbers(tmp_path / "one")
    ours, plain = (read_weights(tmp_path / name / "weights") for name in ("many", "one"))
    assert ours.keys() == plain.keys()
    assert all(torch.allclose(ours[name], plain[name], atol=1e-4) for name in plain)


def test_a_mistake_is_told_by_one_of_several_processes(text: Path, tmp_path: Path) -> None:
    ran = run_script("-m", "penstock", *flags(text, tmp_path, microbatches=9), processes=2)
    assert ran[0].status == 2
    assert "".join(rank.err for rank in ran).count("penstock: microbatches=9") == 1
