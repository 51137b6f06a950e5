"""The schedules by name. A new one is added by listing it here; the tests then cover it."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from penstock.errors import ScheduleError
from penstock.schedule.base import Schedule
from penstock.schedule.library.forward_only import forward_only
from penstock.schedule.library.gpipe import gpipe
from penstock.schedule.library.one_f_one_b import one_f_one_b
from penstock.schedule.library.zb_h1 import zb_h1

BUILDERS: dict[str, Callable[[int, int], Schedule]] = {
    "GPipe": gpipe,
    "1F1B": one_f_one_b,
    "ZB-H1": zb_h1,
    "forward-only": forward_only,
}


def names() -> tuple[str, ...]:
    """The names that :func:`build` knows."""
    return tuple(BUILDERS)


def build(
    name: str, *, ranks: int, microbatches: int, stages_per_rank: int | None = None
) -> Schedule:
    """Build a schedule by name.

    Args:
        name: one of :func:`names`, upper or lower case.
        ranks: how many ranks share the model.
        microbatches: into how many parts a batch is split.
        stages_per_rank: for schedules with several stages on a rank; by default what the schedule has.

    Raises:
        ScheduleError: unknown name (with the nearest ones), or numbers the schedule cannot take.
    """
    known = {candidate.lower(): candidate for candidate in BUILDERS}
    if name.lower() not in known:
        near = get_close_matches(name.lower(), known, n=1)
        hint = f"; did you mean {known[near[0]]!r}?" if near else ""
        raise ScheduleError(f"unknown schedule {name!r}{hint} Known: {', '.join(BUILDERS)}")
    if stages_per_rank not in (None, 1):
        raise ScheduleError(f"{name} has 1 stage a rank, not {stages_per_rank}")
    return BUILDERS[known[name.lower()]](ranks, microbatches)
