"""The ``penstock`` command: it imports only the subcommand that is called, and turns errors into statuses."""

from __future__ import annotations

import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any, Protocol, runtime_checkable

import typer
from typer.core import TyperGroup

from penstock.errors import (
    FAILURE,
    INPUT,
    INTERRUPTED,
    NON_FINITE,
    OK,
    USAGE,
    InputFileError,
    NonFiniteError,
    PeerFailed,
    UsageError,
    printable,
)
from penstock.faults.processes import interrupt, terminate

COMMANDS = {
    "train": "Train a byte-level GPT through pipeline stages.",
    "run": "Run a script in one process per rank on this machine; when one fails, all end.",
    "plan": "Find the fastest ways to run a model on a number of devices, before it runs.",
    "checkpoint": "See what checkpoints hold, and export weights.",
    "schedule": "List, draw, check, simulate, convert and compare schedules; no model needed.",
}
"""What ``penstock --help`` lists. Each is a module of this package with an ``app``, imported on a call."""


class Lazily(TyperGroup):
    """A group that imports a command when it is called, not when it is listed."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the arguments name, and the arguments that are left for it."""
        name, listed, rest = super().resolve_command(ctx, args)
        return name, loaded(name) if name in COMMANDS else listed, rest


def loaded(name: str) -> Any:
    """A subcommand in the form in which typer runs it."""
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
    # importlib.metadata is slow to import, and only needed here.
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
    """List a command; its options are found when it is called."""
    app.command(name, help=help_)(lambda: None)


for _name, _help in COMMANDS.items():
    _listed(_name, _help)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: what follows the program's name; by default from ``sys.argv``.

    Returns:
        The exit status: 0 done, 2 a wrong flag or argument, 65 a file that cannot be used, 70 an exception in
        the user's code or in Penstock, 75 a rank died or fell silent, so that it makes sense to try again, 76
        a loss or gradient that is not finite, 130 interrupted, 143 terminated.
    """
    with leaving_on_sigterm():
        return guarded(lambda: app(arguments, prog_name="penstock", standalone_mode=False))


# ---- from an error to an exit status, and to a message


PATIENCE = 10.0
"""How many seconds the other processes of a machine wait for the first one to say what is wrong."""


@runtime_checkable
class Refusal(Protocol):
    """What the parser of the command line raises; typer has no public name for that class."""

    exit_code: int

    def format_message(self) -> str:
        """What is wrong, in a line."""


def guarded(run: Callable[[], object]) -> int:
    """Run a command, and turn what it raises into an exit status.

    A mistake in the call or in a file is reported in one line. Anything else keeps its traceback.
    """
    try:
        result = run()
    except (KeyboardInterrupt, typer.Abort):
        result = INTERRUPTED
    except Exception as error:
        return _report(error)
    if result == INTERRUPTED and _first_of_machine():
        _tell("interrupted")
    return result if isinstance(result, int) else OK


@contextmanager
def leaving_on_sigterm() -> Iterator[None]:
    """Leave through the open contexts on SIGTERM, as on Ctrl-C, so that a terminal gets its cursor back.

    A second signal ends the process at once.
    """
    handlers = {signal.SIGTERM: terminate, signal.SIGINT: interrupt}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _report(error: Exception) -> int:
    if isinstance(error, Refusal):
        if message := error.format_message().rstrip("."):
            _tell(f"{message}; see --help")
        return error.exit_code
    if isinstance(error, (UsageError, InputFileError)):
        _tell(str(error))
        return INPUT if isinstance(error, InputFileError) else USAGE
    if isinstance(error, PeerFailed):
        _say(str(error))
        return error.status
    if isinstance(error, NonFiniteError):
        _tell(str(error))
        return NON_FINITE
    traceback.print_exception(error)
    return FAILURE


def _tell(message: str) -> None:
    """Print one line, in general only once per machine.

    Under torchrun all processes have the same message. The first one prints it and ends, upon which torchrun
    ends the others; one that is still alive after a while prints its own.
    """
    if not _first_of_machine():
        time.sleep(PATIENCE)
    _say(message)


def _say(message: str) -> None:
    print(f"penstock: {printable(' '.join(message.split()))}", file=sys.stderr)  # noqa: T201


def _first_of_machine() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"
