"""A rank's program, made ready to run: what each action waits for and where its messages go."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from penstock.schedule import Action, Dependencies, Edge, Op, Overlap, Schedule
from penstock.schedule.action import MESSAGE_OPS, SEND_OPS, WAIT_SEND_OPS, Entry
from penstock.transport import BACKWARD, FORWARD, Channel


class Instruction(NamedTuple):
    """An action and the messages of this rank that must be complete before it."""

    action: Action
    messages: tuple[Action, ...]


class Wire(NamedTuple):
    """Where a message travels and which values it carries."""

    channel: Channel
    edges: tuple[Edge, ...]


@dataclass(frozen=True)
class RankProgram:
    """What one rank of a schedule does.

    Args:
        schedule: with its messages spelled out.
        rank: which rank.
    """

    schedule: Schedule
    rank: int

    @cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        """The rank's actions in order."""
        rule = Dependencies(self.schedule)
        return tuple(
            Instruction(action, tuple(_messages(rule, action)))
            for action in self.schedule.actions(self.rank)
        )

    @cached_property
    def paired(self) -> tuple[tuple[Entry, tuple[Action, ...]], ...]:
        """As :attr:`instructions`, with overlapped pairs as one."""
        messages = dict(self.instructions)
        return tuple(
            (entry, tuple(message for action in parts(entry) for message in messages[action]))
            for entry in self.schedule.programs[self.rank]
        )

    @cached_property
    def wires(self) -> dict[tuple[Op, int, int], Wire]:
        """By op, stage and peer stage of a message action."""
        found: dict[tuple[Op, int, int], Wire] = {}
        for action, _ in self.instructions:
            key = (action.op, action.stage, action.peer if action.peer is not None else -1)
            if action.op in MESSAGE_OPS and key not in found:
                found[key] = self._wire(action)
        return found

    def wire(self, action: Action) -> Wire:
        """The wire of a message action."""
        return self.wires[action.op, action.stage, action.peer if action.peer is not None else -1]

    def _wire(self, action: Action) -> Wire:
        rank_of = self.schedule.placement.rank_of
        other = rank_of[action.peer_stage]
        ends = (self.rank, other) if action.op in SEND_OPS else (other, self.rank)
        forward = action.op in (Op.SEND_F, Op.RECV_F)
        source, carrier = sorted((action.stage, action.peer_stage))
        edges = (
            edge
            for edge in self.given(source)
            if rank_of[carrier] in {rank_of[target] for target in edge.targets}
            and (forward or edge.gradient)
        )
        return Wire(Channel(*ends, FORWARD if forward else BACKWARD), tuple(edges))

    def given(self, stage: int) -> tuple[Edge, ...]:
        """The values that a stage makes for others."""
        return self._given[stage]

    def taken(self, stage: int) -> tuple[Edge, ...]:
        """The values that a stage uses."""
        return self._taken[stage]

    @cached_property
    def _given(self) -> list[tuple[Edge, ...]]:
        edges, stages = self.schedule.edges, range(self.schedule.stages)
        return [tuple(edge for edge in edges if edge.source == stage) for stage in stages]

    @cached_property
    def _taken(self) -> list[tuple[Edge, ...]]:
        edges, stages = self.schedule.edges, range(self.schedule.stages)
        return [tuple(edge for edge in edges if stage in edge.targets) for stage in stages]

    @cached_property
    def uses_of(self) -> dict[str, int]:
        """How often this rank reads each value.

        Once for each stage here that uses it, and once for each message.
        """
        rank_of = self.schedule.placement.rank_of
        uses: dict[str, int] = {}
        for edge in self.schedule.edges:
            ranks = [rank_of[target] for target in edge.targets]
            away = len(set(ranks) - {self.rank}) if rank_of[edge.source] == self.rank else 0
            uses[edge.value] = ranks.count(self.rank) + away
        return uses

    def payers(self, edge: Edge) -> list[int]:
        """The stages through which the gradients of a value come to this rank, the last one first.

        A stage on this rank that uses the value hands its gradient over itself. For all users on another
        rank, one message brings the sum, under the stage that the message names. Where a message carries
        several values, that stage need not use this one.
        """
        rank_of = self.schedule.placement.rank_of
        here = {target for target in edge.targets if rank_of[target] == self.rank}
        return sorted(here | self._carriers.get(edge.value, set()), reverse=True)

    @cached_property
    def _carriers(self) -> dict[str, set[int]]:
        """For each value, the stages named by the messages that bring its gradients."""
        found: dict[str, set[int]] = {}
        for action, _ in self.instructions:
            if action.op is Op.RECV_B:
                for edge in self.wire(action).edges:
                    found.setdefault(edge.value, set()).add(action.peer_stage)
        return found

    def last_reads(self, value: str, reader: int | Action) -> frozenset[int]:
        """The microbatches for which this reader is the last one on this rank to read a value.

        Args:
            value: which one.
            reader: a stage that uses it, or a SEND_F that carries it (of any microbatch).
        """
        return self._last_reads.get((value, _reader(reader)), frozenset())

    @cached_property
    def _last_reads(self) -> dict[tuple[str, _Reader], frozenset[int]]:
        last: dict[tuple[str, int | None], _Reader] = {}
        for action, _ in self.instructions:
            if action.op is Op.F:
                read, reader = self.taken(action.stage), _reader(action.stage)
            elif action.op is Op.SEND_F:
                read, reader = self.wire(action).edges, _reader(action)
            else:
                continue
            last |= {(edge.value, action.microbatch): reader for edge in read}
        found: dict[tuple[str, _Reader], set[int]] = {}
        for (value, microbatch), reader in last.items():
            found.setdefault((value, reader), set()).add(microbatch or 0)
        return {key: frozenset(microbatches) for key, microbatches in found.items()}

    @cached_property
    def awaited(self) -> frozenset[Action]:
        """The messages that some action of this rank waits for."""
        return frozenset(message for _, messages in self.instructions for message in messages)


_Reader = tuple[int, int | None]
"""A stage that uses a value; or, with a peer stage, the messages that carry it there."""


def _reader(reader: int | Action) -> _Reader:
    return (reader, None) if isinstance(reader, int) else (reader.stage, reader.peer_stage)


def _messages(rule: Dependencies, action: Action) -> list[Action]:
    """The receives that an action needs; for a WAIT_SEND the send."""
    return rule.before(action) if action.op in WAIT_SEND_OPS else rule.receives(action)


def parts(entry: Entry) -> tuple[Action, ...]:
    """An action, or the two of an overlapped pair."""
    return (entry.forward, entry.backward) if isinstance(entry, Overlap) else (entry,)


def channels(schedule: Schedule) -> list[Channel]:
    """The channels that a schedule's messages use, in the same order on every rank."""
    found: dict[Channel, None] = {}
    for rank in range(schedule.ranks):
        found |= dict.fromkeys(wire.channel for wire in RankProgram(schedule, rank).wires.values())
    return sorted(found)
