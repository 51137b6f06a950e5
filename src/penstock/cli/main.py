"""The ``penstock`` command: finds the subcommand and imports no more than that one needs."""

from __future__ import annotations

import platform
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from penstock.cli.exits import guarded, leaving_on_sigterm

COMMANDS = {
    "train": "Train a byte-level GPT through pipeline stages.",
    "run": "Run a script in one process per rank on this machine; when one fails, all end.",
    "plan": "Find the fastest ways to run a model on a number of devices, before it runs.",
    "checkpoint": "See what checkpoints hold, and export weights.",
    "schedule": "List, draw, check, simulate, convert and compare schedules; no model needed.",
}
"""What ``penstock --help`` lists. Each is a module of this package with an ``app``, imported when called."""


class Lazily(TyperGroup):
    """A group that imports a command when it is called, not when it is listed."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the arguments name, and what is left for it."""
        name, listed, rest = super().resolve_command(ctx, args)
        return name, loaded(name) if name in COMMANDS else listed, rest


def loaded(name: str) -> Any:
    """A subcommand, as typer runs it."""
    command = typer.main.get_command(import_module(f"penstock.cli.{name}").app)
    command.name = name
    return command


app = typer.Typer(cls=Lazily)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(
            f"penstock {_installed('penstock')}, torch {_installed('torch')}, "
            f"Python {platform.python_version()}"
        )
        raise typer.Exit


def _installed(package: str) -> str:
    # Slow to import, and needed by nothing else here.
    metadata = import_module("importlib.metadata")
    try:
        return str(metadata.version(package))
    except metadata.PackageNotFoundError:
        return "not installed"


@app.callback()
def _root(
    shown: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the versions and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Pipeline parallelism for PyTorch."""


def _listed(name: str, help_: str) -> None:
    """List a command; what it takes is known when it is called."""
    app.command(name, help=help_)(lambda: None)


for _name, _help in COMMANDS.items():
    _listed(_name, _help)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: what follows the program's name; by default from ``sys.argv``.

    Returns:
        The exit status: 0 done, 2 a wrong flag or argument, 65 a file that cannot be used, 70 an exception in
        the user's code or in Penstock, 75 a rank died or fell silent, so that trying again is sensible, 76 a
        loss or gradient that is not finite, 130 interrupted, 143 told to end.
    """
    with leaving_on_sigterm():
        return guarded(lambda: app(arguments, prog_name="penstock", standalone_mode=False))
