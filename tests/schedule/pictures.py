"""Draws the pictures and the table of docs/schedules.md: ``python -m tests.schedule.pictures``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.schedule import Costs, build, draw_svg, names, simulate
from penstock.schedule.library import RECIPES

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "schedules.md"
RANKS, MICROBATCHES = 4, 8
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
NOTE = "Simulated: F = I = W = 1 unit of one stage, B = 2, messages take no time."


def picture(name: str) -> str:
    """The timeline of a schedule as SVG."""
    made = build(name, ranks=RANKS, microbatches=MICROBATCHES)
    title = f"{name}: {RANKS} ranks, {made.stages} stages, {MICROBATCHES} microbatches"
    return draw_svg(simulate(made).timeline, title=title, note=NOTE)


def path(name: str) -> Path:
    """Where the picture of a schedule is."""
    return DOCS / "schedules" / f"{name.lower()}.svg"


def table() -> str:
    """The schedules side by side, for one model: costs and memory are those of a rank's whole share."""
    head = (
        "| schedule | stages per rank | also called | makespan | bubble | longest-stage bubble "
        "| peak memory |",
        "|---|---|---|---:|---:|---:|---:|",
    )
    shown = [name for name in names() if name != "forward-only"]
    pictures = (f"![{name}](schedules/{name.lower()}.svg)" for name in shown)
    return "\n".join((*head, *map(_row, shown), "", *pictures))


def _row(name: str) -> str:
    recipe = RECIPES[name]
    share = 1 / recipe.stages_per_rank
    costs = Costs(forward=share, input=share, weight=share, activation=share, stash=share)
    ran = simulate(build(name, ranks=RANKS, microbatches=MICROBATCHES), costs)
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


def files() -> Iterator[tuple[Path, str]]:
    """Every generated file and what it should hold."""
    yield PAGE, page()
    for name in names():
        yield path(name), picture(name)


def main() -> None:
    """Write them all."""
    for file, content in files():
        file.write_text(content)


if __name__ == "__main__":
    main()
