"""Failures of ranks: as data that travels, and as reports in files."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from penstock.errors import (
    FAILURE,
    INPUT,
    INTERRUPTED,
    NON_FINITE,
    TERMINATED,
    USAGE,
    InputFileError,
    NonFiniteError,
    StageError,
    UsageError,
    printable,
)
from penstock.faults.progress import Place

Kind = Literal["raised", "died", "silent", "left", "interrupted", "lost"]

LONGEST_LINE = 500
LONGEST_TRACE = 20_000
FILE = "failure.json"

logger = logging.getLogger("penstock")


@dataclass(frozen=True)
class Failure:
    """One rank's failure.

    Args:
        kind: ``raised`` an exception; ``died``: its process ended without an error; ``silent``: makes no
            progress; ``left`` the pipeline while others continue; ``interrupted`` by a signal; ``lost``:
            out of reach.
        rank: the rank that failed.
        step: the training step that it was in, counted from 1.
        stage: the stage that it worked on, if known.
        microbatch: the microbatch, if known.
        action: the action as text, if known.
        error: the type of the exception.
        what: the first line of its message; for other kinds, what is known.
        trace: the traceback.
        status: the exit status for it.
        time: in seconds since the epoch, on the clock of the rank that noticed it.
        by: the rank that noticed it.
        story: what else that rank has found, line by line.
        everywhere: whether all ranks find the same error by themselves, as when they disagree.
        module: the path and type of the module that raised, if it was one.
    """

    kind: Kind
    rank: int
    step: int = 0
    stage: int | None = None
    microbatch: int | None = None
    action: str | None = None
    error: str = ""
    what: str = ""
    trace: str = ""
    status: int = FAILURE
    time: float = field(default_factory=time.time)
    by: int = -1
    story: tuple[str, ...] = ()
    everywhere: bool = False
    module: str = ""

    def __str__(self) -> str:
        said = f"{self.error}: {self.what}" if self.error else self.what
        return f"{self.place}: {said}"

    @property
    def is_raised(self) -> bool:
        """Whether the rank itself reported it; other kinds of failures are found by other ranks."""
        return self.kind in ("raised", "interrupted")

    @property
    def place(self) -> str:
        """Rank, step, stage, microbatch and action, as far as they are known."""
        parts = [f"rank {self.rank}"]
        if self.step:
            parts.append(f"step {self.step}")
        if self.stage is not None:
            parts.append(f"stage {self.stage}")
        if self.microbatch is not None:
            parts.append(f"microbatch {self.microbatch}")
        if self.action is not None:
            parts.append(f"action {self.action}")
        if self.module:
            parts.append(f"module {self.module}")
        return ", ".join(parts)

    @classmethod
    def from_data(cls, found: Any) -> Failure | None:
        """From JSON data; None if it is not a failure, since a broken peer may write anything."""
        try:
            return cls(**_checked(found))
        except (ValueError, TypeError, KeyError):
            return None


def of_exception(error: BaseException, rank: int, place: Mapping[str, Any]) -> Failure:
    """The failure that an exception on a rank means.

    Args:
        error: the exception.
        rank: the rank.
        place: a snapshot of the rank's activity.
    """
    # A StageError in an action only adds the place, which is known anyway: report the user's own error.
    is_placed = isinstance(error, StageError) and place["action"] is not None
    root = error.__cause__ if is_placed and error.__cause__ else error
    lines = str(root).strip().splitlines()
    status = status_of(error)
    signal = _SIGNALS.get(status)
    return Failure(
        "interrupted" if signal else "raised",
        rank,
        place["step"],
        place["stage"],
        place["microbatch"],
        place["action"],
        "" if signal else type(root).__name__,
        printable(signal or (lines[0] if lines else ""))[:LONGEST_LINE],
        printable("".join(traceback.format_exception(error)))[-LONGEST_TRACE:],
        status,
        by=rank,
        module=printable(failing_module(root)) if is_placed else "",
    )


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
    found, kept = [], None
    trace = error.__traceback__
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    for each in reversed(found):
        if not each.tb_frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept


_NOT_THE_USERS = tuple(
    f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])
)


def is_orderly(error: BaseException) -> bool:
    """Whether it is a normal exit."""
    return isinstance(error, SystemExit) and status_of(error) == 0


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


_KINDS = {"raised", "died", "silent", "left", "interrupted", "lost"}
_OPTIONAL = {"stage", "microbatch", "action"}


def _checked(found: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a failure, after a check of their types."""
    kinds = {f.name: type(getattr(_EXAMPLE, f.name)) for f in fields(Failure)}
    given = {name: found[name] for name in kinds}
    if given["kind"] not in _KINDS:
        raise ValueError("unknown kind")
    given["story"] = tuple(printable(str(line)) for line in given["story"])
    given["time"] = float(given["time"])
    for name, kind in kinds.items():
        if not (isinstance(given[name], kind) or (name in _OPTIONAL and given[name] is None)):
            raise TypeError(name)
        if kind is str and given[name] is not None:
            given[name] = printable(given[name])
    return given


_EXAMPLE = Failure("raised", 0, 0, 0, 0, "", story=())


# ---- reports: ``failure.json``, and torchrun's error file


def versions() -> dict[str, str]:
    """The versions of Penstock, torch and Python."""
    try:
        own = version("penstock")
    except PackageNotFoundError:
        own = "unknown"
    return {"penstock": own, "torch": torch.__version__, "python": platform.python_version()}


def stacks() -> str:
    """The stacks of all threads of this process, without values, which may be secret."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            lines = "".join(traceback.format_stack(frame))
            parts.append(f"thread {names.get(ident, ident)}:\n{lines}")
    return printable("\n".join(parts))[-LONGEST_TRACE:]


def story(
    failures: Sequence[Failure],
    places: Mapping[int, Place],
    found: Mapping[int, str],
    rank: int,
) -> dict[str, Any]:
    """The whole report as JSON data, without environment variables.

    Args:
        failures: in the order in which they happened.
        places: where each rank is.
        found: the stacks of the ranks that gave them.
        rank: the rank that writes the report.
    """
    return {
        "summary": summary(failures),
        "failures": [asdict(failure) for failure in failures],
        "ranks": [{**asdict(place), "words": str(place)} for place in places.values()],
        "stacks": {str(number): text for number, text in found.items()},
        "told_by": rank,
        "time": time.time(),
        "versions": versions(),
    }


def summary(failures: Sequence[Failure]) -> str:
    """All failures in one line."""
    first, *later = map(str, failures)
    return first + "".join(f"; then {failure}" for failure in later)


def write(folder: Path | None, told: Mapping[str, Any]) -> None:
    """Write ``failure.json``, unless there is one.

    If that fails, it is only logged, so as not to hide the cause.
    """
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_new(folder / FILE, json.dumps(told, indent=1))
    except OSError as error:
        logger.error("penstock: the story of the failure could not be written: %s", error)


def _write_new(path: Path, text: str) -> None:
    """Write a file, unless there is one; a file that could not be completed is removed."""
    with contextlib.suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
        except OSError:
            path.unlink()
            raise


def tell_torchrun(failure: Failure, *, own: bool) -> None:
    """Write the error file that torchrun asks for, unless there is one.

    Torchrun reports the file with the earliest time stamp, in seconds, as the cause. So a rank that only
    stops because of another one dates its file a little later.

    Args:
        failure: the failure.
        own: whether it happened on this rank.
    """
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not name:
        return
    moment = int(failure.time) if own else int(max(failure.time, time.time())) + 2
    extra: dict[str, Any] = {
        "py_callstack": failure.trace if own else "",
        "timestamp": str(moment),
        "status": failure.status,
        "own": own,
    }
    said = str(failure) if own else f"stopped because {failure}"
    path = Path(name)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_new(path, json.dumps({"message": {"message": said, "extraInfo": extra}}))
