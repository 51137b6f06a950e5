"""Signals that arrive while the main thread is blocked, and launchers that vanish."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

from penstock.faults.failure import TERMINATED


class Interrupts:
    """Hears of a signal even while the main thread waits in native code, where no Python handler runs.

    Only of one whose handler will raise: another may mean to go on.
    """

    def __init__(self) -> None:
        self._ends: tuple[int, int] | None = None
        self._came = False

    def open(self) -> None:
        """Listen, where this is the main thread and nobody else listens."""
        if threading.current_thread() is not threading.main_thread():
            return
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        self._ends = (reading, writing)
        if before != -1:
            try:
                signal.set_wakeup_fd(before)
            except OSError:
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
        if threading.current_thread() is threading.main_thread():
            current = signal.set_wakeup_fd(-1)
            if current not in (-1, ends[1]):
                signal.set_wakeup_fd(current)
        for end in ends:
            os.close(end)


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


def launcher() -> int | None:
    """The process that must not vanish: the launcher's, where one has started this process."""
    return os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
