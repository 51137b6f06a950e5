"""The run folder: the files of a run, and how a run stops and resumes."""

from __future__ import annotations

import json
import math
import os
import shlex
from datetime import datetime
from pathlib import Path
from typing import Any

from penstock._engine.weights.storage import open_regular, replace_file
from penstock.errors import UsageError

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
            with open(self.path / METRICS, "a", encoding="utf-8", opener=_open_no_link) as file:
                file.write(json.dumps(record) + "\n")

    def rewind(self, step: int) -> int:
        """Drop the measurements after the step from which the run resumes; return the last step made."""
        if not self._writes:
            return step
        path = self.path / METRICS
        with open_regular(path) as file:
            lines = [(_step_of(line), line) for line in file]
        replace_file(path, b"".join(line for of, line in lines if of <= step))
        return int(max((of for of, _ in lines if of < math.inf), default=step))


def _step_of(line: bytes) -> float:
    """The step of a line of the metrics; infinite for one that a kill has cut off."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError):
        return math.inf


def _open_no_link(path: str, flags: int) -> int:
    """Open what lies in the folder itself; what a link points to is not the run's to write."""
    no_link = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    return os.open(path, flags | no_link, 0o666)


def create_folder(out: str | None, *, resumes: bool = False) -> Path:
    """Make the folder of a run; by default one below ``runs`` that is named after the time.

    Raises:
        UsageError: it cannot be made, or it holds a run already.
    """
    path = Path(out or datetime.now().strftime("runs/%Y%m%d-%H%M%S"))
    try:
        path.mkdir(parents=True, exist_ok=True)
        with open(path / METRICS, "ab" if resumes else "xb", opener=_open_no_link):
            pass
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
