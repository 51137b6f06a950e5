"""The run folder: what a run leaves there, when it stops, and how it goes on from there."""

from __future__ import annotations

import json
import os
import shlex
import signal
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from penstock.checkpoint.team import ProcessTeam
from penstock.errors import UsageError
from penstock.pipeline import Pipeline
from penstock.schedule import Timeline, draw_svg

# ---- what a run leaves in its folder


METRICS = "metrics.jsonl"


class RunFolder:
    """A run folder, to which only one process of the run writes.

    Args:
        path: where it is.
        writes: whether this process is that one; on the others the methods do nothing.
    """

    def __init__(self, path: Path, *, writes: bool) -> None:
        self.path = path
        self._writes = writes

    @property
    def weights(self) -> Path:
        """Where the weights go."""
        return self.path / "weights"

    def write_config(self, toml: str) -> None:
        """Keep the settings, so that ``--config`` can repeat the run."""
        self._write("config.toml", toml)

    def log(self, record: dict[str, Any]) -> None:
        """Append a line to the metrics at once, so that a run that is stopped keeps its measurements."""
        if self._writes:
            with (self.path / METRICS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    def rewind(self, step: int) -> None:
        """Drop what was measured after the step from which the run goes on."""
        if not self._writes:
            return
        path = self.path / METRICS
        kept = [line for line in path.read_text("utf-8").splitlines() if _until(line, step)]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        os.replace(partial, path)

    def write_timeline(self, timeline: Timeline, *, title: str, note: str) -> None:
        """Keep a step's timeline as a Chrome trace and as a drawing."""
        self._write("timeline.json", timeline.to_chrome_trace())
        self._write("timeline.svg", draw_svg(timeline, title=title, note=note))

    def write_report(self, html: str) -> None:
        """Keep the report of a measured step beside the predicted one."""
        self._write("report.html", html)

    def _write(self, name: str, text: str) -> None:
        if self._writes:
            (self.path / name).write_text(text, encoding="utf-8")


def _until(line: str, step: int) -> bool:
    """Whether a line of the metrics is of a step up to this one; a kill may have cut off the last line."""
    try:
        return int(json.loads(line)["step"]) <= step
    except (ValueError, KeyError, TypeError):
        return False


def create_folder(out: str | None, *, resumes: bool = False) -> Path:
    """Make the folder of a run.

    Args:
        out: its path; by default a folder below ``runs`` that is named after the time.
        resumes: whether a run that it holds may go on there.

    Raises:
        UsageError: it cannot be made, or it holds a run already.
    """
    path = Path("runs", datetime.now().strftime("%Y%m%d-%H%M%S")) if out is None else Path(out)
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / METRICS).touch(exist_ok=resumes)
    except FileExistsError as error:
        raise UsageError(_taken(path)) from error
    except OSError as error:
        raise UsageError(
            f"out={str(path)!r}: {error.strerror}; choose a folder to write to"
        ) from error
    return path


def _taken(path: Path) -> str:
    if path.is_dir():
        return (
            f"out={str(path)!r} holds a run already; choose another folder, or go on with it by "
            "resume='auto'"
        )
    return f"out={str(path)!r} is a file; choose a folder"


# ---- stop and go on: signals, the time limit, the folder from which a run goes on, and the command for it


AUTO = "auto"
CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in a run folder."""

_TIME = -1
"""Stands for the time limit, among the numbers of signals."""


class Stop:
    """Tells whether the run is to stop after this step, because of a signal on any rank or of the time.

    In its context a first SIGINT or SIGTERM is noted; a second one does what it does without this context.

    Args:
        limit: how many seconds the run may take from now on; None for any number.
        say: prints a line when a signal arrives.
    """

    def __init__(self, limit: float | None, say: Callable[[str], object]) -> None:
        self._end = None if limit is None else time.monotonic() + limit
        self._say = say
        self._heard = 0
        self._before: dict[int, Any] = {}

    def agreed(self, pipe: Pipeline) -> int:
        """The signal that some rank got, or that the time is up; 0 to go on. All ranks must call it."""
        late = self._end is not None and time.monotonic() >= self._end
        told: list[int] = ProcessTeam(pipe, None).agree(self._heard or (_TIME if late else 0))
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
            f"{signal.Signals(number).name}: this step is finished and saved first; a second signal ends the "
            "run at once"
        )

    def deliver(self, number: int, frame: Any = None) -> None:
        """Do what a signal does outside of this context."""
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
    """The folder of the checkpoints from which a run goes on.

    Args:
        resume: the setting of that name.
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
    """The run folder in which a run goes on, given the folder it goes on from; None for a new one."""
    given = Path(resume)
    for path in (given, given.parent):
        if resume != AUTO and (path / CHECKPOINTS).is_dir():
            return path
    return None


def command_to_go_on(out: Path) -> str:
    """The command that continues a run."""
    train, processes = ["train", "--resume", str(out)], os.environ.get("WORLD_SIZE", "1")
    if processes == "1":
        return shlex.join(["penstock", *train])
    if os.environ.get("TORCHELASTIC_RUN_ID", "").startswith("penstock-"):
        return shlex.join(["penstock", *train, "--processes", processes])
    return shlex.join(["torchrun", "--nproc-per-node", processes, "-m", "penstock", *train])
