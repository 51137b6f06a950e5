"""Drawings of timelines: SVG for a browser, text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from html import escape
from typing import NamedTuple

from penstock.schedule.action import COMPUTE_OPS, Action, Op
from penstock.schedule.timeline import Span, Timeline

# ---- readable times: a suitable unit, round ticks, short numbers


_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_STEPS = (1, 2, 5, 10)


class TimeUnit(NamedTuple):
    """A unit for written times: its name, and how many of them make one unit of the timeline."""

    name: str
    factor: float


def unit_for(timeline: Timeline) -> TimeUnit:
    """The unit in which the makespan is a number from 1 to 1000; unnamed if times are plain numbers."""
    if timeline.unit not in _SECONDS:
        return TimeUnit("", 1.0)
    seconds = timeline.makespan * _SECONDS[timeline.unit]
    name = next((name for name, size in _SECONDS.items() if seconds >= size), "us")
    return TimeUnit(name, _SECONDS[timeline.unit] / _SECONDS[name])


def ticks(length: float, wanted: int) -> list[float]:
    """About ``wanted`` round numbers from 0 to ``length``, 1, 2 or 5 times a power of 10 apart."""
    if length <= 0:
        return [0.0]
    rough = length / max(1, wanted)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * s for s in _STEPS if power * s >= rough * (1 - 1e-9))
    return [step * i for i in range(math.floor(length / step * (1 + 1e-9)) + 1)]


def short(number: float) -> str:
    """A number with at most five digits."""
    return f"{number:.5g}"


def percent(share: float) -> str:
    """A share as a percentage."""
    return f"{100 * share:.1f} %"


def stages_of(timeline: Timeline) -> list[list[int]]:
    """The stages that each rank has spans of, ascending."""
    ranks = range(timeline.ranks)
    return [sorted({span.action.stage for span in timeline.of_rank(rank)}) for rank in ranks]


# ---- the colours of the ops
# Okabe and Ito, "Color Universal Design", 2008: eight colours that people with any colour vision can tell
# apart.
COLOURS = {Op.F: "#56b4e9", Op.I: "#e69f00", Op.W: "#009e73", Op.B: "#cc79a7"}
OTHER = "#999999"
NAMES = {
    Op.F: "forward",
    Op.I: "input backward",
    Op.W: "weight backward",
    Op.B: "full backward",
}
RESET = "\x1b[0m"
PALEST = 0.6
"""How far the colour of a rank's last stage fades to white."""


def colour(op: Op, place: int = 0, places: int = 1) -> str:
    """The colour of an op on the ``place``-th of a rank's ``places`` stages; later ones are paler."""
    white = PALEST * place / max(1, places - 1)
    parts = (int(COLOURS.get(op, OTHER)[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)


def painted(text: str, op: Op) -> str:
    """A text on the colour of an op, for a terminal with 256 colours."""
    red, green, blue = (round(int(colour(op)[at : at + 2], 16) / 51) for at in (1, 3, 5))
    return f"\x1b[30;48;5;{16 + 36 * red + 6 * green + blue}m{text}{RESET}"


# ---- as SVG: a row per rank, a colour per op, numbers of the microbatches


LABELS, SHARES = 62, 58
"""Width left and right of the rows, for ranks and idle shares."""
TOP, LEGEND, AXIS, NOTE = 34, 24, 36, 20
"""Height of title, legend, time axis and note."""
NARROWEST, WIDEST, SCREEN = 640, 12_000, 2000
"""The smallest and largest width of the rows, and the width above which the reader must scroll."""
ROOM = 21
"""Width of a box in which a number of two digits is legible."""
DIGIT, TIGHT = 6.6, 4.6
"""Width of a digit in a label, and of one in small type where there is less room."""

_STYLE = (
    "text{font-family:Helvetica,Arial,sans-serif;font-size:12px;fill:#222}"
    ".title{font-size:16px;font-weight:bold}.small{font-size:8px}.box{font-size:11px;text-anchor:middle}"
    ".right{text-anchor:end}.middle{text-anchor:middle}.tight{font-size:8px;text-anchor:middle}.note{font-style:italic;fill:#555}"
    ".pair{fill:none;stroke:#222;stroke-width:1.6;pointer-events:none}"
    "rect{stroke:#fff;stroke-width:.7}.idle{fill:#f1f1f1;stroke:none}line{stroke:#ccc;stroke-width:1}"
)


class _Sheet:
    """An SVG drawing under construction: its layout and its parts.

    Args:
        timeline: the timeline to draw.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.unit = unit_for(timeline)
        self.places = [{stage: i for i, stage in enumerate(held)} for held in stages_of(timeline)]
        """The stages of each rank, with their order on that rank."""
        self.most_places = max(map(len, self.places), default=1)
        makespan = timeline.makespan or 1.0
        durations = sorted(s.duration for s in timeline.spans if s.duration > 0)
        typical = durations[len(durations) // 4] if durations else makespan
        # As many pixels per unit of time as the numbers need, within the bounds on the width.
        self.scale = min(max(ROOM / typical, NARROWEST / makespan), WIDEST / makespan)
        # With several stages per rank, a row has room for the stage below the number.
        self.row = 26 if self.most_places == 1 else 34
        self.length = timeline.makespan * self.scale
        self.top = TOP + LEGEND
        self.bottom = self.top + self.row * timeline.ranks

    def x(self, time: float) -> float:
        return LABELS + (time - self.timeline.start) * self.scale

    def y(self, rank: int) -> int:
        return self.top + rank * self.row

    def legend(self) -> Iterator[str]:
        ops = {span.action.op for span in self.timeline.spans}
        x = float(LABELS)
        for op in (op for op in Op if op in ops):
            name = f"{op.value} {NAMES[op]}" if op in NAMES else op.value
            yield _rect(x, TOP + 2, 14, 14, f'fill="{colour(op)}"')
            yield _text(x + 19, TOP + 13, name)
            x += 19 + DIGIT * len(name) + 16
        notes = (
            (self.most_places > 1, "small: stage; paler: later stages of the rank"),
            (bool(self.timeline.pairs), "framed: F and B that overlap"),
        )
        if shown := "; ".join(note for applies, note in notes if applies):
            yield _text(x, TOP + 13, shown)

    def axis(self) -> Iterator[str]:
        unit, length = self.unit, self.timeline.makespan * self.unit.factor
        for tick in ticks(length, round(self.length / 80)):
            x = _number(LABELS + tick / unit.factor * self.scale)
            yield f'<line x1="{x}" y1="{self.top}" x2="{x}" y2="{self.bottom + 5}"/>'
            yield _text(float(x), self.bottom + 18, short(tick), "middle")
        label = f"time in {unit.name}" if unit.name else "time"
        makespan = f"makespan {short(length)} {unit.name}".rstrip()
        yield _text(LABELS, self.bottom + 32, f"{label}; {makespan}")

    def rank(self, rank: int) -> Iterator[str]:
        y, middle = self.y(rank), self.y(rank) + self.row / 2 + 4
        yield _text(LABELS - 8, middle, f"rank {rank}", "right")
        yield _rect(LABELS, y + 2, self.length, self.row - 4, kind="idle")
        spans = self.timeline.of_rank(rank)
        shared = _at_the_same_time(spans)
        for i, span in enumerate(spans):
            yield from self.box(span, shares=i in shared)
        again = f"rank {rank}: " if self.length > SCREEN else ""
        share = again + percent(self.timeline.bubbles[rank])
        yield _text(LABELS + self.length + 6, middle, share)

    def box(self, span: Span, *, shares: bool) -> Iterator[str]:
        """Draw the box of a span; one that overlaps another has half the height, forwards on top."""
        stage, op, microbatch, _ = span.action
        x, width = self.x(span.start), span.duration * self.scale
        height = (self.row - 4) / (2 if shares else 1)
        y = self.y(span.rank) + 2 + (height if shares and op is not Op.F else 0)
        start = (span.start - self.timeline.start) * self.unit.factor
        end = short(start + span.duration * self.unit.factor)
        tip = f"{span.action}: {short(start)} to {end} {self.unit.name}".strip()
        fill = colour(op, self.places[span.rank][stage], self.most_places)
        yield f"<g><title>{escape(tip)}</title>" + _rect(x, y, width, height, f'fill="{fill}"')
        number = str(microbatch)
        if op in COMPUTE_OPS and width >= TIGHT * len(number) + 1:
            kind = "box" if width >= DIGIT * len(number) + 2 else "tight"
            with_stage = self.most_places > 1 and not shares
            middle = x + width / 2, y + height / 2
            yield _text(middle[0], middle[1] + (1 if with_stage else 4), number, kind)
            if with_stage:
                yield _text(middle[0], middle[1] + 12, str(stage), "middle small")
        yield "</g>"

    def gap(self, gap: tuple[int, float, float, Action, Action]) -> str:
        """Let an idle time say in a tooltip what the rank waits for."""
        rank, start, end, action, cause = gap
        lasts = f"{short((end - start) * self.unit.factor)} {self.unit.name}".strip()
        tip = f"rank {rank} is idle for {lasts} before {action}, which waits for {_awaited(cause)}"
        box = _rect(
            self.x(start), self.y(rank) + 2, (end - start) * self.scale, self.row - 4, kind="idle"
        )
        return f"<g><title>{escape(tip)}</title>{box}</g>"

    def pairs(self) -> Iterator[str]:
        """A frame around each overlapped pair, whether or not the overlap saves time here."""
        spans = {span.action: span for span in self.timeline.spans} if self.timeline.pairs else {}
        for pair in self.timeline.pairs:
            halves = [spans[half] for half in pair if half in spans]
            if len(halves) == len(pair):
                start, end = min(h.start for h in halves), max(h.end for h in halves)
                y, width = self.y(halves[0].rank) + 2, (end - start) * self.scale
                yield _rect(self.x(start), y, width, self.row - 4, 'rx="2"', kind="pair")


class Picture(str):
    """An SVG document, which a notebook shows as a picture."""

    __slots__ = ()

    def _repr_svg_(self) -> str:
        return str(self)


def draw_svg(
    timeline: Timeline,
    *,
    title: str = "",
    note: str = "",
    gaps: Iterable[tuple[int, float, float, Action, Action]] = (),
) -> Picture:
    """Draw a timeline.

    Args:
        timeline: the timeline of a simulated or measured step.
        title: the text above it.
        note: the text below it, such as the source of the times.
        gaps: idle times, as ``Simulation.gaps`` gives them.

    Returns:
        An SVG document: a string that a notebook shows as a picture. All text is escaped; each box names
        its action and times in a tooltip, and each gap what it waits for.
    """
    sheet = _Sheet(timeline)
    shares = SHARES if sheet.length <= SCREEN else SHARES + LABELS
    width = LABELS + max(sheet.length, NARROWEST) + shares
    height = sheet.bottom + AXIS + (NOTE if note else 0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
        f'width="{width:.0f}" height="{height}" role="img">',
        f"<style>{_STYLE}</style>",
        f'<rect class="sheet" width="{width:.0f}" height="{height}" fill="#fff"/>',
        _text(LABELS, 22, title, "title"),
        _text(width - 8, 22, f"idle {percent(timeline.bubble)}", "right"),
        *sheet.legend(),
        *sheet.axis(),
        *(part for rank in range(timeline.ranks) for part in sheet.rank(rank)),
        *map(sheet.gap, gaps),
        *sheet.pairs(),
        _text(LABELS, sheet.bottom + AXIS + 10, note, "note") if note else "",
        "</svg>",
    ]
    return Picture("\n".join(part for part in parts if part) + "\n")


def _awaited(action: Action) -> str:
    """The action that a rank waits for, in words."""
    if action.op is Op.RECV_F:
        return f"what {action.peer_stage}F{action.microbatch} sends"
    if action.op is Op.RECV_B:
        return f"the gradient of microbatch {action.microbatch} from stage {action.peer_stage}"
    return str(action)


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{_number(x)}" y="{_number(y)}"{style}>{escape(text)}</text>'


def _number(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")


def _rect(
    x: float, y: float, width: float, height: float, more: str = "", *, kind: str = ""
) -> str:
    style = f'class="{kind}" ' if kind else ""
    size = f'width="{_number(width)}" height="{_number(height)}"'
    return f'<rect {style}x="{_number(x)}" y="{_number(y)}" {size} {more}'.rstrip() + "/>"


def _at_the_same_time(spans: Iterable[Span]) -> set[int]:
    """The indices of the spans that overlap another; ``spans`` are one rank's, sorted by start."""
    shared: set[int] = set()
    last, end = -1, float("-inf")
    for i, span in enumerate(spans):
        if span.start < end - 1e-9 * abs(end):
            shared |= {last, i}
        if span.end >= end:
            last, end = i, span.end
    return shared


# ---- as lines of text, fitted to the width of a terminal


IDLE = "."
FEWEST = 10
SHARE = "| 100.0 % idle"


def draw_text(timeline: Timeline, *, width: int = 100, colour: bool = False) -> str:
    """Draw a timeline in characters.

    Each rank has one line or, if ranks hold several stages, one per stage. A box starts with its op and, if
    there is room, its microbatch; ``.`` marks idle time of the rank. A legend follows.

    Args:
        timeline: the timeline of a simulated or measured step.
        width: the most characters per line; labels and ten columns of time are always drawn.
        colour: whether to paint the boxes, for a terminal.
    """
    page = _Page(timeline, width, colour)
    lines = [line for rank in range(timeline.ranks) for line in page.lines(rank)]
    return "\n".join((*lines, page.ruler(), page.legend()))


class _Page:
    """A text drawing under construction."""

    def __init__(self, timeline: Timeline, width: int, colour: bool) -> None:
        self.timeline, self.colour = timeline, colour
        self.stages = stages_of(timeline)
        self.is_staged = any(len(held) > 1 for held in self.stages)
        highest = max((stage for held in self.stages for stage in held), default=0)
        self.label = len(f"rank {timeline.ranks - 1}")
        self.label += len(f" stage {highest}") if self.is_staged else 0
        columns = max(FEWEST, width - self.label - len(" |") - len(SHARE))
        scale = columns / timeline.makespan if timeline.makespan else 0.0
        shortest = min((s.duration for s in timeline.spans if s.duration > 0), default=0.0)
        # Columns per unit of time, such that boxes of equal times have equal widths if possible.
        self.scale = math.floor(shortest * scale) / shortest if shortest * scale >= 1 else scale
        self.columns = max(FEWEST, math.ceil(timeline.makespan * self.scale - 1e-9))

    def lines(self, rank: int) -> Iterator[str]:
        """A rank's lines; the first ends with the rank's idle share."""
        spans = self.timeline.of_rank(rank)
        busy = [IDLE] * self.columns
        for span in spans:
            first, last = self.place(span)
            busy[first:last] = " " * (last - first)
        share = f"| {percent(self.timeline.bubbles[rank]).rjust(7)} idle"
        for number, stage in enumerate(self.stages[rank] or [0]):
            name = f"rank {rank}" if number == 0 else ""
            if self.is_staged:
                name = f"{name.ljust(self.label - len(f' stage {stage}'))} stage {stage}"
            row = self.row([span for span in spans if span.action.stage == stage], busy)
            yield f"{name.ljust(self.label)} |{row}{share if number == 0 else '|'}"

    def place(self, span: Span) -> tuple[int, int]:
        """The first column of a box, and the one after its last."""
        start, end = (
            round((at - self.timeline.start) * self.scale) for at in (span.start, span.end)
        )
        return start, min(end, self.columns)

    def row(self, spans: list[Span], idle: list[str]) -> str:
        """The boxes of one stage."""
        cells = list(idle)
        for span in spans:
            first, last = self.place(span)
            text = _cell(span.action, last - first)
            cells[first:last] = text
            if self.colour and last > first:
                # The first cell gets the whole box, so that its text is painted at once.
                cells[first:last] = [painted(text, span.action.op), *[""] * (last - first - 1)]
        return "".join(cells)

    def ruler(self) -> str:
        """The time axis below the lines."""
        unit = unit_for(self.timeline)
        line = ""
        for tick in ticks(self.timeline.makespan * unit.factor, self.columns // 12):
            column = round(tick / unit.factor * self.scale)
            if column >= len(line):
                line = line.ljust(column) + short(tick) + " "
        return (" " * (self.label + 2) + line + unit.name).rstrip()

    def legend(self) -> str:
        """The meaning of the letters."""
        ops = {span.action.op for span in self.timeline.spans}
        names = [(op, f"{op.value} {NAMES.get(op, op.value)}") for op in Op if op in ops]
        shown = [painted(f" {name} ", op) if self.colour else name for op, name in names]
        return " " * (self.label + 2) + ", ".join([*shown, f"{IDLE} idle"])


def _cell(action: Action, width: int) -> str:
    """The name of an action if it leaves a space before the next box, otherwise its op."""
    microbatch = "" if action.microbatch is None else action.microbatch
    name = f"{action.op.value}{microbatch}"
    return (name if len(name) < width else action.op.value)[:width].ljust(width)
