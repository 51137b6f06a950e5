"""Stages driven call by call, by a user's own loop or function: the engine performs each call's action."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp

from penstock.pipelining._utils import CallError
from penstock.runtime import StepState
from penstock.schedule import Action, Dependencies, Op, Placement, Schedule
from penstock.schedule.base import Edges

Perform = Callable[[Action], None]


class Drive:
    """What the calls of a stage do while a custom function runs: the engine performs the function's action.

    Arguments come from the batch, messages are on their way, and the engine has computed the loss.

    Args:
        perform: performs an action of the running step.
    """

    is_loop = False
    """Whether a loop of the user's own runs the whole step."""

    def __init__(self, perform: Perform) -> None:
        self.perform = perform

    def forward(self, action: Action, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Run a forward."""
        self.perform(action)

    def backward(self, stage: Any, action: Action, loss: Tensor | None) -> None:
        """Run a backward, or its inputs' half."""
        self.perform(action)

    def receive(self, action: Action) -> None:
        """Post the receives of what an action needs."""

    def send(self, action: Action) -> None:
        """Send what an action has made."""


class OwnLoop(Drive):
    """What they do in a step of a loop of the user's own, which also says when messages go.

    The first call begins the step; the loop of every rank makes one.

    Args:
        begin: makes the context of the step, which gives its state and what performs its actions.
        schedule: returns a schedule of the actions that the loop may take, in any order.
    """

    is_loop = True

    def __init__(
        self,
        begin: Callable[[], AbstractContextManager[tuple[StepState, Perform]]],
        schedule: Callable[[], Schedule],
    ) -> None:
        super().__init__(self._perform_first)
        self._begin, self._schedule = begin, schedule
        self._stack = ExitStack()
        self._step: StepState | None = None
        self._posted: set[Action] = set()
        self._done: set[tuple[int, int | None]] = set()
        """The stages and microbatches whose inputs' gradients are there."""

    @cached_property
    def _rule(self) -> Dependencies:
        return Dependencies(self._schedule())

    def __enter__(self) -> OwnLoop:
        return self

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)

    @property
    def has_begun(self) -> bool:
        """Whether a call has begun the step."""
        return self._step is not None

    def start(self) -> StepState:
        """Begin the step, if no call has, and return its state."""
        if self._step is None:
            self._step, self.perform = self._stack.enter_context(self._begin())
        return self._step

    def _perform_first(self, action: Action) -> None:
        self.start()
        self.perform(action)

    def forward(self, action: Action, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Run a forward; the first stage takes these arguments, others those by name."""
        self._check_posted(action, "get_fwd_recv_ops")
        self.start().bring(action.microbatch or 0, None if action.stage else args, kwargs)
        self.perform(action)

    def backward(self, stage: Any, action: Action, loss: Tensor | None) -> None:
        """Run a backward, or its inputs' half; the last stage's starts from the loss."""
        self._check_posted(action, "get_bwd_recv_ops")
        stage.start_from_loss(action.microbatch, loss)
        self.perform(action)
        self._done.add((action.stage, action.microbatch))

    def _check_posted(self, action: Action, before: str) -> None:
        if not self._posted.issuperset(self._rule.receives(action)):
            raise nothing_for(action.stage, action.microbatch, before)

    def receive(self, action: Action) -> None:
        """Post the receives of what an action needs."""
        for message in self._rule.receives(action):
            if message not in self._posted:
                self._posted.add(message)
                self.perform(message)

    def send(self, action: Action) -> None:
        """Send what an action has made; a sum of gradients after the last that adds to it."""
        for message in self._rule.sends(action):
            needed = {(need.stage, need.microbatch) for need in self._rule.before(message)}
            if action.op is Op.F or needed <= self._done:
                self.perform(message)


def any_order(rank_of: Sequence[int], microbatches: int, edges: Edges | None) -> Schedule:
    """All that a loop by hand may do on these stages; its own order is that of the stages, there and back."""
    ways = (Op.F, range(len(rank_of))), (Op.B, reversed(range(len(rank_of))))
    actions = [Action(s, op, m) for op, stages in ways for s in stages for m in range(microbatches)]
    programs = [
        [a for a in actions if rank_of[a.stage] == rank] for rank in range(max(rank_of) + 1)
    ]
    schedule = Schedule(
        "by hand", Placement(tuple(rank_of)), microbatches, tuple(map(tuple, programs))
    )
    return schedule if edges is None else schedule.with_edges(edges)


def nothing_for(stage: int, microbatch: int | None, before: str) -> CallError:
    """The error of a call that comes too early; ``before`` names the one that comes first."""
    return CallError(f"stage {stage} has nothing for microbatch {microbatch}; {before} comes first")


# ---- torch's functions for messages that a user makes himself


def start(p2p_ops: Sequence[P2POp], desc: str | None = None) -> list[Any]:
    """Start sends and receives, and return the work to wait for.

    Operations in one direction start one by one: they cannot block each other, whereas NCCL would run a
    batch of them in sequence. Only a mixture could deadlock, so it goes as a batch.
    """
    ways = {one.op for one in p2p_ops}
    if ways in ({dist.isend}, {dist.irecv}):
        peer = "group_dst" if ways == {dist.isend} else "group_src"
        return [
            one.op(one.tensor, group=one.group, tag=one.tag, **{peer: one.group_peer})
            for one in p2p_ops
        ]
    return dist.batch_isend_irecv(list(p2p_ops)) if p2p_ops else []


def start_by_peer(p2p_ops: Sequence[P2POp], desc: str | None = None) -> dict[int, list[Any]]:
    """Start sends and receives peer by peer, in rank order, and return the work to wait for by peer."""
    peers = sorted({operation.peer for operation in p2p_ops})
    return {peer: start([one for one in p2p_ops if one.peer == peer]) for peer in peers}


def wait_all(work: Sequence[Any]) -> None:
    """Wait for communication."""
    for item in work:
        item.wait()
