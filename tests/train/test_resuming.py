"""A run of ``penstock train`` that stops goes on as if it had not."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock.cli.main import main
from penstock.errors import ConfigError, UsageError
from penstock.train import TrainConfig, resolve, train
from penstock.train.trainer import Run
from tests.train.test_trainer import SMALL, config_for, records, text, weights

__all__ = ["text"]


def run(config: TrainConfig) -> tuple[Any, str]:
    """Its outcome and what it printed."""
    out = io.StringIO()
    return train(config, Console(file=out, width=200)), out.getvalue()


def losses(outcome: Any) -> list[float]:
    return [record["loss"] for record in records(outcome) if "loss" in record]


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int, number: int) -> None:
    """Have a signal come in the middle of a step."""
    inner = Run._step

    def stepped(self: Run, now: int) -> Any:
        if now == step:
            os.kill(os.getpid(), number)
        return inner(self, now)

    monkeypatch.setattr(Run, "_step", stepped)


def test_a_time_limit_and_another_layout(text: Path, tmp_path: Path) -> None:
    whole, _ = run(config_for(text, out=str(tmp_path / "whole")))
    first, told = run(config_for(text, out=str(tmp_path / "run"), time_limit=1e-6))
    assert first.held_out_loss is None
    assert "time limit: checkpoint of step 1: " in told
    assert f"go on with: penstock train --resume {tmp_path / 'run'}" in told
    # With the settings of the run folder; another schedule, without a limit.
    changes = {"resume": str(tmp_path / "run"), "ranks": 1, "schedule": "ZB-V", "time_limit": 1e9}
    again, told = run(resolve(changes))
    assert "goes on after step 1 of" in told
    assert "the text is not that" not in told
    assert again.folder == tmp_path / "run"
    assert losses(again) == pytest.approx(losses(whole), abs=1e-5)
    assert len(again.losses) == SMALL["steps"] - 1
    assert weights(again).keys() == weights(whole).keys()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal(
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    status: int,
) -> None:
    flags = {**SMALL, "data": text, "out": tmp_path / "run", "resume": "auto", "save_every": 4}
    command = ["train"]
    for name, value in flags.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    with monkeypatch.context() as patched:
        stop_at(patched, 3, number)
        if status == 130:
            assert main(command) == status
        else:
            with pytest.raises(SystemExit) as raised:
                main(command)
            assert raised.value.code == status
    told = capsys.readouterr().out
    assert f"{signal.Signals(number).name}: this step is finished and saved" in told
    assert f"go on with: penstock train --resume {tmp_path / 'run'}" in told.replace("\n", "")
    assert main(command) == 0
    assert "goes on after step 3" in capsys.readouterr().out
    whole, _ = run(config_for(text, out=str(tmp_path / "whole")))
    found = [one for one in records(type(whole)((), None, b"", tmp_path / "run")) if "loss" in one]
    assert [one["loss"] for one in found] == list(whole.losses)
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")) == [
        "step-00000004",
        "step-00000006",
    ]


def test_a_run_that_broke_off_goes_on_at_its_last_checkpoint(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(text, out=str(tmp_path / "run"), resume="auto", save_every=2)
    inner = Run._step

    def broken(self: Run, step: int) -> Any:
        if step == 6:
            raise OSError("pulled the plug")
        return inner(self, step)

    with monkeypatch.context() as patched:
        patched.setattr(Run, "_step", broken)
        with pytest.raises(OSError, match="plug"):
            train(config, Console(quiet=True))
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    outcome, told = run(config)
    assert "goes on after step 4" in told
    whole, _ = run(config_for(text, out=str(tmp_path / "whole")))
    assert losses(outcome) == list(whole.losses)


def test_other_data_are_told(text: Path, tmp_path: Path) -> None:
    run(config_for(text, out=str(tmp_path / "run"), save_every=3))
    _, told = run(resolve({"resume": str(tmp_path / "run"), "batch": 2, "steps": 7}))
    assert "batch was 4 and is 2: the text is not that of a run without a stop" in told


def test_what_cannot_be_resumed(text: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name it with out="):
        resolve({"resume": "auto"})
    with pytest.raises(UsageError, match="resume='no/such': there is no such folder"):
        run(config_for(text, out=str(tmp_path / "a"), resume="no/such"))
    with pytest.raises(UsageError, match="there is no checkpoint in"):
        run(config_for(text, out=str(tmp_path / "b"), resume=str(tmp_path)))


def test_show_and_export(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome, _ = run(config_for(text, out=str(tmp_path / "run"), save_every=6))
    assert main(["checkpoint", "show", str(tmp_path / "run"), "--check"]) == 0
    shown = capsys.readouterr().out
    for part in (
        "step-00000006  20",
        "all bytes are those that were written",
        "1F1B, 2 stages on 2 ranks",
        "  optimizer: AdamW, states of ",
        "    group 0: ",
        "  randomness: the same on all processes",
        '  extra: {"seed": 3, "batch": 4',
    ):
        assert part in shown
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "plain")]) == 0
    plain = type(outcome)((), None, b"", tmp_path)
    (tmp_path / "plain").rename(tmp_path / "weights")
    found, expected = weights(plain), weights(outcome)
    assert found.keys() == expected.keys()
    assert all((found[name] == expected[name]).all() for name in found)
    table = next((tmp_path / "run").rglob("checkpoint.json"))
    table.write_bytes(table.read_bytes()[:-1])
    capsys.readouterr()
    assert main(["checkpoint", "show", str(tmp_path / "run")]) == 0
    assert "step-00000006  DAMAGED: " in capsys.readouterr().out
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "x")]) == 65
    assert main(["checkpoint", "show", str(tmp_path / "weights")]) == 2


# ---- in processes


def start(arguments: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def flags(text: Path, out: Path, **changes: Any) -> list[str]:
    settings = {**SMALL, "data": text, "out": out, "resume": "auto", **changes}
    pairs = ((f"--{name.replace('_', '-')}", str(value)) for name, value in settings.items())
    return ["penstock", "train", *(part for pair in pairs for part in pair)]


def await_checkpoint(folder: Path, process: subprocess.Popen[str]) -> None:
    while process.poll() is None and not list(folder.glob("checkpoints/step-*")):
        time.sleep(0.05)


def children(process: int) -> list[int]:
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(one) for one in found]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_killed_rank_under_torchrun(text: Path, tmp_path: Path) -> None:
    """With restarts it costs the steps since the last checkpoint, and no number changes."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    many = {"steps": 60, "save_every": 1, "log_every": 20}
    command = flags(text, tmp_path / "run", **many)
    with start([*torchrun, "--max-restarts", "1", "-m", *command]) as process:
        await_checkpoint(tmp_path / "run", process)
        os.kill(children(process.pid)[-1], signal.SIGKILL)
        told, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    assert "goes on after step " in told
    whole, _ = run(config_for(text, out=str(tmp_path / "whole"), **many))
    assert losses(type(whole)((), None, b"", tmp_path / "run")) == list(whole.losses)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_signal_to_processes(text: Path, tmp_path: Path) -> None:
    """Two replicas of one rank, which hold the halves of each weight; both stop at the same step."""
    changes = {"steps": 100_000, "save_every": 5, "ranks": 1, "replicas": 2}
    command = [*flags(text, tmp_path / "run", processes=2, **changes), "--shard"]
    with start(command) as process:
        await_checkpoint(tmp_path / "run", process)
        process.send_signal(signal.SIGTERM)
        told, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "SIGTERM: checkpoint of step " in told
    assert f"penstock train --resume {tmp_path / 'run'} --processes 2" in told.replace("\n", "")
    assert "Traceback" not in errors
    found = [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")]
    last = int(max(found).removeprefix("step-"))
    # Another number of processes goes on from there.
    again, told = run(
        resolve({"resume": str(tmp_path / "run"), "replicas": 1, "shard": False, "steps": last + 2})
    )
    assert f"goes on after step {last} of" in told
    assert len(again.losses) == 2
