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
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from penstock.errors import (
    FAILURE,
    INPUT,
    INTERRUPTED,
    NON_FINITE,
    TEMPORARY,
    TERMINATED,
    USAGE,
    AgreementError,
    InputFileError,
    NonFiniteError,
    PeerFailed,
    PenstockError,
    StageError,
    UsageError,
)
from penstock.faults.places import Place, Where, cut

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
        status: the exit status for this failure.
        time: when it was noticed, in seconds since the epoch, on the clock of rank ``by``.
        by: the global rank of the process that noticed it.
        everywhere: whether every rank finds the same error on its own, as when ranks disagree.
    """

    kind: str = ""
    error: str = ""
    what: str = ""
    trace: str = ""
    module: str = ""
    status: int = TEMPORARY
    time: float = field(default_factory=time.time)
    by: int = -1
    everywhere: bool = False

    def __str__(self) -> str:
        parts = [self.name]
        if self.step:
            parts.append(f"step {self.step}")
        for name in ("stage", "microbatch", "action", "module"):
            if getattr(self, name) not in (None, ""):
                parts.append(f"{name} {getattr(self, name)}")
        said = f"{self.error}: {self.what}" if self.error else self.what
        return f"{', '.join(parts)}: {said}"


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
        signal or (str(root).strip().splitlines() or [""])[0],
        error="" if signal else type(root).__name__,
        trace=cut("".join(traceback.format_exception(error)), "trace"),
        module=cut(failing_module(root)) if is_placed else "",
        status=status,
        by=place.process,
        everywhere=isinstance(error, PenstockError)
        and (error.rank is not None or isinstance(error, AgreementError | NonFiniteError)),
    )


def at_place(place: Place, kind: str, what: str, **more: Any) -> Failure:
    """A failure of the rank at this place."""
    where = {one.name: getattr(place, one.name) for one in fields(Where)}
    return Failure(**where, kind=kind, what=cut(what), **more)


MUTE = (
    "its process has ended or is stopped by a signal, its interpreter is held by code that does not let "
    "other threads run, its machine is down, or the network to it is cut"
)


def of_silence(place: Place, stale: float, by: int) -> Failure:
    """The failure of a rank that waits for nobody and makes no progress, or is not heard of."""
    if stale:
        what = (
            f"makes no progress: it {place.doing}, by its last heartbeat {stale:.1f} s ago; {MUTE}"
        )
    else:
        what = f"makes no progress: it {place.doing} for {place.age:.1f} s, and waits for nobody"
        if place.setup is not None:
            what += "; if it needs that long, raise rendezvous_timeout="
        elif not place.inside:
            what += "; if it needs that long, say so by pipe.patient() or timeout="
    return at_place(place, "silent", what, by=by)


def of_death(place: Place, stale: float, by: int) -> Failure:
    """The failure of a rank whose connections broke, and which has not been heard of since."""
    what = (
        "its process died without reporting an error, its machine is down, or the network to it is cut; "
        f"it {place.doing}, by its last heartbeat at least {stale:.1f} s ago"
    )
    return at_place(place, "died", what, by=by)


def of_circle(places: Sequence[Place], by: int) -> Failure:
    """The failure of ranks that wait for each other."""
    listed = "; ".join(map(str, places[:4]))
    what = (
        f"{len(places)} ranks wait for each other: {listed}: they call different things, the network "
        "between them is cut, or messages were lost"
    )
    return at_place(places[0], "lost", what, by=by)


def of_leaving(place: Place, by: int) -> Failure:
    """The failure of a rank that has finished while others go on."""
    what = (
        f"left after {place.step} training step{'' if place.step == 1 else 's'}, while others go on; every "
        "rank must make the same calls of the pipeline: look for a loop that ends earlier there"
    )
    alone = Place(place.rank, place.process, place.replica, step=place.step)
    return at_place(alone, "left", what, by=by)


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


def without_own_frames(error: BaseException) -> TracebackType | None:
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
    f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])
)


def status_of(error: BaseException) -> int:
    """The exit status for an exception."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    for kind, status in _STATUSES:
        if isinstance(error, kind):
            return status
    return int(getattr(error, "status", FAILURE))


_STATUSES: tuple[tuple[type[BaseException], int], ...] = (
    (KeyboardInterrupt, INTERRUPTED),
    (NonFiniteError, NON_FINITE),
    (InputFileError, INPUT),
    (UsageError, USAGE),
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


_last: tuple[Failure, BaseException | None] | None = None
"""The latest failure that ended a call here, with this rank's own error; None where another rank failed."""


def note_for_torchrun(failure: Failure, error: BaseException | None = None) -> None:
    """Note why this rank stops, for torchrun's error file.

    Args:
        failure: the failure.
        error: the exception on this rank; None if another rank failed.
    """
    global _last
    _last = failure, error


def uncaught_error() -> BaseException | None:
    """The error that ends the program, at the interpreter's exit."""
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def _tell_torchrun() -> None:
    """At exit, write torchrun's error file: of the error that ends the program, or of the failure noted last.

    Torchrun reports the file with the earliest time stamp, in seconds, as the cause. So a rank that only
    stops because of another one dates its file a little later.
    """
    name, last = os.environ.get("TORCHELASTIC_ERROR_FILE"), uncaught_error()
    failure, noted = _last or (None, None)
    error, said = last, str(failure)
    while error is not None and error is not noted and not isinstance(error, PeerFailed):
        error = error.__cause__ or error.__context__
    if last is not None and error is None:  # an error elsewhere in the program
        failure, noted = of_exception(last, Place(0)), last
        said = f"{failure.error}: {failure.what}"
    if not name or failure is None:
        return
    moment = failure.time
    if noted is None:
        said, moment = f"stopped because {said}", max(moment, time.time()) + 2
    extra = {"py_callstack": failure.trace, "timestamp": str(int(moment))}
    with contextlib.suppress(OSError):
        Path(name).write_text(
            json.dumps({"message": {"message": said, "extraInfo": extra}}), "utf-8"
        )


atexit.register(_tell_torchrun)
