"""Post each receive as late as the proof allows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from penstock.schedule.action import (
    COMPUTE_OPS,
    RECV_OPS,
    WAIT_SEND_OPS,
    Action,
    Entry,
    Op,
    Overlap,
    Program,
)
from penstock.schedule.base import Schedule, flat
from penstock.schedule.dependencies import Dependencies

Channel = tuple[int, Op]
"""On one rank: the other rank and the kind of message."""


def delay_receives(schedule: Schedule) -> Schedule:
    """Move each RECV to just before the entry that needs it.

    A pending receive may occupy what a computation needs, such as the compute units that NCCL uses. Messages
    of a channel keep their order. Since SEND and RECV only post, later receives cannot close a circle of
    waits, unless some rank waits for its sends: with WAIT_SEND, receives pass only entries that never wait.
    """
    delay = _Delay(schedule)
    return schedule.with_programs(delay.program(program) for program in schedule.programs)


class _Delay:
    def __init__(self, schedule: Schedule) -> None:
        self._rule = Dependencies(schedule)
        self._rank_of = schedule.placement.rank_of
        self._careful = not schedule.ops.isdisjoint(WAIT_SEND_OPS)

    def program(self, program: Program) -> Iterator[Entry]:
        """The program of a rank with its receives moved."""
        held: dict[Channel, deque[Action]] = {}
        for entry in program:
            if isinstance(entry, Action) and entry.op in RECV_OPS:
                held.setdefault(self._channel(entry), deque()).append(entry)
                continue
            for receive in self._needed(entry):
                yield from _until(receive, held.get(self._channel(receive), deque()))
            if self._careful and self._waits(entry):
                yield from _rest(held)
            yield entry
        yield from _rest(held)

    def _channel(self, receive: Action) -> Channel:
        return self._rank_of[receive.peer_stage], receive.op

    def _needed(self, entry: Entry) -> list[Action]:
        return [receive for action in flat((entry,)) for receive in self._rule.receives(action)]

    def _waits(self, entry: Entry) -> bool:
        """Whether a rank may stand at an entry until another rank has done something."""
        if isinstance(entry, Overlap) or entry.op in WAIT_SEND_OPS:
            return True
        return entry.op in COMPUTE_OPS and bool(self._rule.receives(entry))


def _until(receive: Action, held: deque[Action]) -> Iterator[Action]:
    """The receives of a channel up to one of them; none where it has been posted."""
    if receive in held:
        while (posted := held.popleft()) != receive:
            yield posted
        yield receive


def _rest(held: dict[Channel, deque[Action]]) -> Iterator[Action]:
    for channel in held.values():
        yield from channel
        channel.clear()
