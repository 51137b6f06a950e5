"""Passes: functions that make a new schedule from a schedule and leave their argument unchanged.

A person or a function of the library writes what a rank computes. Passes add the rest: messages, the
gathering and freeing of sharded parameters, and the sum of gradients over replicas.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from heapq import heappop, heappush

from penstock.errors import ScheduleError, UsageError
from penstock.schedule.action import (
    COMPUTE_OPS,
    GRADIENT_OPS,
    SEND_OPS,
    Action,
    Entry,
    Op,
    Overlap,
    Program,
    Slice,
    computes,
    halves,
)
from penstock.schedule.base import Schedule, flat, paused_collection
from penstock.schedule.dependencies import Dependencies, counterpart, proofs

AHEAD = 2
"""The receives that the runtime posts ahead on a channel. One would be late if ranks do not keep step."""

Pass = Callable[[Schedule], Schedule]
"""A function that makes a new schedule from a schedule and leaves its argument unchanged."""


def compose(*passes: Pass) -> Pass:
    """Chain ``passes``, first to last, into one pass; without any, it changes nothing."""
    return lambda schedule: reduce(lambda result, apply: apply(result), passes, schedule)


# ---- what a rank computes


def compute_only(schedule: Schedule) -> Schedule:
    """Keep only F, I, W, B and overlapped pairs: the form in which schedules are written by hand."""
    return schedule.with_programs(filter(computes, program) for program in schedule.programs)


def merge_backward(schedule: Schedule) -> Schedule:
    """Merge each I and its own W directly after it into a B, which saves a second pass over the graph.

    Apply it before :func:`add_communication`: a message between the two halves prevents the merge, since B
    would send it later.
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
    """The B that an I and a W make, if they are of one stage and microbatch."""
    if not (isinstance(first, Action) and first.op is Op.I):
        return None
    weight = Action(first.stage, Op.W, first.microbatch)
    return Action(first.stage, Op.B, first.microbatch) if second == weight else None


# ---- messages: spell them out


@paused_collection()
def add_communication(schedule: Schedule, *, ahead: int = 1) -> Schedule:
    """Add every SEND and RECV that the edges need, for values that change ranks.

    A SEND follows the action that makes its value. A RECV is posted just before the last entry that waits for
    an earlier message from the same rank. So a message finds its buffer ready, posting takes no compute time,
    and few buffers wait. Messages from one rank to another are received in the order of their sends,
    activations and gradients alike: torch's runtime has one queue for both. Stages on one rank hand values
    over directly.

    Args:
        schedule: a schedule without messages; one that has messages is returned unchanged.
        ahead: how many messages from a rank to post ahead of the awaited one.

    Raises:
        ScheduleError: an action needs a value that no action makes.
        UsageError: ``ahead`` is less than 1, or there are not as many numbers as ranks.
    """
    if ahead < 1:
        raise UsageError(f"ahead={ahead}: must be at least 1")
    if schedule.communicates:
        return schedule
    messages = _Messages(schedule)
    with_sends = [list(messages.with_sends(program)) for program in schedule.programs]
    return schedule.with_programs(
        messages.with_receives(rank, program, ahead) for rank, program in enumerate(with_sends)
    )


class _Messages:
    """The messages of a schedule; those of one stage and op differ only in their microbatch.

    Attributes:
        sends: the SENDs that each stage and op makes possible, as those of microbatch 0, each with the number
            of actions whose results it adds up.
        receives: the RECVs that each stage and op needs, likewise, each with the rank that sends.
        channels: for each pair of ranks, the RECVs that are not posted yet, in the order of their SENDs.
    """

    def __init__(self, schedule: Schedule) -> None:
        rule, self.rank_of = Dependencies(schedule), schedule.placement.rank_of
        lanes = [Action(stage, op, 0) for stage in range(schedule.stages) for op in COMPUTE_OPS]
        self.sends = {
            a[:2]: [(s, len(rule.needs(s.stage, s.op, s.peer))) for s in rule.sends(a)]
            for a in lanes
        }
        self.receives = {
            a[:2]: [(r, self.rank_of[r.peer_stage]) for r in rule.receives(a)] for a in lanes
        }
        self.channels: dict[tuple[int, int], deque[Action]] = defaultdict(deque)

    def with_sends(self, program: Program) -> Iterator[Entry]:
        """Add each send after the entry that makes its value, and fill the channels."""
        parts = Counter[Action]()
        for entry in program:
            yield entry
            sends = (
                (Action(first.stage, first.op, microbatch, first.peer), count)
                for stage, op, microbatch, _ in halves(entry)
                for first, count in self.sends.get((stage, op), ())
            )
            for send, count in sends:
                parts[send] += 1
                if parts[send] == count:
                    ends = self.rank_of[send.stage], self.rank_of[send.peer_stage]
                    self.channels[ends].append(counterpart(send))
                    yield send

    def with_receives(self, rank: int, program: list[Entry], ahead: int) -> Iterator[Entry]:
        """Add each receive before an earlier entry that waits for a message of its channel.

        The first receives of a channel go before the last entry that waits for any message.
        """
        before: dict[int, list[Action]] = defaultdict(list)
        posted: set[Action] = set()
        waits: dict[int, deque[int]] = defaultdict(lambda: deque(maxlen=ahead))
        last: int | None = None
        for place, entry in enumerate(program):
            needed = [
                (Action(first.stage, first.op, microbatch, first.peer), source)
                for stage, op, microbatch, _ in halves(entry)
                for first, source in self.receives.get((stage, op), ())
            ]
            for receive, source in needed:
                if receive not in posted:
                    earlier = waits.get(source, (place if last is None else last,))
                    order = self.up_to(receive, source, rank)
                    before[earlier[0]] += order
                    posted.update(order)
            for _, source in needed:
                waits[source].append(place)
                last = place
        for place, entry in enumerate(program):
            yield from before.get(place, ())
            yield entry

    def up_to(self, receive: Action, source: int, rank: int) -> list[Action]:
        """Take the receives off a channel, up to and including a given one."""
        channel, order = self.channels[source, rank], list[Action]()
        while not order or order[-1] != receive:
            if not channel:
                raise ScheduleError(
                    f"rank {rank}: {receive} is needed, but no action makes its value"
                )
            order.append(channel.popleft())
        return order


# ---- when the parameters of a sharded stage are gathered and freed


def prefetch(schedule: Schedule, *, unsharded: int = 3) -> Schedule:
    """Add UNSHARD and RESHARD so that each stage is gathered ahead of its use.

    Each rank keeps the stages that it uses next gathered, up to a bound, and frees the others. A schedule
    that has an UNSHARD is returned unchanged.

    Args:
        schedule: the schedule, with or without messages.
        unsharded: how many stages of a rank may be gathered at a time; at least 2 if F and B overlap.

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
        if computes(entry):
            yield from (Action(stage, Op.RESHARD) for stage in held if stage not in coming)
            yield from (Action(stage, Op.UNSHARD) for stage in coming if stage not in held)
            held = coming
        yield entry
    yield from (Action(stage, Op.RESHARD) for stage in held)


def _coming(program: Program, bound: int) -> list[list[int]]:
    """The next distinct stages that are used from each entry on, nearest first."""
    coming: list[list[int]] = []
    order: list[int] = []
    for entry in reversed(program):
        if computes(entry):
            stages = [action.stage for action in halves(entry)]
            if stages != order[: len(stages)]:
                order = stages + [stage for stage in order if stage not in stages]
        coming.append(order[:bound])
    return coming[::-1]


# ---- which activations wait for their backward on the host


def offload(
    schedule: Schedule, *, keep: int | Sequence[int] | None = None, ahead: int = 1
) -> Schedule:
    """Add OFFLOAD and RELOAD, so that activations wait for their backward in the host's memory.

    OFFLOAD follows the F; RELOAD comes ``ahead`` computing entries before the I or B. Of all choices that
    meet the bound, this one moves as few activations as possible. A schedule that has an OFFLOAD is returned
    unchanged. Apply it after :func:`merge_backward`, which a RELOAD between I and W would prevent.

    Args:
        schedule: the schedule, with or without messages.
        keep: for how many microbatches and stages a rank may hold activations on its device at a time: those
            that stay, leave, are coming back or are in use; or a number for each rank. By default every
            activation leaves that has the time.
        ahead: for how many computing entries a copy is under way. What waits for no longer than two copies
            take stays.

    Raises:
        ScheduleError: a rank needs more than ``keep``; the message says how many.
        UsageError: ``ahead`` is less than 1.
    """
    if ahead < 1:
        raise UsageError(f"ahead={ahead}: must be at least 1")
    keeps = [keep] * schedule.ranks if keep is None or isinstance(keep, int) else [*keep]
    if len(keeps) != schedule.ranks:
        raise UsageError(
            f"keep= has {len(keeps)} numbers; {schedule.name} has {schedule.ranks} ranks"
        )
    if Op.OFFLOAD in schedule.ops:
        return schedule
    programs = []
    for rank, (program, bound) in enumerate(zip(schedule.programs, keeps, strict=True)):
        stays = _Stays(program, ahead)
        most, leaving = stays.leaving(0 if bound is None else bound)
        if bound is not None and most > bound:
            raise ScheduleError(
                f"keep={bound}: with ahead={ahead}, rank {rank} of {schedule.name} holds the activations of "
                f"{most} microbatches even if all that have the time leave; give keep={most} or more"
            )
        programs.append(stays.offloaded(leaving))
    return schedule.with_programs(programs)


class _Stays:
    """How long the activations of a rank stay on its device, counted in computing entries.

    Attributes:
        uses: for each stage and microbatch, the entries of its F and of its I or B.
        gaps: those that may leave, by the first entry at which they would be gone, each with the one at which
            they would come back.
    """

    def __init__(self, program: Program, ahead: int) -> None:
        self.program, self.ahead = program, ahead
        self.computing = [entry for entry in program if computes(entry)]
        starts: dict[tuple[int, int | Slice | None], int] = {}
        self.uses: dict[tuple[int, int | Slice | None], tuple[int, int]] = {}
        for place, entry in enumerate(self.computing):
            for stage, op, microbatch, _ in halves(entry):
                if op is Op.F:
                    starts[stage, microbatch] = place
                elif op in GRADIENT_OPS and (stage, microbatch) in starts:
                    self.uses[stage, microbatch] = starts[stage, microbatch], place
        self.gaps: dict[int, list[tuple[int, tuple[int, int | Slice | None]]]] = defaultdict(list)
        for which, (first, last) in self.uses.items():
            if last - first > 2 * ahead:
                self.gaps[first + ahead + 1].append((last - ahead, which))

    def leaving(self, keep: int) -> tuple[int, set[tuple[int, int | Slice | None]]]:
        """How many are on the device at a time, and which leave so that these are no more than ``keep``.

        Where one too many would stay, the one that may be away longest from there leaves.
        """
        ends = {last for _, last in self.uses.values()}
        begins = {first for first, _ in self.uses.values()}
        left, most, held = set[tuple[int, int | Slice | None]](), 0, 0
        may_leave: list[tuple[int, tuple[int, int | Slice | None]]] = []
        back = Counter[int]()
        for place in range(len(self.computing)):
            held += (place in begins) - (place - 1 in ends) + back[place]
            for end, which in self.gaps.get(place, ()):
                heappush(may_leave, (-end, which))
            while held > keep and may_leave and -may_leave[0][0] > place:
                end, which = heappop(may_leave)
                left.add(which)
                back[-end] += 1
                held -= 1
            most = max(most, held)
        return most, left

    def offloaded(self, leaving: set[tuple[int, int | Slice | None]]) -> Iterator[Entry]:
        """The program, with what leaves and comes back."""
        returning = defaultdict[int, list[Action]](list)
        for which in leaving:
            stage, microbatch = which
            last = self.uses[which][1]
            returning[last - self.ahead].append(Action(stage, Op.RELOAD, microbatch))
        place = 0
        for entry in self.program:
            if computes(entry):
                yield from returning[place]
                place += 1
            yield entry
            for stage, op, microbatch, _ in halves(entry):
                if op is Op.F and (stage, microbatch) in leaving:
                    yield Action(stage, Op.OFFLOAD, microbatch)


# ---- messages: wait until they have left


def wait_for_sends(schedule: Schedule) -> Schedule:
    """Add a WAIT_SEND for each SEND that has none, which torch's own runtime demands since torch 2.15.

    It follows the entry whose messages show that the value was used, so that it waits for nothing; if there
    is no such entry, it stands at the end of the program. A schedule without messages gets them first.

    Write such a file only for torch 2.15 or newer: up to 2.14, torch reads ``0WAIT_SEND_F0`` as ``0W``. A
    Penstock pipeline needs no such waits.
    """
    schedule = add_communication(schedule)
    rule = Dependencies(schedule)
    return schedule.with_programs(
        _with_waits(program, proofs(schedule, rank, rule), rule)
        for rank, program in enumerate(schedule.programs)
    )


def _with_waits(
    program: Program, proves: Mapping[Action, Sequence[Action]], rule: Dependencies
) -> Iterator[Entry]:
    actions = set(flat(program))
    waits = {a: a._replace(op=Op(f"WAIT_{a.op}")) for a in flat(program) if a.op in SEND_OPS}
    left = {send: wait for send, wait in waits.items() if wait not in actions}
    for entry in program:
        yield entry
        arrived = [message for action in halves(entry) for message in rule.receives(action)]
        used = [send for message in arrived for send in proves.get(message, ())]
        yield from (left.pop(send) for send in used if send in left)
    yield from left.values()


# ---- when a stage's gradients are summed over data-parallel replicas


_LAST = (Op.W, Op.B)
"""Ops that complete a weight gradient."""


def reduce_gradients(schedule: Schedule) -> Schedule:
    """Add a REDUCE_GRAD after the last weight gradient of each stage.

    The reduction runs while other stages of the rank still compute. A schedule that has a REDUCE_GRAD is
    returned unchanged.
    """
    if Op.REDUCE_GRAD in schedule.ops:
        return schedule
    return schedule.with_programs(map(_reduce, schedule.programs))


def _reduce(program: Program) -> Iterator[Entry]:
    left = Counter(action.stage for action in flat(program) if action.op in _LAST)
    for entry in program:
        yield entry
        for stage in [action.stage for action in halves(entry) if action.op in _LAST]:
            left[stage] -= 1
            if not left[stage]:
                yield Action(stage, Op.REDUCE_GRAD)
