"""Proof that a schedule completes, or everything that is wrong with it.

The proof gives actions this meaning: SEND and RECV *post* and return. A message is complete when both
ends have posted it and the earlier ones on its channel are complete; there is one first-in first-out channel
per ordered pair of ranks and kind of message. A compute action waits for what it needs, WAIT_SEND for its
message. An overlapped pair starts when both halves may.

An action that may run now may also run later. So one run of the programs, on simulated clocks, shows for all
runs whether they complete.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.errors import ScheduleError
from penstock.schedule.action import (
    COMPUTE_OPS,
    GRADIENT_OPS,
    MESSAGE_OPS,
    PEER_OPS,
    RECV_OPS,
    SEND_OPS,
    Action,
    Op,
    Overlap,
)
from penstock.schedule.base import Schedule, flat, paused_collection
from penstock.schedule.clock import Clock, Costs, Numbered
from penstock.schedule.dependencies import counterpart


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a schedule.

    Attributes:
        rank: the rank whose program is wrong; ``None`` if it is not a single one.
        position: the place in that program, from 0; ``None`` for a missing action.
        action: the action at fault.
        what: what is wrong.
        remedy: what to change.
    """

    rank: int | None
    position: int | None
    action: Action | None
    what: str
    remedy: str

    def __str__(self) -> str:
        rank = None if self.rank is None else f"rank {self.rank}"
        position = None if self.position is None else f"position {self.position}"
        action = None if self.action is None else str(self.action)
        where = ", ".join(part for part in (rank, position, action) if part is not None)
        return f"{where}: {self.what}; {self.remedy}"


@dataclass(frozen=True)
class Report:
    """The result of :func:`validate`.

    Attributes:
        schedule: the name of the schedule.
        problems: everything that is wrong; empty if the schedule is proven to complete.
        survives_blocking_sends: whether it would also complete if each SEND waited for its RECV.
    """

    schedule: str
    problems: tuple[Problem, ...]
    survives_blocking_sends: bool

    @property
    def ok(self) -> bool:
        """Whether the schedule is proven to complete."""
        return not self.problems

    def raise_if_bad(self) -> None:
        """Refuse a schedule with problems.

        Raises:
            ScheduleError: there are problems; the message lists them all.
        """
        if self.problems:
            raise ScheduleError(str(self))

    def __str__(self) -> str:
        if self.ok:
            sends = "also" if self.survives_blocking_sends else "not"
            return f"{self.schedule}: valid; {sends} with blocking sends"
        head = f"{self.schedule}: {len(self.problems)} problem(s)"
        return "\n".join((head, *(f"  {problem}" for problem in self.problems)))


@paused_collection()
def validate(schedule: Schedule, *, blocking_sends: bool = False) -> Report:
    """Prove that a schedule completes, in time linear in its actions.

    Args:
        schedule: the schedule; if its messages are not spelled out, values change ranks without them.
        blocking_sends: whether it must also complete where each SEND waits for its RECV.

    Returns:
        A report of all problems.
    """
    numbered = Numbered(schedule)
    problems = list(_incomplete(numbered))
    absent = {problem.action for problem in problems}
    problems += _order(numbered, absent)
    problems += (problem for check in CHECKS for problem in check(numbered))
    clock = Clock(numbered, [0.0] * len(numbered))
    if not clock.completes:
        problems.append(_deadlock(numbered, clock))
    survives = not problems and clock.completes_blocking()
    if blocking_sends and not problems and not survives:
        problems.append(_deadlock(numbered, clock))
    return Report(schedule.name, tuple(problems), survives_blocking_sends=survives)


def completed(numbered: Numbered, takes: Sequence[float], costs: Costs | None = None) -> Clock:
    """Run a schedule on simulated clocks; it must complete.

    Raises:
        ScheduleError: an action is on a wrong rank, or needs one that no program has or that comes
            later, or there is a deadlock.
    """
    problem = next(
        (p for check in (_order, _unreceived, _wrong_rank) for p in check(numbered)), None
    )
    clock = Clock(numbered, takes, costs)
    if not clock.completes and problem is None:
        problem = _deadlock(numbered, clock)
    if problem:
        raise ScheduleError(f"{numbered.schedule.name} does not complete: {problem}")
    return clock


@paused_collection()
def merged(schedule: Schedule) -> list[Action]:
    """Merge all ranks' actions into one order that respects every dependency, for a single process.

    Each rank's own order is kept. The backward of an overlapped pair directly follows its forward. The time
    is linear in the number of actions.

    Args:
        schedule: the schedule; its messages are left out, since one process needs none.

    Raises:
        ScheduleError: there is a deadlock, or an action needs one that comes later or is in no program; the
            message says which rank waits for which.
    """
    silent = schedule.with_programs(
        (e for e in program if isinstance(e, Overlap) or e.op not in PEER_OPS)
        for program in schedule.programs
    )
    numbered = Numbered(silent)
    clock = completed(numbered, [0.0] * len(numbered))
    return [numbered.action(number) for number in clock.order]


# ---- what can be wrong with a schedule: one function for each kind of problem


def _incomplete(numbered: Numbered) -> Iterator[Problem]:
    """Each stage must run each microbatch forward and, if the schedule trains, backward once."""
    schedule = numbered.schedule
    for stage in range(schedule.stages):
        home = schedule.placement.rank_of[stage]
        for absent in _absent(numbered, stage):
            yield Problem(
                home, None, absent, "missing", f"add {absent} to the program of rank {home}"
            )


def _absent(numbered: Numbered, stage: int) -> Iterator[Action]:
    rows = (numbered.has(stage, op) for op in (Op.F, Op.B, Op.I, Op.W))
    for microbatch, (forward, whole, half, weight) in enumerate(zip(*rows, strict=True)):
        if not forward:
            yield Action(stage, Op.F, microbatch)
        if numbered.schedule.trains and not whole and not (half and weight):
            absent = Action(stage, Op.W, microbatch)
            yield absent if half else numbered.rule.gradient(stage, microbatch)


def _order(numbered: Numbered, absent: Container[Action | None] = ()) -> Iterator[Problem]:
    """Everything that an action needs is in a program, and comes first if it is on the same rank.

    Args:
        numbered: the schedule.
        absent: actions that are known to be missing.
    """
    place = numbered.place
    for (_, op, _), need, links in numbered.needs:
        for number, needed in links if op not in RECV_OPS else ():
            at, there = place[number], place.get(needed)
            if there is None:
                action = numbered.rule.settle(need, number % numbered.schedule.microbatches)
                home = numbered.schedule.placement.rank_of[action.stage]
                what, remedy = f"needs {action}, which is in no program", f"add it to rank {home}"
            elif there[0] == at[0] and there[1] >= at[1]:
                action = numbered.action(needed)
                what = f"needs {action}, which comes later, at position {there[1]}"
                remedy = f"move {action} before it"
            else:
                continue
            if action not in absent:
                yield Problem(*at, numbered.action(number), what, remedy)


Check = Callable[[Numbered], Iterator[Problem]]


def _duplicate(numbered: Numbered) -> Iterator[Problem]:
    """Only UNSHARD and RESHARD may occur twice; no microbatch has both B and I or W."""
    for number, (rank, position) in numbered.again:
        action = numbered.action(number)
        if action.op not in (Op.UNSHARD, Op.RESHARD):
            first = numbered.place[number]
            what = f"is already at position {first[1]} of rank {first[0]}"
            yield Problem(rank, position, action, what, "remove one of the two")
    for stage in range(numbered.schedule.stages if Op.B in numbered.schedule.ops else 0):
        whole = numbered.has(stage, Op.B)
        halves = [number for op in (Op.I, Op.W) for number in numbered.numbers_of(stage, op)]
        for number, has_whole in zip(halves, 2 * whole, strict=True):
            if has_whole and number in numbered.place:
                what = "the microbatch has a full backward as well (B = I and W)"
                remedy = "keep either B, or I and W"
                yield Problem(*numbered.place[number], numbered.action(number), what, remedy)


def _wrong_rank(numbered: Numbered) -> Iterator[Problem]:
    """Every action is on the rank that holds its stage."""
    rank_of = numbered.schedule.placement.rank_of
    homes = numbered.per_lane(lambda lane: rank_of[lane[0]])
    for number, (rank, position) in numbered.place.items():
        if rank != homes[number]:
            action, home = numbered.action(number), homes[number]
            what = f"stage {action.stage} is on rank {home}"
            yield Problem(rank, position, action, what, f"move it to rank {home}")


def _unreceived(numbered: Numbered) -> Iterator[Problem]:
    """Every message has both ends."""
    is_message = numbered.per_lane(lambda lane: lane[1] in MESSAGE_OPS)
    whole = {end for message in numbered.messages for end in message}
    for number, place in numbered.place.items():
        if is_message[number] and number not in whole:
            other = counterpart(numbered.action(number))
            home = numbered.schedule.placement.rank_of[other.stage]
            what = f"no rank has the {other.op.value} at its other end"
            remedy = f"add {other} to rank {home}, or remove it"
            yield Problem(*place, numbered.action(number), what, remedy)


def _purposeless(numbered: Numbered) -> Iterator[Problem]:
    """Every message carries a value of the edge table to another rank."""
    stages = range(numbered.schedule.stages)
    makers = [Action(stage, op, 0) for stage in stages for op in (Op.F, *GRADIENT_OPS)]
    known = {send for maker in makers for send in numbered.rule.sends(maker)}
    sends = (lane for lane in numbered.lanes if lane[1] in SEND_OPS)
    unknown = (s for s in sends if Action(s[0], s[1], 0, s[2]) not in known)
    for number in (number for lane in unknown for number in numbered.numbers_of(*lane)):
        if number in numbered.place:
            what = "no edge carries such a message between these stages' ranks"
            remedy = "remove it and its RECV, or give the schedule the edge"
            yield Problem(*numbered.place[number], numbered.action(number), what, remedy)


def _channels(numbered: Numbered) -> Iterator[Problem]:
    """Both ends of a channel have its messages in the same order."""
    place = numbered.place
    kinds = numbered.per_lane(lambda lane: lane[1])
    channels: dict[object, list[tuple[int, int]]] = defaultdict(list)
    for send, receive in sorted(numbered.messages, key=lambda ends: place[ends[0]]):
        channels[place[send][0], place[receive][0], kinds[send]].append((send, receive))
    for messages in channels.values():
        for one, two in pairwise(messages):
            if place[two[1]] < place[one[1]]:
                yield _crossed(numbered, one, two)


def _crossed(numbered: Numbered, one: tuple[int, int], two: tuple[int, int]) -> Problem:
    """Report two messages of a channel that are received in the wrong order."""
    (rank, late), (_, early) = numbered.place[one[1]], numbered.place[two[1]]
    what = (
        f"is sent after {numbered.action(one[0])}, but rank {rank} posts {numbered.action(two[1])} "
        f"(position {early}) before {numbered.action(one[1])} (position {late})"
    )
    remedy = "give both ends of the channel the same order"
    return Problem(*numbered.place[two[0]], numbered.action(two[0]), what, remedy)


def _shards(numbered: Numbered) -> Iterator[Problem]:
    """Sharded stages are gathered whenever they compute."""
    if Op.UNSHARD not in numbered.schedule.ops:
        return
    for rank, program in enumerate(numbered.schedule.programs):
        gathered: set[int] = set()
        places = ((at, action) for at, entry in enumerate(program) for action in flat((entry,)))
        for position, action in places:
            stage, op = action.stage, action.op
            if op is Op.UNSHARD and stage in gathered:
                what = "the stage is unsharded already"
                yield Problem(rank, position, action, what, "remove it")
            is_user = op is Op.RESHARD or (op in COMPUTE_OPS and numbered.rule.shards(stage))
            if is_user and stage not in gathered:
                what = "runs while the stage is not unsharded"
                yield Problem(rank, position, action, what, f"put {stage}UNSHARD before it")
            if op in (Op.UNSHARD, Op.RESHARD):
                (gathered.add if op is Op.UNSHARD else gathered.discard)(stage)


CHECKS: tuple[Check, ...] = (
    _duplicate,
    _wrong_rank,
    _unreceived,
    _purposeless,
    _channels,
    _shards,
)


def _deadlock(numbered: Numbered, clock: Clock) -> Problem:
    """Report which ranks wait for which where programs stopped: most often a cycle."""
    waits = clock.blame()
    circle = " -> ".join(
        f"rank {rank} at {numbered.action(number)} waits for {numbered.action(needed)} "
        f"of rank {numbered.place[needed][0]}"
        for rank, number, needed in waits
    )
    number = waits[0][1]
    remedy = "move one of these actions before the one it holds up"
    what = f"deadlock: {circle}"
    return Problem(*numbered.place[number], numbered.action(number), what, remedy)
