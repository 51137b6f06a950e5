"""``penstock schedule``: list, show, validate, simulate, convert and compare schedules; no model needed."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from penstock import schedule as ps
from penstock.cli.output import write, write_text
from penstock.errors import INPUT, InputFileError, ScheduleError, UsageError
from penstock.schedule.library import RECIPES
from penstock.schedule.reading import MOST_ACTIONS, SUFFIXES

app = typer.Typer(
    help="List, draw, check, simulate, convert and compare schedules; no model needed.",
    no_args_is_help=True,
    add_completion=False,
)

RANKS = 4
SHOWN_PROBLEMS = 20
PASSES: dict[str, ps.Pass] = {
    "compute-only": ps.compute_only,
    "merge-backward": ps.merge_backward,
    "prefetch": ps.prefetch,
    "offload": ps.offload,
    "reduce-gradients": ps.reduce_gradients,
    "communication": ps.add_communication,
    "wait-for-sends": ps.wait_for_sends,
}


# ---- options that several commands share


SHAPE, COSTS = "Shape of a named schedule", "Costs"
Source = Annotated[
    str,
    typer.Argument(
        help="Name of a schedule, or a .csv or .json file.",
        autocompletion=lambda incomplete: [
            name for name in ps.names() if name.startswith(incomplete)
        ],
    ),
]
Ranks = Annotated[
    int | None, typer.Option("--ranks", "-p", help=f"Default: {RANKS}.", rich_help_panel=SHAPE)
]
Microbatches = Annotated[
    int | None,
    typer.Option("--microbatches", "-m", help="Default: twice the ranks.", rich_help_panel=SHAPE),
]
Stages = Annotated[int | None, typer.Option("--stages-per-rank", "-v", rich_help_panel=SHAPE)]
Slices = Annotated[
    int | None,
    typer.Option("--slices", help="Of sequences, for Seq1F1B.", rich_help_panel=SHAPE),
]
Forward = Annotated[
    str,
    typer.Option(help="Time of F: a number, or one per stage: 1,2,1,2.", rich_help_panel=COSTS),
]
Input = Annotated[str, typer.Option(help="Time of I.", rich_help_panel=COSTS)]
Weight = Annotated[str, typer.Option(help="Time of W.", rich_help_panel=COSTS)]
Backward = Annotated[
    str | None, typer.Option(help="Time of B. Default: I + W.", rich_help_panel=COSTS)
]
Latency = Annotated[float, typer.Option(help="Time of a message.", rich_help_panel=COSTS)]


def _schedule_from(
    source: str,
    ranks: int | None,
    microbatches: int | None,
    stages: int | None,
    slices: int | None = None,
) -> ps.Schedule:
    """Read a schedule from a file, or build a named one in some size."""
    sizes = {"--ranks": ranks, "--microbatches": microbatches, "--stages-per-rank": stages}
    sizes["--slices"] = slices
    if _is_file(source):
        flags = ", ".join(flag for flag, size in sizes.items() if size is not None)
        if flags:
            raise UsageError(f"{flags} is only for a named schedule; {source} has its own size")
        return ps.load(source)
    ranks = RANKS if ranks is None else ranks
    microbatches = 2 * ranks if microbatches is None else microbatches
    if ranks * microbatches * (stages or 1) * (slices or 1) > MOST_ACTIONS:
        raise UsageError(
            f"ranks={ranks}, microbatches={microbatches}: more than {MOST_ACTIONS} actions; "
            "try smaller numbers"
        )
    return ps.build(
        source, ranks=ranks, microbatches=microbatches, stages_per_rank=stages, slices=slices
    )


def _is_file(source: str) -> bool:
    return os.sep in source or Path(source).suffix.lower() in SUFFIXES


def _costs(forward: str, input: str, weight: str, backward: str | None, latency: float) -> ps.Costs:
    return ps.Costs(
        forward=_cost("forward", forward),
        input=_cost("input", input),
        weight=_cost("weight", weight),
        backward=None if backward is None else _cost("backward", backward),
        latency=latency,
    )


def _cost(name: str, text: str) -> float | list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--{name}={text}: must be a number, or one per stage: 1,2,1,2") from None
    return numbers if len(numbers) > 1 else numbers[0]


# ---- the commands


@app.command("list")
def list_schedules() -> None:
    """List the schedules that have a name."""
    table = Table("name", "stages per rank", "also called", "what it is", box=None, pad_edge=False)
    for name, recipe in RECIPES.items():
        number = "any" if recipe.any_stages else str(recipe.stages_per_rank)
        table.add_row(name, number, ", ".join(recipe.aliases), recipe.summary)
    _print(table)


@app.command()
def show(  # noqa: PLR0913 - one parameter for each flag
    source: Source,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: Stages = None,
    slices: Slices = None,
    forward: Forward = "1",
    input: Input = "1",
    weight: Weight = "1",
    backward: Backward = None,
    latency: Latency = 0,
    svg: Annotated[
        Path | None, typer.Option("--svg", help="Also write the timeline to this file, as SVG.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Also write it to this file, as a Chrome trace for Perfetto."),
    ] = None,
    width: Annotated[
        int | None,
        typer.Option("--width", help="Characters per line. Default: the terminal's width.", min=40),
    ] = None,
) -> None:
    """Draw a schedule: in the terminal, as SVG, or as a Chrome trace."""
    costs = _costs(forward, input, weight, backward, latency)
    schedule = _schedule_from(source, ranks, microbatches, stages_per_rank, slices)
    timeline = _simulated(source, schedule, costs).timeline
    typer.echo(_title(schedule))
    typer.echo(ps.draw_text(timeline, width=width or _width(), colour=_in_colour()))
    note = "Simulated times."
    write_text(svg, lambda: ps.draw_svg(timeline, title=_title(schedule), note=note))
    write_text(trace, timeline.to_chrome_trace)


@app.command()
def validate(
    source: Source,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: Stages = None,
    slices: Slices = None,
) -> int:
    """Prove that a schedule completes, or say why it does not."""
    return _report(
        ps.validate(_schedule_from(source, ranks, microbatches, stages_per_rank, slices))
    )


@app.command()
def simulate(  # noqa: PLR0913 - one parameter for each flag
    source: Source,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: Stages = None,
    slices: Slices = None,
    forward: Forward = "1",
    input: Input = "1",
    weight: Weight = "1",
    backward: Backward = None,
    latency: Latency = 0,
) -> None:
    """Run a schedule on simulated clocks: times, bubbles, memory, and what the ranks wait for."""
    costs = _costs(forward, input, weight, backward, latency)
    ran = _simulated(
        source, _schedule_from(source, ranks, microbatches, stages_per_rank, slices), costs
    )
    typer.echo(_title(ran.schedule))
    typer.echo(f"makespan              {ran.makespan:g}")
    typer.echo(f"bubble                {_percent(ran.bubble)}")
    typer.echo(f"longest-stage bubble  {_percent(ran.longest_stage_bubble)}")
    typer.echo(f"messages              {ran.messages}")
    table = Table("rank", "busy", "idle", "peak memory", "longest wait", box=None, pad_edge=False)
    for rank, (busy, peak) in enumerate(zip(ran.busy, ran.peak_memory, strict=True)):
        idle = f"{ran.makespan - busy:g}"
        table.add_row(str(rank), f"{busy:g}", idle, f"{peak:g}", _longest_wait(ran, rank))
    _print(table)


@app.command()
def convert(
    source: Source,
    output: Path,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: Stages = None,
    slices: Slices = None,
    apply: Annotated[
        list[str] | None,
        typer.Option("--pass", help=f"Apply a pass first: {', '.join(PASSES)}; may be repeated."),
    ] = None,
) -> int:
    """Write a schedule to a .csv or .json file, after passes; one that cannot complete is refused."""
    schedule = _schedule_from(source, ranks, microbatches, stages_per_rank, slices)
    for name in apply or ():
        if name not in PASSES:
            raise UsageError(f"--pass={name}: must be one of {', '.join(PASSES)}")
        schedule = PASSES[name](schedule)
    report = ps.validate(schedule)
    if not report.ok:
        return _report(report)
    write(output, lambda path: ps.save(schedule, path))
    typer.echo(f"{_title(schedule)}, {sum(map(len, schedule.programs))} actions")
    return 0


@app.command()
def compare(
    ranks: Ranks = None, microbatches: Microbatches = None, stages_per_rank: Stages = None
) -> None:
    """Put the schedules that train side by side.

    Each of F, I and W takes 1 for a rank's whole share of the model, and memory counts such shares.
    """
    numbers = ("stages", "makespan", "bubble", "longest stage bubble", "peak memory", "messages")
    table = Table(
        "schedule", *(Column(each, justify="right") for each in numbers), box=None, pad_edge=False
    )
    # A name that is shortened could be that of another schedule.
    table.columns[0].no_wrap = True
    refusals = []
    for name in (name for name, recipe in RECIPES.items() if recipe.trains):
        try:
            schedule = _schedule_from(name, ranks, microbatches, stages_per_rank)
        except ScheduleError as refused:
            refusals.append(f"{name} is left out: {refused}")
            continue
        share = 1 / len(schedule.placement.stages_on(0))
        ran = ps.simulate(schedule, ps.Costs(share, share, share, activation=share, stash=share))
        table.add_row(
            name,
            str(schedule.stages),
            f"{ran.makespan:g}",
            _percent(ran.bubble),
            _percent(ran.longest_stage_bubble),
            f"{max(ran.peak_memory):g}",
            str(ran.messages),
        )
    _print(table)
    typer.echo("\n".join(refusals), nl=bool(refusals))


# ---- what they print and write


def _simulated(source: str, schedule: ps.Schedule, costs: ps.Costs) -> ps.Simulation:
    try:
        return ps.simulate(schedule, costs)
    except ScheduleError as stops:
        raise InputFileError(f"{source}: {stops}") from stops


def _width() -> int:
    return shutil.get_terminal_size().columns


def _in_colour() -> bool:
    """Tell whether the output goes to a terminal whose user accepts colours (https://no-color.org)."""
    return (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def _longest_wait(ran: ps.Simulation, rank: int) -> str:
    gap = max(ran.gaps(rank), key=lambda gap: gap.end - gap.start, default=None)
    if gap is None:
        return ""
    return f"{gap.end - gap.start:g} before {gap.action}, for {gap.waits_for}"


def _report(report: ps.Report) -> int:
    lines = str(report).splitlines()
    typer.echo("\n".join(lines[: SHOWN_PROBLEMS + 1]))
    if len(lines) > SHOWN_PROBLEMS + 1:
        typer.echo(f"  and {len(lines) - SHOWN_PROBLEMS - 1} more")
    return 0 if report.ok else INPUT


def _title(schedule: ps.Schedule) -> str:
    sizes = f"{schedule.ranks} ranks, {schedule.stages} stages"
    slices = f" of {schedule.slices} slices" if schedule.slices > 1 else ""
    return f"{schedule.name}: {sizes}, {schedule.microbatches} microbatches{slices}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _print(table: Table) -> None:
    Console(width=_width(), markup=False, highlight=False).print(table)
