"""What a user's code raises comes back as one named error, and the Pipeline is done for."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipeline
from penstock.errors import PeerFailed, PoisonedError, StageError, UsageError
from penstock.testing import WorkerPool

X = torch.arange(12.0).reshape(4, 3)
"""Four samples; the last one is the only one with an 11."""


class Oops(Exception):
    """The user's own."""


def bad(x: Tensor) -> bool:
    """Whether it is the last microbatch, and not a stand-in."""
    return x.device.type != "meta" and bool((x.detach() == 11).any())


class FailsForward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if bad(x):
            raise Oops("forward")
        return x


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.bad = bad(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.bad:
            raise Oops("backward")
        return grads[0]


class FailsBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        checked: Tensor = cast("Any", _Fails).apply(x * self.scale)
        return checked


class Passes(nn.Module):
    """Keeps the marked sample as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.one


def fails_loss(output: Tensor, target: Tensor) -> Tensor:
    if bad(output):
        raise Oops("loss")
    return output.sum()


def fine_loss(output: Tensor, target: Tensor) -> Tensor:
    return output.sum()


def pipe(*modules: nn.Module, loss: Any = fine_loss, schedule: str = "1F1B") -> Pipeline:
    return Pipeline(
        nn.Sequential(*modules), schedule=schedule, ranks=2, microbatches=4, loss_fn=loss
    )


FAILING: dict[str, tuple[Callable[[], Pipeline], str]] = {
    "forward, first": (lambda: pipe(FailsForward(), Passes()), "rank 0, stage 0.*action 0F3"),
    "forward, last": (lambda: pipe(Passes(), FailsForward()), "rank 1, stage 1.*action 1F3"),
    "backward": (lambda: pipe(FailsBackward(), Passes()), "rank 0, stage 0.*action 0B3"),
    "backward's half": (
        lambda: pipe(Passes(), FailsBackward(), schedule="ZB-H1"),
        "rank 1, stage 1.*action 1I3",
    ),
    "loss": (lambda: pipe(Passes(), Passes(), loss=fails_loss), "rank 1, stage 1.*action 1F3"),
}


def failure(name: str) -> tuple[Pipeline, StageError]:
    make, _ = FAILING[name]
    made = make()
    with pytest.raises(StageError) as caught:
        made.step(X, target=X)
    return made, caught.value


@pytest.mark.parametrize("name", sorted(FAILING))
def test_an_error_names_rank_stage_microbatch_and_action(name: str) -> None:
    _, error = failure(name)
    assert error.args == (str(error),)
    with pytest.raises(StageError, match=f"{FAILING[name][1]}.*: .*{name.split(',')[0][:4]}"):
        raise error
    assert "microbatch 3" in str(error)


@pytest.mark.parametrize("name", sorted(FAILING))
def test_the_users_error_is_the_cause(name: str) -> None:
    _, error = failure(name)
    assert isinstance(error.__cause__, Oops)


@pytest.mark.parametrize("name", sorted(FAILING))
def test_a_failed_step_leaves_nothing_in_flight(name: str) -> None:
    made, _ = failure(name)
    assert [stage.in_flight for stage in made.stages] == [0, 0]


CALLS: dict[str, Callable[[Pipeline], Any]] = {
    "step": lambda made: made.step(X[:3], target=X[:3]),
    "eval": lambda made: made.eval(X, target=X),
    "predict": lambda made: made.predict(X),
    "clip": lambda made: made.clip_grad_norm_(1.0),
    "agree": lambda made: made.agree(1),
}


@pytest.mark.parametrize("call", sorted(set(CALLS) - {"step"}))
def test_a_failed_pipeline_does_nothing_more(call: str) -> None:
    made, error = failure("loss")
    with pytest.raises(
        PoisonedError, match=r"failed \(StageError: rank 1.*build a new Pipe"
    ) as found:
        CALLS[call](made)
    assert found.value.__cause__ is error


@pytest.mark.parametrize("failing", ["forward, first", "loss"])
def test_a_failed_evaluation_restores_the_modes(failing: str) -> None:
    made = FAILING[failing][0]()
    with pytest.raises(StageError):
        made.eval(X, target=X)
    assert all(stage.module.training for stage in made.stages)


def test_a_usage_error_says_where() -> None:
    made = pipe(Passes(), Passes(), loss=lambda output, target: output)
    with pytest.raises(UsageError, match=r"scalar tensor, not \[1, 3\]") as caught:
        made.step(X, target=X)
    assert caught.value.__notes__ == ["on rank 1, in 1F0"]


def test_what_is_refused_before_the_step_poisons_nothing() -> None:
    made = pipe(Passes(), Passes())
    with pytest.raises(UsageError):
        made.step(X, target=X[:2])
    assert made.step(X, target=X).loss == float(X.sum()) / 4


def test_a_failed_pipeline_can_be_freed() -> None:
    made, error = failure("loss")
    alive = weakref.ref(made)
    del made, error
    gc.collect()
    assert alive() is None


# ---- over processes


def fail_in_one_process(group: Any) -> list[str]:
    """Rank 1 fails in the last forward of an evaluation, when rank 0 waits for the loss."""
    made = Pipeline(
        nn.Sequential(Passes(), FailsForward()), microbatches=4, loss_fn=fine_loss, group=group
    )
    try:
        made.eval(X, target=X)
    except (StageError, PeerFailed) as error:
        return [str(error), type(error.__cause__).__name__]
    finally:
        made.close()
    return []


def test_every_process_names_the_failing_one() -> None:
    # Workers of its own: wires that were cut are of no use to later tests.
    with WorkerPool(2) as workers:
        first, second = workers.run(f"{__name__}:fail_in_one_process", 2, 30.0)
    place = "rank 1, stage 1, microbatch 3, action 1F3, module '1' (FailsForward)"
    assert first == [f"rank 0 stopped because {place}: Oops: forward", "NoneType"]
    assert second == [f"{place}: Oops: forward", "Oops"]
