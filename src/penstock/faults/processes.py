"""Processes: the condition of another process, which is only looked at; signals; what ends this process."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from penstock.errors import TERMINATED


@dataclass(frozen=True)
class Process:
    """A process, which can be told from a later one with the same number.

    Args:
        host: the machine, its current boot, and its namespace of process numbers.
        pid: its number there.
        started: when it started, in the system's ticks; empty if that cannot be known.
        address: the address of its machine, as the host of the store sees it; empty if not known.
    """

    host: str
    pid: int
    started: str
    address: str = ""

    def condition(self) -> str:
        """``runs``, ``stopped`` by a signal, ``ended``; ``unknown`` of another machine or system."""
        if self.host != this_host() or not self.started:
            return "unknown"
        fields = _stat(self.pid)
        if not fields or fields[_STARTED] != self.started or fields[_STATE] in "ZX":
            return "ended"
        return "stopped" if fields[_STATE] in "Tt" else "runs"


_STATE, _STARTED = 0, 19
"""Fields of /proc/PID/stat, counted after the program's name."""


def this_process(address: str = "") -> Process:
    """This one; ``address`` is that of this machine."""
    fields = _stat(os.getpid())
    return Process(this_host(), os.getpid(), fields[_STARTED] if fields else "", address)


@cache
def this_host() -> str:
    """A name that two processes share exactly if they can see each other's process numbers."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot = space = ""
    return "/".join([platform.node(), boot, space])


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def die_with_parent() -> None:
    """Have Linux kill this process when its parent ends, even if it is stopped or holds the GIL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


_SET_DEATH_SIGNAL = 1


# ---- handlers of signals, for commands


def end_at_once(number: int, frame: Any) -> None:
    """A handler for a second signal: exit without cleaning up."""
    del frame
    os._exit(128 + number)


def terminate(number: int, frame: Any) -> None:
    """A handler of SIGTERM: exit through all open contexts; a second signal ends the process at once."""
    del frame
    signal.signal(number, end_at_once)
    sys.exit(TERMINATED)


def interrupt(number: int, frame: Any) -> None:
    """A handler of SIGINT, like Python's own; a second signal ends the process at once."""
    del frame
    signal.signal(number, end_at_once)
    raise KeyboardInterrupt
