"""Failures of ranks: as data that the ranks exchange, and as reports in files."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import platform
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from penstock._engine.faults.places import Place, Where, clipped
from penstock.errors import (
    INTERRUPTED,
    TEMPORARY,
    TERMINATED,
    PeerFailed,
    StageError,
    first_line,
    status_of,
)

FILE = "failure.json"

logger = logging.getLogger("penstock")


@dataclass(frozen=True)
class Failure(Where):
    """One rank's failure, and where it was.

    Args:
        kind: ``raised`` an exception; ``interrupted`` by a signal; ``died``: its process ended without an
            error; ``silent``: makes no progress; ``left`` the pipeline while others continue; ``lost``: out
            of reach.
        error: the type of the exception.
        what: the first line of the exception's message; for other kinds, what is known.
        trace: the traceback.
        module: the path and type of the module that raised, if a module did.
        status: the exit status for this failure, from 1 to 255.
        time: when it was noticed, in seconds since the epoch, on the clock of rank ``by``.
        by: the global rank of the process that noticed it.
    """

    kind: str = ""
    error: str = ""
    what: str = ""
    trace: str = ""
    module: str = ""
    status: int = TEMPORARY
    time: float = field(default_factory=time.time)
    by: int = -1

    def __post_init__(self) -> None:
        if not 0 < self.status < 256:
            raise ValueError(f"status={self.status}: that of a failure is from 1 to 255")

    def __str__(self) -> str:
        parts = [self.name]
        if self.step:
            parts.append(f"step {self.step}")
        for name in ("stage", "microbatch", "action", "module"):
            if getattr(self, name) not in (None, ""):
                parts.append(f"{name} {getattr(self, name)}")
        said = dict.fromkeys(text for text in (self.error, self.what) if text)
        return ": ".join((", ".join(parts), *said))


def of_exception(error: BaseException, place: Place) -> Failure:
    """The failure that an exception means on the rank at this place."""
    # A StageError in an action only adds the place, which is known anyway: report the user's own error.
    is_placed = isinstance(error, StageError) and place.action is not None
    root = error.__cause__ if is_placed and error.__cause__ else error
    status = status_of(error)
    signal = _SIGNALS.get(status)
    return at_place(
        place,
        "interrupted" if signal else "raised",
        signal or first_line(root),
        error="" if signal else type(root).__name__,
        trace=clipped("".join(traceback.format_exception(error)), "trace"),
        module=clipped(failing_module(root)) if is_placed else "",
        status=status,
        by=place.process,
    )


def at_place(place: Place, kind: str, what: str, **more: Any) -> Failure:
    """A failure of the rank at this place."""
    where = {one.name: getattr(place, one.name) for one in fields(Where)}
    return Failure(**where, kind=kind, what=clipped(what), **more)


# ---- Python exceptions


def failing_module(error: BaseException) -> str:
    """The innermost module whose call raised an error, such as ``'blocks.2' (Block)``.

    Its path starts at the outermost module that contains it. Empty if no module was called.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    calls = [f.f_locals.get("self") for f in frames if f.f_code is nn.Module._call_impl.__code__]
    modules = [module for module in calls if isinstance(module, nn.Module)]
    for outer in modules:
        for path, module in outer.named_modules():
            if path and module is modules[-1]:
                return f"{path!r} ({type(module).__name__})"
    return ""


def without_library_frames(error: BaseException) -> TracebackType | None:
    """The traceback of an error in the user's code, without the frames of Penstock and torch."""
    entries, kept = [], None
    trace = error.__traceback__
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    for each in reversed(entries):
        if not each.tb_frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept


_NOT_THE_USERS = tuple(
    f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[2])
)


_SIGNALS = {
    INTERRUPTED: "was interrupted by Ctrl-C (SIGINT)",
    TERMINATED: "was told to end (SIGTERM)",
}


# ---- reports: ``failure.json``, and torchrun's error file


def versions() -> dict[str, str]:
    """The versions of Penstock, torch and Python."""
    try:
        penstock = version("penstock-pipeline")
    except PackageNotFoundError:
        penstock = "unknown"
    return {
        "penstock": penstock,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def write_report(folder: Path | None, failure: Failure, places: Iterable[Place]) -> None:
    """Write ``failure.json``, unless one exists; it holds nothing of the environment.

    An error in writing is only logged, so that it does not hide the cause.

    Args:
        folder: the folder to write to; ``None`` to write nothing.
        failure: the failure.
        places: where each rank is.
    """
    if folder is None:
        return
    report = {
        "summary": str(failure),
        "failures": [asdict(failure)],
        "ranks": [{**asdict(place), "words": str(place)} for place in places],
        "time": time.time(),
        "versions": versions(),
    }
    path = folder / FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
            try:
                file.write(json.dumps(report, indent=1))
                file.flush()
            except OSError:
                path.unlink()
                raise
    except OSError as error:
        logger.error("penstock: the report of the failure could not be written: %s", error)


def uncaught_error() -> BaseException | None:
    """The error that ends the program, at the interpreter's exit."""
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def _tell_torchrun() -> None:
    """At exit, write torchrun's error file about the error that ends the program.

    Torchrun reports the file with the earliest time stamp, in seconds, as the cause. So a rank that only
    stops because of another one dates its file later.
    """
    name, error = os.environ.get("TORCHELASTIC_ERROR_FILE"), uncaught_error()
    if not name or error is None:
        return
    said, trace = (
        "".join(form(error)).strip()
        for form in (traceback.format_exception_only, traceback.format_exception)
    )
    causes = dict[int, BaseException]()
    cause: BaseException | None = error
    # Causes and contexts together may run in a circle.
    while cause is not None and id(cause) not in causes:
        causes[id(cause)] = cause
        cause = cause.__cause__ or cause.__context__
    later = 10 if any(isinstance(one, PeerFailed) for one in causes.values()) else 0
    extra = {"py_callstack": clipped(trace, "trace"), "timestamp": str(int(time.time() + later))}
    with contextlib.suppress(OSError):
        message = {"message": {"message": clipped(said), "extraInfo": extra}}
        Path(name).write_text(json.dumps(message), "utf-8")


atexit.register(_tell_torchrun)
