"""The programs of docs/elastic-training.md, stopped and started again, beside runs that nothing stopped."""

from __future__ import annotations

import os
import re
import runpy
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from accelerate.state import AcceleratorState, GradientState

from penstock import Pipeline
from tests.processes import run_script
from tests.test_pages import CODE_OF, ROOT

pytestmark = pytest.mark.on_cpu("recipes resume, whatever they compute on")
PROGRAMS = {
    block.said: block.text
    for block in CODE_OF[ROOT / "docs/elastic-training.md"]
    if block.mark == "file"
}
SIGNALLED = """
import os, signal, penstock
inner, numbers = penstock.Pipeline.step, iter(range(1, 99))
def step(self, *args, **kwargs):
    if next(numbers) == 7 and self.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return inner(self, *args, **kwargs)
penstock.Pipeline.step = step
"""


def losses(printed: str) -> dict[int, float]:
    """The losses by step; the Trainer prints epochs, of eight steps."""
    rows = re.findall(r"^step (\d+)  loss ([\d.]+)", printed, re.MULTILINE)
    epochs = re.findall(r"^{'loss': '([\d.]+)'.* 'epoch': '([\d.]+)'}", printed, re.MULTILINE)
    rows += [(round(8 * float(epoch)), loss) for loss, epoch in epochs]
    return {int(step): float(loss) for step, loss in rows}


def run(name: str, capfd: Any) -> tuple[dict[int, float], BaseException | None]:
    """Run a program as the only process of torchrun; returns the losses by step, and how it ended."""
    # What Accelerate keeps for a whole process.
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    ended: BaseException | None = None
    with patch.dict(os.environ, {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}):
        try:
            runpy.run_path(name, run_name="__main__")
        except BaseException as error:
            ended = error
    return losses(capfd.readouterr().out), ended


def fail_in_step(monkeypatch: pytest.MonkeyPatch, number: int, how: str) -> None:
    inner, numbers = Pipeline.step, iter(range(1, 99))

    def step(self: Pipeline, *args: Any, **kwargs: Any) -> Any:
        if next(numbers) == number:
            if how == "OSError":
                raise OSError("the plug was pulled")
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(self, *args, **kwargs)

    monkeypatch.setattr(Pipeline, "step", step)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("how", ["SIGTERM", "OSError"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_recipe_goes_on_as_if_nothing_had_stopped_it(
    name: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    signalled = how == "SIGTERM"
    for folder in ("whole", "stopped"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(PROGRAMS[name])
    monkeypatch.chdir(tmp_path / "whole")
    whole, _ = run(name, capfd)
    monkeypatch.chdir(tmp_path / "stopped")
    with monkeypatch.context() as patched:
        fail_in_step(patched, 7, how)
        first, error = run(name, capfd)
    second, _ = run(name, capfd)
    assert type(error).__name__ in ({"SystemExit"} if signalled else {how})
    assert [*whole] == [*range(1, 13)]
    assert [*first] == [*range(1, 8 if signalled else 7)]
    assert [*second] == [*range(8 if signalled else 5 if name == "lit.py" else 6, 13)]
    assert first | second == pytest.approx(whole, rel=1e-5)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.whole
@pytest.mark.filterwarnings("default")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_signal_to_one_rank_of_two_saves_on_both(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(SIGNALLED + PROGRAMS[name])
    ran = run_script(name, processes=2)
    assert all(rank.status for rank in ran), ran
    first = losses("".join(rank.out for rank in ran))
    assert [*first] == [*range(1, 8)], ran
    # One process resumes what two have saved.
    Path(name).write_text(PROGRAMS[name])
    second, error = run(name, capfd)
    assert error is None
    assert [*second] == [*range(8, 13)]
