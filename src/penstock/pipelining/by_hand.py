"""Stages driven call by call, by a user's loop or function: the engine performs each call's action."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp

from penstock._engine.runtime import StepState
from penstock.pipelining._utils import CallError
from penstock.schedule import Action, Dependencies, Op, Placement, Schedule
from penstock.schedule.action import microbatch_of
from penstock.schedule.base import Edges

Perform = Callable[[Action], None]


class FunctionDrive:
    """What the calls of a stage do while a custom function runs: the engine performs the function's action.

    Arguments come from the batch, messages are on their way, and the engine computes the loss.

    Args:
        perform: performs an action of the running step.
    """

    leaves_results = True
    """Whether the engine keeps the outputs and computes the losses."""

    def __init__(self, perform: Perform) -> None:
        self._perform = perform

    def perform(self, action: Action) -> None:
        """Perform an action of the step."""
        self._perform(action)

    def forward(
        self, stage: Any, action: Action, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a forward, and return the output."""
        return stage.output_of(self.perform, action)

    def backward(self, stage: Any, action: Action, loss: Tensor | None) -> None:
        """Run a backward, or its inputs' half."""
        self.perform(action)

    def receive(self, action: Action) -> None:
        """Post the receives of what an action needs."""

    def send(self, action: Action) -> None:
        """Send what an action has computed."""

    def divide(self, stage: Any, divisor: int) -> None:
        """Divide a stage's gradients."""


class LoopDrive(FunctionDrive):
    """What they do in a step that a user's loop runs, which also says when messages go.

    The first call begins the step; the loop of every rank makes one.

    Args:
        begin: begins the step, and returns the rule of its messages, its state, and what performs actions.
    """

    leaves_results = False

    def __init__(self, begin: Callable[[], tuple[Dependencies, StepState, Perform]]) -> None:
        self._begin = begin
        self._begun: tuple[Dependencies, StepState, Perform] | None = None
        self._posted: set[Action] = set()
        self._answered: set[tuple[int, int | None]] = set()
        """The stages and microbatches whose inputs' gradients are there."""
        self._divisors: dict[Any, int] = {}

    def start(self) -> tuple[Dependencies, StepState, Perform]:
        """Begin the step, if no call has."""
        if self._begun is None:
            self._begun = self._begin()
        return self._begun

    def perform(self, action: Action) -> None:
        """Perform an action of the step."""
        _, _, perform = self.start()
        perform(action)

    def forward(
        self, stage: Any, action: Action, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a forward; the first stage takes these arguments, others those by name."""
        _, step, _ = self.start()
        self._check_posted(action, "get_fwd_recv_ops")
        step.bring(microbatch_of(action) or 0, None if action.stage else args, kwargs)
        return super().forward(stage, action, args, kwargs)

    def backward(self, stage: Any, action: Action, loss: Tensor | None) -> None:
        """Run a backward, or its inputs' half; the last stage's starts from the loss."""
        self._check_posted(action, "get_bwd_recv_ops")
        stage.start_from_loss(action.microbatch, loss)
        self.perform(action)
        self._answered.add((action.stage, microbatch_of(action)))

    def _check_posted(self, action: Action, before: str) -> None:
        rule, _, _ = self.start()
        if not self._posted.issuperset(rule.receives(action)):
            raise CallError(
                f"stage {action.stage} has nothing for microbatch {action.microbatch}; {before} comes first"
            )

    def receive(self, action: Action) -> None:
        """Post the receives of what an action needs."""
        rule, _, _ = self.start()
        for message in rule.receives(action):
            if message not in self._posted:
                self._posted.add(message)
                self.perform(message)

    def send(self, action: Action) -> None:
        """Send what an action has computed; a sum of gradients after the last that adds to it."""
        rule, _, _ = self.start()
        for message in rule.sends(action):
            needed = {(need.stage, need.microbatch) for need in rule.before(message)}
            if action.op is Op.F or needed <= self._answered:
                self.perform(message)

    def divide(self, stage: Any, divisor: int) -> None:
        """Divide a stage's gradients once they are reduced, at the step's end."""
        self._divisors[stage] = self._divisors.get(stage, 1) * divisor

    def end(self) -> None:
        """Divide the gradients, after the step."""
        for stage, divisor in self._divisors.items():
            stage.scale_grads(divisor)


@contextmanager
def driving(stages: Sequence[Any], drive: FunctionDrive) -> Iterator[None]:
    """A context in which the stages' calls do what the drive says."""
    before = [stage.hand_to(drive) for stage in stages]
    try:
        yield
    finally:
        for stage, last in zip(stages, before, strict=True):
            stage.hand_to(last)


@lru_cache(maxsize=8)
def any_order(rank_of: tuple[int, ...], microbatches: int, edges: Edges | None) -> Schedule:
    """All that a loop by hand may do on these stages; its own order is that of the stages, there and back."""
    ways = (Op.F, range(len(rank_of))), (Op.B, reversed(range(len(rank_of))))
    actions = [Action(s, op, m) for op, stages in ways for s in stages for m in range(microbatches)]
    programs = [
        [a for a in actions if rank_of[a.stage] == rank] for rank in range(max(rank_of) + 1)
    ]
    schedule = Schedule("by hand", Placement(rank_of), microbatches, tuple(map(tuple, programs)))
    return schedule if edges is None else schedule.with_edges(edges)


# ---- torch's functions for messages that a user makes himself


def start_messages(p2p_ops: Sequence[P2POp], desc: str | None = None) -> list[Any]:
    """Start sends and receives, and return the work to wait for."""
    return dist.batch_isend_irecv(list(p2p_ops)) if p2p_ops else []


def start_by_peer(p2p_ops: Sequence[P2POp], desc: str | None = None) -> dict[int, list[Any]]:
    """Start sends and receives peer by peer, in rank order, and return the work to wait for by peer."""
    peers = sorted({operation.peer for operation in p2p_ops})
    return {peer: start_messages([one for one in p2p_ops if one.peer == peer]) for peer in peers}


def wait_all(work: Sequence[Any]) -> None:
    """Wait for communication."""
    for item in work:
        item.wait()
