"""``penstock run``: a script in one process per rank on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.errors import UsageError
from penstock.launch import launch

Processes = Annotated[int, typer.Option("--processes", "-n", help="How many, one per rank.")]
Script = Annotated[str, typer.Argument(help="The script; with --module, a module.")]
AsModule = Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module.")]


def run(
    context: typer.Context, script: Script, processes: Processes, module: AsModule = False
) -> int:
    """Run a script in one process per rank on this machine, and end all when one fails.

    What follows SCRIPT is passed on to it.
    """
    if not module and not Path(script).is_file():
        raise UsageError(f"there is no script {script!r}")
    program = ["-m", script] if module else [script]
    return start([*program, *context.args], processes)


def start(arguments: list[str], processes: int) -> int:
    """Run Python with these arguments in so many processes; the exit status that says best how it went."""
    outcome = launch([sys.executable, "-u", *arguments], processes)
    if outcome.causes:
        print(f"penstock: {outcome}", file=sys.stderr)  # noqa: T201
    return outcome.status
