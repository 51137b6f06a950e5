"""Passes: functions from a schedule to a schedule that leave their argument as it is.

What a rank computes is written by hand or by a function of the library. Passes add the rest: the messages,
when they are received and when a rank waits for its sends, when sharded parameters are gathered and freed,
and when gradients are summed over replicas.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from functools import reduce
from typing import NamedTuple

from penstock.errors import ScheduleError, UsageError
from penstock.schedule.action import (
    COMPUTE_OPS,
    RECV_OPS,
    SEND_OPS,
    WAIT_SEND_OPS,
    Action,
    Entry,
    Op,
    Overlap,
    Program,
)
from penstock.schedule.base import Schedule, flat, paused_collection
from penstock.schedule.clock import Costs, prices, run_clocks
from penstock.schedule.dependencies import Dependencies, counterpart
from penstock.schedule.packed import NOWHERE, Wiring

Pass = Callable[[Schedule], Schedule]
"""A function from a schedule to a schedule that leaves its argument as it is."""


def compose(*passes: Pass) -> Pass:
    """The pass that applies ``passes`` from first to last; without any, one that changes nothing."""
    return lambda schedule: reduce(lambda made, apply: apply(made), passes, schedule)


# ---- what a rank computes


def compute_only(schedule: Schedule) -> Schedule:
    """Keep only F, I, W, B and overlapped pairs: the form in which schedules are written by hand."""
    return schedule.with_programs(filter(_computes, program) for program in schedule.programs)


def _computes(entry: Entry) -> bool:
    return isinstance(entry, Overlap) or entry.op in COMPUTE_OPS


def merge_backward(schedule: Schedule) -> Schedule:
    """Replace each I that is directly followed by its own W by a B, which saves a second pass over the graph.

    Apply it before :func:`add_communication`: a message between the two halves keeps them apart, since a
    merged B would send it later.
    """
    return schedule.with_programs(map(_merge, schedule.programs))


def _merge(program: Program) -> list[Entry]:
    merged: list[Entry] = []
    for entry in program:
        full = _together(merged[-1], entry) if merged else None
        if full is None:
            merged.append(entry)
        else:
            merged[-1] = full
    return merged


def _together(first: Entry, second: Entry) -> Action | None:
    """The B that an I and a W make up, if they are of one stage and microbatch."""
    if not (isinstance(first, Action) and first.op is Op.I):
        return None
    weight = Action(first.stage, Op.W, first.microbatch)
    return Action(first.stage, Op.B, first.microbatch) if second == weight else None


# ---- messages: spell them out


Channel = deque[Action]
"""The receives of a channel, in the order of their sends."""


class _Send(NamedTuple):
    """A SEND that actions of one stage and op make possible, for any microbatch."""

    stage: int
    op: Op
    peer: int | None
    receive: Action
    """The RECV at its other end, for microbatch 0."""
    channel: Channel
    alone: bool
    """Whether it needs this action only."""


class _Receive(NamedTuple):
    """A RECV that actions of one stage and op need, for any microbatch."""

    action: Action
    channel: Channel
    shared: bool
    """Whether several stages of the rank use its values."""


@paused_collection()
def add_communication(schedule: Schedule, *, ahead: int = 1) -> Schedule:
    """Add every SEND and RECV that the edges need, for values that change ranks.

    A SEND follows the action that makes its value. A RECV is posted just before the last entry that waits for
    an earlier message of the same channel. So a message finds its buffer ready, posting takes no time in
    which the rank could compute, and few buffers wait. The messages of a channel keep the order of their
    sends. Stages on one rank hand values over directly.

    Args:
        schedule: one without messages; if it has messages already it is returned as it is.
        ahead: for how many messages of a channel to be ready besides the one that is waited for.

    Raises:
        ScheduleError: an action needs a value that no action makes.
        UsageError: ``ahead`` is less than 1.
    """
    if ahead < 1:
        raise UsageError(f"ahead={ahead}: must be at least 1")
    if schedule.communicates:
        return schedule
    wiring = _Messages(schedule, ahead)
    with_sends = [wiring.add_sends(program) for program in schedule.programs]
    return schedule.with_programs(
        wiring.add_receives(rank, program) for rank, program in enumerate(with_sends)
    )


class _Messages:
    """The messages of each stage and op, and the channels with what is on them."""

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
        """Put the sends after the entries that make their values, and their receives on the channels."""
        done: set[Action] = set()
        placed: list[Entry] = []
        for entry in program:
            placed.append(entry)
            for action in entry if isinstance(entry, Overlap) else (entry,):
                placed += self._post_sends(action, done)
        return placed

    def _post_sends(self, action: Action, done: set[Action]) -> list[Action]:
        """The sends that an action makes possible; puts their receives on the channels."""
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
        """Put each receive before an earlier entry that waits for a message of its channel too."""
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
    """The places, in a program that grows, of the last entries that wait for a message of each channel.

    Args:
        ahead: how many places to remember for each channel.
    """

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._last: dict[int, list[int]] = {}

    def place(self, channel: Channel, end: int) -> int:
        """Where to post a channel's next receive; the first ones go before the last wait of any channel."""
        known = self._last.get(id(channel), [])
        if known:
            return known[0]
        return max((places[-1] for places in self._last.values()), default=end)

    def note(self, channel: Channel, place: int) -> None:
        """Note that the entry at this place waits for a message of the channel."""
        known = self._last.setdefault(id(channel), [])
        known.append(place)
        del known[: -self._ahead]

    def moved(self, place: int, count: int) -> None:
        """Note that so many entries were inserted at a place."""
        for known in self._last.values():
            known[:] = [last + count if last >= place else last for last in known]


def _post(rank: int, receive: _Receive, action: Action, early: set[Action]) -> list[Action]:
    """The receives to post for an action: its own, after those ahead of it on the channel.

    Args:
        rank: the rank whose program it is.
        receive: what the action needs.
        action: the action.
        early: the receives that were posted before they are needed; updated.
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


# ---- post each receive as late as the proof allows


_Lane = tuple[int, Op]
"""On one rank: the other rank and the kind of message."""


def delay_receives(schedule: Schedule) -> Schedule:
    """Move each RECV to just before the entry that needs it.

    A pending receive may occupy what a computation needs, such as the compute units that NCCL uses. Messages
    of a channel keep their order. Since SEND and RECV only post, later receives cannot close a circle of
    waits unless some rank waits for its sends: with WAIT_SEND, receives are moved past entries that never
    wait, and no others.
    """
    delay = _Delay(schedule)
    return schedule.with_programs(delay.program(program) for program in schedule.programs)


class _Delay:
    """Moves the receives of a schedule's programs."""

    def __init__(self, schedule: Schedule) -> None:
        self._rule = Dependencies(schedule)
        self._rank_of = schedule.placement.rank_of
        self._careful = not schedule.ops.isdisjoint(WAIT_SEND_OPS)

    def program(self, program: Program) -> Iterator[Entry]:
        """The program of a rank with its receives moved."""
        held: dict[_Lane, deque[Action]] = {}
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

    def _channel(self, receive: Action) -> _Lane:
        return self._rank_of[receive.peer_stage], receive.op

    def _needed(self, entry: Entry) -> list[Action]:
        return [receive for action in flat((entry,)) for receive in self._rule.receives(action)]

    def _waits(self, entry: Entry) -> bool:
        """Whether a rank may have to wait at an entry for another rank."""
        if isinstance(entry, Overlap) or entry.op in WAIT_SEND_OPS:
            return True
        return entry.op in COMPUTE_OPS and bool(self._rule.receives(entry))


def _until(receive: Action, held: deque[Action]) -> Iterator[Action]:
    """The receives of a channel up to one of them; none where it has been posted."""
    if receive in held:
        while (posted := held.popleft()) != receive:
            yield posted
        yield receive


def _rest(held: dict[_Lane, deque[Action]]) -> Iterator[Action]:
    for channel in held.values():
        yield from channel
        channel.clear()


# ---- wait for sends at the end, or not at all


_WAIT = {Op.SEND_F: Op.WAIT_SEND_F, Op.SEND_B: Op.WAIT_SEND_B}


def wait_of(send: Action) -> Action:
    """The WAIT_SEND of a SEND."""
    return Action(send.stage, _WAIT[send.op], send.microbatch, send.peer)


def add_wait_sends(schedule: Schedule) -> Schedule:
    """Add a WAIT_SEND for each SEND, at the end of the program, where it can hold nothing up.

    Newer versions of torch want them in files. A schedule that has some already is returned as it is. For
    early waits, so that little memory is kept, see :func:`release_sends`.
    """
    if not schedule.ops.isdisjoint(WAIT_SEND_OPS):
        return schedule
    return schedule.with_programs((*program, *_waits(program)) for program in schedule.programs)


def _waits(program: Program) -> Iterator[Entry]:
    for entry in program:
        if isinstance(entry, Action) and entry.op in SEND_OPS:
            yield wait_of(entry)


def remove_wait_sends(schedule: Schedule) -> Schedule:
    """Remove every WAIT_SEND, which older versions of torch do not accept in files."""
    return schedule.with_programs(
        (e for e in program if not (isinstance(e, Action) and e.op in WAIT_SEND_OPS))
        for program in schedule.programs
    )


# ---- wait for each send early, but where that holds nothing up, so that what was sent is not kept for long
# There are two ways to know that a message has been taken, tried in this order:
#
# *By what came back.* A rank that has waited for a message knows that its sender got at least as far as that
# SEND. A receive that the sender posts earlier in its program is therefore posted, and the message that it
# takes needs nothing else: waiting for that costs no more than the transfer.
#
# *By one possible run.* Where too little comes back, as in a schedule without backward, a rank waits for its
# oldest message once a window of them is under way; but only at a place that it reaches, on simulated clocks,
# later than the peer posts the receive. That run, with these waits, is a run of the new schedule. An action
# that may run now may also run later, so if one run of a schedule completes, all do.


WINDOW = 4
"""How many messages of a channel may be under way before a rank waits for the oldest."""


@paused_collection()
def release_sends(schedule: Schedule, *, window: int = WINDOW) -> Schedule:
    """Add a WAIT_SEND for each SEND, at the first place where its message has certainly been taken.

    So a rank keeps few messages, whatever the number of microbatches. The new schedule completes if the given
    one does. A message for which a gradient comes back is released when the gradient has come: until then
    the stage that made it holds it anyway. A schedule that has any WAIT_SEND already is returned as it is.

    Args:
        schedule: one with its messages spelled out; one without is returned as it is.
        window: how many other messages of a channel may be under way at a time.

    Raises:
        ScheduleError: the schedule does not complete.
        UsageError: a window below 1.
    """
    if window < 1:
        raise UsageError(f"window={window}: must be at least 1")
    if not schedule.communicates or not schedule.ops.isdisjoint(WAIT_SEND_OPS):
        return schedule
    places = _Places(Wiring(schedule))
    return schedule.with_programs(
        _Rank(places, rank, window).program() for rank in range(schedule.ranks)
    )


class _Places:
    """Where both ends of each message are, and when these are posted in one possible run."""

    def __init__(self, wiring: Wiring) -> None:
        self.packed = wiring.packed
        self.partner: list[int] = wiring.partner.tolist()
        self.rank: list[int] = self.packed.rank.tolist()
        self.waits: list[list[int]] = [column.tolist() for column in wiring.waits]
        self.times: list[float] = run_clocks(wiring, prices(wiring, Costs())).start.tolist()
        """When each action starts if all F, I and W take equally long."""

    def answered(self, send: Action) -> bool:
        """Whether a gradient comes back for a message."""
        if send.op is not Op.SEND_F or not self.packed.schedule.trains:
            return False
        back = self.packed.rule.receives(Action(send.stage, Op.B, send.microbatch))
        rank_of = self.packed.schedule.placement.rank_of
        return rank_of[send.peer_stage] in {rank_of[receive.peer_stage] for receive in back}


class _Rank:
    """Reads one rank's program from its start to its end, and adds the waits."""

    def __init__(self, places: _Places, rank: int, window: int) -> None:
        self._places = places
        self._rank = rank
        self._window = window
        self._known: dict[int, int] = defaultdict(lambda: NOWHERE)
        """For each other rank the last of its actions that it is known to have passed."""
        self._kept: dict[tuple[int, Op, bool], deque[tuple[int, Action]]] = defaultdict(deque)
        """Sends that were not waited for yet, by the peer, the op, and whether gradients come back."""
        self._answered: dict[tuple[int, int], bool] = {}

    def program(self) -> Iterator[Entry]:
        """The program with its waits."""
        schedule = self._places.packed.schedule
        number = int(self._places.packed.starts[self._rank])
        for entry in schedule.programs[self._rank]:
            if isinstance(entry, Overlap) or entry.op not in SEND_OPS:
                yield entry
                yield from self._learn(number)
            else:
                kept = self._kept[self._lane(number, entry)]
                if not self._returns(entry):
                    yield from self._make_room(kept, number)
                kept.append((number, entry))
                yield entry
            number += 2 if isinstance(entry, Overlap) else 1
        for kept in self._kept.values():
            yield from (wait_of(send) for _, send in kept)

    def _lane(self, number: int, send: Action) -> tuple[int, Op, bool]:
        peer = self._places.rank[self._places.partner[number]]
        return peer, send.op, self._returns(send)

    def _returns(self, send: Action) -> bool:
        key = send.stage, send.peer_stage
        if send.op is Op.SEND_B:
            return False
        if key not in self._answered:
            self._answered[key] = self._places.answered(send)
        return self._answered[key]

    def _learn(self, number: int) -> Iterator[Action]:
        """The waits that may follow an action, because of what that action itself waited for."""
        partner, rank = self._places.partner, self._places.rank
        for column in self._places.waits:
            sent = partner[column[number]] if column[number] != NOWHERE else NOWHERE
            if sent != NOWHERE:
                peer = rank[sent]
                self._known[peer] = max(self._known[peer], sent)
                yield from self._taken_by(peer)

    def _taken_by(self, peer: int) -> Iterator[Action]:
        known, partner = self._known[peer], self._places.partner
        for (to, _, _), kept in self._kept.items():
            while to == peer and kept and partner[kept[0][0]] < known:
                yield wait_of(kept.popleft()[1])

    def _make_room(self, kept: deque[tuple[int, Action]], number: int) -> Iterator[Action]:
        """The waits that must precede a send because its window is full."""
        while len(kept) >= self._window and self._posted_before(kept[0][0], number):
            yield wait_of(kept.popleft()[1])

    def _posted_before(self, send: int, number: int) -> bool:
        times, partner = self._places.times, self._places.partner
        return times[partner[send]] < times[number]


# ---- when the parameters of a sharded stage are gathered and freed


def prefetch(schedule: Schedule, *, unsharded: int = 3) -> Schedule:
    """Add UNSHARD and RESHARD so that each stage is gathered ahead of its use.

    At any time a rank has the stages gathered that it uses next, up to a bound; other stages are freed. A
    schedule that has any UNSHARD already is returned as it is.

    Args:
        schedule: with or without messages.
        unsharded: how many stages of a rank may be gathered at a time; at least 2 where F and B overlap.

    Raises:
        ScheduleError: the bound is too small.
    """
    least = 2 if any(Overlap in set(map(type, program)) for program in schedule.programs) else 1
    if unsharded < least:
        raise ScheduleError(f"unsharded={unsharded}: must be at least {least} for {schedule.name}")
    if Op.UNSHARD in schedule.ops:
        return schedule
    return schedule.with_programs(_prefetch(program, unsharded) for program in schedule.programs)


def _prefetch(program: Program, bound: int) -> Iterator[Entry]:
    held: list[int] = []
    for entry, coming in zip(program, _coming(program, bound), strict=True):
        if _computes(entry):
            yield from (Action(stage, Op.RESHARD) for stage in held if stage not in coming)
            yield from (Action(stage, Op.UNSHARD) for stage in coming if stage not in held)
            held = coming
        yield entry
    yield from (Action(stage, Op.RESHARD) for stage in held)


def _coming(program: Program, bound: int) -> list[list[int]]:
    """For each entry the next distinct stages that are used from there on, nearest first."""
    found: list[list[int]] = []
    order: list[int] = []
    for entry in reversed(program):
        if _computes(entry):
            stages = [action.stage for action in flat((entry,))]
            if stages != order[: len(stages)]:
                order = stages + [stage for stage in order if stage not in stages]
        found.append(order[:bound])
    return found[::-1]


# ---- when a stage's gradients are summed over data-parallel replicas


_LAST = (Op.W, Op.B)
"""Ops that complete a weight gradient."""


def reduce_gradients(schedule: Schedule) -> Schedule:
    """Add a REDUCE_GRAD after the last weight gradient of each stage.

    So it runs while other stages of the rank still compute. A schedule that has any already is returned as
    it is.
    """
    if Op.REDUCE_GRAD in schedule.ops:
        return schedule
    return schedule.with_programs(map(_reduce, schedule.programs))


def _reduce(program: Program) -> Iterator[Entry]:
    left = Counter(action.stage for action in flat(program) if action.op in _LAST)
    for entry in program:
        yield entry
        for stage in [action.stage for action in flat((entry,)) if action.op in _LAST]:
            left[stage] -= 1
            if not left[stage]:
                yield Action(stage, Op.REDUCE_GRAD)
