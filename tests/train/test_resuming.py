"""A run of ``penstock train`` that stops is resumed as if it had not."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock import Pipeline, read_weights
from penstock.cli.main import main
from penstock.errors import InputFileError, UsageError
from penstock.train import resolve, train
from tests.processes import script
from tests.train.runs import SMALL, config_for, flags, losses, run


def in_step(monkeypatch: pytest.MonkeyPatch, number: int, do: Any) -> None:
    """Have something happen in the middle of a step."""
    inner, steps = Pipeline.step, iter(range(1, 100))

    def step(self: Pipeline, *args: Any, **kwargs: Any) -> Any:
        if next(steps) == number:
            do()
        return inner(self, *args, **kwargs)

    monkeypatch.setattr(Pipeline, "step", step)


@pytest.fixture(scope="module")
def plain(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing stopped."""
    return run(config_for(text, out=str(tmp_path_factory.mktemp("plain") / "run")))[0].folder


def test_a_time_limit_and_another_layout(text: Path, tmp_path: Path, plain: Path) -> None:
    first, shown = run(config_for(text, out=str(tmp_path / "run"), time_limit=1e-6))
    assert first.held_out_loss is None
    assert "time limit: checkpoint of step 1: " in shown
    assert f"resume with: penstock train --resume {tmp_path / 'run'}" in shown
    # The limit counts anew; so each time the run comes one step further.
    again, shown = run(resolve({"resume": str(tmp_path / "run")}))
    assert "resumed from step 1 of" in shown
    assert "time limit: checkpoint of step 2: " in shown
    assert len(again.losses) == 1
    # With the settings of the run folder, but another schedule, and time enough.
    changes = {"resume": str(tmp_path / "run"), "ranks": 1, "schedule": "ZB-V", "time_limit": 1e9}
    last, shown = run(resolve(changes))
    assert "resumed from step 2 of" in shown
    assert "will not see the text" not in shown
    assert last.folder == tmp_path / "run"
    assert losses(last.folder) == pytest.approx(losses(plain), abs=1e-5)
    assert len(last.losses) == SMALL["steps"] - 2
    assert read_weights(last.folder / "weights").keys() == read_weights(plain / "weights").keys()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal(
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    plain: Path,
) -> None:
    command = flags(text, tmp_path / "run", resume="auto", save_every=4)
    with monkeypatch.context() as patched:
        in_step(patched, 3, lambda: os.kill(os.getpid(), number))
        if number == signal.SIGINT:
            assert main(command) == 130
        else:
            with pytest.raises(SystemExit, match="143"):
                main(command)
    shown = capsys.readouterr().out
    assert f"{signal.Signals(number).name}: checkpoint of step 3: " in shown
    assert f"resume with: penstock train --resume {tmp_path / 'run'}" in shown.replace("\n", "")
    metrics = tmp_path / "run" / "metrics.jsonl"
    # A kill may cut off a line, and steps after the checkpoint are taken again.
    metrics.write_text(metrics.read_text() + '{"step": 5, "loss": 9}\n{"step": 1, "lo')
    assert main(command) == 0
    assert re.search(
        r"resumed from step 3 of .*; 2 steps after it were lost", capsys.readouterr().out
    )
    assert losses(tmp_path / "run") == losses(plain)
    saved = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert sorted(path.name for path in saved) == ["step-00000004", "step-00000006"]


def test_a_run_that_broke_off_is_resumed_from_its_last_checkpoint(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: Path
) -> None:
    def pull_the_plug() -> None:
        raise OSError("pulled the plug")

    config = config_for(text, out=str(tmp_path / "run"), resume="auto", save_every=2)
    with monkeypatch.context() as patched:
        in_step(patched, 6, pull_the_plug)
        with pytest.raises(OSError, match="plug"):
            train(config, Console(quiet=True))
    _, shown = run(config)
    assert "resumed from step 4" in shown
    assert losses(tmp_path / "run") == losses(plain)


def test_show_and_export_and_other_data(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    run(config_for(text, out=str(folder), save_every=6))
    assert main(["checkpoint", "show", str(folder), "--check"]) == 0
    shown = capsys.readouterr().out
    for part in ("step-00000006", "1F1B, 2 stages on 2 ranks", "AdamW", '{"seed": 3, "batch": 4'):
        assert part in shown
    assert main(["checkpoint", "export", str(folder), str(tmp_path / "weights")]) == 0
    exported, trained = read_weights(tmp_path / "weights"), read_weights(folder / "weights")
    assert exported.keys() == trained.keys()
    assert all((exported[name] == trained[name]).all() for name in trained)
    _, shown = run(resolve({"resume": str(folder), "batch": 2, "steps": 7}))
    assert "batch was 4 and is 2: the run will not see the text that an uninterrupted" in shown
    for table in folder.rglob("checkpoint.json"):
        table.write_bytes(table.read_bytes()[:-1])
    capsys.readouterr()
    assert main(["checkpoint", "show", str(folder)]) == 0
    assert "step-00000006  DAMAGED: " in capsys.readouterr().out
    assert main(["checkpoint", "export", str(folder), str(tmp_path / "x")]) == 65
    assert main(["checkpoint", "show", str(tmp_path / "weights")]) == 2


def test_folders_that_cannot_be_used(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="resume='no/such': there is no run with checkpoints"):
        run(config_for(text, out=str(tmp_path / "a"), resume="no/such"))
    assert not (tmp_path / "a").exists()
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UsageError, match="there is no checkpoint in"):
        run(config_for(text, out=str(tmp_path / "b"), resume=str(tmp_path)))
    with pytest.raises(UsageError, match="holds a run already; choose another folder"):
        run(config_for(text, out=str(tmp_path / "b")))
    (tmp_path / "file").touch()
    for out, gist in (("file", "is a file; choose"), ("file/below", "Not a directory; choose")):
        with pytest.raises(UsageError, match=gist):
            run(config_for(text, out=str(tmp_path / out)))
    monkeypatch.chdir(tmp_path)
    assert run(config_for(text, steps=1))[0].folder.parent == Path("runs")


def test_a_run_folder_of_somebody_else_says_nowhere_where_to_write(
    text: Path, tmp_path: Path
) -> None:
    folder, mine = tmp_path / "run", tmp_path / "mine"
    run(config_for(text, steps=1, save_every=1, out=str(folder)))
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").symlink_to(mine)
    with pytest.raises(UsageError, match="Too many levels of symbolic links"):
        run(config_for(text, steps=2, out=str(folder), resume="auto"))
    with (folder / "config.toml").open("a") as file:
        file.write(f"out = '{mine}'\n")
    with pytest.raises(
        InputFileError, match=r"config\.toml: out= is no setting that a run folder keeps"
    ):
        resolve({"resume": str(folder)})
    assert not mine.exists()


# ---- under torchrun


def has_saved(folder: Path) -> bool:
    return bool(list(folder.glob("checkpoints/step-*")))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_signal_to_processes(text: Path, tmp_path: Path) -> None:
    """Two replicas of one rank, which hold the halves of each weight; both stop at the same step."""
    changes = {"steps": 100_000, "save_every": 5, "ranks": 1, "replicas": 2}
    command = flags(text, tmp_path / "run", resume="auto", **changes)

    with script("-m", "penstock", *command, "--shard", processes=2) as job:
        job.until(lambda: has_saved(tmp_path / "run"))
        for pid in job.pids:
            os.kill(pid, signal.SIGTERM)
        ran = job.wait(together=True)
    shown = "".join(rank.out for rank in ran)
    assert "SIGTERM: checkpoint of step " in shown, ran
    assert "--nproc-per-node 2 -m penstock train --resume" in shown
    saved = [path.name for path in tmp_path.glob("run/checkpoints/step-*")]
    last = int(max(saved).removeprefix("step-"))
    # Another number of processes resumes from there.
    changes = {"replicas": 1, "shard": False, "steps": last + 2}
    again, shown = run(resolve({"resume": str(tmp_path / "run"), **changes}))
    assert f"resumed from step {last} of" in shown
    assert len(again.losses) == 2
