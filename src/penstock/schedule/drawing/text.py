"""A timeline as lines of text, fitted to the width of a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from penstock.schedule.action import Action, Op
from penstock.schedule.drawing.axis import Unit, percent, short, ticks, unit_for
from penstock.schedule.drawing.palette import NAMES, painted
from penstock.schedule.timeline import Span, Timeline

IDLE = "."
NARROWEST = 10
SHARE = "| 100.0 % idle"


def draw_text(timeline: Timeline, *, width: int = 100, colour: bool = False) -> str:
    """Draw a timeline in characters.

    There is one line per rank or, where ranks hold several stages, one per stage. A box begins with its op
    and, where it fits, its microbatch; ``.`` is time in which the rank is idle. A legend stands below.

    Args:
        timeline: of a simulated or measured step.
        width: how many characters a line may have; at least enough for labels and ten columns of time.
        colour: whether to paint the boxes, for a terminal.
    """
    sheet = _Sheet(timeline, width, colour)
    lines = [line for rank in range(timeline.ranks) for line in sheet.lines(rank)]
    return "\n".join((*lines, sheet.ruler(unit_for(timeline)), sheet.legend()))


@dataclass(frozen=True)
class _Sheet:
    """Where everything is in the drawing."""

    timeline: Timeline
    width: int
    colour: bool

    @cached_property
    def stages(self) -> list[list[int]]:
        """The stages of each rank."""
        ranks = range(self.timeline.ranks)
        return [sorted({s.action.stage for s in self.timeline.of_rank(rank)}) for rank in ranks]

    @cached_property
    def staged(self) -> bool:
        """Whether a rank holds several stages."""
        return any(len(found) > 1 for found in self.stages)

    @cached_property
    def label(self) -> int:
        """The width of what stands before a line."""
        highest = max((stage for found in self.stages for stage in found), default=0)
        stage = len(f" stage {highest}") if self.staged else 0
        return len(f"rank {self.timeline.ranks - 1}") + stage

    @cached_property
    def scale(self) -> float:
        """Columns per unit of time; boxes that take equally long are equally wide, where they can be."""
        columns = max(NARROWEST, self.width - self.label - len(" |") - len(SHARE))
        whole = columns / self.timeline.makespan if self.timeline.makespan else 0.0
        shortest = min((s.duration for s in self.timeline.spans if s.duration > 0), default=0.0)
        return math.floor(shortest * whole) / shortest if shortest * whole >= 1 else whole

    @cached_property
    def columns(self) -> int:
        return max(NARROWEST, math.ceil(self.timeline.makespan * self.scale - 1e-9))

    def lines(self, rank: int) -> Iterator[str]:
        """A rank's lines; its idle share stands behind the first."""
        spans = self.timeline.of_rank(rank)
        busy = [IDLE] * self.columns
        for span in spans:
            first, last = self.place(span)
            busy[first:last] = " " * (last - first)
        share = f"| {percent(self.timeline.bubbles[rank]).rjust(7)} idle"
        for number, stage in enumerate(self.stages[rank] or [0]):
            name = f"rank {rank}" if number == 0 else ""
            if self.staged:
                name = f"{name.ljust(self.label - len(f' stage {stage}'))} stage {stage}"
            row = self.row([span for span in spans if span.action.stage == stage], busy)
            yield f"{name.ljust(self.label)} |{row}{share if number == 0 else '|'}"

    def place(self, span: Span) -> tuple[int, int]:
        """The first column of a box, and the one behind it."""
        start, end = (
            round((at - self.timeline.start) * self.scale) for at in (span.start, span.end)
        )
        return start, min(end, self.columns)

    def row(self, spans: list[Span], idle: list[str]) -> str:
        """The boxes of one stage."""
        cells = list(idle)
        for span in spans:
            first, last = self.place(span)
            text = _box(span.action, last - first)
            cells[first:last] = text
            if self.colour and last > first:
                # The whole box is in its first cell.
                cells[first:last] = [painted(text, span.action.op), *[""] * (last - first - 1)]
        return "".join(cells)

    def ruler(self, unit: Unit) -> str:
        """The time below the lines."""
        length = self.timeline.makespan * unit.factor
        line = ""
        for tick in ticks(length, self.columns // 12):
            column = round(tick / unit.factor * self.scale)
            if column >= len(line):
                line = line.ljust(column) + short(tick) + " "
        return (" " * (self.label + 2) + line + unit.name).rstrip()

    def legend(self) -> str:
        """What the letters mean."""
        ops = {span.action.op for span in self.timeline.spans}
        named = [(op, f"{op.value} {NAMES.get(op, op.value)}") for op in Op if op in ops]
        shown = [painted(f" {name} ", op) if self.colour else name for op, name in named]
        return " " * (self.label + 2) + ", ".join([*shown, f"{IDLE} idle"])


def _box(action: Action, width: int) -> str:
    """The longest of the names of an action that leaves a space before the next box, or its op."""
    microbatch = "" if action.microbatch is None else action.microbatch
    name = f"{action.op.value}{microbatch}"
    return (name if len(name) < width else action.op.value)[:width].ljust(width)
