"""``penstock train``: the ready-made trainer."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer

from penstock import train
from penstock.cli.flags import PROCESSES, Flags, command
from penstock.cli.run import start

app = typer.Typer(add_completion=False)


def run_training(flags: Flags, config: Path | None) -> int:
    """Train a byte-level GPT through pipeline stages.

    All ranks take turns in one process; with --processes, or under torchrun, each rank has its own process,
    as it always has with --replicas.
    """
    processes = flags.pop(PROCESSES, None)
    if processes is None and "WORLD_SIZE" not in os.environ:
        processes = train.processes_needed(flags, config)
    if processes is not None:
        return start(["-m", "penstock", *_without_processes(sys.argv[1:])], processes)
    train.train(train.resolve(flags, config))
    return 0


def _without_processes(arguments: list[str]) -> list[str]:
    """The arguments of each process: those of this one except for the number of processes."""
    found = iter(arguments)
    kept = []
    for argument in found:
        if argument == "--processes":
            next(found, None)
        elif not argument.startswith("--processes="):
            kept.append(argument)
    return kept


app.command()(command(run_training))
