"""Spell out the messages of a schedule."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from penstock.errors import ScheduleError, UsageError
from penstock.schedule.action import COMPUTE_OPS, Action, Entry, Op, Overlap, Program
from penstock.schedule.base import Schedule, paused_collection
from penstock.schedule.dependencies import Dependencies, counterpart

Channel = deque[Action]
"""The receives of a channel, in the order of their sends."""


class _Send(NamedTuple):
    """A SEND that the actions of a stage and an op make possible, for any microbatch."""

    stage: int
    op: Op
    peer: int | None
    receive: Action
    """Its RECV, for microbatch 0."""
    channel: Channel
    alone: bool
    """Whether it needs no other action."""


class _Receive(NamedTuple):
    """A RECV that the actions of a stage and an op need, for any microbatch."""

    action: Action
    channel: Channel
    shared: bool
    """Whether several stages of the rank use its values."""


@paused_collection()
def add_communication(schedule: Schedule, *, ahead: int = 1) -> Schedule:
    """Add every SEND and RECV that the edges need, for values that change ranks.

    A SEND follows the action that makes its value. A RECV is posted while the rank waits for the message
    before on the same channel: right ahead of the last entry that needs one of it. So a message finds its
    buffer ready, posting costs no time in which the rank could compute, and few buffers wait. Messages of one
    channel keep the order of their sends. Stages on one rank hand over directly.

    Args:
        schedule: without messages. One whose messages are spelled out already is returned as it is.
        ahead: how many messages of a channel to be ready for beside the one that is waited for.

    Raises:
        ScheduleError: an action needs a value that no action makes.
        UsageError: ``ahead`` is less than 1.
    """
    if ahead < 1:
        raise UsageError(f"ahead={ahead}: must be at least 1")
    if schedule.communicates:
        return schedule
    wiring = _Wiring(schedule, ahead)
    with_sends = [wiring.add_sends(program) for program in schedule.programs]
    return schedule.with_programs(
        wiring.add_receives(rank, program) for rank, program in enumerate(with_sends)
    )


class _Wiring:
    """The messages of a schedule's lanes, and its channels with what is on them."""

    def __init__(self, schedule: Schedule, ahead: int) -> None:
        self._ahead = ahead
        self._rule = Dependencies(schedule)
        self._rank_of = schedule.placement.rank_of
        self._channels: dict[tuple[int, int, Op], Channel] = {}
        lanes = [(stage, op) for stage in range(schedule.stages) for op in COMPUTE_OPS]
        self._sends = {lane: tuple(self._sends_of(*lane)) for lane in lanes}
        self._receives = {lane: tuple(self._receives_of(*lane)) for lane in lanes}

    def _sends_of(self, stage: int, op: Op) -> Iterator[_Send]:
        for send in self._rule.sends(Action(stage, op, 0)):
            alone = len(self._rule.needs(send.stage, send.op, send.peer)) == 1
            channel = self._channel(send)
            yield _Send(send.stage, send.op, send.peer, counterpart(send), channel, alone)

    def _receives_of(self, stage: int, op: Op) -> Iterator[_Receive]:
        for receive in self._rule.receives(Action(stage, op, 0)):
            users = self._rule.users(receive)
            yield _Receive(receive, self._channel(counterpart(receive)), len(users) > 1)

    def _channel(self, send: Action) -> Channel:
        ranks = self._rank_of[send.stage], self._rank_of[send.peer_stage]
        return self._channels.setdefault((*ranks, send.op), deque())

    def add_sends(self, program: Program) -> list[Entry]:
        """Put the sends behind the entries that make their values, and their receives on the channels."""
        done: set[Action] = set()
        placed: list[Entry] = []
        for entry in program:
            placed.append(entry)
            if isinstance(entry, Overlap):
                for action in entry:
                    placed += self._post_sends(action, done)
            else:
                placed += self._post_sends(entry, done)
        return placed

    def _post_sends(self, action: Action, done: set[Action]) -> list[Action]:
        """The sends of an action, with their receives put on the channels."""
        stage, op, microbatch, _ = action
        posted = []
        for send in self._sends.get((stage, op), ()):
            if send.alone or self._is_due(action, send, done):
                posted.append(Action(send.stage, send.op, microbatch, send.peer))
                to, receive, _, source = send.receive
                send.channel.append(Action(to, receive, microbatch, source))
        return posted

    def _is_due(self, action: Action, send: _Send, done: set[Action]) -> bool:
        """Whether the last of the actions whose gradients a message adds up is done."""
        done.add(action)
        message = Action(send.stage, send.op, action.microbatch, send.peer)
        return all(needed in done for needed in self._rule.before(message))

    def add_receives(self, rank: int, program: list[Entry]) -> list[Entry]:
        """Put each receive before an entry ahead that needs one of its channel too."""
        early: set[Action] = set()
        placed: list[Entry] = []
        waits = _Waits(self._ahead)
        for entry in program:
            actions = entry if isinstance(entry, Overlap) else (entry,)
            for action in actions:
                for receive in self._receives.get(action[:2], ()):
                    at = waits.place(receive.channel, len(placed))
                    posted = _post(rank, receive, action, early)
                    placed[at:at] = posted
                    waits.moved(at, len(posted))
            for action in actions:
                for receive in self._receives.get(action[:2], ()):
                    waits.note(receive.channel, len(placed))
            placed.append(entry)
        return placed


class _Waits:
    """Where in a program that grows the last entries stand that wait for a message of each channel.

    Args:
        ahead: how many of them to know for each channel.
    """

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._last: dict[int, list[int]] = {}

    def place(self, channel: Channel, end: int) -> int:
        """Where to post a channel's next receive; of its first ones, ahead of the last wait of any."""
        known = self._last.get(id(channel), [])
        if known:
            return known[0]
        return max((places[-1] for places in self._last.values()), default=end)

    def note(self, channel: Channel, place: int) -> None:
        """An entry at this place waits for a message of the channel."""
        known = self._last.setdefault(id(channel), [])
        known.append(place)
        del known[: -self._ahead]

    def moved(self, place: int, count: int) -> None:
        """So many entries were put in at a place."""
        for known in self._last.values():
            known[:] = [last + count if last >= place else last for last in known]


def _post(rank: int, receive: _Receive, action: Action, early: set[Action]) -> list[Action]:
    """The receives to post for an action: its own, after those ahead of it on the channel.

    Args:
        rank: whose program it is.
        receive: what the action needs.
        action: the action.
        early: what has been posted and will be needed yet; changed.
    """
    stage, op, _, peer = receive.action
    wanted = Action(stage, op, action[2], peer)
    if wanted in early:
        if not receive.shared:
            early.remove(wanted)
        return []
    order: list[Action] = []
    while not order or order[-1] != wanted:
        if not receive.channel:
            raise ScheduleError(f"rank {rank}: {wanted} is needed, but no action makes its value")
        order.append(receive.channel.popleft())
    early.update(order if receive.shared else order[:-1])
    return order
