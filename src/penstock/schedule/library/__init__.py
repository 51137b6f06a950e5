"""Schedules by name: those of the library, and those that a user registers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

from penstock.errors import ScheduleError
from penstock.schedule.base import Schedule, check_at_least_one, paused_collection
from penstock.schedule.library.schedules import (
    dualpipe_v,
    eager_1f1b,
    forward_only,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zb_v,
)


@dataclass(frozen=True)
class Recipe:
    """How to build a schedule of a name.

    Attributes:
        build: from ranks, microbatches and stages per rank.
        stages_per_rank: how many stages it puts on a rank; the default if it takes any number.
        any_stages: whether it takes any number.
        summary: what it is, in one line.
        aliases: other names for it.
    """

    build: Callable[[int, int, int], Schedule]
    stages_per_rank: int
    any_stages: bool
    summary: str
    aliases: tuple[str, ...] = ()


def _fixed(build: Callable[[int, int], Schedule], stages_per_rank: int, *aliases: str) -> Recipe:
    return Recipe(
        lambda ranks, microbatches, _: build(ranks, microbatches),
        stages_per_rank,
        any_stages=False,
        summary=_summary(build),
        aliases=aliases,
    )


def _any(build: Callable[[int, int, int], Schedule], default: int, *aliases: str) -> Recipe:
    return Recipe(build, default, any_stages=True, summary=_summary(build), aliases=aliases)


def _summary(build: Callable[..., Schedule]) -> str:
    return (build.__doc__ or "").partition("\n")[0]


RECIPES: dict[str, Recipe] = {
    "GPipe": _fixed(gpipe, 1),
    "1F1B": _fixed(one_f_one_b, 1),
    "Eager-1F1B": _fixed(eager_1f1b, 1, "Eager1F1B"),
    "Interleaved1F1B": _any(interleaved_1f1b, 2, "Interleaved-1F1B"),
    "LoopedBFS": _any(looped_bfs, 2),
    "ZB-H1": _fixed(zb_h1, 1, "ZBH1"),
    "ZB-H2": _fixed(zb_h2, 1, "ZBH2"),
    "InterleavedZeroBubble": _any(interleaved_zero_bubble, 2, "ZB1P"),
    "ZB-V": _fixed(zb_v, 2, "ZBV", "ZBVZeroBubble"),
    "V-Half": _fixed(v_half, 2, "VHalf"),
    "V-Min": _fixed(v_min, 2, "VMin"),
    "DualPipeV": _fixed(dualpipe_v, 2),
    "forward-only": _any(forward_only, 1, "ForwardOnly"),
}

_BY_NAME = {
    known.lower(): name for name, recipe in RECIPES.items() for known in (name, *recipe.aliases)
}


def names() -> tuple[str, ...]:
    """The names of the schedules, without aliases."""
    return tuple(RECIPES)


def register(
    name: str,
    build: Callable[[int, int], Schedule] | Callable[[int, int, int], Schedule],
    *,
    stages_per_rank: int = 1,
    any_stages: bool = False,
) -> None:
    """Give a schedule of your own a name, by which ``Pipeline`` and :func:`build` find it in this process.

    Where there are several processes, each must register it.

    Args:
        name: a new name.
        build: a function of ranks and microbatches, and with ``any_stages`` also of the stages on each rank,
            that returns the schedule. Where there is none for some numbers it raises a ScheduleError.
        stages_per_rank: how many stages it puts on a rank; with ``any_stages`` the default.
        any_stages: whether it takes any number.

    Raises:
        ScheduleError: the name is taken, or looks like that of a file.
    """
    check_at_least_one(stages_per_rank=stages_per_rank)
    if not name or name.lower() in _BY_NAME or name.lower().endswith((".csv", ".json")):
        why = "it is taken" if name.lower() in _BY_NAME else "it looks like the name of a file"
        raise ScheduleError(
            f"a schedule cannot be registered as {name!r}: {why}; choose another name"
        )
    made: Callable[..., Schedule] = build
    RECIPES[name] = _any(made, stages_per_rank) if any_stages else _fixed(made, stages_per_rank)
    _BY_NAME[name.lower()] = name


def find(name: str) -> tuple[str, Recipe]:
    """The proper name and the recipe for a name or alias, in upper or lower case.

    Raises:
        ScheduleError: an unknown name; the message gives the nearest one, and all.
    """
    found = _BY_NAME.get(name.lower())
    if found is None:
        near = get_close_matches(name.lower(), _BY_NAME, n=1)
        hint = f"; did you mean {_BY_NAME[near[0]]!r}?" if near else "."
        raise ScheduleError(f"unknown schedule {name!r}{hint} Known: {', '.join(RECIPES)}")
    return found, RECIPES[found]


@paused_collection()
def build(
    name: str, *, ranks: int, microbatches: int, stages_per_rank: int | None = None
) -> Schedule:
    """Build a schedule by name.

    Args:
        name: one of :func:`names` or torch's name for it, in upper or lower case.
        ranks: how many ranks share the model.
        microbatches: into how many parts a batch is split.
        stages_per_rank: for schedules that take any number of stages per rank; others have their own.

    Raises:
        ScheduleError: an unknown name, or numbers that the schedule cannot take.
    """
    check_at_least_one(ranks=ranks, microbatches=microbatches)
    proper, recipe = find(name)
    wanted = recipe.stages_per_rank if stages_per_rank is None else stages_per_rank
    check_at_least_one(stages_per_rank=wanted)
    if wanted != recipe.stages_per_rank and not recipe.any_stages:
        free = ", ".join(other for other, candidate in RECIPES.items() if candidate.any_stages)
        own = "one stage" if recipe.stages_per_rank == 1 else f"{recipe.stages_per_rank} stages"
        raise ScheduleError(
            f"{proper} has {own} on each rank, not stages_per_rank={wanted}; {free} take any number"
        )
    return built(lambda: recipe.build(ranks, microbatches, wanted), proper, ranks, microbatches)


def built(make: Callable[[], object], who: str, ranks: int, microbatches: int) -> Schedule:
    """The schedule that a function, which may be the user's, makes for some numbers.

    Raises:
        ScheduleError: it is not a schedule, or is one for other numbers.
    """
    made = make()
    if not isinstance(made, Schedule):
        found = f"a {type(made).__name__}, which is not a penstock.schedule.Schedule"
    elif (made.ranks, made.microbatches) != (ranks, microbatches):
        found = f"a schedule of ranks={made.ranks}, microbatches={made.microbatches}"
    else:
        return made
    raise ScheduleError(f"for ranks={ranks}, microbatches={microbatches} {who} gave {found}")
