"""A timeline as lines of text, fitted to the width of a terminal."""

from __future__ import annotations

from penstock.schedule.action import Action
from penstock.schedule.drawing.axis import Unit, percent, short, ticks, unit_for
from penstock.schedule.timeline import Timeline

IDLE = "."
NARROWEST = 10


def draw_text(timeline: Timeline, *, width: int = 100) -> str:
    """Draw a timeline in characters.

    A box begins with its op and, where they fit, microbatch and stage; ``.`` is idle time.

    Args:
        timeline: of a simulated or measured step.
        width: characters a line; at least enough for labels and ten columns of time.
    """
    label = len(f"rank {timeline.ranks - 1}")
    columns = max(NARROWEST, width - label - len(" |") - len("| 100.0 % idle"))
    staged = _room_for_stages(timeline, columns)
    rows = [
        f"{f'rank {rank}'.ljust(label)} |{_row(timeline, rank, columns, staged)}|"
        f" {percent(timeline.bubbles[rank]).rjust(7)} idle"
        for rank in range(timeline.ranks)
    ]
    return "\n".join((*rows, " " * (label + 2) + _ruler(timeline, columns, unit_for(timeline))))


def _room_for_stages(timeline: Timeline, columns: int) -> bool:
    """Whether there is something to say about stages, and room for it in most boxes."""
    several = any(
        len({span.action.stage for span in timeline.of_rank(rank)}) > 1
        for rank in range(timeline.ranks)
    )
    durations = sorted(span.duration for span in timeline.spans)
    longest = max((len(str(span.action)) for span in timeline.spans), default=0)
    return several and durations[len(durations) // 4] * columns > longest * timeline.makespan


def _row(timeline: Timeline, rank: int, columns: int, staged: bool) -> str:
    cells = [IDLE] * columns
    scale = columns / timeline.makespan if timeline.makespan else 0.0
    for span in timeline.of_rank(rank):
        first = round((span.start - timeline.start) * scale)
        last = round((span.end - timeline.start) * scale)
        cells[first:last] = _box(span.action, last - first, staged)
    return "".join(cells[:columns])


def _box(action: Action, width: int, staged: bool) -> str:
    """The longest of the names of an action that leaves a space before the next box, or its op."""
    microbatch = "" if action.microbatch is None else action.microbatch
    middle = f"{action.op.value}{microbatch}"
    names = ([f"{action.stage}{middle}"] if staged else []) + [middle]
    fitting = next((name for name in names if len(name) < width), action.op.value)
    return fitting[:width].ljust(width)


def _ruler(timeline: Timeline, columns: int, unit: Unit) -> str:
    length = timeline.makespan * unit.factor
    line = ""
    for tick in ticks(length, columns // 12):
        column = round(tick / length * columns) if length else 0
        if column >= len(line):
            line = line.ljust(column) + short(tick) + " "
    return line + unit.name
