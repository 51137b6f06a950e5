"""The run folder: the files of a run, and how a run stops and resumes."""

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
from typing import Any, Self

from penstock.errors import UsageError
from penstock.weights.storage import replace_file

METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in a run folder."""


class RunFolder:
    """A run folder. Only one process of the run writes to it; on the others the methods do nothing."""

    def __init__(self, path: Path, *, writes: bool) -> None:
        self.path = path
        self._writes = writes

    def write(self, name: str, text: str) -> None:
        """Write a file whole, or leave the old one."""
        if self._writes:
            replace_file(self.path / name, text.encode())

    def log(self, record: dict[str, Any]) -> None:
        """Append a line to the metrics at once, so that a stopped run keeps its measurements."""
        if self._writes:
            with (self.path / METRICS).open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    def rewind(self, step: int) -> None:
        """Drop the measurements after the step from which the run resumes."""
        if not self._writes:
            return
        path = self.path / METRICS
        lines = path.read_text("utf-8").splitlines()
        kept = "".join(f"{line}\n" for line in lines if _until(line, step))
        replace_file(path, kept.encode())


def _until(line: str, step: int) -> bool:
    """Whether a line of the metrics is for a step up to this one; a kill may have truncated the last line."""
    try:
        return int(json.loads(line)["step"]) <= step
    except (ValueError, KeyError, TypeError):
        return False


def create_folder(out: str | None, *, resumes: bool = False) -> Path:
    """Make the folder of a run; by default one below ``runs`` that is named after the time.

    Raises:
        UsageError: it cannot be made, or it holds a run already.
    """
    path = Path(out or datetime.now().strftime("runs/%Y%m%d-%H%M%S"))
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / METRICS).touch(exist_ok=resumes)
    except FileExistsError as error:
        problem = (
            "holds a run already; choose another folder, or resume it with resume='auto'"
            if path.is_dir()
            else "is a file; choose a folder"
        )
        raise UsageError(f"out={str(path)!r} {problem}") from error
    except OSError as error:
        raise UsageError(
            f"out={str(path)!r}: {error.strerror}; choose a folder to write to"
        ) from error
    return path


# ---- stop and resume


AUTO = "auto"


class Stop:
    """Records why the run must stop after this step: a signal, or the time limit.

    Inside its context, a first SIGINT or SIGTERM is only recorded; a second one acts as it does outside.

    Args:
        limit: the seconds that the run may take from now on; None for no limit.
        say: prints a line when a signal arrives.
    """

    def __init__(self, limit: float | None, say: Callable[[str], object]) -> None:
        self._end = None if limit is None else time.monotonic() + limit
        self._say = say
        self._signal = ""
        self._handlers: dict[int, Any] = {}

    @property
    def reason(self) -> str:
        """The name of the signal, ``"time limit"``, or an empty string if the run goes on."""
        late = self._end is not None and time.monotonic() >= self._end
        return self._signal or ("time limit" if late else "")

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._handlers[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        if self._signal:
            self.__exit__()
            signal.raise_signal(number)
            return
        self._signal = signal.Signals(number).name
        self._say(
            f"{self._signal}: finishing and saving this step first; a second signal ends the run at once"
        )


def source_of(resume: str, out: Path) -> Path:
    """The folder of the checkpoints from which a run resumes.

    Raises:
        UsageError: there is none.
    """
    source = (out if resume == AUTO else Path(resume)) / CHECKPOINTS
    if resume != AUTO and not source.is_dir():
        raise UsageError(
            f"resume={resume!r}: there is no run with checkpoints; give a run folder, or 'auto'"
        )
    return source


def command_to_resume(out: Path) -> str:
    """The command that resumes a run; of a run on several machines, the line for each of them."""
    command = ["penstock", "train", "--resume", str(out.absolute())]
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    here = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    if processes == 1:
        return shlex.join(command)
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", processes // here))
    machines = ["--standalone"]
    if nodes > 1:
        # On every machine the same line: this rendezvous numbers the machines itself.
        host, port = (os.environ.get(f"MASTER_{name}") for name in ("ADDR", "PORT"))
        endpoint = f"{host or 'HOST'}:{port or 29500}"
        name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        machines = ["--nnodes", str(nodes), "--rdzv-backend", "c10d"]
        machines += ["--rdzv-endpoint", endpoint]
        machines += [] if name == "none" else ["--rdzv-id", name]
    launch = ["torchrun", *machines, "--nproc-per-node", str(here), "-m", *command]
    return shlex.join(launch) + (f"    (on each of the {nodes} machines)" if nodes > 1 else "")
