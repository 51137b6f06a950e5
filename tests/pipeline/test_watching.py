"""What a user may watch a run with: callbacks on steps, TensorBoard, and ranges of torch's profiler."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.profiler import ProfilerActivity, profile

from penstock import Pipeline, StepEvent, TensorBoard
from penstock.errors import UsageError

X = torch.ones(4, 4)


def make() -> Pipeline:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return Pipeline(model, schedule="ZB-H1", ranks=2, microbatches=2, loss_fn=mse_loss)


def test_functions_are_called_around_each_step_until_they_are_removed() -> None:
    pipe = make()
    seen: list[tuple[str, StepEvent]] = []
    handle = pipe.on_step(lambda event: seen.append(("after", event)))
    with pipe.on_step(before=lambda event: seen.append(("before", event))):
        result = pipe.step(X, target=X)
    pipe.step(X, target=X)
    handle.remove()
    handle.remove()
    pipe.step(X, target=X)
    assert [(when, event.step) for when, event in seen] == [
        ("before", 1),
        ("after", 1),
        ("after", 2),
    ]
    before, after = seen[0][1], seen[1][1]
    assert before.result is None
    assert after.result is result
    assert after.seconds > before.seconds == 0
    assert after.leads
    assert after.memory > 1 << 20


def test_steps_are_counted_on_from_a_loaded_state() -> None:
    pipe = make()
    pipe.randomness.load_state_dict({"seed": 1, "step": 40})
    steps: list[int] = []
    pipe.on_step(lambda event: steps.append(event.step))
    pipe.step(X, target=X)
    assert steps == [41]


def test_what_a_callback_raises_the_step_raises() -> None:
    def stop(event: StepEvent) -> None:
        raise KeyError(event.step)

    pipe = make()
    with pipe.on_step(stop), pytest.raises(KeyError, match="1"):
        pipe.step(X, target=X)
    pipe.step(X, target=X)


@pytest.mark.parametrize("given", [{}, {"after": 3}, {"before": "loss"}])
def test_what_cannot_be_called_is_refused(given: Any) -> None:
    with pytest.raises(UsageError, match="on_step needs a function of a StepEvent"):
        make().on_step(**given)


def test_tensorboard_gets_the_numbers_of_each_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    pipe = make()
    with TensorBoard(tmp_path) as board, pipe.on_step(board):
        losses = [pipe.step(X, target=X, record=True).loss for _ in range(2)]
        board.add("rate", 0.5)
    written = EventAccumulator(str(tmp_path)).Reload()
    assert set(written.Tags()["scalars"]) == {"loss", "seconds", "memory", "bubble", "rate"}
    assert [one.value for one in written.Scalars("loss")] == pytest.approx(losses)
    assert [one.step for one in written.Scalars("rate")] == [2]


def test_only_the_leading_process_writes(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    folder = tmp_path / "logs"
    with TensorBoard(folder) as board:
        board(
            StepEvent(1, leads=False, device=torch.device("cpu"), result=make().step(X, target=X))
        )
        board.add("rate", 0.5)
    assert not folder.exists()


def test_tensorboard_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match=r"pip install 'penstock\[tensorboard\]'"):
        TensorBoard("logs")


def test_actions_are_ranges_while_a_profiler_runs(tmp_path: Path) -> None:
    pipe = make()
    pipe.step(X, target=X)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        pipe.step(X, target=X)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["name"] for event in trace if event.get("cat") == "user_annotation"}
    assert {"0F0", "1F1", "1I0", "0W1"} <= names
