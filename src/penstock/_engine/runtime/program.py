"""What a process does in a step, and which values travel between which ranks: once for a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock._engine.transport import GRADIENTS, VALUES
from penstock.schedule import Action, Dependencies, Edge, Op, Overlap, Schedule, merged
from penstock.schedule.action import MESSAGE_OPS
from penstock.schedule.dependencies import proofs


class Wire(NamedTuple):
    """What the messages of one op between two stages carry, and between which ranks.

    Attributes:
        peer: the rank at the other end.
        channel: (source rank, target rank, direction).
        number: identifies the wire within the schedule; number and kind make up a message's tag.
        edges: the edges whose values travel, each with a stage; for gradients, the stage that owes them.
    """

    peer: int
    channel: tuple[int, int, int]
    number: int
    edges: tuple[tuple[Edge, int], ...]


class Instruction(NamedTuple):
    """An action for a microbatch, and the messages that must have arrived before it.

    A slice of a microbatch counts as one of its own: ``microbatch`` is its position among all of them.
    """

    action: Action
    stage: int
    microbatch: int
    needs: tuple[Instruction, ...] = ()


class StageInstruction(NamedTuple):
    """An action on a whole stage, for all microbatches."""

    action: Action
    stage: int
    needs: tuple[Instruction, ...] = ()


class Flow:
    """The values that travel for microbatches of one kind.

    Args:
        schedule: the schedule, with its messages spelled out; some may carry nothing.
        rank: this process's rank; None if it runs all of them.
        edges: the values.
    """

    def __init__(self, schedule: Schedule, rank: int | None, edges: Sequence[Edge]) -> None:
        self._schedule, self._rank, self.edges = schedule, rank, tuple(edges)
        stages = range(schedule.stages)
        self.inputs = [tuple(e for e in edges if s in e.targets) for s in stages]
        self.outputs = [tuple(e for e in edges if e.source == s) for s in stages]
        self.learned = [tuple(e for e in of if e.gradient) for of in self.outputs]
        self._wires: dict[tuple[Op, int, int], Wire] = {}
        self.uses = {edge.value: self._count_uses(edge) for edge in edges}
        rank_of = schedule.placement.rank_of
        self.local = {e.value for e in edges if rank is None or rank_of[e.source] == rank}
        """The values made here; their makers may still use the memory."""

    def _count_uses(self, edge: Edge) -> int:
        """How often a value is read here: by the stages that use it, and by the messages that carry it."""
        if self._rank is None:
            return len(edge.targets)
        rank_of = self._schedule.placement.rank_of
        users = [rank_of[target] for target in edge.targets]
        sends = set(users) - {self._rank} if rank_of[edge.source] == self._rank else ()
        return users.count(self._rank) + len(sends)

    def wire_of(self, action: Action) -> Wire:
        """The wire of a message; it has no edges if nothing travels for this kind of microbatch."""
        key = action.op, action.stage, action.peer_stage
        wire = self._wires.get(key)
        if wire is None:
            wire = self._wires[key] = self._make_wire(action)
        return wire

    def _make_wire(self, action: Action) -> Wire:
        schedule, rank_of = self._schedule, self._schedule.placement.rank_of
        home, peer = rank_of[action.stage], rank_of[action.peer_stage]
        sends = action.op in (Op.SEND_F, Op.SEND_B)
        direction = VALUES if action.op in (Op.SEND_F, Op.RECV_F) else GRADIENTS
        source, carrier = sorted((action.stage, action.peer_stage))
        edges: list[tuple[Edge, int]] = []
        for edge in self.outputs[source]:
            users = [target for target in edge.targets if rank_of[target] == rank_of[carrier]]
            if direction == VALUES and users:
                edges.append((edge, carrier))
            elif direction == GRADIENTS and edge.gradient:
                # Sent one by one, not summed, so that all gradients of a value are added in one order.
                edges += [(edge, user) for user in users]
        number = (source * schedule.stages + carrier) * 2 + direction
        channel = (home, peer, direction) if sends else (peer, home, direction)
        return Wire(peer, channel, number, tuple(edges))


class Program:
    """What this process does in a step: the actions of its rank, or of all ranks in one order.

    Args:
        schedule: the schedule, with its messages spelled out.
        rank: this process's rank; None if it runs all of them.
    """

    def __init__(self, schedule: Schedule, rank: int | None) -> None:
        self.schedule = schedule
        self._rank, self._rule = rank, Dependencies(schedule)
        actions = merged(schedule) if rank is None else schedule.actions(rank)
        self.instructions = [self.instruction(action) for action in actions]
        self.offloaded = {
            (i.stage, i.microbatch)
            for i in self.instructions
            if isinstance(i, Instruction) and i.action.op is Op.OFFLOAD
        }
        """The stages and microbatches whose activations wait on the host."""
        here = schedule.programs if rank is None else schedule.programs[rank : rank + 1]
        self.pairs = [entry for program in here for entry in program if isinstance(entry, Overlap)]
        """The overlapped pairs of this process."""
        self._flows: dict[tuple[Edge, ...], Flow] = {}
        self.proves = {} if rank is None else proofs(schedule, rank, self._rule)
        """For each message that arrives, this rank's SENDs that its sender has used by then."""

    def instruction(self, action: Action) -> Instruction | StageInstruction:
        """Return what there is to do for an action of this process, which need not be one of the schedule."""
        if action.microbatch is None:
            return StageInstruction(action, action.stage)
        receives = () if self._rank is None else self._rule.receives(action)
        part = self.schedule.position(action.microbatch)
        needs = tuple(Instruction(r, r.stage, part) for r in receives)
        return Instruction(action, action.stage, part, needs)

    def flow(self, edges: Sequence[Edge] | None = None) -> Flow:
        """The flow of values for microbatches with some edges; by default, with those of the schedule."""
        key = self.schedule.edges if edges is None else tuple(edges)
        if key not in self._flows:
            self._flows[key] = Flow(self.schedule, self._rank, key)
        return self._flows[key]

    @property
    def channels(self) -> Iterator[tuple[int, int, int]]:
        """The channels that this schedule's messages use on any rank."""
        flow = self.flow()
        return (
            flow.wire_of(action).channel
            for rank in range(self.schedule.ranks)
            for action in self.schedule.actions(rank)
            if action.op in MESSAGE_OPS
        )
