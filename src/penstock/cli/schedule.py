"""``penstock schedule``: list, show, validate, simulate, convert and compare schedules; no model needed."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from penstock import schedule as ps
from penstock.cli.schedule_options import CostFlags, PassFlags, Shape, Source, grouped
from penstock.errors import INPUT, InputFileError, ScheduleError, UsageError
from penstock.schedule.files import csv_table
from penstock.schedule.library import RECIPES

app = typer.Typer(
    help="List, draw, check, simulate, convert and compare schedules; no model needed.",
    no_args_is_help=True,
    add_completion=False,
)

SHOWN_PROBLEMS = 20
GAP = 2
"""Spaces between columns."""
COLUMNS = (
    "schedule",
    "ranks",
    "stages",
    "makespan",
    "bubble",
    "longest-stage bubble",
    "peak memory",
    "messages",
)

WriteSvg = Annotated[
    Path | None, typer.Option("--svg", help="Also write the timeline to this file, as SVG.")
]
WriteTrace = Annotated[
    Path | None,
    typer.Option("--trace", help="Also write it to this file, as a Chrome trace for Perfetto."),
]
WriteCsv = Annotated[
    Path | None, typer.Option("--csv", help="Also write the table to this file, as CSV.")
]
Width = Annotated[
    int | None,
    typer.Option("--width", help="Characters per line. Default: the terminal's width.", min=40),
]


def list_schedules() -> None:
    """List the schedules that have a name."""
    table = Table("name", "stages per rank", "also called", "what it is", box=None, pad_edge=False)
    for name, recipe in RECIPES.items():
        number = "any" if recipe.any_stages else str(recipe.stages_per_rank)
        table.add_row(name, number, ", ".join(recipe.aliases), recipe.summary)
    _print(table)


def show(
    source: Source,
    shape: Shape,
    costs: CostFlags,
    svg: WriteSvg = None,
    trace: WriteTrace = None,
    width: Width = None,
) -> None:
    """Draw a schedule: in the terminal, as SVG, or as a Chrome trace."""
    ran = _simulated(source, shape, costs)
    made, timeline = ran.schedule, ran.timeline
    typer.echo(_title(made))
    typer.echo(ps.draw_text(timeline, width=_columns(width), colour=_in_colour()))
    note = "Simulated times."
    _write(svg, lambda: ps.draw_svg(timeline, title=_title(made), note=note))
    _write(trace, timeline.to_chrome_trace)


def _columns(width: int | None) -> int:
    return shutil.get_terminal_size().columns if width is None else width


def _in_colour() -> bool:
    """Whether a terminal is there to see it, and its user does not mind (https://no-color.org)."""
    return (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def validate(source: Source, shape: Shape) -> int:
    """Prove that a schedule completes, or say why it does not."""
    return _report(ps.validate(source.read(shape)))


def simulate(source: Source, shape: Shape, costs: CostFlags) -> None:
    """Run a schedule on simulated clocks: times, bubbles, memory, and what the ranks wait for."""
    ran = _simulated(source, shape, costs)
    unit = f" {costs.unit}" if costs.unit else ""
    typer.echo(_title(ran.schedule))
    typer.echo(f"makespan              {ran.makespan:g}{unit}")
    typer.echo(f"bubble                {_percent(ran.bubble)}")
    typer.echo(f"longest-stage bubble  {_percent(ran.longest_stage_bubble)}")
    typer.echo(f"messages              {ran.messages}")
    table = Table("rank", "busy", "idle", "peak memory", "longest wait", box=None, pad_edge=False)
    for rank, (busy, peak) in enumerate(zip(ran.busy, ran.peak_memory, strict=True)):
        table.add_row(
            str(rank),
            f"{busy:g}",
            f"{ran.makespan - busy:g}",
            f"{peak:g}",
            _longest_wait(ran, rank),
        )
    _print(table)


def convert(source: Source, shape: Shape, passes: PassFlags, output: Path) -> int:
    """Write a schedule to a .csv or .json file, after passes; one that cannot complete is refused."""
    made = passes.apply(source.read(shape))
    report = ps.validate(made)
    if not report.ok:
        return _report(report)
    _writing(output, lambda: ps.save(made, output))
    typer.echo(f"{output}: {_title(made)}, {sum(map(len, made.programs))} actions")
    return 0


def compare(
    shape: Shape,
    costs: CostFlags,
    names: Annotated[
        list[str] | None, typer.Argument(help="Names or files; by default every name.")
    ] = None,
    csv: WriteCsv = None,
    width: Width = None,
) -> None:
    """Put schedules side by side.

    Times are those of a rank's whole share of the model, and memory counts such shares.
    """
    chosen = names or [name for name in ps.names() if name != "forward-only"]
    rows = [_row(name, shape, costs) for name in chosen]
    for line in _columns_of(rows, _columns(width)):
        typer.echo(line)
    _write(csv, lambda: csv_table([COLUMNS, *map(_filled, rows)]))


_COMMANDS: dict[str, Callable[..., object]] = {
    "list": list_schedules,
    "show": show,
    "validate": validate,
    "simulate": simulate,
    "convert": convert,
    "compare": compare,
}
for _name, _command in _COMMANDS.items():
    app.command(_name)(grouped(_command))


def _simulated(source: Source, shape: Shape, costs: CostFlags) -> ps.Simulation:
    made = source.read(shape)
    try:
        return ps.simulate(made, costs.costs())
    except ScheduleError as stops:
        raise InputFileError(f"{source.source}: {stops}") from stops


def _row(name: str, shape: Shape, costs: CostFlags) -> Sequence[str]:
    """A line of the comparison; a named schedule that cannot be of this shape says so."""
    try:
        made = Source(name).read(Shape() if Source(name).is_file else shape)
        ran = ps.simulate(made, costs.costs(share=len(made.placement.stages_on(0))))
    except ScheduleError as refused:
        if name in RECIPES:
            return (name, f"refused: {refused}")
        raise
    return (
        made.name,
        str(made.ranks),
        str(made.stages),
        f"{ran.makespan:g}",
        _percent(ran.bubble),
        _percent(ran.longest_stage_bubble),
        f"{max(ran.peak_memory):g}",
        str(ran.messages),
    )


def _filled(row: Sequence[str]) -> Sequence[str]:
    return (*row, *[""] * (len(COLUMNS) - len(row)))


def _columns_of(rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """The lines of the comparison; where they are too long, the last columns are left out, and said to be.

    Names are never shortened: two that begin alike would look the same.
    """
    said = [row for row in rows if len(row) == len(COLUMNS)]
    sizes = [max(map(len, column)) for column in zip(COLUMNS, *said, strict=True)]
    sizes[0] = max(len(row[0]) for row in (COLUMNS, *rows))
    shown = len(COLUMNS)
    while shown > 2 and sum(sizes[:shown]) + GAP * (shown - 1) > width:
        shown -= 1
    for row in (COLUMNS, *rows):
        cells = [
            text.ljust(size) if at == 0 else text.rjust(size)
            for at, (text, size) in enumerate(zip(row, sizes, strict=False))
        ]
        yield (
            (" " * GAP)
            .join(cells[:shown] if len(row) == len(COLUMNS) else [cells[0], row[1]])
            .rstrip()
        )
    if shown < len(COLUMNS):
        yield f"Not shown, as a line has {width} characters: {', '.join(COLUMNS[shown:])}."


def _longest_wait(ran: ps.Simulation, rank: int) -> str:
    gap = max(ran.gaps(rank), key=lambda gap: gap.end - gap.start, default=None)
    return (
        "" if gap is None else f"{gap.end - gap.start:g} before {gap.action}, for {gap.waits_for}"
    )


def _report(report: ps.Report) -> int:
    lines = str(report).splitlines()
    typer.echo("\n".join(lines[: SHOWN_PROBLEMS + 1]))
    if len(lines) > SHOWN_PROBLEMS + 1:
        typer.echo(f"  and {len(lines) - SHOWN_PROBLEMS - 1} more")
    return 0 if report.ok else INPUT


def _title(made: ps.Schedule) -> str:
    return (
        f"{made.name}: {made.ranks} ranks, {made.stages} stages, {made.microbatches} microbatches"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _print(table: Table) -> None:
    Console(width=shutil.get_terminal_size().columns, markup=False, highlight=False).print(table)


def _write(path: Path | None, text: Callable[[], str]) -> None:
    """Write a text to a file, if one is wanted."""
    if path is not None:
        _writing(path, lambda: path.write_text(text(), encoding="utf-8", newline=""))
        typer.echo(f"wrote {path}")


def _writing(path: Path, write: Callable[[], object]) -> None:
    try:
        write()
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from error
