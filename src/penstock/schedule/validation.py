"""Proof that a schedule completes, or every reason why it does not.

The meaning proven: SEND and RECV *post* and return. A message is complete when both ends have posted it and
the earlier ones on its channel are complete; there is one first-in first-out channel per ordered pair of
ranks and kind. A compute action waits for what it needs, WAIT_SEND for its message. An overlapped pair
starts when both its halves may.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.errors import ScheduleError
from penstock.schedule.action import Action
from penstock.schedule.base import Schedule
from penstock.schedule.checks import CHECKS, Finding
from penstock.schedule.collection import paused_collection
from penstock.schedule.packed import NOWHERE, Packed
from penstock.schedule.progress import circle, run
from penstock.schedule.wiring import Wiring


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a schedule.

    Attributes:
        rank: the rank whose program is wrong; ``None`` where it is no single rank's.
        position: the place in that program, from 0; ``None`` for what is missing.
        action: the action.
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
    """What :func:`validate` found.

    Attributes:
        schedule: the name of the schedule.
        problems: everything that is wrong; empty for a schedule that is proven to complete.
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
def validate(schedule: Schedule) -> Report:
    """Prove that a schedule completes, in time linear in its actions.

    Args:
        schedule: with its messages spelled out, or without: then values simply are where they are needed.

    Returns:
        A report with every problem at once.
    """
    wiring = Wiring(schedule)
    packed = wiring.packed
    problems = [_problem(packed, finding) for check in CHECKS for finding in check(wiring)]
    progress = run(wiring)
    if not progress.complete:
        number, path = circle(packed, progress)
        problems.append(_stuck(packed, number, path))
    blocking = not problems and run(wiring, blocking_sends=True).complete
    return Report(schedule.name, tuple(problems), blocking)


def _problem(packed: Packed, finding: Finding) -> Problem:
    number, action, what, remedy = finding
    if number != NOWHERE:
        rank = int(packed.rank[number])
        return Problem(rank, packed.position(number), packed.action(number), what, remedy)
    home = None if action is None else packed.schedule.placement.rank_of[action.stage]
    return Problem(home, None, action, what, remedy)


def _stuck(packed: Packed, number: int, path: Iterable[str]) -> Problem:
    what = f"a circle of waits, which never ends: {' -> '.join(path)}"
    rank, position = int(packed.rank[number]), packed.position(number)
    remedy = "move one of these actions before the one it holds up"
    return Problem(rank, position, packed.action(number), what, remedy)
