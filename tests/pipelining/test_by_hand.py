"""Stages that are driven without a schedule, and weights that stages share."""

from __future__ import annotations

import re
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.partition import Shared
from penstock.pipelining import PipelineStage, ScheduleGPipe
from penstock.pipelining.schedules import PipelineScheduleSingle
from penstock.testing import WorkerPool
from tests.pipelining.stages import OURS, WIDTH, Held, Layer, X, Y, sum_loss
from tests.pipelining.test_processes import loop_of_turns

PART = X[:2]


def driven(count: int = 2, **examples: Any) -> Held:
    """Stages that know what travels."""
    held = Held(OURS, at={0: [*range(count)]}, **examples)
    passed: Any = (PART,)
    for stage in held.stages:
        passed = stage._prepare_forward_infra(2, passed, {}, has_backward=True)
        stage._prepare_backward_infra(2)
    return held


def squares(module: Any, output: Tensor) -> Tensor:
    """A loss of the output and, beside it, of the last weights."""
    loss: Tensor = output.square().sum() + module.second.weight.square().sum()
    return loss


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("examples", [{}, {"output_args": PART.clone().requires_grad_()}])
def test_without_a_schedule(halves: bool, examples: dict[str, Any]) -> None:
    held = driven(**examples)
    first, last = held.stages
    for microbatch in range(2):
        output = first.forward_one_chunk(microbatch, (PART,))
        assert first.get_fwd_send_ops(microbatch) == []
        last.set_local_fwd_input(output, microbatch)
        loss = squares(last.submod, last.forward_one_chunk(microbatch, ()))
        last.backward_one_chunk(microbatch, loss=loss, full_backward=not halves)
        first.set_local_bwd_input(last.get_local_bwd_output(microbatch), microbatch)
        first.backward_one_chunk(microbatch, full_backward=not halves)
        for stage in (first, last) if halves else ():
            stage.backward_weight_one_chunk(microbatch)
    for stage in (first, last):
        stage.perform_reduce_grad(2)
    squares(held.plain[1], held.plain(PART)).backward()
    expected = {name: p.grad for name, p in held.plain.named_parameters()}
    torch.testing.assert_close(held.gradients(), expected)


class Masks(nn.Module):
    """Takes a mask before the values that learn."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, mask: Tensor, hidden: Tensor, scale: Tensor) -> Tensor:
        return self.linear(hidden.where(mask, 0.0)) * scale  # type: ignore[no-any-return]


def test_gradients_by_hand_stand_at_the_places_of_the_values() -> None:
    stage = PipelineStage(Masks(), 1, 2, "cpu")
    stage._prepare_forward_infra(1, has_backward=True)
    values = PART > 0, PART, torch.tensor(3.0)
    stage.set_local_fwd_input(values, 0)
    stage.backward_one_chunk(0, loss=stage.forward_one_chunk(0).sum())
    mask, *leaves = [v.clone().requires_grad_(v.is_floating_point()) for v in values]
    expected = torch.autograd.grad(stage.submod(mask, *leaves).sum(), leaves)
    gradients = stage.get_local_bwd_output(0)
    assert gradients[0] is None
    torch.testing.assert_close(gradients[1:], expected)


def test_what_comes_too_early_is_named() -> None:
    first, last = driven().stages
    with pytest.raises(RuntimeError, match="set_local_fwd_input comes first"):
        last.forward_one_chunk(0, ())
    last.set_local_fwd_input(first.forward_one_chunk(0, (PART,)), 0)
    last.forward_one_chunk(0, ())
    with pytest.raises(RuntimeError, match="set_local_bwd_input comes first"):
        first.backward_one_chunk(0)
    with pytest.raises(RuntimeError, match="out of range of 2 chunks"):
        first.backward_one_chunk(2)
    with pytest.raises(RuntimeError, match="starts at loss="):
        last.backward_one_chunk(0)
    with pytest.raises(AssertionError, match="full_backward=False"):
        last.backward_weight_one_chunk(0)
    fresh = PipelineStage(Layer(), 0, 2, "cpu")
    fresh.stage_index_to_group_rank = {0: 0, 1: 1}
    with pytest.raises(RuntimeError, match="drive them in its _step_microbatches"):
        fresh.get_fwd_send_ops(0)
    fresh.backward_one_chunk(0)  # without a backward they do nothing
    fresh.backward_weight_one_chunk(0)
    fresh.has_backward = True
    with pytest.raises(RuntimeError, match="no chunks yet"):
        fresh.backward_one_chunk(0)


def test_the_next_step_drops_what_was_left() -> None:
    (stage,) = driven(1).stages
    stage.forward_one_chunk(0, (PART,))
    assert stage.in_flight == 1
    ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss).step(PART, target=PART)
    assert stage.in_flight == 0
    assert stage.fwd_cache == {}


def test_a_loop_that_failed_leaves_nothing_for_the_next_step() -> None:
    held = Held(OURS, at={0: [0]})
    calls = count()

    def loss(output: Tensor, target: Tensor) -> Any:
        if next(calls) == 1:
            raise ZeroDivisionError
        return sum_loss(output, target)

    loop = held.schedule(loop_of_turns(OURS), loss_fn=loss)
    with pytest.raises(ZeroDivisionError):
        held.step(loop)
    held.check_steps(loop, 1)


class Early(PipelineScheduleSingle):
    """Does, on each rank, what a function says."""

    says: Any
    current: Any

    def _step_microbatches(
        self, arg_mbs: Any = None, kwarg_mbs: Any = None, *_: Any, **__: Any
    ) -> None:
        parts = self._check_inputs(arg_mbs, kwarg_mbs)[0]
        self._initialize_stage(parts[0], {})
        self.says(self._stage, parts)


def other_values(stage: Any, args: Any) -> None:
    """The second microbatch gives another length than the first."""
    for index, (x,) in enumerate(args if stage.is_first else []):
        stage.forward_one_chunk(index, (x.repeat(1 + index, 1),))
        stage.get_fwd_send_ops(index)


def too_early(stage: Any, args: Any) -> None:
    if not stage.is_first:
        stage.forward_one_chunk(0)


def by_the_schedule_too(stage: Any, args: Any) -> None:
    """The class has no actions, and the step has begun by hand."""
    PipelineScheduleSingle._step_microbatches(Early.current)


WRONG: list[tuple[Any, int, str]] = [
    (other_values, 0, "SpecError: 0SEND_F1: .*float32.2, 4.*float32.1, 4"),
    (too_early, 1, "stage 1 has nothing for microbatch 0; get_fwd_recv_ops comes first"),
    (by_the_schedule_too, 0, "either by a loop over stages or by the schedule"),
]
"""What a loop does wrong, and which rank says what."""


def wrong_loops(group: Any) -> list[str]:
    texts = []
    for function, *_ in WRONG:
        held = Held(OURS, group, "GPipe")
        Early.says, Early.current = staticmethod(function), held.schedule(Early, 2)
        with pytest.raises(Exception, match=r".") as caught:
            Early.current.step(*([PART] if held.is_first else []), return_outputs=False)
        texts.append(f"{caught.typename}: {caught.value}")
    return texts


def test_a_loop_that_goes_wrong_is_named_on_every_rank(workers: WorkerPool) -> None:
    ranks = workers.run(f"{__name__}:wrong_loops", 2, 60.0)
    for place, (_, rank, says) in enumerate(WRONG):
        assert re.search(says, ranks[rank][place])


# ---- weights that stages share: equal where that is asked for

TABLE = (Shared(("0.weight", "1.weight"), ((0, "weight"), (1, "weight"))),)


def tied() -> list[nn.Module]:
    first, last = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
    last.weight = first.weight
    return [first, last]


def train(group: Any, asked: bool) -> list[list[float]]:
    held = Held(OURS, group, "GPipe", tied)
    (stage,) = held.stages
    stage.shared = TABLE if asked else ()
    schedule = held.schedule("GPipe")
    optimizers = [torch.optim.AdamW(one.parameters(), 0.1) for one in (stage.submod, held.plain)]
    for _ in range(5):
        held.step(schedule)
        sum_loss(held.plain(X), Y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if asked:
        torch.testing.assert_close(stage.submod.weight, held.plain[0].weight)
    weight: list[list[float]] = stage.submod.weight.tolist()
    return weight


@pytest.mark.parametrize("asked", [True, False])
def test_shared_weights_over_processes(workers: WorkerPool, asked: bool) -> None:
    first, last = workers.run(f"{__name__}:train", 2, 60.0, asked=asked)
    assert (first == last) is asked
