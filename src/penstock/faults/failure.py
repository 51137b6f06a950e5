"""What went wrong on a rank, as data that travels and is kept."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from penstock.errors import InputFileError, NonFiniteError, StageError, UsageError, printable

Kind = Literal["raised", "died", "silent", "left", "interrupted", "lost"]

USAGE, INPUT, FAILURE, TEMPORARY, NON_FINITE = 2, 65, 70, 75, 76
INTERRUPTED, TERMINATED = 130, 143

LONGEST_LINE = 500
LONGEST_TRACE = 20_000
LONGEST_JSON = 200_000


@dataclass(frozen=True)
class Failure:
    """One rank's failure.

    Args:
        kind: ``raised`` an exception; ``died`` without a word; ``silent``: makes no progress; ``left``
            the pipeline while others go on; ``interrupted`` by a signal; ``lost``: out of reach.
        rank: whose.
        step: the training step it was in, counted from 1.
        stage: where it was, as far as that is known.
        microbatch: likewise.
        action: likewise, as text.
        error: the type of the exception.
        what: its first line, or what is known otherwise.
        trace: the traceback.
        status: the exit status that it means.
        time: when, in seconds since the epoch, on the clock of the rank that noticed.
        by: the rank that noticed.
        story: what else the one that noticed has to tell, line by line.
        everywhere: whether all ranks find the same by themselves, as when they do not agree.
        module: the path and type of the module in whose call it raised, if it was in one.
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
        """Whether the rank itself raised it; the others were found from outside."""
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

    def to_json(self) -> str:
        """As text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Failure | None:
        """From text; None of what is no failure, which a broken peer might write."""
        if len(text) > LONGEST_JSON:
            return None
        try:
            found = json.loads(text)
            return cls(**_checked(found))
        except (ValueError, TypeError, KeyError):
            return None


def of_exception(error: BaseException, rank: int, place: Mapping[str, Any]) -> Failure:
    """What an exception on a rank means.

    Args:
        error: what was raised.
        rank: where.
        place: a snapshot of the rank's activity.
    """
    # A StageError of an action says where; the place says that too, so the user's own error is what counts.
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
    """The innermost module in whose call an error was raised, such as ``'blocks.2' (Block)``.

    By its path from the outermost module that knows it; empty where no module was called.
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
    """The traceback of an error that the user's code raised, without the frames of Penstock and torch."""
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
    """Whether it is an end without a fault."""
    return isinstance(error, SystemExit) and status_of(error) == 0


def status_of(error: BaseException) -> int:
    """The exit status that an exception means."""
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
    """The fields of a failure, if each is of its type."""
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
