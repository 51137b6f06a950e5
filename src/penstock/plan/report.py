"""The report: one HTML file with the table of plans, and each plan's steps, memory and cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from penstock._engine.values import bytes_as_text
from penstock.plan.choice import COLUMNS, Order, Plan, row_of, seconds_as_text
from penstock.plan.costs import Profile, UnitCost
from penstock.schedule import Op, Timeline, draw_svg
from penstock.schedule.drawing import COLOURS

MOST_BOXES = 20_000
"""The most actions that are drawn; if that is not enough for all plans, only the first have pictures."""
WIDTH, ROW = 900, 60
"""The size of the picture of a rank's memory."""
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ margin: 1.2rem; font: 15px/1.45 system-ui, sans-serif; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .88rem; }}
th, td {{ padding: .3rem .6rem; text-align: left; white-space: nowrap; border-bottom: 1px solid #8886; }}
summary {{ font-size: 1.1rem; margin: 1rem 0 .5rem; cursor: pointer; }}
</style>
<h1>{title}</h1>
<p>{note}</p>
{body}
</html>
"""


def report_of(
    plans: Iterable[Plan],
    *,
    profile: Profile | None = None,
    title: str = "A plan and its step",
    note: str = "",
    measured: Timeline | None = None,
) -> str:
    """The report as the text of an HTML file that needs no other file, no script and no network.

    Args:
        plans: the plans, the fastest first.
        profile: the profile that they were made from, to show the costs of each unit.
        title: the heading.
        note: a sentence below the heading.
        measured: a step that ran the first plan, to show next to its simulation.
    """
    plans = list(plans)
    rows = [[str(n), *row_of(plan, plans[0])] for n, plan in enumerate(plans, 1)]
    parts = [_table(["#", *COLUMNS], rows)]
    left = MOST_BOXES
    for number, plan in enumerate(plans):
        left -= sum(map(len, plan.schedule.programs))
        parts += [
            f"<details{' open' if number == 0 else ''}>"
            f"<summary>Plan {number + 1}: {escape(plan.shape.schedule)}</summary>",
            *(
                _pictures(plan, measured if number == 0 else None)
                if not number or left >= 0
                else ()
            ),
            _cut(plan, profile),
            "</details>",
        ]
    return _PAGE.format(title=escape(title), note=escape(note), body="\n".join(parts))


def _pictures(plan: Plan, measured: Timeline | None) -> Iterator[str]:
    ran = plan.simulation
    gaps = [gap for rank in range(plan.ranks) for gap in ran.gaps(rank)]
    yield _wide(draw_svg(ran.timeline, title="simulated", gaps=gaps))
    if measured is not None:
        yield _wide(draw_svg(measured, title="measured"))
    yield "<h2>Memory over time</h2>"
    yield _wide(_memory(plan))


def _memory(plan: Plan) -> str:
    """Return what each rank holds while it computes, as an SVG document."""
    length, highest = plan.timeline.makespan or 1.0, max(*plan.memory, plan.limit, 1.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{ROW * plan.ranks}" '
        'font-size="12" role="img">'
    ]
    for rank, sizes in enumerate(Order(plan.schedule).held(plan.stage_costs)):
        spans = [span for span in plan.timeline.of_rank(rank) if span.action.op in COLOURS]
        base, scale = ROW * (rank + 1) - 4, (ROW - 22) / highest

        def y(size: float, base: float = base, scale: float = scale) -> str:
            return f"{base - size * scale:.1f}"

        corners = [
            f"{WIDTH * when / length:.1f},{y(size)}"
            for span, size in zip(spans, sizes, strict=True)
            for when in (span.start, span.end)
        ]
        static = plan.stage_costs.static_on(plan.schedule.placement, rank)
        told = f"rank {rank}: at most {bytes_as_text(plan.memory[rank])}"
        parts += [
            f"<g><title>{told}</title>",
            f'<polygon points="0,{base} {" ".join(corners)} {WIDTH},{base}" fill="{COLOURS[Op.F]}"/>',
            f'<rect width="{WIDTH}" y="{y(static)}" height="{static * scale:.1f}" fill="#7f8c9b"/>',
            f'<text y="{base - ROW + 16}" fill="currentColor">{told}, of which weights, gradients and '
            f"optimizer states {bytes_as_text(static)}</text>",
            f'<path d="M0 {y(plan.limit)}H{WIDTH}" stroke="#b3261e"/></g>'
            if plan.limit
            else "</g>",
        ]
    return "\n".join([*parts, "</svg>"])


def _cut(plan: Plan, profile: Profile | None) -> str:
    """The modules of each stage, with their costs if they are known."""
    units = profile.at(plan.shape.samples).units if profile is not None else ()
    known = {unit.path: unit for unit in units}
    head = ["stage", "rank", "module", "recomputed"]
    head += ["forward", "backward", "spread", "held", "I to W", "weights"] if known else []
    rows = [
        [
            str(stage),
            str(rank),
            path,
            "yes" if path in plan.recompute else "",
            *_costs(known.get(path)),
        ]
        for stage, (rank, paths) in enumerate(
            zip(plan.schedule.placement.rank_of, plan.stages, strict=True)
        )
        for path in paths
    ]
    return "<h2>The cut</h2>" + _table(head, rows)


def _costs(unit: UnitCost | None) -> list[str]:
    if unit is None:
        return []
    times = [seconds_as_text(unit.forward), seconds_as_text(unit.backward), f"{unit.spread:.1%}"]
    return times + [bytes_as_text(size) for size in (unit.held, unit.stash, unit.parameters)]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [("th", head), *(("td", row) for row in rows)]
    return _wide(
        "<table>"
        + "\n".join(
            "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
            for tag, cells in lines
        )
        + "</table>"
    )


def _wide(content: str) -> str:
    return f'<div class="wide">{content}</div>'
