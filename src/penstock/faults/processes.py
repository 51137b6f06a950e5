"""Processes of this machine: in what condition another is, and what ends this one."""

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


# ---- signals


class Interrupts:
    """Hears of a signal even while the main thread waits in native code, where no Python handler runs.

    Only of one whose handler will raise: another may mean to go on.
    """

    def __init__(self) -> None:
        self._ends: tuple[int, int] | None = None
        self._came = False
        _LISTENING.add(self)

    def open(self) -> None:
        """Listen, where this is the main thread and nobody else listens."""
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
                return  # who listened has closed its end without a word: this one listens now
            self.close()

    def came(self) -> bool:
        """Whether a signal came that will raise."""
        if self._ends is None:
            return self._came
        try:
            numbers = os.read(self._ends[0], 64)
        except BlockingIOError:
            return self._came
        self._came = self._came or any(map(_raises, numbers))
        return self._came

    def close(self) -> None:
        """Listen no more."""
        if self._ends is None:
            return
        ends, self._ends = self._ends, None
        if threading.current_thread() is not threading.main_thread():
            # Only the main thread may have signals go elsewhere, and a number of a closed end may be reused.
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
"""By its writing end each pipe that was given up outside of the main thread and may still be written to."""
_LISTENING: weakref.WeakSet[Interrupts] = weakref.WeakSet()


def _deafen() -> None:
    """In a process that was forked: its signals are none of those that the one it came from hears of."""
    for listener in list(_LISTENING):
        listener.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_deafen)


def end_at_once(number: int, frame: Any) -> None:
    """A handler of signals: the second one; nothing is cleaned up."""
    del frame
    os._exit(128 + number)


def terminate(number: int, frame: Any) -> None:
    """A handler of SIGTERM: leave through the contexts that are open; a second signal ends at once."""
    del frame
    signal.signal(number, end_at_once)
    sys.exit(TERMINATED)


def interrupt(number: int, frame: Any) -> None:
    """A handler of SIGINT: as Python's own; a second signal ends at once."""
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


# ---- what ends this process when nobody else does

_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_DEATH_SIGNAL = 1
"""``PR_SET_PDEATHSIG``: the signal that a process gets when its parent ends."""
_MONOTONIC = 1


def die_with_parent() -> None:
    """Have the system kill this process when its parent ends, also if it is stopped or holds the GIL."""
    if _LIBC is not None:
        _LIBC.prctl(_DEATH_SIGNAL, signal.SIGKILL)


def launcher() -> int | None:
    """The process that must not vanish: the launcher's, where one has started this process."""
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None


class _Event(ctypes.Structure):
    """``struct sigevent``, as far as it is used here."""

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
    """Kills this process unless it is put off again and again.

    It is a timer of the system, so that it also ends a process that is stopped, or whose interpreter is held
    by code that lets no other thread run, where nobody else can reach it. A child does not inherit it. Where
    the system is not Linux it does nothing.
    """

    def __init__(self) -> None:
        self._timer: ctypes.c_void_p | None = None
        event, timer = _Event(None, signal.SIGKILL, 0, b""), ctypes.c_void_p()
        create = getattr(_LIBC, "timer_create", None)
        if create and not create(_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)):
            self._timer = timer

    def put_off(self, seconds: float) -> None:
        """Let it happen so much later than now; with 0 never."""
        if self._timer is not None and _LIBC is not None:
            span = _Span(0, 0, int(seconds), int(seconds % 1 * 1e9))
            _LIBC.timer_settime(self._timer, 0, ctypes.byref(span), None)

    def retire(self) -> None:
        """Take the timer back."""
        timer, self._timer = self._timer, None
        if timer is not None and _LIBC is not None:
            _LIBC.timer_delete(timer)
