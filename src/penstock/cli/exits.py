"""From what went wrong to an exit status, and to what is printed about it."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import typer

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

PATIENCE = 10.0
"""Seconds that the other processes of a machine leave to the first one to say what is wrong."""


@runtime_checkable
class Refusal(Protocol):
    """What the parser of the command line raises; typer has no public name for its class."""

    exit_code: int

    def format_message(self) -> str:
        """What is wrong, in a line."""


def guarded(run: Callable[[], object]) -> int:
    """Run a command and turn what it raises into an exit status.

    A mistake in the call or in a file is told in one line. Anything else keeps its traceback.
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
    """Leave through the contexts that are open, so that a terminal gets its cursor back.

    So does Ctrl-C; a second signal ends the process at once.
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
    """Print one line, as a rule once for a machine.

    Under torchrun all processes have the same to say. The first one says it and ends, upon which
    torchrun ends the others; one that is still there after a while has something of its own to say.
    """
    if not _first_of_machine():
        time.sleep(PATIENCE)
    _say(message)


def _say(message: str) -> None:
    print(f"penstock: {printable(' '.join(message.split()))}", file=sys.stderr)  # noqa: T201


def _first_of_machine() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"
