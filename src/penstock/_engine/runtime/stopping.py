"""How a run stops between two steps: by a signal or a time limit, and on all ranks after the same step."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, ClassVar, Self

from penstock.errors import TERMINATED

logger = logging.getLogger("penstock")

SIGNAL, TIME_LIMIT = "a signal", "the time limit"
"""Why a run stops."""
TOGETHER = 3.0
"""Seconds within which signals are one: SLURM tells every process, and torchrun tells its own once more."""


class GracefulStop:
    """Lets a run stop after a step, in place of in the middle of it, so that it can be saved.

    A spot machine, SLURM's time limit, and torchrun when it restarts send SIGTERM, and leave a process some
    seconds. In this context the signal is only noted. The sum that ends each training step tells it to all
    processes of the job, so that :attr:`Pipeline.stopping` becomes true after the same step on every rank,
    whichever of them got the signal::

        with penstock.GracefulStop(), penstock.Pipeline(...) as pipe:
            for step in range(done, steps):
                ...
                if pipe.stopping or (step + 1) % 100 == 0:
                    checkpoints.save(step + 1, pipe=pipe, optimizer=opt)
                if pipe.stopping:
                    break

    At the end of the context a run that was stopped by a signal leaves with status 143, or by
    KeyboardInterrupt after Ctrl-C, on every rank: a launcher that restarts does so, and no process counts as
    done. The pipeline belongs inside. Before the first step there is nothing to save, and a signal acts as it
    does outside; so does a second one, 3 s after the first or later.

    Args:
        time_limit: the seconds after which the run stops, from now on; None for no limit. The status is then
            that of the program.
        signals: what to take as the wish to stop; only the main thread can receive signals.
    """

    _open: ClassVar[list[GracefulStop]] = []

    def __init__(
        self,
        time_limit: float | None = None,
        *,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGINT),
    ) -> None:
        self._end = None if time_limit is None else time.monotonic() + time_limit
        self._signals = signals
        self._stepped = False
        self._received, self._came = 0, 0.0
        self._agreed = ""
        self._handlers: dict[int, Any] = {}

    @property
    def reason(self) -> str:
        """Why the ranks have agreed to stop: the name of the signal, ``"time limit"``, or an empty string."""
        if self._agreed != SIGNAL:
            return "time limit" if self._agreed else ""
        return signal.Signals(self._received or signal.SIGTERM).name

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                self._handlers[number] = signal.signal(number, self._note)
        self._open.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._restore()
        self._open.remove(self)
        # Lightning ends a loop by an exit without a status, which would count as done.
        ends_well = error is None or (isinstance(error, SystemExit) and not error.code)
        if ends_well and self._agreed == SIGNAL:
            raise KeyboardInterrupt if self._received == signal.SIGINT else SystemExit(TERMINATED)

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        now = time.monotonic()
        if self._received and now < self._came + TOGETHER:
            return
        if self._received or not self._stepped:
            self._restore()
            signal.raise_signal(number)
            return
        self._received, self._came = number, now
        if os.environ.get("LOCAL_RANK", "0") == "0":
            logger.warning(
                "penstock: %s: the run stops after this step; a second signal ends it at once",
                signal.Signals(number).name,
            )

    @classmethod
    def take_signals(cls) -> None:
        """Take the signals again, after a library has put handlers of its own over those of open contexts."""
        for one in cls._open:
            for number in one._handlers:
                signal.signal(number, one._note)

    # ---- for the sum after a step

    @classmethod
    def wishes(cls) -> list[float]:
        """Tell whether this process was told to stop, and whether it is late: what the ranks add up."""
        signalled = late = False
        for one in cls._open:
            signalled |= bool(one._received)
            late |= one._end is not None and time.monotonic() >= one._end
        return [float(signalled), float(late)]

    @classmethod
    def agree(cls, signalled: float, late: float) -> str:
        """Why all ranks stop after this step, from the sum of their wishes; empty if they go on."""
        reason = SIGNAL if signalled else TIME_LIMIT if late else ""
        for one in cls._open:
            one._stepped = True
            one._agreed = one._agreed or reason
        return reason
