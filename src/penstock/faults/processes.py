"""Processes: the condition of another process, signals, and what ends this process."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
import threading
import weakref
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from penstock.errors import TERMINATED

Condition = Literal["runs", "stopped", "ended", "unknown"]

_STATE, _STARTED, _EXIT = 0, 19, 49
"""Fields of /proc/PID/stat, counted after the program's name."""


@dataclass(frozen=True)
class Process:
    """A process, which can be told from a later one with the same number.

    Args:
        host: the machine, its current boot, and its namespace of process numbers.
        pid: its number there.
        started: when it started, in the system's ticks; empty if that cannot be known.
    """

    host: str
    pid: int
    started: str

    @property
    def is_here(self) -> bool:
        """Whether it runs on this machine."""
        return self.host == this_host()

    def condition(self) -> Condition:
        """Whether it runs, is stopped by a signal, or has ended."""
        if not self.is_here:
            return "unknown"
        if not self.started:
            return _by_signal(self.pid)
        fields = _stat(self.pid)
        if not fields or fields[_STARTED] != self.started or fields[_STATE] in "ZX":
            return "ended"
        return "stopped" if fields[_STATE] in "Tt" else "runs"

    def cause_of_end(self) -> int | None:
        """Its exit code, as its parent would get it: a signal is negative. None if it cannot be known."""
        fields = _stat(self.pid) if self.is_here and self.started else []
        if len(fields) <= _EXIT or fields[_STARTED] != self.started or fields[_STATE] not in "ZX":
            return None
        return os.waitstatus_to_exitcode(int(fields[_EXIT]))

    def kill(self) -> bool:
        """Kill it, if it is still the same process; returns whether that was possible."""
        if self.condition() not in ("runs", "stopped"):
            return False
        try:
            os.kill(self.pid, signal.SIGKILL)
        except OSError:
            return False
        return True

    def as_json(self) -> dict[str, Any]:
        """Its fields as JSON data."""
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
    """A name that two processes share exactly if they can see each other's process numbers."""
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


# ---- signals


class Interrupts:
    """Notices signals even while the main thread waits in native code, where no Python handler runs.

    Only signals whose handler raises count: with other handlers, the process may mean to continue.
    """

    def __init__(self) -> None:
        self._ends: tuple[int, int] | None = None
        self._came = False
        _LISTENING.add(self)

    def open(self) -> None:
        """Listen, if this is the main thread and nothing else listens."""
        if threading.current_thread() is not threading.main_thread():
            return
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        self._ends = (reading, writing)
        if before in _ABANDONED:
            _close(_ABANDONED.pop(before))
        elif before != -1:
            try:
                signal.set_wakeup_fd(before)
            except (OSError, ValueError):
                return  # the earlier listener has closed its end, so this one takes its place
            self.close()

    def came(self) -> bool:
        """Whether a signal came whose handler raises."""
        if self._ends is None:
            return self._came
        try:
            numbers = os.read(self._ends[0], 64)
        except BlockingIOError:
            return self._came
        self._came = self._came or any(map(_raises, numbers))
        return self._came

    def close(self) -> None:
        """Stop listening."""
        if self._ends is None:
            return
        ends, self._ends = self._ends, None
        if threading.current_thread() is not threading.main_thread():
            # Only the main thread may redirect signals, and the number of a closed end could be reused.
            _ABANDONED[ends[1]] = ends
            return
        current = signal.set_wakeup_fd(-1)
        if current not in (-1, ends[1]):
            signal.set_wakeup_fd(current)
        _close(ends)


def _close(ends: tuple[int, int]) -> None:
    for end in ends:
        os.close(end)


_ABANDONED: dict[int, tuple[int, int]] = {}
"""Pipes that were given up outside the main thread, by writing end; signals may still be written to them."""
_LISTENING: weakref.WeakSet[Interrupts] = weakref.WeakSet()


def _deafen() -> None:
    """In a forked process: stop listening, since its signals must not reach the listeners of its parent."""
    for listener in list(_LISTENING):
        listener.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_deafen)


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


def _raises(number: int) -> bool:
    return signal.getsignal(number) in (
        signal.default_int_handler,
        terminate,
        interrupt,
        end_at_once,
    )


# ---- what ends this process if nothing else does

_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_DEATH_SIGNAL = 1
"""``PR_SET_PDEATHSIG``: sets the signal that a process gets when its parent ends."""
_MONOTONIC = 1


def die_with_parent() -> None:
    """Have the system kill this process when its parent ends, even if it is stopped or holds the GIL."""
    if _LIBC is not None:
        _LIBC.prctl(_DEATH_SIGNAL, signal.SIGKILL)


def launcher() -> int | None:
    """The process of torchrun, if it has started this process; this one ends if that one does."""
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None


class _Event(ctypes.Structure):
    """``struct sigevent``, with the fields that are used here."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("padding", ctypes.c_char * 48),
    )


class _Span(ctypes.Structure):
    """``struct itimerspec``."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("every", "every_ns", "first", "first_ns"))


class DeadMan:
    """A timer that kills this process unless it is reset again and again.

    It is a timer of the operating system, so that it also ends a process that is stopped, or whose
    interpreter is held by native code that lets no other thread run. A child process does not inherit it.
    It does nothing on systems other than Linux.
    """

    def __init__(self) -> None:
        self._timer: ctypes.c_void_p | None = None
        event, timer = _Event(None, signal.SIGKILL, 0, b""), ctypes.c_void_p()
        create = getattr(_LIBC, "timer_create", None)
        if create and not create(_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)):
            self._timer = timer

    def put_off(self, seconds: float) -> None:
        """Set the timer to so many seconds from now; 0 switches it off."""
        if self._timer is not None and _LIBC is not None:
            span = _Span(0, 0, int(seconds), int(seconds % 1 * 1e9))
            _LIBC.timer_settime(self._timer, 0, ctypes.byref(span), None)

    def retire(self) -> None:
        """Delete the timer."""
        timer, self._timer = self._timer, None
        if timer is not None and _LIBC is not None:
            _LIBC.timer_delete(timer)
