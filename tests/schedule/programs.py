"""Schedules written as text, a line of actions for each rank."""

from __future__ import annotations

from penstock.schedule import Edge, Placement, Schedule, looped, parse_action

SKIPPING = (
    Edge("x", 0, (1, 3)),
    Edge("y", 1, (2,)),
    Edge("z", 2, (3,)),
    Edge("m", 0, (2,), gradient=False),
)
"""Edges between four stages that skip some, and one without a gradient."""


def schedule(*programs: str, microbatches: int = 1, placement: Placement | None = None) -> Schedule:
    """A schedule of one stage per rank, or of another placement."""
    actions = tuple(tuple(map(parse_action, program.split())) for program in programs)
    return Schedule("test", placement or looped(len(programs)), microbatches, actions)


def rows(made: Schedule) -> list[str]:
    """The programs as text."""
    return [" ".join(map(str, program)) for program in made.programs]
