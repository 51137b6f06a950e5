"""``penstock train`` as a user meets it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import read_weights
from penstock.cli.main import main
from tests.scripts import Ran, run_script

Capture = pytest.CaptureFixture[str]

SMALL = {
    "ranks": 2,
    "layers": 2,
    "width": 16,
    "heads": 2,
    "sequence": 16,
    "batch": 4,
    "microbatches": 2,
    "steps": 4,
    "log-every": 2,
    "warmup": 1,
    "held-out-batches": 1,
    "sample-length": 5,
    "threads": 1,
}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_text("to be or not to be, that is the question. " * 100)
    return path


def small(text: Path, **changes: object) -> list[str]:
    settings = {**SMALL, "data": text, "out": text.parent / "run", **changes}
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


def refused(capsys: Capture, arguments: list[str]) -> tuple[int, str]:
    """The exit status, and what was said in one line."""
    status = main(["train", *arguments])
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "Traceback" not in shown
    return status, shown


def train(*arguments: str, processes: int, status: int = 0) -> Ran:
    """A run in several processes, and what all of them printed."""
    ran = run_script("-m", "penstock", "train", *arguments, processes=processes)
    assert ran[0].status == status, ran
    assert status or all(rank.status == 0 for rank in ran), ran
    return Ran(status, "".join(rank.out for rank in ran), "".join(rank.err for rank in ran))


def records(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_prints_steps_and_ends_with_its_folder(text: Path, capsys: Capture) -> None:
    assert main(["train", *small(text)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:8] for line in lines if line.startswith("step")] == ["step 2/4", "step 4/4"]
    assert lines[-1] == f"run folder: {text.parent / 'run'}"


def test_a_config_file_does_what_flags_do(text: Path, capsys: Capture) -> None:
    config = text.parent / "run.toml"
    config.write_text("".join(f"{k.replace('-', '_')} = {v}\n" for k, v in SMALL.items()))
    arguments = ["--config", str(config), "--data", str(text), "--out", str(text.parent / "a")]
    assert main(["train", *arguments]) == 0
    assert main(["train", *small(text, out=text.parent / "b")]) == 0
    losses = [[r.get("loss") for r in records(text.parent / name)] for name in "ab"]
    assert losses[0] == losses[1]
    capsys.readouterr()


def test_a_run_can_be_repeated_from_its_folder(text: Path, capsys: Capture) -> None:
    assert main(["train", *small(text)]) == 0
    arguments = ["--config", str(text.parent / "run" / "config.toml")]
    assert main(["train", *arguments, "--out", str(text.parent / "again")]) == 0
    ends = [records(text.parent / name)[-1] for name in ("run", "again")]
    assert ends[0] == ends[1]
    capsys.readouterr()


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--data", "/no/such/text"], ("data='/no/such/text'", "give the path")),
        (["--config", "no.toml"], ("config='no.toml'", "give the path")),
        (["--schedule", "1F2B"], ("'1F2B'", "did you mean '1F1B'")),
        (["--steps", "many"], ("'--steps'", "valid integer", "see --help")),
        (["--steps", "0xff"], ("'--steps'", "valid integer", "see --help")),
        (["--steps", "9" * 30], (f"steps={'9' * 30}", "at most 1000000000")),
        (["--microbatches", "1000000000", "--batch", "1000000000"], ("batch=1000000000",)),
        (["--learning-rate", "inf"], ("learning_rate=inf", "finite")),
        (["--device", "abacus"], ("device='abacus'", "use cpu")),
        (["--stepps", "1"], ("No such option: --stepps", "see --help")),
        (["text"], ("unexpected extra argument", "see --help")),
        (["--out", __file__], ("is a file; choose a folder",)),
    ],
)
def test_a_wrong_call(flags: list[str], parts: tuple[str, ...], capsys: Capture) -> None:
    status, shown = refused(capsys, flags)
    assert status == 2
    assert all(part in shown for part in parts)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("steps 3", ("not TOML", "line 1", "write lines such as")),
        ("stepps = 3", ("unknown setting 'stepps'", "did you mean 'steps'?")),
        ("steps = 0", ("steps=0", "at least 1")),
        ('schedule = "1F2B"', ("'1F2B'", "did you mean '1F1B'")),
    ],
)
def test_a_wrong_config_file(
    content: str, parts: tuple[str, ...], tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "run.toml").write_text(content)
    status, shown = refused(capsys, ["--config", str(tmp_path / "run.toml")])
    assert status == 65
    assert all(part in shown for part in ("run.toml: ", *parts))


def test_a_rate_that_makes_the_loss_infinite(text: Path, capsys: Capture) -> None:
    status, shown = refused(capsys, small(text, **{"learning-rate": 1e30, "steps": 20}))
    assert status == 76
    assert "learning_rate=1e+30" in shown
    assert "use a lower learning rate" in shown


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_processes_give_the_losses_of_one_bit_for_bit(text: Path) -> None:
    many = train(*small(text, out=text.parent / "many"), processes=2)
    assert many.out.count("step 4/4") == 1
    assert "measured on the clocks of the ranks" in many.out
    assert main(["train", *small(text, out=text.parent / "one")]) == 0
    numbers = ("loss", "gradient_norm", "held_out_loss")
    many_numbers, one_numbers = (
        [record.get(number) for record in records(text.parent / name) for number in numbers]
        for name in ("many", "one")
    )
    assert many_numbers == one_numbers


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("shard", [pytest.param((), marks=pytest.mark.nightly), ("--shard",)])
def test_replicas_give_the_losses_of_one_process(text: Path, shard: tuple[str, ...]) -> None:
    options = {"ranks": 2, "replicas": 2}
    many = train(*small(text, out=text.parent / "many", **options), *shard, processes=4)
    assert many.out.count("step 4/4") == 1
    assert main(["train", *small(text, out=text.parent / "one")]) == 0
    for name in ("loss", "gradient_norm", "held_out_loss"):
        values, expected = (
            [record[name] for record in records(text.parent / run) if name in record]
            for run in ("many", "one")
        )
        assert values == pytest.approx(expected, rel=1e-5)
    mine, plain = (read_weights(text.parent / run / "weights") for run in ("many", "one"))
    assert mine.keys() == plain.keys()
    assert all(torch.allclose(mine[name], plain[name], atol=1e-4) for name in plain)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"replicas": 2}, "replicas=2 of 2 ranks need 4 processes, not 2"),
        ({"shard": ""}, "shard=True without replicas"),
    ],
)
def test_replicas_that_cannot_be(
    text: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], said: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    arguments = [one for one in small(text, ranks=2, **options) if one]
    status, shown = refused(capsys, arguments)
    assert status == 2
    assert said in shown


def test_a_mistake_is_told_by_one_of_several_processes(text: Path) -> None:
    done = train(*small(text, microbatches=9), processes=2, status=2)
    assert done.err.count("penstock: microbatches=9") == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_is_interrupted_keeps_its_metrics(text: Path) -> None:
    command = [sys.executable, "-m", "penstock", "train", *small(text, steps=100_000)]
    metrics = text.parent / "run" / "metrics.jsonl"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 130
    assert errors == b"penstock: interrupted\n"
    assert records(text.parent / "run")
