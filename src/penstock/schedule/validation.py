"""Everything that is wrong with a schedule, or the proof that it completes.

A run on simulated clocks shows what keeps a schedule from its end; ``simulation.py`` says what actions mean
there. What else can be wrong is found here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from penstock.errors import ScheduleError
from penstock.schedule.action import COMPUTE_OPS, GRADIENT_OPS, SEND_OPS, Action, Op
from penstock.schedule.base import Schedule, flat, paused_collection
from penstock.schedule.clock import Costs
from penstock.schedule.simulation import Numbered, Problem, Simulation


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
    numbered = Numbered(schedule, Costs())
    at_once = [0.0] * len(numbered.actions)
    problems = list(_incomplete(numbered))
    absent = {problem.action for problem in problems}
    problems += Simulation(numbered, at_once).obstacles(absent)
    problems += (problem for check in CHECKS for problem in check(numbered))
    survives = False
    if not problems:
        blocked = Simulation(numbered, at_once, blocking_sends=True)
        survives = blocked.completes
        problems += blocked.obstacles() if blocking_sends else ()
    return Report(schedule.name, tuple(problems), survives_blocking_sends=survives)


# ---- what can be wrong beside what keeps it from its end: one function for each kind of problem


Check = Callable[[Numbered], Iterator[Problem]]


def _incomplete(numbered: Numbered) -> Iterator[Problem]:
    """Each stage must run each microbatch forward and, if the schedule trains, backward once."""
    schedule = numbered.schedule
    for stage in range(schedule.stages):
        home = schedule.placement.rank_of[stage]
        for absent in _absent(numbered, stage):
            remedy = f"add {absent} to the program of rank {home}"
            yield Problem(home, None, absent, "missing", remedy)


def _absent(numbered: Numbered, stage: int) -> Iterator[Action]:
    done = {
        op: {numbered.actions[n][2] for n in numbered.lanes.get((stage, op, None), ())}
        for op in COMPUTE_OPS
    }
    for m in range(numbered.schedule.microbatches):
        if m not in done[Op.F]:
            yield Action(stage, Op.F, m)
        if (
            numbered.schedule.trains
            and m not in done[Op.B]
            and not (m in done[Op.I] and m in done[Op.W])
        ):
            absent = Action(stage, Op.W, m)
            yield absent if m in done[Op.I] else numbered.rule.gradient(stage, m)


def _duplicate(numbered: Numbered) -> Iterator[Problem]:
    """Only UNSHARD and RESHARD may occur twice; no microbatch has both B and I or W."""
    for number, action in enumerate(numbered.actions):
        first = numbered.number[action]
        if first != number and action.op not in (Op.UNSHARD, Op.RESHARD):
            what = (
                f"is already at position {numbered.position(first)} of rank {numbered.rank[first]}"
            )
            yield numbered.problem(number, what, "remove one of the two")
    for (stage, op, _), numbers in numbered.lanes.items():
        for number in numbers if op in (Op.I, Op.W) else ():
            if (stage, Op.B, numbered.actions[number].microbatch, None) in numbered.number:
                what = "the microbatch has a full backward as well (B = I and W)"
                yield numbered.problem(number, what, "keep either B, or I and W")


def _purposeless(numbered: Numbered) -> Iterator[Problem]:
    """Every message carries a value of the edge table to another rank."""
    stages = range(numbered.schedule.stages)
    makers = [Action(stage, op, 0) for stage in stages for op in (Op.F, *GRADIENT_OPS)]
    known = {send for maker in makers for send in numbered.rule.sends(maker)}
    for (stage, op, peer), numbers in numbered.lanes.items():
        if op in SEND_OPS and Action(stage, op, 0, peer) not in known:
            what = "no edge carries such a message between these stages' ranks"
            remedy = "remove it and its RECV, or give the schedule the edge"
            yield from (numbered.problem(number, what, remedy) for number in numbers)


def _channels(numbered: Numbered) -> Iterator[Problem]:
    """Both ends of a channel have its messages in the same order."""
    actions = numbered.actions
    for messages in numbered.channels.values():
        for (before, late), (send, early) in pairwise(messages):
            if early < late:
                what = (
                    f"is sent after {actions[before]}, but rank {numbered.rank[late]} posts {actions[early]} "
                    f"(position {numbered.position(early)}) before {actions[late]} "
                    f"(position {numbered.position(late)})"
                )
                yield numbered.problem(send, what, "give both ends of the channel the same order")


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


CHECKS: tuple[Check, ...] = (_duplicate, _purposeless, _channels, _shards)
