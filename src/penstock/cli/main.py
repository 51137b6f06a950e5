"""The ``penstock`` command."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer

from penstock import train
from penstock.cli import checkpoint, schedule
from penstock.cli.exits import guarded, leaving_on_sigterm
from penstock.cli.flags import PROCESSES, Flags, command
from penstock.cli.plan import plan
from penstock.cli.run import run, start

app = typer.Typer(add_completion=False)


@app.callback()
def _root() -> None:
    """Pipeline parallelism for PyTorch."""


def run_training(flags: Flags, config: Path | None) -> int:
    """Train a byte-level GPT through pipeline stages.

    In one process all ranks take turns; with --processes, or started by torchrun, each has its own, as they
    always have with --replicas.
    """
    processes = flags.pop(PROCESSES, None)
    if processes is None and "WORLD_SIZE" not in os.environ:
        processes = train.processes_needed(flags, config)
    if processes is not None:
        return start(["-m", "penstock", *_without_processes(sys.argv[1:])], processes)
    train.train(train.resolve(flags, config))
    return 0


def _without_processes(arguments: list[str]) -> list[str]:
    """The arguments for each process: those of this one but for how many there are."""
    found = iter(arguments)
    kept = []
    for argument in found:
        if argument == "--processes":
            next(found, None)
        elif not argument.startswith("--processes="):
            kept.append(argument)
    return kept


app.command("train")(command(run_training))
app.command("run", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(run)
app.command("plan")(plan)
app.add_typer(schedule.app, name="schedule")
app.add_typer(checkpoint.app, name="checkpoint")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: what follows the program's name; by default from ``sys.argv``.

    Returns:
        The exit status: 0 done, 2 a wrong call, 65 a wrong file, 70 the user's or Penstock's code failed,
        75 a rank died or was silent, so that trying again is sensible, 76 a loss or gradient that is not
        finite, 130 interrupted, 143 told to end.
    """
    with leaving_on_sigterm():
        return guarded(lambda: app(arguments, prog_name="penstock", standalone_mode=False))
