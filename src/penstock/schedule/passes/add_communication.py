"""Spell out the messages of a schedule."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from penstock.errors import ScheduleError
from penstock.schedule.action import SEND_OPS, Action, Entry
from penstock.schedule.base import Schedule, flat
from penstock.schedule.dependencies import Dependencies, counterpart

Channels = dict[tuple[int, int, str], "deque[Action]"]
"""Sends in order, per channel: sender's rank, receiver's rank, kind of message."""


def add_communication(schedule: Schedule) -> Schedule:
    """Add every SEND and RECV that the edges need, for values that change ranks.

    A SEND follows the action that makes its value. A RECV stands one entry ahead of the action that
    needs it, so that the transfer runs beside the entry between; messages of one channel keep the order
    of their sends.

    Args:
        schedule: compute actions only. One whose messages are spelled out already is returned as it is.

    Raises:
        ScheduleError: an action needs a value that no action makes.
    """
    if schedule.communicates:
        return schedule
    rule = Dependencies(schedule)
    with_sends = [list(_add_sends(program, rule)) for program in schedule.programs]
    channels = _channels(schedule, with_sends)
    return schedule.with_programs(
        _add_receives(rank, program, schedule, rule, channels)
        for rank, program in enumerate(with_sends)
    )


def _add_sends(program: Iterable[Entry], rule: Dependencies) -> Iterator[Entry]:
    done: set[Action] = set()
    for entry in program:
        yield entry
        for action in flat((entry,)):
            done.add(action)
            yield from (send for send in rule.sends(action) if _is_due(send, done, rule))


def _is_due(send: Action, done: set[Action], rule: Dependencies) -> bool:
    return all(action in done for action in rule.before(send))


def _channels(schedule: Schedule, programs: list[list[Entry]]) -> Channels:
    channels: Channels = {}
    for rank, program in enumerate(programs):
        for action in flat(program):
            if action.op in SEND_OPS:
                to = schedule.placement.rank_of[action.peer_stage]
                channels.setdefault((rank, to, action.op), deque()).append(action)
    return channels


def _add_receives(
    rank: int, program: list[Entry], schedule: Schedule, rule: Dependencies, channels: Channels
) -> list[Entry]:
    """Put the receives of each entry before the computing entry that precedes it."""
    posted: set[Action] = set()
    placed: list[Entry] = []
    last = 0
    for entry in program:
        sends = isinstance(entry, Action) and entry.op in SEND_OPS
        if not sends:
            needed = [r for action in flat((entry,)) for r in rule.receives(action)]
            receives = _post(rank, needed, posted, schedule, channels)
            placed[last:last] = receives
            last = len(placed)
        placed.append(entry)
    return placed


def _post(
    rank: int, needed: list[Action], posted: set[Action], schedule: Schedule, channels: Channels
) -> list[Action]:
    """The receives to post for ``needed``: those, and the ones ahead of them on their channels."""
    order: list[Action] = []
    for receive in needed:
        send = counterpart(receive)
        channel = channels.get(
            (schedule.placement.rank_of[send.stage], rank, send.op), deque[Action]()
        )
        while receive not in posted:
            if not channel:
                raise ScheduleError(
                    f"rank {rank}: {receive} is needed, but no action makes its value"
                )
            ahead = counterpart(channel.popleft())
            posted.add(ahead)
            order.append(ahead)
    return order
