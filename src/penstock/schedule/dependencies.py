"""The one rule about what must come before an action.

The validator, the passes, the simulator and the runtime all use it.

====================  =====================================================================
action                must be complete before it
====================  =====================================================================
F of a stage          the values it uses: F of a source on the same rank, else the RECV_F
I or B of a stage     its F, or the RELOAD of what was offloaded; the gradients owed to it: I or B of a
                      user, else the RECV_B
W of a stage          its I
SEND_F                the F that makes the values
SEND_B                I or B of each of the rank's stages that owe the gradient
RECV_F, RECV_B        the SEND at the other end
WAIT_SEND_F/B         the SEND it waits for
REDUCE_GRAD           W or B of every microbatch of the stage
WAIT_REDUCE_GRAD      the REDUCE_GRAD of the stage
UNSHARD               nothing
RESHARD               the UNSHARD of the stage
OFFLOAD               the F that saves the activations
RELOAD                the OFFLOAD
F of a slice          also the F of the slice before, whose state it uses
I or B of a slice     also the I or B of the slice after, which owes the state its gradient
====================  =====================================================================

If the schedule spells out no messages, a value from another rank needs that rank's F, I or B itself.
If a stage has an UNSHARD, its F, I, W and B need the stage unsharded: :meth:`Dependencies.shards`.

What an action needs does not depend on its microbatch, nor on its slice but for the first or last. So
:meth:`Dependencies.needs` states the rule once for a stage, an op and a peer, and :meth:`Dependencies.before`
applies it to one action.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import NamedTuple

from penstock.schedule.action import (
    COMPUTE_OPS,
    GRADIENT_OPS,
    MESSAGE_OPS,
    SEND_OPS,
    STAGE_OPS,
    Action,
    Op,
    Slice,
    message,
)
from penstock.schedule.base import Edge, Schedule

# The op at the other end of a message.
COUNTERPART = {
    Op.SEND_F: Op.RECV_F,
    Op.RECV_F: Op.SEND_F,
    Op.SEND_B: Op.RECV_B,
    Op.RECV_B: Op.SEND_B,
    Op.WAIT_SEND_F: Op.SEND_F,
    Op.WAIT_SEND_B: Op.SEND_B,
}


class Either(Enum):
    """A need that either of two ops meets: the second if the microbatch has it, else the first."""

    INPUT_GRADIENT = Op.I, Op.B
    WEIGHT_GRADIENT = Op.W, Op.B
    ACTIVATIONS = Op.F, Op.RELOAD


class Need(NamedTuple):
    """An action that is needed, without its microbatch; ``slice`` is how many slices after it is."""

    stage: int
    op: Op | Either
    peer: int | None = None
    slice: int = 0

    @property
    def split_op(self) -> Op:
        """The op that meets the need if every backward is split in two halves and nothing is offloaded."""
        return self.op.value[0] if isinstance(self.op, Either) else self.op


Needs = tuple[Need, ...]


def counterpart(action: Action) -> Action:
    """The action at the other end of a message; for a WAIT_SEND, the send it waits for."""
    op = COUNTERPART[action.op]
    if action.op in (Op.WAIT_SEND_F, Op.WAIT_SEND_B):
        return Action(action.stage, op, action.microbatch, action.peer)
    return message(action.peer_stage, op, action.microbatch, action.stage)


class Dependencies:
    """The dependencies of each action of a schedule, and the messages that its values need.

    Args:
        schedule: any schedule, with or without its messages.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._parts, self._slices = schedule.parts, schedule.slices
        self._rank_of = schedule.placement.rank_of
        used = _used_by(schedule.edges, schedule.stages)
        self._sources: list[list[int]] = [[] for _ in used]
        """The stages whose values a stage uses."""
        for source, users in enumerate(used):
            for user in users:
                self._sources[user].append(source)
        self._users = _used_by((e for e in schedule.edges if e.gradient), schedule.stages)
        """The stages that use a stage's values and owe it a gradient."""
        self._carriers = [self._first_on_ranks(users) for users in used]
        """For each stage, by rank, the stage after which its message to that rank is named."""
        self._gradient_carriers = [self._first_on_ranks(users) for users in self._users]
        """The same for the messages that return its gradients."""
        self._communicates = schedule.communicates
        self._full = _full_backwards(schedule)
        self._sharded = frozenset(stage for stage, _ in _places(schedule, Op.UNSHARD))
        self._offloaded = _places(schedule, Op.OFFLOAD)
        self._known: dict[tuple[int, Op, int | None], Needs] = {}
        self._rule: dict[Op, Callable[[Action], Needs]] = {
            Op.F: self._before_forward,
            Op.I: self._before_gradient,
            Op.B: self._before_gradient,
            Op.W: lambda a: (Need(a.stage, Op.I),),
            Op.SEND_F: lambda a: (Need(a.stage, Op.F),),
            Op.SEND_B: self._before_gradient_send,
            Op.RECV_F: _other_end,
            Op.RECV_B: _other_end,
            Op.WAIT_SEND_F: _other_end,
            Op.WAIT_SEND_B: _other_end,
            Op.REDUCE_GRAD: lambda a: (Need(a.stage, Either.WEIGHT_GRADIENT),),
            Op.WAIT_REDUCE_GRAD: lambda a: (Need(a.stage, Op.REDUCE_GRAD),),
            Op.UNSHARD: lambda _: (),
            Op.RESHARD: lambda a: (Need(a.stage, Op.UNSHARD),),
            Op.OFFLOAD: lambda a: (Need(a.stage, Op.F),),
            Op.RELOAD: lambda a: (Need(a.stage, Op.OFFLOAD),),
        }

    def before(self, action: Action) -> list[Action]:
        """The actions that must be complete before ``action`` may start."""
        stage, op, microbatch, peer = action
        needs = self.needs(stage, op, peer)
        if op is Op.REDUCE_GRAD:
            return [self.settle(need, m) for need in needs for m in self._parts]
        return [self.settle(need, microbatch) for need in needs if self.has(need, microbatch)]

    def needs(self, stage: int, op: Op, peer: int | None = None) -> Needs:
        """The needs of the actions of a stage, an op and a peer, whatever their microbatch.

        REDUCE_GRAD needs them for every microbatch, other actions for their own.
        """
        key = (stage, op, peer)
        if key not in self._known:
            shard = (Need(stage, Op.UNSHARD),) if self.shards(stage) and op in COMPUTE_OPS else ()
            self._known[key] = self._rule[op](Action(stage, op, 0, peer)) + shard
            if self._slices > 1 and op is Op.F:
                self._known[key] += (Need(stage, op, slice=-1),)
            elif self._slices > 1 and op in GRADIENT_OPS:
                self._known[key] += (Need(stage, Either.INPUT_GRADIENT, slice=1),)
        return self._known[key]

    def has(self, need: Need, microbatch: int | Slice | None) -> bool:
        """Tell if there is the slice that a need is about: the first has none before it."""
        if not (need.slice and isinstance(microbatch, Slice)):
            return True
        return 0 <= microbatch.number + need.slice < self._slices

    def settle(self, need: Need, microbatch: int | Slice | None) -> Action:
        """The action that meets a need for one microbatch."""
        stage, op, peer, after = need
        if after and isinstance(microbatch, Slice):
            microbatch = Slice(microbatch.microbatch, microbatch.number + after)
        if op is Either.ACTIVATIONS:
            return Action(stage, op.value[self.offloads(stage, microbatch)], microbatch)
        if isinstance(op, Either):
            gradient = self.gradient(stage, microbatch)
            return gradient if gradient.op is Op.B else Action(stage, op.value[0], microbatch)
        return Action(stage, op, None if op in STAGE_OPS else microbatch, peer)

    def shards(self, stage: int) -> bool:
        """Tell if UNSHARD gathers the stage's parameters and RESHARD frees them.

        If so, the stage must be unsharded before each of its computing actions and before a RESHARD, and
        not unsharded before an UNSHARD.
        """
        return stage in self._sharded

    def offloads(self, stage: int, microbatch: int | Slice | None) -> bool:
        """Tell if what F of a stage and microbatch has saved waits for its backward on the host."""
        return (stage, microbatch) in self._offloaded

    def gradient(self, stage: int, microbatch: int | Slice | None) -> Action:
        """The action that computes the gradient of a stage's inputs: its B if it has one, else its I."""
        full = self._full is None or (stage, microbatch) in self._full
        return Action(stage, Op.B if full else Op.I, microbatch)

    def sends(self, action: Action) -> list[Action]:
        """The messages that ``action`` makes possible, as SENDs of its rank.

        A gradient message carries the sum over all stages of the rank that use the value. It is listed for
        each of these stages, and becomes possible after the last.
        """
        stage, op, microbatch, _ = action
        home = self._rank_of[stage]
        if op is Op.F:
            peers = sorted(peer for rank, peer in self._carriers[stage].items() if rank != home)
            return [message(stage, Op.SEND_F, microbatch, peer) for peer in peers]
        if op is Op.I or op is Op.B:
            return [
                message(self._gradient_carriers[source][home], Op.SEND_B, microbatch, source)
                for source in self._sources[stage]
                if stage in self._users[source] and self._rank_of[source] != home
            ]
        return []

    def receives(self, action: Action) -> list[Action]:
        """The messages that ``action`` needs, as RECVs of its rank."""
        stage, op, microbatch, _ = action
        home = self._rank_of[stage]
        if op is Op.F:
            return [
                message(self._carriers[source][home], Op.RECV_F, microbatch, source)
                for source in self._sources[stage]
                if self._rank_of[source] != home
            ]
        if op is Op.I or op is Op.B:
            carriers = self._gradient_carriers[stage]
            peers = sorted(peer for rank, peer in carriers.items() if rank != home)
            return [message(stage, Op.RECV_B, microbatch, peer) for peer in peers]
        return []

    def _first_on_ranks(self, users: Iterable[int]) -> dict[int, int]:
        first: dict[int, int] = {}
        for user in sorted(users):
            first.setdefault(self._rank_of[user], user)
        return first

    def _before_forward(self, action: Action) -> Needs:
        return (*self._local(action, self._sources[action.stage], Op.F), *self._messages(action))

    def _before_gradient(self, action: Action) -> Needs:
        users = sorted(self._users[action.stage])
        local = self._local(action, users, Either.INPUT_GRADIENT)
        return (Need(action.stage, Either.ACTIVATIONS), *local, *self._messages(action))

    def _local(self, action: Action, stages: Iterable[int], op: Op | Either) -> Iterator[Need]:
        """What an action needs from stages that hand it over without a message."""
        home = self._rank_of[action.stage]
        return (
            Need(stage, op)
            for stage in stages
            if not self._communicates or self._rank_of[stage] == home
        )

    def _messages(self, action: Action) -> Iterator[Need]:
        receives = self.receives(action) if self._communicates else ()
        return (Need(receive.stage, receive.op, receive.peer) for receive in receives)

    def _before_gradient_send(self, action: Action) -> Needs:
        home = self._rank_of[action.stage]
        users = sorted(self._users[action.peer_stage])
        return tuple(
            Need(user, Either.INPUT_GRADIENT) for user in users if self._rank_of[user] == home
        )


def proofs(schedule: Schedule, rank: int, rule: Dependencies) -> dict[Action, list[Action]]:
    """For each message that arrives at a rank, the rank's own SENDs that its sender has used by then.

    Args:
        schedule: a schedule with its messages.
        rank: the rank.
        rule: the schedule's dependencies.
    """
    rank_of = schedule.placement.rank_of
    messages = [action for action in schedule.actions(rank) if action.op in MESSAGE_OPS]
    proves: dict[Action, list[Action]] = {}
    for peer in {rank_of[action.peer_stage] for action in messages}:
        seen: set[Action] = set()
        fresh: list[Action] = []
        for action in schedule.actions(peer):
            needs = [n for n in rule.receives(action) if rank_of[n.peer_stage] == rank]
            new = [send for send in map(counterpart, needs) if send not in seen]
            seen.update(new)
            fresh += new
            if action.op in SEND_OPS and rank_of[action.peer_stage] == rank and fresh:
                proves[counterpart(action)] = fresh
                fresh = []
    return proves


def _used_by(edges: Iterable[Edge], stages: int) -> list[set[int]]:
    """The stages that use each stage's values."""
    users: list[set[int]] = [set() for _ in range(stages)]
    for edge in edges:
        users[edge.source].update(edge.targets)
    return users


def _other_end(action: Action) -> Needs:
    stage, op, _, peer = counterpart(action)
    return (Need(stage, op, peer),)


def _places(schedule: Schedule, op: Op) -> frozenset[tuple[int, int | Slice | None]]:
    """The pairs (stage, microbatch) that have an op."""
    if op not in schedule.ops:
        return frozenset()
    return frozenset(
        (action.stage, action.microbatch)
        for rank in range(schedule.ranks)
        for action in schedule.actions(rank)
        if action.op is op
    )


def _full_backwards(schedule: Schedule) -> frozenset[tuple[int, int | Slice | None]] | None:
    """The pairs (stage, microbatch) that run B rather than I; ``None`` if all do."""
    return _places(schedule, Op.B) if Op.I in schedule.ops else None
