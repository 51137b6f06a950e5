"""Activations that wait on the host: the same numbers, and less memory on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from penstock import ActionEvent, Pipeline, PipelineStage
from penstock import schedule as ps
from penstock.errors import StageError, UsageError
from penstock.schedule.action import GRADIENT_OPS, Entry, Program, halves
from tests.pipeline.models import (
    WIDTH,
    X,
    Y,
    assert_same_bits,
    chain,
    mean_loss,
    restless,
    two_steps,
)
from tests.processes import in_processes


def all_moved(schedule: ps.Schedule) -> ps.Schedule:
    """Every activation leaves after its forward, and comes back before its backward."""

    def moved(program: Program) -> Iterator[Entry]:
        for entry in program:
            for stage, op, m, _ in halves(entry):
                if op in GRADIENT_OPS:
                    yield ps.Action(stage, ps.Op.RELOAD, m)
            yield entry
            for stage, op, m, _ in halves(entry):
                if op is ps.Op.F:
                    yield ps.Action(stage, ps.Op.OFFLOAD, m)

    return schedule.with_programs(map(moved, schedule.programs))


def numbers(model: nn.Module, schedule: ps.Schedule, **options: Any) -> list[Tensor]:
    return two_steps(Pipeline(model, schedule=schedule, loss_fn=mean_loss, **options))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["1F1B", "GPipe", "ZB-V", "DualPipeV"])
def test_numbers_are_those_without(name: str, recompute: bool) -> None:
    plain = ps.build(name, ranks=2, microbatches=4)
    without = numbers(chain(8), plain, recompute=recompute)
    assert_same_bits(numbers(chain(8), all_moved(plain), recompute=recompute), without)
    assert_same_bits(numbers(chain(8), ps.offload(plain), recompute=recompute), without)


def test_layers_that_draw_and_count_give_the_same_numbers_too() -> None:
    plain = ps.build("GPipe", ranks=2, microbatches=4)
    assert_same_bits(numbers(restless(), all_moved(plain)), numbers(restless(), plain))


@in_processes(2)
def test_numbers_are_those_without_between_processes(group: Any) -> None:
    for name in ("1F1B", "ZB-V"):
        plain = ps.build(name, ranks=2, microbatches=4)
        for recompute in (False, True):
            moved = numbers(chain(8), all_moved(plain), mesh=group, recompute=recompute)
            assert_same_bits(moved, numbers(chain(8), plain, mesh=group, recompute=recompute))


def test_evaluation_moves_nothing() -> None:
    plain = ps.build("1F1B", ranks=2, microbatches=4)
    without, with_moves = (
        Pipeline(chain(8), schedule=schedule, loss_fn=mean_loss).evaluate(X, target=Y).loss
        for schedule in (plain, all_moved(plain))
    )
    assert without == with_moves


class Noting(nn.Module):
    """Notes the memory of its output, which its backward needs."""

    def __init__(self, made: list[StorageWeakRef]) -> None:
        super().__init__()
        self.made = made
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        output = torch.tanh(self.linear(x))
        self.made.append(StorageWeakRef(output.untyped_storage()))
        return output


def alive(schedule: ps.Schedule) -> list[set[tuple[int, object]]]:
    """After each action, the stages and microbatches whose forward's own memory is in use."""
    made: list[StorageWeakRef] = []
    kept: dict[tuple[int, object], list[StorageWeakRef]] = {}
    history = []
    stages = [
        PipelineStage(nn.Sequential(*[Noting(made) for _ in range(3)]), s, 4) for s in range(4)
    ]
    pipe = Pipeline.from_stages(stages, schedule=schedule, microbatches=8, loss_fn=mean_loss)

    def after(event: ActionEvent) -> None:
        action = event.action
        if action.op is ps.Op.F:
            # What the stage returns is also the next stage's until that has run.
            kept[action.stage, action.microbatch] = made[-3:-1]
        made.clear()
        history.append({w for w, refs in kept.items() if not all(r.expired() for r in refs)})

    pipe.on("*", after=after)
    pipe.step(X, target=Y)
    return history


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_what_has_left_takes_no_memory_on_the_device(name: str) -> None:
    plain = ps.build(name, ranks=4, microbatches=8)
    moved = ps.offload(plain, keep=3)
    expected, here = [], set[tuple[int, object]]()
    for stage, op, m, _ in ps.merged(moved):
        here |= {(stage, m)} if op is ps.Op.F else set()
        here -= {(stage, m)} if op in (ps.Op.OFFLOAD, ps.Op.B) else set()
        expected.append({*here})
    assert alive(moved) == expected
    assert max(map(len, alive(plain))) > max(map(len, expected))


class Product(torch.autograd.Function):
    """Notes the memory of what its backward reads."""

    read: list[StorageWeakRef] = []  # noqa: RUF012 - the test's own

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        Product.read += [StorageWeakRef(each.untyped_storage()) for each in (a, b)]
        return grads[0] * b, grads[0] * a


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = Product.apply(*self.linear(x).chunk(2, dim=-1))  # type: ignore[no-untyped-call]  # torch's
        return product


def test_each_memory_moves_once_and_what_has_come_back_is_freed_after_backward() -> None:
    Product.read.clear()
    plain = ps.build("GPipe", ranks=2, microbatches=4)
    stages = [PipelineStage(Gated(), s, 2) for s in range(2)]
    schedule = all_moved(plain)
    pipe = Pipeline.from_stages(stages, schedule=schedule, microbatches=4, loss_fn=mean_loss)
    pipe.step(X, target=Y)
    pairs = list(zip(Product.read[::2], Product.read[1::2], strict=True))
    assert len(pairs) == 8
    assert all(a == b for a, b in pairs)  # two views of what the linear layer gave
    assert all(ref.expired() for ref in Product.read)


def forward_to_offload() -> tuple[PipelineStage, Tensor]:
    stage = PipelineStage(Gated(), 0, 1)
    with stage.offloading(0, [X]):
        output = stage.forward(0, [X], loss=torch.Tensor.sum)
    return stage, output


def test_backward_without_reload_is_refused() -> None:
    stage, _ = forward_to_offload()
    stage.offload(0)
    with pytest.raises((UsageError, StageError), match="on the host; run the RELOAD"):
        stage.backward(0, None)


def test_what_is_changed_in_place_after_the_graph_has_saved_it_is_refused() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.linear(x))
            out = hidden * 2
            hidden.add_(1)
            return out

    stage = PipelineStage(Changing(), 0, 1)
    with stage.offloading(0, [X]):
        stage.forward(0, [X], loss=torch.Tensor.sum)
    stage.offload(0)
    stage.reload(0)
    with pytest.raises((UsageError, StageError), match="modified by an inplace"):
        stage.backward(0, None)


def test_the_weights_half_does_what_it_does_without() -> None:
    waiting, gradients = [], []
    for moves in (False, True):
        stage = PipelineStage(chain(2), 0, 1)
        with stage.offloading(0, [X]) if moves else nullcontext():
            stage.forward(0, [X], loss=torch.Tensor.sum)
        if moves:
            stage.offload(0)
            stage.reload(0)
        stage.backward_input(0, None)
        later = stage.weights_of_half(0)
        assert later
        waiting.append([name for name, p in stage.named_parameters() if id(p) in later])
        stage.backward_weight(0)
        gradients.append([p.grad for _, p in stage.named_parameters() if p.grad is not None])
    assert waiting[0] == waiting[1]
    assert_same_bits(*gradients)
    assert len(gradients[0]) == 4
