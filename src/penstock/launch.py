"""Start one process per rank on this machine; when one fails, end the others.

torch is imported when a job starts, so that ``penstock run --help`` does not wait for it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from penstock.errors import FAILURE, TEMPORARY, UsageError
from penstock.faults.processes import die_with_parent

__all__ = ["Launcher", "Outcome", "launch"]

GRACE = 10.0
"""Seconds that processes have to end after a signal to the launcher."""
FOLLOW = 2.5
"""Seconds that the others have after one has failed."""
_POLL = 0.05


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Args:
        status: the exit status that says it best.
        causes: how the ranks ended that failed, in the order in which they did: the rank, and its exit
            status, below zero a signal.
    """

    status: int
    causes: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return "; ".join(f"rank {rank} {_words(status)}" for rank, status in self.causes)


def launch(command: Sequence[str], processes: int) -> Outcome:
    """Run a command in one process per rank, and wait for all.

    Args:
        command: the program and its arguments.
        processes: how many ranks.

    Raises:
        UsageError: fewer than one.
    """
    with Launcher(command, processes) as job:
        return job.wait()


class Launcher:
    """A job of processes that share a store, kept here and reached over the loopback interface alone.

    Each gets the variables that torchrun sets. When one fails, the others have a few seconds to say
    why they stop; what is left then is killed, with what they have started. Should this process die, they
    are killed by the system.

    Args:
        command: the program and its arguments.
        processes: how many.
    """

    def __init__(self, command: Sequence[str], processes: int) -> None:
        if processes < 1:
            raise UsageError(f"processes={processes}: start at least 1")
        # Before there are children, which an interrupt meanwhile would leave behind.
        store_class = import_module("torch.distributed").TCPStore
        self._folder = _new_folder()
        self._signal = 0
        self._handlers: dict[int, Any] = {}
        self._listening = socket.socket()
        self._listening.bind(("127.0.0.1", 0))
        self._listening.listen(1024)
        port: int = self._listening.getsockname()[1]
        parent = os.getpid()
        self._children = [
            subprocess.Popen(
                list(command),
                env=os.environ | _variables(rank, processes, port) | self._error_file(rank),
                # Before the store has threads, since this runs between fork and exec.
                preexec_fn=lambda: _die_with(parent),
                start_new_session=True,
            )
            for rank in range(processes)
        ]
        self._store = store_class(
            "127.0.0.1",
            port,
            None,
            True,
            timedelta(seconds=30),
            wait_for_workers=False,
            master_listen_fd=self._listening.detach(),
        )

    def wait(self) -> Outcome:
        """Wait until all have ended; a signal to this process is passed on, a second one ends it at once."""
        causes: list[tuple[int, int]] = []
        deadline = float("inf")
        left = dict(enumerate(self._children))
        while left:
            for rank, child in list(left.items()):
                status = _poll(child)
                if status is None:
                    continue
                del left[rank]
                if status:
                    causes.append((rank, status))
                    deadline = min(deadline, time.monotonic() + FOLLOW)
            if self._signal and deadline == float("inf"):
                deadline = time.monotonic() + GRACE
            if time.monotonic() > deadline:
                self._kill(left.values())
            time.sleep(_POLL)
        # A rank that only follows may end first.
        causes.sort(key=lambda cause: not self._said(cause[0], "own"))
        return Outcome(self._status(causes), tuple(causes))

    def _status(self, causes: Sequence[tuple[int, int]]) -> int:
        if self._signal:
            return 128 + self._signal
        # What a rank says of the cause; a death has no word, and its peers call it temporary.
        told = [
            said
            for rank, status in causes
            if (said := self._said(rank, "status") or _meant(status))
        ]
        return told[0] if told else (TEMPORARY if causes else 0)

    def _error_file(self, rank: int) -> dict[str, str]:
        """Where a rank writes why it stops; where there is no room for that, its exit status says it."""
        if self._folder is None:
            return {}
        return {"TORCHELASTIC_ERROR_FILE": str(Path(self._folder.name, f"{rank}.json"))}

    def _said(self, rank: int, what: str) -> int:
        """What a rank wrote down about its end: its exit status, or whether the failure was its own."""
        if self._folder is None:
            return 0
        try:
            found = json.loads(Path(self._folder.name, f"{rank}.json").read_text())
            return int(found["message"]["extraInfo"][what])
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._signal:
            self._kill(self._children)
            os._exit(128 + number)
        self._signal = number
        for child in self._children:
            if child.poll() is None:
                child.send_signal(number)

    @staticmethod
    def _kill(children: Iterable[subprocess.Popen[bytes]]) -> None:
        for child in children:
            if child.poll() is None:
                _end_session(child)

    def __enter__(self) -> Launcher:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._kill(self._children)
        for child in self._children:
            child.wait()
        del self._store
        if self._folder is not None:
            self._folder.cleanup()


def _new_folder() -> tempfile.TemporaryDirectory[str] | None:
    with suppress(OSError):
        return tempfile.TemporaryDirectory(prefix="penstock-launch-", ignore_cleanup_errors=True)
    return None


def _poll(child: subprocess.Popen[bytes]) -> int | None:
    """How a process has ended, if it has; what one that failed has started ends with it."""
    if child.returncode is None and hasattr(os, "waitid"):
        # As long as it is not waited for, its number cannot be another's.
        found = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is not None and (found.si_code, found.si_status) != (os.CLD_EXITED, 0):
            _end_session(child)
    return child.poll()


def _end_session(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


def _variables(rank: int, processes: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": f"penstock-{port}",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def _die_with(parent: int) -> None:
    die_with_parent()
    if os.getppid() != parent:
        os._exit(TEMPORARY)


def _meant(status: int) -> int:
    """What an exit status means: Python ends with 1 after any exception."""
    return FAILURE if status == 1 else max(status, 0)


def _words(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    return f"was killed by {signal.Signals(-status).name}"
