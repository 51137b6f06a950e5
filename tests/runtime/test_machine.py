"""One rank, one step: what it refuses, and what it leaves behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import PipelineStage
from penstock.errors import MessageError, SpecError
from penstock.runtime import (
    BoundProgram,
    RankProgram,
    StepData,
    Wanted,
    channels,
    drive,
    reports_of,
)
from penstock.schedule import Placement, Schedule, add_communication, build, parse_action
from penstock.step import Loss, Tally, Weights
from penstock.transport import in_process
from penstock.values import ValueSpec, split
from tests.runtime.graphs import BATCH, GRAPHS, make_ranks, order_of, schedule_of, square_loss

HIDDEN = ValueSpec.of(torch.zeros(2, 3, requires_grad=True))
SPECS = {"stage0": HIDDEN}


def programs(*texts: str, microbatches: int = 1) -> Schedule:
    """A schedule of two ranks and stages, as one would draw it."""
    rows = tuple(tuple(map(parse_action, text.split())) for text in texts)
    return Schedule("by hand", Placement((0, 1)), microbatches, rows)


STEP = programs(
    "0F0 0SEND_F0 0RECV_B0 0B0",
    "1RECV_F0 1F0 1B0 1SEND_B0",
)


def run(
    schedule: Schedule,
    modules: Sequence[nn.Module] | None = None,
    specs: dict[str, ValueSpec] = SPECS,
    grad: bool = True,
) -> list[StepData]:
    """Run both ranks' programs; what the step left there."""
    modules = modules or [nn.Linear(3, 3), nn.Linear(3, 3)]
    many = schedule.microbatches
    parts = split((torch.ones(2, 3),), {}, many)
    steps, tasks = [], []
    for end, module in zip(in_process(2), modules, strict=True):
        end.open(channels(schedule))
        stages = {end.rank: PipelineStage(module, end.rank, 2)}
        loss = Loss(lambda output, _: output.sum()) if grad else None
        weights = Weights([1.0] * many, [1.0] * many, [1.0] * many)
        step = StepData(parts, loss, [None] * many, weights, Tally(weights, {}))
        wanted = Wanted(with_loss=grad, outputs=not grad)
        program = RankProgram(schedule, end.rank)
        bound = BoundProgram(program, stages, end, [specs] * many, wanted)
        steps.append(step)
        tasks.append(bound.run(step))
    with torch.set_grad_enabled(grad):
        drive(tasks)
    return steps


# ---- what it leaves where


def test_the_last_rank_has_the_losses() -> None:
    first, last = run(STEP)
    assert not first.tally.sums().totals
    assert list(last.tally.sums().totals) == [("main", "")]


def test_the_last_rank_keeps_outputs_where_asked() -> None:
    first, last = run(programs("0F0 0SEND_F0", "1RECV_F0 1F0"), grad=False)
    assert first.outputs == {}
    assert last.outputs[0].shape == (2, 3)


OTHER_OPS = programs(
    "0UNSHARD 0F0 0SEND_F0 0WAIT_SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD 0RESHARD",
    "1RECV_F0 1F0 1B0 1SEND_B0 1WAIT_SEND_B0",
)


def test_ops_that_ask_nothing_of_a_plain_stage() -> None:
    assert list(run(OTHER_OPS)[1].tally.sums().totals) == [("main", "")]


# ---- what it refuses


class Gives(nn.Module):
    """Gives something else than was agreed."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.lin(x))


SURPRISES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "shape": (lambda hidden: hidden[:1], r"expected float32\[2, 3\].*found float32\[1, 3\]"),
    "dtype": (lambda hidden: hidden.double(), "found float64"),
    "no gradient": (torch.Tensor.detach, r"requires grad, found float32\[2, 3\]"),
    "structure": (lambda hidden: (hidden,), "the value: expected a tensor, found nothing there"),
}


@pytest.mark.parametrize("name", sorted(SURPRISES))
def test_another_value_than_agreed_is_refused_before_it_is_sent(name: str) -> None:
    make, says = SURPRISES[name]
    seen = Watch()
    with pytest.raises(
        SpecError,
        match=f"the value '.*' of stage 0, microbatch 0, is not what was agreed: .*{says}",
    ) as caught:
        run(STEP, [Gives(make), seen])
    assert caught.value.__notes__ == ["on rank 0, in 0F0"]
    assert not seen.called


class Watch(nn.Module):
    called = False

    def forward(self, x: Tensor) -> Tensor:
        self.called = True
        return x


def test_what_cannot_travel_is_refused() -> None:
    with pytest.raises(SpecError, match="a value of type set"):
        run(STEP, [Gives(lambda hidden: {hidden}), Watch()])


def test_gradients_need_not_agree_in_evaluation() -> None:
    assert len(run(programs("0F0 0SEND_F0", "1RECV_F0 1F0"), grad=False)[1].outputs) == 1


def test_a_message_that_nobody_sends_is_an_error() -> None:
    with pytest.raises(MessageError, match="no rank can go on: rank 1 waits in 1F0 for 1RECV_F0"):
        run(programs("0F0", "1RECV_F0 1F0"))


def test_a_message_that_nobody_uses_is_an_error() -> None:
    with pytest.raises(MessageError, match="rank 1: no action used what arrived with 1RECV_F0"):
        run(programs("0F0 0SEND_F0", "1RECV_F0"))


# ---- what is left


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Ghosts:
    """Weak references to every activation and every gradient of one."""

    def __init__(self) -> None:
        self.seen: list[weakref.ref[Tensor]] = []

    def watch(self, module: nn.Module) -> None:
        module.register_forward_hook(self._forward)

    def _forward(self, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_in((args, output)):
            self.seen.append(weakref.ref(tensor))
            if tensor.requires_grad:
                tensor.register_hook(self._backward)

    def _backward(self, gradient: Tensor) -> None:
        self.seen.append(weakref.ref(gradient))

    @property
    def alive(self) -> int:
        return sum(ref() is not None for ref in self.seen)


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return [t for item in items if not isinstance(item, str | None) for t in tensors_in(item)]


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("rank_of", [(0, 1, 2, 3), (0, 1, 0, 1), (0, 0, 0, 0)])
@pytest.mark.parametrize("name", ["used by all", "two values", "a mask", "cut off"])
def test_nothing_of_a_step_is_alive_after_it(name: str, rank_of: tuple[int, ...]) -> None:
    ghosts, graph = Ghosts(), GRAPHS[name]
    modules = graph.modules()
    schedule = schedule_of(graph.edges, Placement(rank_of), 3, halves=True)
    ranks = make_ranks(schedule, modules, in_process(schedule.ranks))
    drive([rank.run(order_of(schedule)) for rank in ranks])
    for module in modules:
        ghosts.watch(module)
    drive([rank.run(order_of(schedule)) for rank in ranks])
    assert len(ghosts.seen) > 3 * 4 * 2
    assert ghosts.alive == 0


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
def test_microbatches_are_freed_while_the_step_runs(name: str) -> None:
    """No more are alive at a time than the schedule has under way."""
    ghosts, most = Ghosts(), 0
    schedule = add_communication(build(name, ranks=2, microbatches=8))

    class Count(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            nonlocal most
            most = max(most, ghosts.alive)
            return super().forward(x)

    modules = [Count(3, 3, dtype=torch.float64), Count(3, 3, dtype=torch.float64)]
    ranks = make_ranks(schedule, modules, in_process(2))
    for module in modules:
        ghosts.watch(module)
    batch = torch.ones(8, 3, dtype=torch.float64)
    drive([rank.run(order_of(schedule, batch)) for rank in ranks])
    # At most two under way on each rank, each with an input, an output and their gradients.
    assert most <= 2 * 2 * 4


@pytest.mark.usefixtures("no_collector")
def test_evaluation_keeps_the_outputs_alone() -> None:
    ghosts, modules = Ghosts(), [nn.Linear(3, 3, dtype=torch.float64) for _ in range(2)]
    schedule = add_communication(build("forward-only", ranks=2, microbatches=5))
    ranks = make_ranks(schedule, modules, in_process(2))
    with torch.no_grad():
        drive([rank.run(order_of(schedule, loss=False)) for rank in ranks])
        for module in modules:
            ghosts.watch(module)
        reports = reports_of(drive([rank.run(order_of(schedule, loss=False)) for rank in ranks]))
    assert [len(report.outputs) for report in reports] == [5, 5]
    assert ghosts.alive == 0, "the reports hold tensors of their own"


# ---- the order of the work


def test_weights_of_a_stage_are_added_in_the_order_of_the_microbatches() -> None:
    """The same bits from every schedule that runs a stage's microbatches in order."""
    bits = set()
    for name in ("GPipe", "1F1B", "ZB-H1"):
        torch.manual_seed(0)
        modules = [nn.Linear(3, 3, dtype=torch.float64) for _ in range(2)]
        schedule = add_communication(build(name, ranks=2, microbatches=5))
        ranks = make_ranks(schedule, modules, in_process(2))
        drive([rank.run(order_of(schedule, BATCH)) for rank in ranks])
        bits.add(
            str([p.grad.tolist() for m in modules for p in m.parameters() if p.grad is not None])
        )
    assert len(bits) == 1


def test_the_loss_is_the_batchs() -> None:
    modules = [nn.Identity(), nn.Linear(3, 3, dtype=torch.float64)]
    schedule = add_communication(build("GPipe", ranks=2, microbatches=3))
    ranks = make_ranks(schedule, modules, in_process(2))
    reports = reports_of(drive([rank.run(order_of(schedule)) for rank in ranks]))
    expected = float(square_loss(modules[1](BATCH).detach(), BATCH))
    assert [report.numbers.loss for report in reports] == [pytest.approx(expected)] * 2
