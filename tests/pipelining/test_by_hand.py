"""Loops and calls of stages that go wrong, and weights that stages share."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.partition import Shared
from penstock.pipelining import PipelineStage
from penstock.pipelining.schedules import PipelineScheduleSingle
from tests.pipelining.stages import OURS, WIDTH, Held, Layer, X, Y, sum_loss
from tests.pipelining.test_processes import loop_of_turns
from tests.processes import in_processes

PART = X[:2]


CALLS: list[Callable[[Any], Any]] = [
    lambda stage: stage.forward_one_chunk(0, (PART,)),
    lambda stage: stage.backward_one_chunk(0),
    lambda stage: stage.backward_weight_one_chunk(0),
    lambda stage: stage.get_fwd_recv_ops(0),
    lambda stage: stage.get_bwd_send_ops(0),
]


@pytest.mark.parametrize("call", CALLS)
def test_calls_outside_of_a_step_are_refused(call: Callable[[Any], Any]) -> None:
    stage = PipelineStage(Layer(), 0, 1, "cpu")
    stage.has_backward = True
    with pytest.raises(RuntimeError, match=r"no step: .*backward_one_chunk.*_step_microbatches"):
        call(stage)


def test_without_a_backward_its_calls_do_nothing() -> None:
    stage = PipelineStage(Layer(), 0, 1, "cpu")
    stage.backward_one_chunk(0)
    stage.backward_weight_one_chunk(0)
    assert stage.get_bwd_send_ops(0) == []


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
        if Early.says is before_it_begins:
            self.says(self._stage, parts)
        self._initialize_stage(parts[0], {})
        self.says(self._stage, parts)


def other_values(stage: Any, args: Any) -> None:
    """The second microbatch gives another length than the first."""
    for index, (x,) in enumerate(args if stage.is_first else []):
        stage.forward_one_chunk(index, (x.repeat(1 + index, 1),))
        stage.get_fwd_send_ops(index)


def before_it_begins(stage: Any, args: Any) -> None:
    """One rank fails before it says anything; the other one waits for its values."""
    if stage.is_first:
        raise ZeroDivisionError("divided by zero")
    forward(stage, args)


def too_early(stage: Any, args: Any) -> None:
    if not stage.is_first:
        stage.forward_one_chunk(0)


def without_loss(stage: Any, args: Any) -> None:
    """The last stage has no loss to start from."""
    forward(stage, args)
    if stage.is_last:
        stage.backward_one_chunk(0)


def beyond(stage: Any, args: Any) -> None:
    forward(stage, args)
    if stage.is_last:
        stage.backward_one_chunk(2)


def half_of_nothing(stage: Any, args: Any) -> None:
    forward(stage, args)
    if stage.is_last:
        stage.backward_weight_one_chunk(0)


def forward(stage: Any, args: Any) -> None:
    stage.get_fwd_recv_ops(0)
    stage.forward_one_chunk(0, args[0])
    stage.get_fwd_send_ops(0)


def by_the_schedule_too(stage: Any, args: Any) -> None:
    """The class has no actions, and the step has begun by hand."""
    PipelineScheduleSingle._step_microbatches(Early.current)


WRONG: list[tuple[Any, int, str]] = [
    (before_it_begins, 1, "rank 0.* ZeroDivisionError: divided by zero"),
    (other_values, 0, "SpecError: 0SEND_F1: .*float32.2, 4.*float32.1, 4"),
    (too_early, 1, "stage 1 has nothing for microbatch 0; get_fwd_recv_ops comes first"),
    (without_loss, 1, "starts at loss="),
    (beyond, 1, "chunk 2 is out of range of 2 chunks"),
    (half_of_nothing, 1, "full_backward=False"),
    (by_the_schedule_too, 0, "either by a loop over stages or by the schedule"),
]
"""What a loop does wrong, and which rank says what."""


@in_processes(2)
def test_a_loop_that_goes_wrong_is_named_on_every_rank(group: Any) -> None:
    for function, rank, says in WRONG:
        held = Held(OURS, group, "GPipe")
        Early.says, Early.current = staticmethod(function), held.schedule(Early, 2)
        with pytest.raises(Exception, match=r".") as caught:  # on the other rank any error
            Early.current.step(*([PART] if held.is_first else []), return_outputs=False)
        text = f"{caught.typename}: {caught.value}"
        assert group.rank() != rank or re.search(says, text), text


# ---- weights that stages share: equal where that is asked for

TABLE = (Shared(("0.weight", "1.weight"), ((0, "weight"), (1, "weight"))),)


def tied() -> list[nn.Module]:
    first, last = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
    last.weight = first.weight
    return [first, last]


@pytest.mark.parametrize("asked", [True, False])
@in_processes(2)
def test_shared_weights_over_processes(group: Any, asked: bool) -> None:
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
    both: list[Any] = [None, None]
    dist.all_gather_object(both, stage.submod.weight.tolist(), group)
    assert (both[0] == both[1]) is asked
