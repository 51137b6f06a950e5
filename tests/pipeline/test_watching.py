"""What tells how a run goes: TensorBoard, torch's profiler, timelines, and how fast a step was."""

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

from penstock import Loss, Pipeline, PipelineStage, StepEvent, StepResult, TensorBoard
from penstock._engine.runtime import StepCost
from penstock.errors import UsageError
from penstock.pipeline import peak_flops
from penstock.schedule import Schedule
from penstock.schedule.action import MESSAGE_OPS
from tests.catalogue.making import Does
from tests.processes import in_processes

X = torch.ones(4, 4)


def make(**options: Any) -> Pipeline:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    defaults: dict[str, Any] = {"schedule": "ZB-H1", "ranks": 2, "microbatches": 2}
    return Pipeline(model, loss_fn=mse_loss, **(defaults | options))


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


def test_only_the_leading_process_writes_if_tensorboard_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    folder, result = tmp_path / "logs", make().step(X, target=X)
    device = torch.device("cpu")
    with TensorBoard(folder) as board:
        board(StepEvent(1, is_main_process=False, device=device, result=result))
        board.add("rate", 0.5)
    assert not folder.exists()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match=r"pip install 'penstock-pipeline\[tensorboard\]'"):
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


# ---- when each rank did what


def record(pipe: Pipeline) -> list[Any]:
    """What a recorded step tells: the kind of its timeline, its actions without messages, and the bubble."""
    result = pipe.step(X, target=X, record=True)
    assert result.timeline is not None
    rows: list[list[str]] = [[] for _ in range(result.timeline.ranks)]
    end = [0.0] * len(rows)
    for span in sorted(result.timeline.spans, key=lambda span: span.start):
        if span.action.op not in MESSAGE_OPS:
            assert end[span.rank] - 1e-9 <= span.start <= span.end
            rows[span.rank].append(str(span.action))
            end[span.rank] = span.end
    return [result.timeline_kind, rows, result.bubble]


def expected(schedule: Schedule) -> list[list[str]]:
    return [
        [str(action) for action in schedule.actions(rank) if action.op not in MESSAGE_OPS]
        for rank in range(schedule.ranks)
    ]


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1"])
def test_in_one_process_the_ranks_are_replayed(schedule: str) -> None:
    pipe = make(schedule=schedule)
    kind, rows, bubble = record(pipe)
    assert (kind, rows) == ("replayed", expected(pipe.schedule))
    assert 0 < bubble < 1
    plain = pipe.step(X, target=X)
    assert (plain.timeline, plain.timeline_kind, plain.bubble) == (None, None, None)
    assert record(make(ranks=1))[0] == "measured"


@in_processes(2)
def test_processes_measure_and_share(group: Any) -> None:
    with make(mesh=group) as pipe:
        kind, rows, bubble = record(pipe)
        assert pipe.job.meet(lambda: [kind, rows, bubble]) == [[kind, rows, bubble]] * 2
    assert (kind, rows) == ("measured", expected(pipe.schedule))
    assert 0 <= bubble < 1


# ---- how fast a step was


def attends(m: Any, hidden: Tensor) -> Any:
    """A layer of attention and of products."""
    parts = m.mix(hidden).view(len(hidden), -1, 3, 2, 8).permute(2, 0, 3, 1, 4)
    attended = nn.functional.scaled_dot_product_attention(*parts)
    return hidden + m.out(attended.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("stages", [1, 3])
def test_a_result_tells_how_fast_the_step_was(stages: int) -> None:
    torch.manual_seed(0)
    layers = [Does(attends, mix=nn.Linear(16, 48), out=nn.Linear(16, 16)) for _ in range(3)]
    model, x = nn.Sequential(*layers), torch.randn(8, 12, 16)
    plain = copy.deepcopy(model)
    pipe = Pipeline(
        model,
        stages=stages,
        microbatches=4,
        loss_fn=Loss(mse_loss, weight=lambda target: target.shape[0] * target.shape[1]),
        recompute=True,
    )
    result = pipe.step(x, target=x)
    assert result.seconds > 0
    assert result.throughput * result.seconds == pytest.approx(8 * 12)
    assert result.memory > 1 << 20
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        plain(x)
    forward = counter.get_total_flops()
    assert result.tflops is not None
    assert result.tflops * result.seconds * 1e12 == pytest.approx(3 * forward)
    evaluated = pipe.evaluate(x, target=x)
    assert evaluated.tflops is not None
    assert evaluated.tflops * evaluated.seconds * 1e12 == pytest.approx(forward)
    # Nobody knows what a CPU can do at most.
    assert result.mfu is None


def test_operations_per_second_are_those_of_a_device() -> None:
    cost = StepCost(2.0, 4, lambda: 0, lambda: 8e12, lambda: 10e12)
    result = StepResult(weight=6.0, cost=cost)
    assert (result.throughput, result.tflops, result.mfu) == (3.0, 1.0, 0.1)
    stages = [PipelineStage(nn.Linear(4, 4), index, 2) for index in range(2)]
    by_hand = Pipeline.from_stages(stages, schedule="1F1B", loss_fn=mse_loss)
    assert by_hand.step(X, target=X).tflops is None, "nobody can count them"


def test_the_peak_is_known_by_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {
        ("NVIDIA H100 80GB HBM3", "high"): 494.7e12,
        ("NVIDIA L40S", "highest"): 91.6e12,
        ("a GPU of the future", "highest"): None,
    }
    for (name, precision), peak in peaks.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda p=precision: p)
        assert peak_flops(torch.device("cuda"), torch.float32) == (peak and pytest.approx(peak))
    assert peak_flops(torch.device("cpu"), torch.float32) is None
