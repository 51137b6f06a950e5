"""Schedules by name: the library's, and those that a user registers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from inspect import Parameter, signature

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
    seq_1f1b,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zb_v,
)

SAMPLES = ((1, 2), (2, 4), (4, 8), (8, 16))
"""Ranks and microbatches of the small samples that show what a function builds."""


@dataclass(frozen=True)
class Recipe:
    """A function that builds schedules, and the properties that they share.

    Args:
        name: the name of the schedule.
        build: a function of ranks and microbatches and, if it has a third parameter, stages per rank.
        aliases: other names for it.
    """

    name: str
    build: Callable[..., Schedule]
    aliases: tuple[str, ...] = ()

    @cached_property
    def any_stages(self) -> bool:
        """True if it takes any number of stages per rank."""
        return len(self._parameters) > 2

    @cached_property
    def slices(self) -> bool:
        """True if it cuts sequences into slices, whose number is the keyword argument ``slices``."""
        return "slices" in signature(self.build).parameters

    @cached_property
    def _parameters(self) -> list[Parameter]:
        """The function's parameters that are given by position."""
        kinds = Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD
        return [one for one in signature(self.build).parameters.values() if one.kind in kinds]

    @cached_property
    def stages_per_rank(self) -> int:
        """The number of stages on a rank; the default if the function takes any number."""
        return len(self.sample.placement.stages_on(0))

    @property
    def trains(self) -> bool:
        """True if it runs any backward."""
        return self.sample.trains

    @property
    def summary(self) -> str:
        """A description in one line."""
        return (self.build.__doc__ or "").partition("\n")[0]

    @cached_property
    def sample(self) -> Schedule:
        """The first small schedule that the function does not refuse.

        Raises:
            ScheduleError: the function refuses them all.
        """
        refusal = None
        for ranks, microbatches in SAMPLES:
            try:
                return self.make(ranks, microbatches)
            except ScheduleError as error:
                refusal = error
        raise ScheduleError(f"{self.name} refuses every small size: {refusal}")

    def make(
        self,
        ranks: int,
        microbatches: int,
        stages_per_rank: int | None = None,
        slices: int | None = None,
    ) -> Schedule:
        """Build the schedule for these numbers.

        Raises:
            ScheduleError: there is none, or the function returns something else.
        """
        sizes = [ranks, microbatches]
        if self.any_stages:
            third = self._parameters[2]
            default = 1 if third.default is Parameter.empty else third.default
            sizes.append(default if stages_per_rank is None else stages_per_rank)
        more = {} if slices is None else {"slices": slices}
        return built(lambda: self.build(*sizes, **more), self.name, ranks, microbatches)


RECIPES: dict[str, Recipe] = {
    name: Recipe(name, build, tuple(aliases))
    for name, build, *aliases in (
        ("GPipe", gpipe),
        ("1F1B", one_f_one_b),
        ("Eager-1F1B", eager_1f1b, "Eager1F1B"),
        ("Interleaved1F1B", interleaved_1f1b, "Interleaved-1F1B"),
        ("LoopedBFS", looped_bfs),
        ("ZB-H1", zb_h1, "ZBH1"),
        ("ZB-H2", zb_h2, "ZBH2"),
        ("InterleavedZeroBubble", interleaved_zero_bubble, "ZB1P"),
        ("ZB-V", zb_v, "ZBV", "ZBVZeroBubble"),
        ("V-Half", v_half, "VHalf"),
        ("V-Min", v_min, "VMin"),
        ("DualPipeV", dualpipe_v),
        ("Seq1F1B", seq_1f1b),
        ("forward-only", forward_only, "ForwardOnly"),
    )
}


def names() -> tuple[str, ...]:
    """The names of the schedules that any stages can run, without aliases.

    :func:`build` also knows Seq1F1B, for stages that hand a state from slice to slice.
    """
    return tuple(name for name, recipe in RECIPES.items() if not recipe.slices)


def register(name: str, build: Callable[..., Schedule]) -> None:
    """Give a schedule of your own a name, by which ``Pipeline`` and :func:`build` find it in this process.

    If there are several processes, each must register it.

    Args:
        name: a new name.
        build: a function of ranks and microbatches that returns the schedule. A third parameter, if any, is
            the number of stages on each rank, with the usual number as its default; a keyword argument
            ``slices``, with a default, is the number of slices. The function raises a
            ScheduleError for numbers without a schedule.

    Raises:
        ScheduleError: the name is taken, or looks like that of a file.
    """
    is_taken = name.lower() in _known()
    if not name or is_taken or name.lower().endswith((".csv", ".json")):
        why = "it is taken" if is_taken else "it looks like the name of a file"
        raise ScheduleError(
            f"a schedule cannot be registered as {name!r}: {why}; choose another name"
        )
    RECIPES[name] = Recipe(name, build)


def unregister(name: str) -> None:
    """Remove a registered name, for instance to register a changed function.

    Raises:
        ScheduleError: the name is unknown.
    """
    del RECIPES[find(name)[0]]


def _known() -> dict[str, str]:
    """The proper name for each name and alias in lower case."""
    return {
        known.lower(): name for name, recipe in RECIPES.items() for known in (name, *recipe.aliases)
    }


def find(name: str) -> tuple[str, Recipe]:
    """Find the proper name and the recipe for a name or alias, in upper or lower case.

    Raises:
        ScheduleError: the name is unknown; the message gives the nearest one, and all names.
    """
    known = _known()
    proper = known.get(name.lower())
    if proper is None:
        near = get_close_matches(name.lower(), known, n=1)
        hint = f"; did you mean {known[near[0]]!r}?" if near else "."
        raise ScheduleError(f"unknown schedule {name!r}{hint} Known: {', '.join(RECIPES)}")
    return proper, RECIPES[proper]


@paused_collection()
def build(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    stages_per_rank: int | None = None,
    slices: int | None = None,
) -> Schedule:
    """Build a schedule by name.

    Args:
        name: one of :func:`names` or torch's name for it, in upper or lower case.
        ranks: the number of ranks that share the model.
        microbatches: the number of parts of a batch.
        stages_per_rank: the number of stages per rank, for schedules that take any; others have their own.
        slices: into how many slices sequences are cut, for schedules that cut them.

    Raises:
        ScheduleError: the name is unknown, or the schedule does not exist for these numbers.
    """
    check_at_least_one(ranks=ranks, microbatches=microbatches)
    if stages_per_rank is not None:
        check_at_least_one(stages_per_rank=stages_per_rank)
    proper, recipe = find(name)
    if slices is not None:
        check_at_least_one(slices=slices)
        if not recipe.slices:
            cut = ", ".join(other for other, candidate in RECIPES.items() if candidate.slices)
            raise ScheduleError(f"{proper} cuts no sequences, but slices={slices}; {cut} does")
    schedule = recipe.make(ranks, microbatches, stages_per_rank, slices)
    count = len(schedule.placement.stages_on(0))
    if stages_per_rank not in (None, count):
        free = ", ".join(other for other, candidate in RECIPES.items() if candidate.any_stages)
        has = "one stage" if count == 1 else f"{count} stages"
        raise ScheduleError(
            f"{proper} has {has} on each rank, not stages_per_rank={stages_per_rank}; {free} take any number"
        )
    return schedule


def built(make: Callable[[], object], who: str, ranks: int, microbatches: int) -> Schedule:
    """Make a schedule with a function, which may be the user's, and check the result.

    Raises:
        ScheduleError: the result is not a schedule, or is one for other numbers.
    """
    result = make()
    if not isinstance(result, Schedule):
        what = f"a {type(result).__name__}, which is not a penstock.schedule.Schedule"
    elif (result.ranks, result.microbatches) != (ranks, microbatches):
        what = f"a schedule of ranks={result.ranks}, microbatches={result.microbatches}"
    else:
        return result
    raise ScheduleError(f"for ranks={ranks}, microbatches={microbatches} {who} gave {what}")
