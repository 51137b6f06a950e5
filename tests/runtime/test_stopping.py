"""A run that is told to stop does so on all ranks after the same step, and ends as what it was."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from penstock import Checkpoints, GracefulStop, Pipeline, PipelineModule
from penstock._engine.parallel import side_by_side
from penstock.errors import PenstockError
from penstock.testing import WorkerPool, fail_at
from tests.pipeline.models import logged

X = torch.ones(4, 2)


def make(**options: Any) -> Pipeline:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    return Pipeline(model, **{"ranks": 2, "microbatches": 2, "loss_fn": mse_loss, **options})


def steps_until_stopped(pipe: Pipeline, count: int, tell: Callable[[int], object]) -> int:
    """The step after which a loop has stopped."""
    x = X.to(pipe.device)
    for step in range(1, count + 1):
        tell(step)
        pipe.step(x, target=x)
        pipe.evaluate(x, target=x)
        if pipe.stopping:
            return step
    return 0


def send(number: int, at: int) -> Callable[[int], object]:
    def tell(step: int) -> None:
        if step == at:
            os.kill(os.getpid(), number)

    return tell


def run_until_stopped(tell: Callable[[int], object], stops: list[Any]) -> None:
    with GracefulStop() as stop, make() as pipe:
        stops += [steps_until_stopped(pipe, 9, tell), stop.reason]


@pytest.mark.parametrize(
    ("number", "leaves"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_signal_is_noted_until_the_step_has_ended(
    number: int, leaves: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    before = signal.getsignal(number)
    stops: list[Any] = []
    with pytest.raises(leaves) as left:
        run_until_stopped(send(number, at=3), stops)
    assert stops == [3, signal.Signals(number).name]
    assert f"{stops[1]}: the run stops after this step" in caplog.text
    assert left.value.args == ((143,) if leaves is SystemExit else ())
    assert signal.getsignal(number) is before


def test_a_first_signal_before_any_step_and_a_later_second_one_act_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    came: list[int] = []

    def twice(step: int) -> None:
        for _ in range(2 if step == 2 else 0):
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        with GracefulStop(), make() as pipe:
            os.kill(os.getpid(), signal.SIGTERM)
            assert came == [signal.SIGTERM]
            assert steps_until_stopped(pipe, 1, lambda _: None) == 0
        with pytest.raises(SystemExit):
            run_until_stopped(twice, [])
        assert len(came) == 1
        monkeypatch.setattr("penstock._engine.runtime.stopping.TOGETHER", 0.0)
        with pytest.raises(SystemExit):
            run_until_stopped(twice, [])
        assert len(came) == 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_time_limit_leaves_the_status_to_the_program() -> None:
    with GracefulStop(time_limit=0.0) as stop, make() as pipe:
        assert not pipe.stopping
        assert steps_until_stopped(pipe, 9, lambda _: None) == 1
        assert stop.reason == "time limit"
    with GracefulStop(time_limit=1e9), make() as pipe:
        assert steps_until_stopped(pipe, 2, lambda _: None) == 0


def stops_in_worker(group: Any, way: str) -> list[Any]:
    """The step after which this process stops, if rank 1 alone is told in the second one, and its status."""
    stopped, until = 0, outputs_until_stopped if way == "outputs" else steps_until_stopped
    options: dict[str, Any] = {"mesh": group}
    if way != "one pipeline":
        # Replicas average over gloo, which has no memory but the CPU's.
        options = side_by_side("cpu", 4, 2) | {"device": "cpu"}
    if way == "without replicas":
        del options["replicas"]
    if way == "outputs":
        options["loss_fn"] = None
    tell = send(signal.SIGUSR1, at=2) if torch.distributed.get_rank() == 1 else lambda _: None
    try:
        with GracefulStop(signals=[signal.SIGUSR1]), make(**options) as pipe:
            stopped = until(pipe, 4, tell)
    except SystemExit as left:
        return [stopped, left.code]
    return [stopped, None]


def outputs_until_stopped(pipe: Pipeline, count: int, tell: Callable[[int], object]) -> int:
    module = PipelineModule(pipe)
    for step in range(1, count + 1):
        tell(step)
        module(X.to(pipe.device)).sum().backward()
        if pipe.stopping:
            return step
    return 0


@pytest.mark.whole
@pytest.mark.parametrize(
    ("way", "processes"),
    [("one pipeline", 2), ("replicas", 4), ("without replicas", 4), ("outputs", 4)],
)
def test_all_ranks_of_the_job_stop_after_the_same_step(
    way: str, processes: int, workers: WorkerPool
) -> None:
    stopped = workers.run(f"{__name__}:stops_in_worker", processes, way=way)
    assert stopped == [[2, 143]] * processes


def fails_in_worker(group: Any, folder: str) -> list[str]:
    """What the log says when rank 1 fails in the fourth step, two steps after a save."""
    with (
        logged() as messages,
        suppress(PenstockError),
        make(mesh=group) as pipe,
        Checkpoints(folder) as checkpoints,
        fail_at(rank=1, step=4, action="1F0"),
    ):
        steps_until_stopped(pipe, 2, lambda _: None)
        checkpoints.save(2, pipe=pipe)
        steps_until_stopped(pipe, 2, lambda _: None)
    return messages


def test_a_failure_says_how_many_steps_are_lost(tmp_path: Path, workers: WorkerPool) -> None:
    messages, _ = workers.run(f"{__name__}:fails_in_worker", 2, folder=str(tmp_path))
    assert any("at most 2 steps since the last complete checkpoint are lost" in m for m in messages)
