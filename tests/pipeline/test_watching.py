"""What a user may watch a run with: callbacks on steps, TensorBoard, and ranges of torch's profiler."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import mse_loss
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from penstock import Pipeline, PipelineStage, StepEvent, StepResult, TensorBoard
from penstock.errors import UsageError
from penstock.pipeline import peak_flops
from penstock.runtime import StepCost

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
    with pytest.raises(UsageError, match="functions that take one StepEvent"):
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


# ---- how fast a step was


class Attends(nn.Module):
    """A layer of attention and of products."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, hidden: Tensor) -> Any:
        parts = self.mix(hidden).view(len(hidden), -1, 3, 2, 8).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*parts)
        return hidden + self.out(attended.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("stages", [1, 3])
def test_a_result_tells_how_fast_the_step_was(stages: int) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*[Attends() for _ in range(3)]), torch.randn(8, 12, 16)
    plain = copy.deepcopy(model)
    pipe = Pipeline(
        model, stages=stages, microbatches=4, loss_fn=nn.functional.mse_loss,
        loss_weight=lambda target: target.shape[0] * target.shape[1], checkpoint=True,
    )  # fmt: skip
    result = pipe.step(x, target=x)
    assert result.seconds > 0
    assert result.throughput * result.seconds == pytest.approx(8 * 12)
    assert result.memory > 1 << 20
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        plain(x)
    forward = counter.get_total_flops()
    assert result.tflops is not None
    assert result.tflops * result.seconds * 1e12 == pytest.approx(3 * forward)
    evaluated = pipe.eval(x, target=x)
    assert evaluated.tflops is not None
    assert evaluated.tflops * evaluated.seconds * 1e12 == pytest.approx(forward)
    # Nobody knows what a CPU can do at most.
    assert result.mfu is None


def test_operations_per_second_are_those_of_a_device() -> None:
    cost = StepCost(2.0, 4, lambda: 0, lambda: 8e12, lambda: 10e12)
    result = StepResult(loss=0.0, weight=6.0, cost=cost)
    assert (result.throughput, result.tflops, result.mfu) == (3.0, 1.0, 0.1)


def test_where_operations_cannot_be_counted_there_is_no_number() -> None:
    stages = [PipelineStage(nn.Linear(4, 4), index, 2) for index in range(2)]
    by_hand = Pipeline.from_stages(stages, schedule="1F1B", loss_fn=nn.functional.mse_loss)
    assert by_hand.step(torch.ones(4, 4), target=torch.ones(4, 4)).tflops is None


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H200", "highest", 66.9e12),
        ("NVIDIA H100 80GB HBM3", "high", 494.7e12),
        ("NVIDIA H100 PCIe", "highest", 51e12),
        ("NVIDIA A100-SXM4-80GB", "high", 156e12),
        ("NVIDIA L40S", "highest", 91.6e12),
        ("NVIDIA L4", "high", 60e12),
        ("a GPU of the future", "highest", None),
    ],
)
def test_the_peak_is_known_by_the_name(
    name: str, precision: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    assert peak_flops(torch.device("cuda"), torch.float32) == (peak and pytest.approx(peak))
    assert peak_flops(torch.device("cpu"), torch.float32) is None
