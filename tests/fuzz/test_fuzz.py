"""The fuzzer finds planted faults, makes them small, and finds nothing else in its fixed programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from campaigns.fuzz.fuzzer import Fuzzer
from campaigns.fuzz.judging import Outcome, judge, judge_in, outcome_of
from campaigns.fuzz.programs import LAYOUTS, Program
from penstock import Pipeline
from penstock.errors import InternalError, PartitionError, PeerFailed, SpecError, StageError
from penstock.testing import WorkerPool

pytestmark = pytest.mark.timeout(400)  # a few CPU seconds each, also where the machine is busy


@pytest.fixture(scope="module")
def together() -> Iterator[WorkerPool]:
    """Workers of its own: a program makes their process groups anew."""
    with WorkerPool(4) as pool:
        yield pool


# ---- fixed programs


@pytest.mark.slow
def test_fixed_programs_in_one_process_do_what_a_plain_loop_does() -> None:
    fuzzer = Fuzzer(lambda program: judge(program.source))
    # About 15, and others that are the same; the campaign takes more.
    fuzzer.explore(seed=0, most=25)
    assert fuzzer.faults == {}, fuzzer.report()
    assert fuzzer.kinds["same"] > 7


@pytest.mark.slow
def test_fixed_programs_with_a_process_for_each_rank_do_too(together: WorkerPool) -> None:
    fuzzer = Fuzzer(lambda program: judge_in(together, program.source, program.processes))
    for layout in LAYOUTS[1:]:
        fuzzer.explore(seed=0, most=4, layout=layout)  # hypothesis begins with the plainest
    assert fuzzer.faults == {}, fuzzer.report()
    assert fuzzer.kinds["same"] >= 4


# ---- planted faults


def scale_a_gradient(pipe: Pipeline) -> None:
    for weight in pipe.parameters():
        if weight.dim() == 1 and weight.grad is not None:
            weight.grad.mul_(1 + 1e-6)


def make_zeros_of_none(pipe: Pipeline) -> None:
    for weight in pipe.parameters():
        if weight.requires_grad and weight.grad is None:
            weight.grad = torch.zeros_like(weight)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "reason"),
    [
        (scale_a_gradient, "gradient differs"),
        pytest.param(make_zeros_of_none, "zeros instead of None", marks=pytest.mark.nightly),
    ],
)
def test_a_planted_fault_is_found_made_small_and_repeated(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[Pipeline], None], reason: str
) -> None:
    step = Pipeline.step

    def wrong(pipe: Pipeline, *args: Any, **kwargs: Any) -> Any:
        result = step(pipe, *args, **kwargs)
        plant(pipe)
        return result

    monkeypatch.setattr(Pipeline, "step", wrong)
    fuzzer = Fuzzer(lambda program: judge(program.source))
    fuzzer.explore(seed=1, most=100)
    fault = fuzzer.faults[next(name for name in fuzzer.faults if reason in name)]
    assert fault["program"].count("self.m") <= 8
    assert "'steps': 1" in fault["program"]
    case = fault["repeat"].split("--case ")[1].rstrip("'")
    program, outcome = fuzzer.repeat(case)
    assert (program.source, outcome.kind) == (fault["program"], "failed")
    monkeypatch.setattr(Pipeline, "step", step)
    assert fuzzer.repeat(case)[1] == Outcome("same")


def test_a_seed_gives_the_same_programs() -> None:
    def sources() -> list[str]:
        listed: list[str] = []

        def note(program: Program) -> Outcome:
            listed.append(program.source)
            return Outcome("same")

        Fuzzer(note).explore(seed=3, most=20)
        return listed

    assert sources() == sources()


# ---- judging


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


REFUSAL = "m3 writes into a tensor of another stage"


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (PartitionError(REFUSAL), "refused", "PartitionError: mn writes"),
        (caused(StageError("rank 0"), PartitionError(REFUSAL)), "refused", "PartitionError"),
        (SpecError("microbatch 1 has a float32 where others have none"), "refused", "SpecError"),
        (PartitionError("this model cannot be cut like that"), "failed", "names no module"),
        (
            caused(StageError("module 'm3', on rank 0 in 1F2"), PartitionError("do not do that")),
            "refused",
            "PartitionError",
        ),
        (SpecError("bad"), "failed", "is no sentence"),
        (caused(StageError("rank 0"), KeyError("x")), "failed", "KeyError"),
        (InternalError("this is a bug in m3"), "failed", "InternalError"),
        (PeerFailed("stopped because rank 1 failed there"), "failed", "PeerFailed"),
    ],
)
def test_errors_are_refusals_or_failures(error: Exception, kind: str, reason: str) -> None:
    outcome = outcome_of(error)
    assert outcome.kind == kind
    assert reason in outcome.reason


HOOKED = """
import torch
from torch import nn
from torch.nn import functional as F

import penstock

seen = []


def record(module, args, output):
    seen.append(("all", [output.sum()]))


def make():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        layer.register_forward_hook(record)
    return model


def batch(step, replica=0):
    return (torch.ones(2, 4),), {}, torch.ones(2, 4)


def change(model, step):
    pass


def pipeline(model, group=None):
    return penstock.Pipeline(model, stages=2, microbatches=2, loss_fn=F.mse_loss, mesh=group, ranks=2)


loss_fn = F.mse_loss
RUN = dict(steps=1, microbatches=2, reduction="mean", dtype="float64", optimizer="SGD", clip=None,
    outputs=True, evaluate=True, inference=True, load=False, accumulate=1, seed=None, loss_weight=False,
    autocast=False, half=True, as_module=False, replicas=1)
"""


@pytest.mark.slow
def test_what_ranks_report_is_put_together(together: WorkerPool) -> None:
    with WorkerPool(1) as alone:
        assert judge_in(alone, HOOKED, 1) == Outcome("same")
    assert judge_in(together, HOOKED, 2) == Outcome("same")
    lost = HOOKED.replace("return penstock", "model[1]._forward_hooks.clear()\n    return penstock")
    for outcome in (judge(lost), judge_in(together, lost, 2)):
        assert (outcome.kind, "hook called" in outcome.reason) == ("failed", True)
