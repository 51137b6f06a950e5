"""A Pipeline from its making to its close, in one process and in several."""

from __future__ import annotations

import copy
import pickle
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock import Microbatches, Pipeline, PipelineModule, PipelineStage
from penstock._engine.microbatches import MISSING
from penstock.errors import PeerFailed, ScheduleError, StageError, UsageError
from penstock.partition import partition
from penstock.schedule import (
    Action,
    Op,
    Placement,
    Schedule,
    add_communication,
    build,
    library,
    register,
)
from penstock.testing import Case, compare, plain_loop
from tests.catalogue.cases import NEXT, RAGGED, TOKENS, language, pipeline, ragged
from tests.pipeline.models import (
    STAGES,
    WIDTH,
    X,
    Y,
    assert_same,
    chain,
    gradients,
    make,
    mean_loss,
    named,
)  # fmt: skip
from tests.processes import in_processes

# ---- ways to make one

VALUE = build("1F1B", ranks=2, microbatches=5)


def last_first(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then the backwards from the last one on: of no library."""
    rows = (
        tuple(Action(rank, Op.F, m) for m in range(microbatches))
        + tuple(Action(rank, Op.B, m) for m in reversed(range(microbatches)))
        for rank in range(ranks)
    )
    return Schedule("last first", Placement(tuple(range(ranks))), microbatches, tuple(rows))


def by_hand(model: nn.Module, order: int = 1) -> Pipeline:
    parts = partition(model, STAGES).modules
    stages = [PipelineStage(part, index, 2) for index, part in enumerate(parts)]
    return Pipeline.from_stages(
        stages[::order], schedule="ZB-H1", microbatches=4, loss_fn=mean_loss
    )


def of_value(**options: Any) -> Callable[[nn.Module], Pipeline]:
    return lambda model: make(model, **({"stages": STAGES} | options))


WAYS: dict[str, tuple[Callable[[nn.Module], Pipeline], tuple[int, int, int]]] = {
    "paths": (of_value(), (2, 2, 4)),
    "a partition": (lambda model: make(model, stages=partition(model, STAGES)), (2, 2, 4)),
    "a count of stages": (of_value(stages=3, ranks=None), (3, 3, 4)),
    "a schedule": (of_value(schedule=build("GPipe", ranks=2, microbatches=4)), (2, 2, 4)),
    "ranks from the stages": (of_value(ranks=None), (2, 2, 4)),
    "microbatches by default": (of_value(microbatches=None), (2, 2, 4)),
    "a value that says all": (of_value(schedule=VALUE, ranks=None, microbatches=None), (2, 2, 5)),
    "a value with its messages": (
        of_value(schedule=add_communication(VALUE), microbatches=5), (2, 2, 5)
    ),
    "one rank": (of_value(ranks=1, stages=None), (1, 1, 4)),
    "paths to cut before": (of_value(stages=["blocks.1"]), (2, 2, 4)),
    "by hand": (by_hand, (2, 2, 4)),
    "by hand, in another order": (lambda model: by_hand(model, -1), (2, 2, 4)),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_say_the_same(way: str) -> None:
    build_one, sizes = WAYS[way]
    pipe, plain = build_one(named()), named()
    schedule = pipe.schedule
    assert (schedule.ranks, schedule.stages, schedule.microbatches) == sizes
    assert schedule.communicates or sizes[0] == 1
    loss = mean_loss(plain(X), Y)
    loss.backward()
    assert pipe.step(X, target=Y).loss == pytest.approx(float(loss.detach()))
    assert [stage.index for stage in pipe.stages] == list(range(sizes[1]))
    assert_same(gradients(pipe), gradients(plain))


@pytest.mark.parametrize("schedule", [last_first, "Last-First", "1F1B"])
def test_a_schedule_that_is_built_takes_a_short_last_batch(
    schedule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "RECIPES", dict(library.RECIPES))
    register("last-first", last_first)
    case = Case(chain(), (X[:3],), Y[:3], mean_loss)
    compare(case, schedule=schedule, ranks=3, microbatches=4).check(1e-12)


def test_a_value_is_for_its_own_number_but_evaluates_any() -> None:
    pipe = make(chain(), schedule=VALUE, microbatches=5)
    with pytest.raises(ScheduleError, match="is for 5 microbatches, not 3; to have one for each"):
        pipe.step(X[:3], target=Y[:3])
    torch.testing.assert_close(pipe.predict(X[:2]), chain()(X[:2]).detach())


# ---- steps


def test_what_was_made_in_inference_mode_is_a_batch() -> None:
    def product(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        return (output * target["y"]).mean()

    with torch.inference_mode():
        x, wanted = X.clone(), Y.clone()
    pipe, expected = (make(schedule="ZB-H1", loss_fn=product) for _ in "ab")
    pipe.step(x, target={"y": wanted})
    expected.step(X, target={"y": Y})
    assert_same(gradients(pipe), gradients(expected))
    with torch.no_grad():
        of_parts = pipe.evaluate(x, target={"y": wanted}).loss
    assert of_parts == expected.evaluate(X, target={"y": Y}).loss


def test_a_model_without_parameters_has_a_loss_and_nothing_to_learn() -> None:
    pipe = make(nn.Sequential(nn.Tanh(), nn.Tanh()))
    assert pipe.step(X, target=Y).loss == pytest.approx(float(mean_loss(X.tanh().tanh(), Y)))
    assert (list(pipe.parameters()), pipe.clip_grad_norm_(1.0)) == ([], 0.0)


def test_shapes_and_the_number_of_microbatches_may_change_from_step_to_step() -> None:
    pipe = make()
    for count, batch in ((4, X), (1, X.reshape(4, 2, WIDTH)), (7, X[:6]), (3, X), (None, X)):
        loss, grads = plain_loop(Case(chain(), (batch,), batch, mean_loss))
        pipe.zero_grad()
        result = pipe.step(batch, target=batch, microbatches=count)
        assert result.loss == pytest.approx(loss)
        assert_same(gradients(pipe), grads)


@pytest.mark.parametrize("everywhere", [True, False])
@in_processes(2)
def test_ready_microbatches_over_processes(group: Any, everywhere: bool) -> None:
    """Who needs no batch gives none; then a step with other lengths and one more."""
    case = ragged()
    with pipeline(case, 2, mesh=group) as pipe:
        args = case.args if everywhere or group.rank() == 0 else []
        target = case.target if args else Microbatches(case.target)
        loss = pipe.step(*args, target=target if everywhere or group.rank() else MISSING).loss
        outputs = pipe.predict(*args)
        pipe.step(TOKENS, target=NEXT, microbatches=5)
        grads, both = gradients(pipe), [plain_loop(of)[1] for of in (case, language())]
        assert_same(grads, {name: sum(one[name] for one in both) for name in grads})
    assert loss == pytest.approx(plain_loop(case)[0])
    torch.testing.assert_close(list(outputs), [case.model(part).detach() for part in RAGGED])


# ---- a first step is like every later one, and stages touch nothing but their own


class Changing(nn.Module):
    """Changes itself whenever it is called, and draws from all generators; perhaps it looks at data."""

    def __init__(self, *, looks: bool) -> None:
        super().__init__()
        layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.lin = nn.utils.parametrizations.spectral_norm(layer)
        self.calls, self.looks = 0, looks

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.looks and bool(torch.isnan(x).any()):
            raise ValueError("not a number")
        hidden: Tensor = self.lin(x) + random.random() + np.random.rand()
        return hidden + torch.rand(WIDTH, dtype=x.dtype, device=x.device)


@pytest.mark.parametrize(("schedule", "looks"), [("1F1B", True), ("ZB-V", False)])
def test_a_first_step_is_like_one_whose_shapes_are_known(schedule: str, looks: bool) -> None:
    """Each module is called once a microbatch in both, and draws the same numbers."""
    torch.manual_seed(0)
    first = nn.Sequential(*(Changing(looks=looks) for _ in range(4)))
    model: Any
    states, models = [], [first, copy.deepcopy(first)]
    pipes = [make(model, schedule=schedule) for model in models]
    pipes[1].predict(X)
    for model, pipe in zip(models, pipes, strict=True):
        before = [module.calls for module in model]
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(1)
        pipe.step(X, target=X)
        assert [module.calls for module in model] == [calls + 4 for calls in before]
        states.append(model.state_dict() | {f"{n}'": p.grad for n, p in model.named_parameters()})
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


# ---- its life


def test_several_pipelines_live_side_by_side_and_one_model_may_be_cut_anew() -> None:
    model = chain()
    with make(model) as first:
        pipes = [first, make(ranks=3), make(model, ranks=3)]
        losses = [pipe.step(X, target=Y).loss for _ in range(2) for pipe in pipes]
    first.close()
    assert losses == [pytest.approx(losses[0], abs=1e-15)] * 6
    assert pipes[1].is_main_process
    assert list(dict(pipes[1].named_parameters())) == list(dict(model.named_parameters()))
    assert pipes[1].job.meet(lambda: {"same": True}) == [{"same": True}]


class Squares(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gradient: Tensor = 2 * x * gradients[0]
        return gradient


class Squared(nn.Module):
    """Uses a custom function and a checkpoint between its units, and prints inside one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        squared: Tensor = cast("Any", Squares).apply(self.first(x))
        output: Tensor = checkpoint(self.last, squared, use_reentrant=False)
        return output


def in_threads(work: Callable[[int], Any], count: int = 4) -> list[Any]:
    """What several threads that start together return, or raise."""
    with ThreadPoolExecutor(count) as pool:
        start = threading.Barrier(count)
        return [
            one.result(60.0)
            for one in [pool.submit(together, start, work, i) for i in range(count)]
        ]


def together(start: threading.Barrier, work: Callable[[int], Any], index: int) -> Any:
    start.wait(60.0)
    return work(index)


def test_calls_of_a_pipeline_from_several_threads_take_turns() -> None:
    pipe = make(schedule="ZB-H1")
    loss = pipe.step(X, target=Y).loss
    once = {name: gradient.clone() for name, gradient in gradients(pipe).items()}

    def call(index: int) -> float:
        return (pipe.evaluate if index % 2 else pipe.step)(X, target=Y).loss

    assert in_threads(call) == [loss] * 4
    assert all(module.training for module in pipe.stages[0].module.modules())
    for name, gradient in gradients(pipe).items():
        torch.testing.assert_close(gradient, 3 * once[name])


def test_two_pipelines_in_two_threads_draw_what_they_draw_one_after_the_other() -> None:
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(4)]
    models = [nn.Sequential(*copy.deepcopy(blocks)) for _ in range(4)]

    def train(seed: int, model: nn.Module) -> list[Tensor]:
        pipe = Pipeline(
            model,
            ranks=2,
            microbatches=4,
            recompute=True,
            seed=seed,
            loss_fn=nn.functional.mse_loss,
        )
        for _ in range(5):
            pipe.step(torch.ones(8, 8), target=torch.ones(8, 8))
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    alone = [train(seed, models[seed]) for seed in range(2)]
    together = in_threads(lambda seed: train(seed, models[2 + seed]), 2)
    torch.testing.assert_close(together, alone, rtol=0, atol=0)


class Counts(nn.Linear):
    """Goes by how often it was called, which an attribute and a list say."""

    def __init__(self, _: int) -> None:
        super().__init__(4, 4)
        self.calls, self.log = 0, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.log.append(1)
        return torch.tanh(super().forward(x) * (self.calls + len(self.log)))


class Whole(nn.Module):
    """A model that gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*map(Counts, range(4)))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers(x).square().mean()
        return loss


def test_forwards_beside_those_of_a_step_leave_what_layers_keep() -> None:
    torch.manual_seed(0)
    model, x = Whole(), torch.randn(4, 4)
    plain, other = copy.deepcopy(model), copy.deepcopy(model.layers)
    first: Any = model.layers[0]
    pipe = Pipeline(model, ranks=2, microbatches=2, loss_fn=lambda loss, _: loss)
    for _ in range(2):  # the first step checks whether the loss is a mean, by another forward
        expected = sum(float(plain(part).detach()) for part in x.split(2)) / 2
        assert pipe.step(x).loss == pytest.approx(expected)
    assert first.calls == plain.layers[0].calls == len(first.log) == 4
    pipe.find_nonfinite(x)
    assert first.calls == len(first.log) == 4
    module = PipelineModule(Pipeline(other, ranks=2, microbatches=2))
    single = copy.deepcopy(other)
    for _ in range(2):
        # Without a loss of its own, it runs the forward again in the backward.
        module(x).square().mean().backward()
        torch.cat([single(part) for part in x.split(2)]).square().mean().backward()
    torch.testing.assert_close(other[0].weight.grad, single[0].weight.grad)
    assert other[0].calls == single[0].calls == 4


def test_steps_in_several_threads_are_one_after_the_other() -> None:
    """A step that begins while another runs has the next number, and draws other random numbers."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4))
    pipe = Pipeline(model, stages=2, microbatches=2, loss_fn=lambda y, _: y.mean(), seed=1)
    numbers: list[int] = []
    pipe.on_step(lambda event: numbers.append(event.step))
    pipe.cut(torch.ones(8, 4))
    at_once = threading.Barrier(2)
    begun = threading.Event()

    def meet(_: Any) -> None:
        if not begun.is_set():  # the other thread calls step too, and waits for its turn
            begun.set()
            at_once.wait(20.0)
            time.sleep(0.2)

    def second() -> float:
        begun.wait(20.0)
        at_once.wait(20.0)
        return pipe.step(torch.ones(8, 4)).loss

    pipe.on("0F0", before=meet)
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(second)
        first = pool.submit(lambda: pipe.step(torch.ones(8, 4)).loss)
        assert first.result(60.0) != other.result(60.0)
    assert numbers == [1, 2]
    assert pipe.randomness.step == 2


def test_a_gradient_that_flows_on_may_come_to_a_step_in_another_thread() -> None:
    """As on a GPU, where autograd runs the caller's graph in threads of its own."""
    outer, inner = (make(schedule="1F1B") for _ in range(2))
    loss = inner.step(X, target=Y).loss

    class Calling(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            with ThreadPoolExecutor(1) as pool:
                losses = [pool.submit(enabled, pipe).result(20.0) for pipe in (inner, outer)]
            assert losses == [loss, loss]
            return gradients[0]

    def enabled(pipe: Pipeline) -> float:
        with torch.enable_grad():
            return pipe.step(X, target=Y).loss

    x = X.clone().requires_grad_()
    outer.step(cast("Any", Calling).apply(x), target=Y)
    assert x.grad is not None
    assert outer.randomness.step == 2


def test_pipelines_and_plain_models_in_threads_leave_each_other_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    apply = vars(torch.autograd.Function)["apply"]
    plain = Squared()
    mean_loss(plain(X), Y).backward()
    wanted = {name: weight.grad for name, weight in plain.named_parameters()}

    models = [Squared() for _ in range(4)]

    def train(index: int) -> dict[str, Any]:
        model = models[index]
        if index % 2:
            for _ in range(20):
                model.zero_grad()
                mean_loss(model(X), Y).backward()
            return {name: weight.grad for name, weight in model.named_parameters()}
        pipe = make(model, schedule="ZB-H1")
        for rows in (4, 6, 8):  # each number of samples is planned anew
            pipe.zero_grad()
            pipe.step(X[:rows], target=Y[:rows])
        return gradients(pipe)

    for found in in_threads(train):
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, wanted[name])
    assert vars(torch.autograd.Function)["apply"] is apply
    sys.stdout.write("shown\n")
    assert capsys.readouterr().out == "shown\n"


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_pipeline_is_not_copied(copied: Callable[[Any], Any]) -> None:
    with pytest.raises(UsageError, match=r"copy.deepcopy\(model\).*Checkpoints"):
        copied(make())


def test_a_recorded_result_is_shown_in_a_line() -> None:
    assert len(repr(make().step(X, target=Y, record=True))) < 300


@in_processes(3)
def test_processes_hold_their_part_and_a_failure_breaks_no_connection_but_its_own(
    group: Any,
) -> None:
    """Pipelines after others, one of which failed; then the user's group is used."""
    plain, stage = chain(), group.rank()
    wanted = mean_loss(plain(X), Y)
    wanted.backward()
    expected = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
    first = make(ranks=3, mesh=group)
    loss = first.step(X, target=Y).loss
    assert first.clip_grad_norm_(1e-3) == pytest.approx(expected)
    assert first.job.meet(lambda: first.is_main_process) == [True, False, False]
    # What is raised after a close, in a context that closes again, passes through.
    with suppress(KeyError), first:
        first.close()
        raise KeyError("of the user's")

    def broken(output: Tensor, target: Tensor) -> Tensor:
        raise ValueError("this loss is broken")

    refused = pytest.raises((ValueError, PeerFailed, StageError), match="this loss is broken")
    with make(ranks=3, loss_fn=broken, mesh=group) as pipe, refused:
        pipe.step(X, target=Y)
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total == 3
    with make(ranks=3, mesh=group) as one, make(ranks=3, schedule="ZB-H1", mesh=group) as other:
        losses = [pipe.step(X, target=Y).loss for pipe in (one, other, one)]
    assert [loss, *losses] == [pytest.approx(float(wanted.detach()))] * 4
    assert sorted(gradients(first)) == [f"{stage}.0.bias", f"{stage}.0.weight"]


def test_it_shows_its_ranks_stages_and_modules() -> None:
    model = nn.Sequential(nn.Linear(4, 4), *[nn.Tanh() for _ in range(3)], nn.Linear(4, 4))
    shown = repr(Pipeline(model, schedule="ZB-V", ranks=1, microbatches=2, stages=["2"]))
    assert shown.splitlines() == [
        "Pipeline(ZB-V, ranks=1, stages=2, microbatches=2, device='cpu')",
        "  rank 0, stage 0: 0 (Linear), 1 (Tanh)",
        "  rank 0, stage 1: 2 to 3 (Tanh), 4 (Linear)",
    ]
