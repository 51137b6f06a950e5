"""The pictures of the pages, drawn from the schedules as they are.

``python -m website.pictures`` writes them, and the table of ``docs/schedules.md``, to ``docs/``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from penstock.schedule import Costs, Schedule, Timeline, build, draw_svg, names, simulate
from penstock.schedule.drawing import COLOURS
from penstock.schedule.library import RECIPES

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "schedules.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
RANKS, MICROBATCHES = 4, 8
NOTE = "Simulated: F = I = W = 1 unit of one stage, B = 2, messages take no time."
COMPARED = [name for name in names() if RECIPES[name].trains]

_STYLE = (
    "text{font-family:Helvetica,Arial,sans-serif;font-size:13px;fill:#222;text-anchor:middle}"
    ".small{font-size:11px;fill:#555}.left{text-anchor:start}.right{text-anchor:end}"
    "rect,circle{stroke:#fff;stroke-width:1}.frame{fill:none;stroke:#999}path{fill:none;stroke:#555;stroke-width:1.5}"
    "line{stroke:#ccc}"
)
_F, _I, _W, _B = COLOURS.values()


def drawn() -> dict[str, str]:
    """Every picture by its path below ``docs/``."""
    return {f"schedules/{name.lower()}.svg": of_schedule(name) for name in names()} | {
        "assets/logo.svg": logo(),
        "pictures/alone.svg": _timeline(
            build("GPipe", ranks=4, microbatches=1), "One batch, four ranks, one after the other"
        ),
        "pictures/gpipe.svg": _timeline(
            build("GPipe", ranks=4, microbatches=4), "The same batch in four microbatches: GPipe"
        ),
        "pictures/1f1b.svg": _timeline(
            build("1F1B", ranks=4, microbatches=8), "1F1B: a backward as soon as it can run"
        ),
        "pictures/halves.svg": _timeline(
            build("ZB-H1", ranks=4, microbatches=8), "ZB-H1: weight backwards fill the idle time"
        ),
        "pictures/cut.svg": _cut(),
        "pictures/placements.svg": _placements(),
        "pictures/travel.svg": _travel(),
        "pictures/choice.svg": _choice(),
    }


def of_schedule(name: str) -> str:
    """The timeline of a schedule of the library."""
    made = build(name, ranks=RANKS, microbatches=MICROBATCHES)
    return _timeline(
        made, f"{name}: {RANKS} ranks, {made.stages} stages, {MICROBATCHES} microbatches"
    )


def _timeline(made: Schedule, title: str) -> str:
    found: Timeline = simulate(made).timeline
    return draw_svg(found, title=title, note=NOTE)


def cost_of_shares(name: str) -> Costs:
    """Costs in which F, I and W of a rank's whole share of the model take 1 each, and hold 1."""
    share = 1 / RECIPES[name].stages_per_rank
    return Costs(forward=share, input=share, weight=share, activation=share, stash=share)


# ---- diagrams


def _svg(width: int, height: int, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img"><style>{_STYLE}</style>'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0 8 4 0 8z" style="fill:#555;stroke:none"/></marker></defs>'
        f'<rect width="{width}" height="{height}" fill="#fff"/>'
    )
    return "\n".join((head, *parts, "</svg>\n"))


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(text)}</text>'


def _box(x: float, y: float, width: float, height: float, fill: str, text: str = "") -> str:
    box = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}"/>'
    return box + (_text(x + width / 2, y + height / 2 + 5, text) if text else "")


def _frame(x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="frame" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>'


def _arrow(path: str) -> str:
    return f'<path d="{path}" marker-end="url(#tip)"/>'


def _cut() -> str:
    """A model, its stages, and the ranks that hold them."""
    modules = ["embed", *[f"block {i}" for i in range(6)], "norm", "head"]
    stages = [modules[:2], modules[2:4], modules[4:6], modules[6:]]
    parts = [_text(10, 32, "the model's modules (units)", "small left")]
    x = 10.0
    for stage, units in enumerate(stages):
        start = x
        for name in units:
            parts.append(_box(x, 42, 68, 30, _F, name))
            x += 72
        width = x - start - 4
        parts += [
            _frame(start - 3, 110, width + 6, 40),
            _text(start + width / 2, 135, f"stage {stage}"),
            _arrow(f"M{start + width / 2:g} 76V104"),
            _box(start, 190, width, 34, "#e8e8e8", f"rank {stage}"),
            _arrow(f"M{start + width / 2:g} 154V184"),
        ]
        if stage:
            parts.append(_arrow(f"M{start - 24:g} 200H{start - 2:g}"))
            parts.append(_arrow(f"M{start - 2:g} 214H{start - 22:g}"))
        x += 24
    parts.append(_text(10, 248, "activations go to the right, gradients come back", "small left"))
    return _svg(round(x), 262, parts)


def _placements() -> str:
    """Which rank holds which stages: one each, looped, and in a V."""
    kinds = {
        "one stage per rank": [[0], [1], [2], [3]],
        "looped: 0 to 3, again 4 to 7": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "in a V: down and back": [[0, 7], [1, 6], [2, 5], [3, 4]],
    }
    parts = []
    for column, (title, ranks) in enumerate(kinds.items()):
        left = 60 + column * 230
        parts.append(_text(left + 60, 24, title))
        for rank, stages in enumerate(ranks):
            y = 40 + rank * 44
            parts.append(_frame(left, y, 120, 36))
            parts.append(_text(left - 8, y + 23, f"rank {rank}", "small right"))
            parts += [
                _box(left + 10 + place * 52, y + 4, 46, 28, (_F, _I)[place], str(stage))
                for place, stage in enumerate(stages)
            ]
    return _svg(700, 224, parts)


def _travel() -> str:
    """Values between stages, one of which skips two."""
    parts = []
    for stage in range(4):
        x = 20 + stage * 170
        parts.append(_box(x, 70, 90, 44, _F, f"stage {stage}"))
        if stage:
            parts.append(_arrow(f"M{x - 78} 84H{x - 3}"))
            parts.append(_arrow(f"M{x - 3} 102H{x - 76}"))
    parts += [
        _arrow("M85 68C140 14 500 14 572 66"),
        _arrow("M572 118C500 170 140 170 88 117"),
        _text(330, 22, "a skip connection is sent once, from where it is made to where it is used"),
        _text(330, 176, "and its gradient comes back the same way", "small"),
    ]
    return _svg(640, 190, parts)


def _choice() -> str:
    """What each schedule costs: idle time against memory."""
    spots = []
    for name in COMPARED:
        ran = simulate(build(name, ranks=RANKS, microbatches=MICROBATCHES), cost_of_shares(name))
        spots.append((max(ran.peak_memory), 100 * ran.bubble, name))
    left, top, width, height, most_x, most_y = 60, 20, 560, 300, 9.0, 30.0
    parts = list(_grid(left, top, width, height, (most_x, most_y)))
    taken: dict[tuple[float, float], int] = {}
    for memory, bubble, name in sorted(spots):
        x, y = left + memory / most_x * width, top + height - bubble / most_y * height
        place = (round(x / 40), round(y / 12))
        above = taken[place] = taken.get(place, -1) + 1
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{_B}"/>')
        parts.append(_text(x + 8, y + 4 - 14 * above, name, "left"))
    return _svg(720, 370, parts)


def _grid(left: int, top: int, width: int, height: int, most: tuple[float, float]) -> Iterator[str]:
    for memory in range(int(most[0]) + 1):
        x = left + memory / most[0] * width
        yield f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{top + height}"/>'
        yield _text(x, top + height + 16, str(memory), "small")
    for bubble in range(0, int(most[1]) + 1, 5):
        y = top + height - bubble / most[1] * height
        yield f'<line x1="{left}" y1="{y:.1f}" x2="{left + width}" y2="{y:.1f}"/>'
        yield _text(left - 6, y + 4, f"{bubble} %", "small right")
    yield _text(left, top + height + 38, "peak memory, in microbatches of a rank's share", "left")
    yield _text(left + 6, top + 14, "idle time", "left small")


def logo() -> str:
    """Three ranks of a pipeline."""
    boxes = [
        f'<rect x="{x}" y="{y}" width="{w}" height="5" rx="1" fill="{fill}"/>'
        for x, y, w, fill in (
            (2, 4, 9, _F), (12, 4, 4, _I), (17, 4, 5, _W),
            (5, 10, 6, _F), (12, 10, 6, _I), (19, 10, 3, _W),
            (8, 16, 5, _F), (14, 16, 8, _I),
        )
    ]  # fmt: skip
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24">{"".join(boxes)}</svg>\n'


# ---- what the repository itself shows


def table() -> str:
    """The schedules side by side, for one model: costs and memory are those of a rank's whole share."""
    head = (
        "| schedule | stages per rank | also called | makespan | bubble | longest-stage bubble "
        "| peak memory |",
        "|---|---|---|---:|---:|---:|---:|",
    )
    pictures = (f"![{name}](schedules/{name.lower()}.svg)" for name in COMPARED)
    return "\n".join((*head, *map(_row, COMPARED), "", *pictures))


def _row(name: str) -> str:
    recipe = RECIPES[name]
    ran = simulate(build(name, ranks=RANKS, microbatches=MICROBATCHES), cost_of_shares(name))
    stages = (
        f"any, by default {recipe.stages_per_rank}" if recipe.any_stages else recipe.stages_per_rank
    )
    return (
        f"| [{name}](schedules/{name.lower()}.svg) | {stages} | {', '.join(recipe.aliases)} "
        f"| {ran.makespan:g} | {100 * ran.bubble:.1f} % | {100 * ran.longest_stage_bubble:.1f} % "
        f"| {max(ran.peak_memory):g} |"
    )


def page() -> str:
    """The page with a current table."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def kept() -> dict[Path, str]:
    """Every drawn file, and what it should hold."""
    return {PAGE: page()} | {DOCS / path: text for path, text in drawn().items()}


if __name__ == "__main__":
    for file, content in kept().items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(content)
