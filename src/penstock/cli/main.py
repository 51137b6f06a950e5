"""The ``penstock`` command."""

from __future__ import annotations

from pathlib import Path

import typer

from penstock import train
from penstock.cli import schedule
from penstock.cli.exits import guarded, leaving_on_sigterm
from penstock.cli.flags import Flags, command

app = typer.Typer(add_completion=False)


@app.callback()
def _root() -> None:
    """Pipeline parallelism for PyTorch."""


def run_training(flags: Flags, config: Path | None) -> None:
    """Train a byte-level GPT through pipeline stages.

    In one process all ranks take turns; start it with torchrun for a process a rank.
    """
    train.train(train.resolve(flags, config))


app.command("train")(command(run_training))
app.add_typer(schedule.app, name="schedule")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: what follows the program's name; by default from ``sys.argv``.

    Returns:
        The exit status: 0 done, 2 a wrong call, 65 a wrong file, 70 a failure with a traceback,
        130 interrupted.
    """
    with leaving_on_sigterm():
        return guarded(lambda: app(arguments, prog_name="penstock", standalone_mode=False))
