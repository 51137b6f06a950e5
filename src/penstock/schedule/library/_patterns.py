"""Shapes that several schedules share."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.schedule.action import Action, Op


def run(stage: int, op: Op, microbatches: Iterable[int]) -> list[Action]:
    """One op on one stage for several microbatches in turn."""
    return [Action(stage, op, microbatch) for microbatch in microbatches]
