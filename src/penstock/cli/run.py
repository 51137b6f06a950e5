"""``penstock run``: a script, run in one process per rank on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock import launch
from penstock.errors import UsageError

app = typer.Typer(add_completion=False)

Processes = Annotated[
    int, typer.Option("--processes", "-n", help="Processes to start, one per rank.")
]
Script = Annotated[str, typer.Argument(help="The script, or with --module a module's name.")]
AsModule = Annotated[
    bool, typer.Option("--module", "-m", help="SCRIPT is a module, as for python -m.")
]


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def run(
    context: typer.Context, script: Script, processes: Processes, module: AsModule = False
) -> int:
    """Run a script in one process per rank on this machine; when one fails, all end.

    Arguments after SCRIPT are passed on to it.
    """
    if not module and not Path(script).is_file():
        raise UsageError(
            f"there is no script {script!r} here; give a path, or with --module the name of a module"
        )
    program = ["-m", script] if module else [script]
    return start([*program, *context.args], processes)


def start(arguments: list[str], processes: int) -> int:
    """Run Python with these arguments in several processes; returns the exit status for all of them."""
    outcome = launch.launch([sys.executable, "-u", *arguments], processes)
    if outcome.causes:
        print(f"penstock: {outcome}", file=sys.stderr)  # noqa: T201
    return outcome.status
