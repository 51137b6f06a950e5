"""Processes of this machine: which one this is, whether another still lives, and in what condition."""

from __future__ import annotations

import os
import platform
import signal
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

Condition = Literal["runs", "stopped", "ended", "unknown"]

_STATE, _STARTED, _EXIT = 0, 19, 49
"""Where /proc/PID/stat holds them, counted after the program's name."""


@dataclass(frozen=True)
class Process:
    """A process that can be told from one that got its number later.

    Args:
        host: the machine, since when it runs, and the space of its process numbers.
        pid: its number there.
        started: when it started, in the system's own ticks; empty where that cannot be known.
    """

    host: str
    pid: int
    started: str

    @property
    def is_here(self) -> bool:
        """Whether it runs on this machine."""
        return self.host == this_host()

    def condition(self) -> Condition:
        """Whether it runs, was stopped by a signal, or has ended."""
        if not self.is_here:
            return "unknown"
        if not self.started:
            return _by_signal(self.pid)
        fields = _stat(self.pid)
        if not fields or fields[_STARTED] != self.started or fields[_STATE] in "ZX":
            return "ended"
        return "stopped" if fields[_STATE] in "Tt" else "runs"

    def cause_of_end(self) -> int | None:
        """How it ended as a parent would hear it: below zero a signal. None if it cannot be known."""
        fields = _stat(self.pid) if self.is_here and self.started else []
        if len(fields) <= _EXIT or fields[_STARTED] != self.started or fields[_STATE] not in "ZX":
            return None
        return os.waitstatus_to_exitcode(int(fields[_EXIT]))

    def kill(self) -> bool:
        """End it at once, if it still is the same one; whether that was possible."""
        if self.condition() not in ("runs", "stopped"):
            return False
        try:
            os.kill(self.pid, signal.SIGKILL)
        except OSError:
            return False
        return True

    def as_json(self) -> dict[str, Any]:
        """Its fields."""
        return asdict(self)


def this_process() -> Process:
    """This one."""
    fields = _stat(os.getpid())
    return Process(this_host(), os.getpid(), fields[_STARTED] if fields else "")


def words_of(status: int | None) -> str:
    """An exit status in words."""
    if status is None:
        return "without a word"
    if status >= 0:
        return f"with exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


@cache
def this_host() -> str:
    """A name that processes share exactly if they can see each other's numbers."""
    return "/".join([platform.node(), _boot(), _space()])


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _space() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _by_signal(pid: int) -> Condition:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "ended"
    except OSError:
        return "unknown"
    return "runs"
