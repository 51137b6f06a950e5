"""The ``penstock`` command: its subcommands, and the exit status and message of each error.

Nothing here imports torch: the parts of penstock that need it are imported when a command uses them.
"""

from __future__ import annotations

import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Annotated, Protocol, runtime_checkable

import typer

from penstock.cli import checkpoint, doctor, plan, schedule, train
from penstock.errors import (
    FAILURE,
    INTERRUPTED,
    OK,
    TERMINATED,
    PeerFailed,
    printable,
    status_of,
)

app = typer.Typer()


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(
            f"{_installed('penstock-pipeline')}, {_installed('torch')}, Python {platform.python_version()}"
        )
        raise typer.Exit


def _installed(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package} (not installed)"


Version = Annotated[
    bool,
    typer.Option(
        "--version", help="Show the versions and exit.", callback=_show_version, is_eager=True
    ),
]


@app.callback()
def _root(version: Version = False) -> None:
    """Pipeline parallelism for PyTorch."""


app.command()(train.train)
app.command()(plan.plan)
app.command()(doctor.doctor)
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(schedule.app, name="schedule")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: what follows the program's name; by default from ``sys.argv``.

    Returns:
        The exit status: 0 done, 1 ``doctor`` found something odd, 2 a wrong flag or argument, 65 a file that
        cannot be used, 70 an exception in the user's code or in Penstock, 75 a rank died or fell silent, so
        that it makes sense to try again, 76 a loss or gradient that is not finite, 130 interrupted, 143
        terminated.
    """
    with leaving_on_signals():
        return guarded(lambda: app(arguments, prog_name="penstock", standalone_mode=False))


# ---- from an error or a signal to an exit status, and to a message

PATIENCE = 10.0
"""Seconds that the other processes of a machine wait for the first one to report an error."""


@runtime_checkable
class ParserError(Protocol):
    """An error of the command line's parser; typer has no public name for its class."""

    exit_code: int

    def format_message(self) -> str:
        """The error in one line."""


def guarded(command: Callable[[], object]) -> int:
    """Run a command, and turn its exceptions into an exit status.

    A mistake in the call or in a file is reported in one line. Anything else keeps its traceback.
    """
    try:
        result = command()
    except (KeyboardInterrupt, typer.Abort):
        result = INTERRUPTED
    except Exception as error:
        # As the interpreter does: torchrun's error file tells it.
        sys.last_value = error
        return _report(error)
    if result == INTERRUPTED and _is_first_of_machine():
        _print("interrupted")
    return result if isinstance(result, int) else OK


def _report(error: Exception) -> int:
    if isinstance(error, ParserError):
        message = error.format_message().rstrip(".")
        if message:
            _print_once(f"{message}; see --help")
        return error.exit_code
    status = status_of(error)
    if isinstance(error, PeerFailed):
        _print(str(error))
    elif status == FAILURE:
        traceback.print_exception(error)
    else:
        _print_once(str(error))
    return status


def _print_once(message: str) -> None:
    """Print one line, in general only once per machine.

    Under torchrun all processes have the same message. The first one prints it and exits, and torchrun then
    ends the others; a process that is still alive after a while prints its own.
    """
    if not _is_first_of_machine():
        time.sleep(PATIENCE)
    _print(message)


def _print(message: str) -> None:
    print(f"penstock: {printable(' '.join(message.split()))}", file=sys.stderr)  # noqa: T201


def _is_first_of_machine() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """Unwind the open contexts on SIGTERM, as on Ctrl-C, so that a terminal gets its cursor back.

    A second signal, of either kind, ends the process at once.
    """
    before = {one: signal.signal(one, _leave) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, _: object) -> None:
    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, signal.SIG_DFL)
    if number == signal.SIGTERM:
        sys.exit(TERMINATED)
    raise KeyboardInterrupt
