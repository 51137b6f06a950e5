"""What lets a run stop and go on: signals, a time limit, the folder it goes on from, and the command."""

from __future__ import annotations

import os
import shlex
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.checkpoint.team import Team
from penstock.errors import UsageError
from penstock.pipeline import Pipeline

AUTO = "auto"
CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in a run folder."""

_TIME = -1
"""Stands beside the numbers of signals."""


class Stop:
    """Whether the run is to stop after this step: because of a signal on any rank, or of the time.

    In the context a first SIGINT or SIGTERM is noted; a second one does what the first would have done.

    Args:
        limit: seconds from now that the run may take; None for as long as it takes.
        say: tells that a signal was heard.
    """

    def __init__(self, limit: float | None, say: Callable[[str], object]) -> None:
        self._end = None if limit is None else time.monotonic() + limit
        self._say = say
        self._heard = 0
        self._before: dict[int, Any] = {}

    def agreed(self, pipe: Pipeline) -> int:
        """The signal that some rank has heard, or that time is up; 0 to go on. All ranks call it."""
        late = self._end is not None and time.monotonic() >= self._end
        told: list[int] = Team(pipe, None).agree(self._heard or (_TIME if late else 0))
        return max(told) or min(told)

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: Any) -> None:
        if self._heard:
            self.deliver(number, frame)
            return
        self._heard = number
        self._say(
            f"{signal.Signals(number).name}: this step is finished and saved; a second one ends the run "
            "at once"
        )

    def deliver(self, number: int, frame: Any = None) -> None:
        """Do what a signal does without a run that saves."""
        if number == _TIME:
            return
        handler = self._before.get(number)
        if callable(handler):
            handler(number, frame)
        elif handler is signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def why(stopped: int) -> str:
    """The reason in words."""
    return "time limit" if stopped == _TIME else signal.Signals(stopped).name


def source_of(resume: str, out: Path) -> Path:
    """The folder of the checkpoints that a run goes on from.

    Args:
        resume: the setting.
        out: the run folder.

    Raises:
        UsageError: there is no such folder.
    """
    if resume == AUTO:
        return out / CHECKPOINTS
    given = Path(resume)
    if not given.is_dir():
        raise UsageError(
            f"resume={resume!r}: there is no such folder; give a run folder, one of checkpoints, or 'auto'"
        )
    return given / CHECKPOINTS if (given / CHECKPOINTS).is_dir() else given


def run_folder_of(resume: str) -> Path | None:
    """The run folder that a run goes on in, by the folder that it goes on from; None for a new one."""
    given = Path(resume)
    for path in (given, given.parent):
        if resume != AUTO and (path / CHECKPOINTS).is_dir():
            return path
    return None


def command(out: Path) -> str:
    """The command that goes on with a run."""
    train, processes = ["train", "--resume", str(out)], os.environ.get("WORLD_SIZE", "1")
    if processes == "1":
        return shlex.join(["penstock", *train])
    if os.environ.get("TORCHELASTIC_RUN_ID", "").startswith("penstock-"):
        return shlex.join(["penstock", *train, "--processes", processes])
    return shlex.join(["torchrun", "--nproc-per-node", processes, "-m", "penstock", *train])
