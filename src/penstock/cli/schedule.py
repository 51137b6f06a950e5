"""``penstock schedule``: list, show, validate, simulate, convert and compare schedules; no model needed."""

from __future__ import annotations

import inspect
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console
from rich.table import Table

from penstock import schedule as ps
from penstock.errors import INPUT, InputFileError, ScheduleError, UsageError
from penstock.schedule.files import csv_table
from penstock.schedule.library import RECIPES

# ---- groups of options that several commands share


RANKS = 4
SHAPE, COSTS, PASSES = "Shape of a named schedule", "Costs", "Passes"


@dataclass(frozen=True)
class Shape:
    """How large a named schedule is."""

    ranks: Annotated[
        int | None, typer.Option("--ranks", "-p", help=f"Default: {RANKS}.", rich_help_panel=SHAPE)
    ] = None
    microbatches: Annotated[
        int | None,
        typer.Option(
            "--microbatches", "-m", help="Default: twice the ranks.", rich_help_panel=SHAPE
        ),
    ] = None
    stages_per_rank: Annotated[
        int | None, typer.Option("--stages-per-rank", "-v", rich_help_panel=SHAPE)
    ] = None

    def build(self, name: str) -> ps.Schedule:
        """The schedule of this name."""
        ranks = RANKS if self.ranks is None else self.ranks
        microbatches = 2 * ranks if self.microbatches is None else self.microbatches
        return ps.build(
            name, ranks=ranks, microbatches=microbatches, stages_per_rank=self.stages_per_rank
        )

    def refuse(self, path: str) -> None:
        """Refuse sizes where a file has its own."""
        given = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if given:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise UsageError(f"{flags} is only for a named schedule; {path} has its own size")


def matching_names(incomplete: str) -> list[str]:
    """The schedules whose names begin like this, for the shell's completion."""
    return [name for name in ps.names() if name.startswith(incomplete)]


@dataclass(frozen=True)
class Source:
    """Where a schedule comes from."""

    source: Annotated[
        str,
        typer.Argument(
            help="Name of a schedule, or a .csv or .json file.", autocompletion=matching_names
        ),
    ]

    @property
    def is_file(self) -> bool:
        """Whether it is a file rather than a name."""
        return Path(self.source).suffix.lower() in (".csv", ".json")

    def read(self, shape: Shape) -> ps.Schedule:
        """The schedule."""
        if self.is_file:
            shape.refuse(self.source)
            return ps.load(self.source)
        return shape.build(self.source)


@dataclass(frozen=True)
class CostFlags:
    """What actions cost."""

    forward: Annotated[
        str,
        typer.Option(help="Time of F: a number, or one per stage: 1,2,1,2.", rich_help_panel=COSTS),
    ] = "1"
    input: Annotated[str, typer.Option(help="Time of I.", rich_help_panel=COSTS)] = "1"
    weight: Annotated[str, typer.Option(help="Time of W.", rich_help_panel=COSTS)] = "1"
    backward: Annotated[
        str | None, typer.Option(help="Time of B. Default: I + W.", rich_help_panel=COSTS)
    ] = None
    latency: Annotated[float, typer.Option(help="Time of a message.", rich_help_panel=COSTS)] = 0
    unit: Annotated[
        str, typer.Option(help="Unit of the times: s, ms or us.", rich_help_panel=COSTS)
    ] = ""

    def costs(self, share: int = 1) -> ps.Costs:
        """The costs that the flags give.

        Args:
            share: by how many to divide single numbers, and the memory.
        """
        if self.unit not in ("", "s", "ms", "us"):
            raise UsageError(f"--unit={self.unit}: must be s, ms or us")
        return ps.Costs(
            forward=_cost("forward", self.forward, share),
            input=_cost("input", self.input, share),
            weight=_cost("weight", self.weight, share),
            backward=None if self.backward is None else _cost("backward", self.backward, share),
            latency=self.latency,
            activation=1 / share,
            stash=1 / share,
            unit=self.unit,
        )


def _cost(name: str, text: str, share: int) -> float | list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--{name}={text}: must be a number, or one per stage: 1,2,1,2") from None
    return numbers if len(numbers) > 1 else numbers[0] / share


@dataclass(frozen=True)
class PassFlags:
    """What to do to a schedule before it is written."""

    communication: Annotated[
        bool,
        typer.Option(
            "--communication", help="Add the SEND and RECV actions.", rich_help_panel=PASSES
        ),
    ] = False
    compute_only: Annotated[
        bool,
        typer.Option("--compute-only", help="Keep only F, I, W and B.", rich_help_panel=PASSES),
    ] = False
    merge_backward: Annotated[
        bool,
        typer.Option(
            "--merge-backward",
            help="Merge each I and the W after it into B.",
            rich_help_panel=PASSES,
        ),
    ] = False
    prefetch: Annotated[
        int | None,
        typer.Option(
            help="Add UNSHARD and RESHARD; a rank holds at most this many stages gathered.",
            rich_help_panel=PASSES,
        ),
    ] = None
    reduce_gradients: Annotated[
        bool,
        typer.Option(
            "--reduce-gradients",
            help="Add REDUCE_GRAD after each stage's last gradient.",
            rich_help_panel=PASSES,
        ),
    ] = False
    delay_receives: Annotated[
        bool,
        typer.Option(
            "--delay-receives",
            help="Post each RECV just before it is needed.",
            rich_help_panel=PASSES,
        ),
    ] = False
    wait_sends: Annotated[
        bool | None,
        typer.Option(
            "--wait-sends/--no-wait-sends",
            help="Add or remove WAIT_SEND actions. Default: leave them as they are.",
            rich_help_panel=PASSES,
        ),
    ] = None

    def apply(self, schedule: ps.Schedule) -> ps.Schedule:
        """The schedule after the chosen passes."""
        bound = self.prefetch
        chosen: list[tuple[bool, ps.Pass]] = [
            (self.compute_only, ps.compute_only),
            (self.merge_backward, ps.merge_backward),
            (bound is not None, lambda s: ps.prefetch(s, unsharded=bound or 0)),
            (self.reduce_gradients, ps.reduce_gradients),
            (self.communication, ps.add_communication),
            (self.delay_receives, ps.delay_receives),
            (self.wait_sends is True, ps.add_wait_sends),
            (self.wait_sends is False, ps.remove_wait_sends),
        ]
        return ps.compose(*(apply for wanted, apply in chosen if wanted))(schedule)


def grouped(run: Callable[..., object]) -> Callable[..., object]:
    """Make a command for typer of a function that takes groups of options; their fields become options."""
    hints = get_type_hints(run, include_extras=True)
    hints.pop("return", None)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    own = inspect.signature(run).parameters

    def wrapper(**given: Any) -> object:
        built = {
            name: group(
                **{option: given.pop(option) for option in inspect.signature(group).parameters}
            )
            for name, group in groups.items()
        }
        return run(**built, **given)

    parameters = [p for group in groups.values() for p in _parameters(group)]
    parameters += [
        own[name].replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name in hints
        if name not in groups
    ]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # for typer
    wrapper.__doc__ = run.__doc__
    return wrapper


def _parameters(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        own.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, own in inspect.signature(group).parameters.items()
    ]


# ---- the commands


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
    """Whether the output goes to a terminal whose user accepts colours (https://no-color.org)."""
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
    chosen = names or [name for name, recipe in RECIPES.items() if recipe.trains]
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
    """A line of the comparison; for a named schedule that cannot have this shape, the reason."""
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
    """The lines of the comparison; if they are too long, the last columns are left out, and a line says so.

    Names are never shortened, since two that begin alike would look the same.
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
    """Write a text to a file, if a path is given."""
    if path is not None:
        _writing(path, lambda: path.write_text(text(), encoding="utf-8", newline=""))
        typer.echo(f"wrote {path}")


def _writing(path: Path, write: Callable[[], object]) -> None:
    try:
        write()
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from error
