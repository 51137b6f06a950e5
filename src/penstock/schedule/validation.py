"""What is wrong with a schedule: what keeps it from its end, and what else.

A run on simulated clocks shows which ranks come to their end; ``numbered.py`` says what actions mean there.
The simulator asks for what keeps a schedule from its end, :func:`validate` for everything.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import itemgetter

from penstock.errors import ScheduleError
from penstock.schedule.action import (
    COMPUTE_OPS,
    GRADIENT_OPS,
    MESSAGE_OPS,
    SEND_OPS,
    Action,
    Op,
    halves,
)
from penstock.schedule.base import Schedule, paused_collection
from penstock.schedule.clock import Ran
from penstock.schedule.dependencies import counterpart
from penstock.schedule.numbered import Numbered


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
        """True if the schedule is proven to complete."""
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
    ran = numbered.run(blocking_sends=True)
    survives = not ran.stuck
    if not (survives or blocking_sends):
        ran = numbered.run()
    problems = list(_missing(numbered))
    absent = {problem.action for problem in problems}
    problems += obstacles(numbered, ran, absent)
    problems += _located(numbered, (fault for check in CHECKS for fault in check(numbered)))
    return Report(schedule.name, tuple(problems), survives and not problems)


def _missing(numbered: Numbered) -> Iterator[Problem]:
    """Each stage must run each microbatch forward and, if the schedule trains, backward once.

    What it offloads, it must reload.
    """
    schedule = numbered.schedule
    for stage, home in enumerate(schedule.placement.rank_of):
        for absent in _absent(numbered, stage):
            remedy = f"add {absent} to the program of rank {home}"
            yield Problem(home, None, absent, "missing", remedy)


def _absent(numbered: Numbered, stage: int) -> Iterator[Action]:
    forward, input, weight, full, offload, reload = (
        numbered.lanes.get((stage, op, None), {})
        for op in (Op.F, Op.I, Op.W, Op.B, Op.OFFLOAD, Op.RELOAD)
    )
    for m in numbered.schedule.parts:
        if m not in forward:
            yield Action(stage, Op.F, m)
        if numbered.schedule.trains and m not in full and not (m in input and m in weight):
            yield Action(stage, Op.W, m) if m in input else numbered.rule.gradient(stage, m)
        if m in offload and m not in reload:
            yield Action(stage, Op.RELOAD, m)


# ---- actions at fault: one function for each kind of fault


Fault = tuple[int, Action, str, str]
"""The number of an action, the action, what is wrong with it, and what to change."""


def _located(numbered: Numbered, faults: Iterable[Fault]) -> Iterator[Problem]:
    """Say where in the programs faults are."""
    for number, action, what, remedy in faults:
        yield Problem(numbered.rank[number], numbered.position(number), action, what, remedy)


# ---- what keeps a schedule from its end


def obstacles(
    numbered: Numbered, ran: Ran, reported: Container[Action | None] = ()
) -> Iterator[Problem]:
    """What keeps ranks from their end.

    Args:
        numbered: the schedule.
        ran: how far it came.
        reported: missing actions, which are not reported once more for each action that needs them.
    """
    faults = (_unmet(numbered, reported), _unanswered(numbered), _misplaced(numbered))
    return _located(numbered, chain(*faults, _deadlock(numbered, ran.stuck)))


def _unmet(numbered: Numbered, reported: Container[Action | None]) -> Iterator[Fault]:
    """What an action needs comes before it."""
    rank_of = numbered.schedule.placement.rank_of
    for number, action, needed, later in sorted(numbered.unmet, key=itemgetter(0)):
        which, remedy = "is in no program", f"add it to rank {rank_of[needed.stage]}"
        if later is not None:
            which = f"comes later, at position {numbered.position(later)}"
            remedy = f"move {needed} before it"
        if needed not in reported:
            yield number, action, f"needs {needed}, which {which}", remedy


def _unanswered(numbered: Numbered) -> Iterator[Fault]:
    """Every message has both ends."""
    rank_of = numbered.schedule.placement.rank_of
    for (stage, op, peer), numbers in numbered.lanes.items():
        for m, number in numbers.items() if op in MESSAGE_OPS else ():
            if number not in numbered.arrival:
                action = Action(stage, op, m, peer)
                other = counterpart(action)
                what = f"no rank has the {other.op.value} at its other end"
                yield (
                    number,
                    action,
                    what,
                    f"add {other} to rank {rank_of[other.stage]}, or remove it",
                )


def _misplaced(numbered: Numbered) -> Iterator[Fault]:
    """Every action is on the rank of its stage."""
    rank, rank_of = numbered.rank, numbered.schedule.placement.rank_of
    strangers = [
        (number, Action(stage, op, m, peer))
        for (stage, op, peer), numbers in numbered.lanes.items()
        for m, number in numbers.items()
        if rank[number] != rank_of[stage]
    ]
    strangers += [each for each in numbered.repeated if rank[each[0]] != rank_of[each[1].stage]]
    for number, action in strangers:
        home = rank_of[action.stage]
        yield number, action, f"stage {action.stage} is on rank {home}", f"move it to rank {home}"


def _deadlock(numbered: Numbered, stuck: Mapping[int, tuple[int, int]]) -> Iterator[Fault]:
    """No ranks wait for each other in a circle, nor for a rank that has ended."""
    path: dict[int, tuple[int, int]] = {}
    rank = min(stuck, default=-1)
    while rank in stuck and rank not in path:
        number, needed = stuck[rank]
        while needed >= len(numbered.entries):
            # A transfer, whose channel waits for one of the ends of a message.
            channel = next(n for n, program in enumerate(numbered.programs) if needed in program)
            needed = stuck[channel][1]
        path[rank] = number, needed
        rank = numbered.rank[needed]
    if path:
        # Who only leads to a circle is no part of it.
        circle = list(path.values())[list(path).index(rank) if rank in path else 0 :]
        waits = " -> ".join(
            f"rank {numbered.rank[number]} at {numbered.action(number)} waits for "
            f"{numbered.action(needed, number)} of rank {numbered.rank[needed]}"
            for number, needed in circle
        )
        first, remedy = circle[0][0], "move one of these actions before the one it holds up"
        yield first, numbered.action(first), f"deadlock: {waits}", remedy


# ---- what else is wrong


def _duplicate(numbered: Numbered) -> Iterator[Fault]:
    """Only UNSHARD and RESHARD may occur twice; no microbatch has both B and I or W."""
    for number, action in numbered.repeated:
        first = numbered.find(action)
        if action.op not in (Op.UNSHARD, Op.RESHARD) and first is not None:
            where = f"position {numbered.position(first)} of rank {numbered.rank[first]}"
            yield number, action, f"is already at {where}", "remove one of the two"
    for (stage, op, _), numbers in numbered.lanes.items():
        full = numbered.lanes.get((stage, Op.B, None), {}) if op in (Op.I, Op.W) else {}
        for m in [m for m in numbers if m in full]:
            what = "the microbatch has a full backward as well (B = I and W)"
            yield numbers[m], Action(stage, op, m), what, "keep either B, or I and W"


def _purposeless(numbered: Numbered) -> Iterator[Fault]:
    """Every message carries a value of the edge table to another rank."""
    stages = range(numbered.schedule.stages)
    makers = [Action(stage, op, 0) for stage in stages for op in (Op.F, *GRADIENT_OPS)]
    known = {send for maker in makers for send in numbered.rule.sends(maker)}
    for (stage, op, peer), numbers in numbered.lanes.items():
        if op in SEND_OPS and Action(stage, op, 0, peer) not in known:
            what = "no edge carries such a message between these stages' ranks"
            remedy = "remove it and its RECV, or give the schedule the edge"
            for m, number in numbers.items():
                yield number, Action(stage, op, m, peer), what, remedy


def _crossed(numbered: Numbered) -> Iterator[Fault]:
    """Both ends of a channel have its messages in the same order."""
    for (before, late), (send, early) in chain.from_iterable(map(pairwise, numbered.channels)):
        if early < late:
            posts, then = (
                f"{numbered.action(number)} (position {numbered.position(number)})"
                for number in (early, late)
            )
            sent = f"is sent after {numbered.action(before)}"
            what = f"{sent}, but rank {numbered.rank[late]} posts {posts} before {then}"
            yield send, numbered.action(send), what, "give both ends of the channel the same order"


def _sharded(numbered: Numbered) -> Iterator[Fault]:
    """Sharded stages are gathered whenever they compute."""
    entries = numbered.entries if Op.UNSHARD in numbered.schedule.ops else []
    gathered: set[tuple[int, int]] = set()
    for number, entry in enumerate(entries):
        for action in halves(entry):
            place, op = (numbered.rank[number], action.stage), action.op
            if op is Op.UNSHARD and place in gathered:
                yield number, action, "the stage is unsharded already", "remove it"
            is_user = op is Op.RESHARD or (op in COMPUTE_OPS and numbered.rule.shards(action.stage))
            if is_user and place not in gathered:
                what = "runs while the stage is not unsharded"
                yield number, action, what, f"put {action.stage}UNSHARD before it"
            if op in (Op.UNSHARD, Op.RESHARD):
                (gathered.add if op is Op.UNSHARD else gathered.discard)(place)


CHECKS: tuple[Callable[[Numbered], Iterator[Fault]], ...] = (
    _duplicate,
    _purposeless,
    _crossed,
    _sharded,
)
