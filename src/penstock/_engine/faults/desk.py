"""One process's end of the store: it writes its place and reads whether there is a failure.

A thread of its own uses the store, since an unreachable store blocks its caller.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from time import monotonic
from typing import Any

from penstock._engine.faults.failure import Failure
from penstock._engine.faults.meeting import Meeting, noticing_gone_machines
from penstock._engine.faults.places import Place, read_record
from penstock.errors import first_line

PERIOD = 1.0
"""Seconds from one heartbeat to the next."""
HURRY = 0.1
"""The same, while the thread that runs the program waits for news."""
FIRST = 5.0
"""Seconds for which a process that joins waits until its first place is written."""


class Desk:
    """A thread that writes this process's place and reads the key ``failure``, once a second.

    Nothing else is read unless somebody is looked for, so what a process costs the store does not depend on
    how many there are.

    Args:
        meeting: the processes, and their part of the store.
        place: returns this process's place.
        look: called after each heartbeat while there is no failure, in the desk's thread, which alone may
            call :meth:`read` and :meth:`count`; returns a failure if it finds one.

    Attributes:
        failure: the first failure, or None.
        since: when this process learnt of it, on its monotonic clock.
        heard: how many processes have read of it, as far as is known.
        places: where all were before it was written, if this process wrote it; see :meth:`keep_places`.
        lost: why the store can no longer be reached; empty while it can.
        clock: the seconds in which the store has answered. Whether a process still writes is judged by
            this clock, so that nobody seems dead because the store, or this process, was stopped for a while.
    """

    def __init__(
        self, meeting: Meeting, place: Callable[[], Place], look: Callable[[], Failure | None]
    ) -> None:
        self.failure: Failure | None = None
        self.since = self.clock = 0.0
        self.heard = 0
        self.places: dict[int, Place] = {}
        self.lost = ""
        self._job = meeting.job
        self._store = meeting.room
        self._place, self._look = place, look
        self._keeps_places = False
        self._news: Failure | None = None
        self._hurries = False
        self._asked: float | None = None
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._wrote = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock heartbeats", daemon=True)
        self._thread.start()
        # The death of a process that has never written a place could not be told from a cut network.
        self._wrote.wait(FIRST)

    @property
    def unanswered(self) -> float:
        """Seconds for which the store has left a request unanswered."""
        asked = self._asked
        return 0.0 if asked is None else monotonic() - asked

    def now(self) -> None:
        """Write this process's place now."""
        self._wake.set()

    def keep_places(self, wanted: bool) -> None:
        """Say whether to read where all processes are before a failure is written."""
        self._keeps_places = wanted

    def learn(self, failure: Failure) -> None:
        """Take a failure for the first one, unless one is known."""
        if self.failure is None:
            self.since, self.failure = monotonic(), failure

    def report(self, failure: Failure, seconds: float) -> None:
        """Write a failure to the store, unless it holds one already, and wait until that is done."""
        self._news = failure
        self.wait_for(lambda: self.failure, seconds)

    def wait_for(self, condition: Callable[[], Any], seconds: float) -> None:
        """Wait for news until a condition holds or the store is lost, for at most this many seconds."""
        deadline = monotonic() + seconds
        self._hurries = True
        self._wake.set()
        while not condition() and not self.lost and monotonic() < deadline:
            self._ending.wait(HURRY / 4)
        self._hurries = False

    def close(self, seconds: float) -> None:
        """Write a last place, and end the thread.

        An interpreter that exits while the thread is in a call to the store would abort.
        """
        self._ending.set()
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    # ---- in the desk's thread

    def read(self, processes: Sequence[int]) -> dict[int, Place]:
        """Read the places of processes, as far as they are readable."""
        keys = [f"place/{process}" for process in processes]
        several = self._store.has_extended_api() and keys
        answers = self._store.multi_get(keys) if several else map(self._store.get, keys)
        records = (read_record(Place, bytes(data)) for data in answers)
        return {
            process: place
            for process, place in zip(processes, records, strict=True)
            if place is not None and place.process == process
        }

    def count(self, what: str) -> int:
        """Count in the store how many have come to something, with this process."""
        return int(self._store.add(what, 1))

    def _run(self) -> None:
        last = None
        try:
            self._asked = monotonic()
            with noticing_gone_machines():
                self._store = self._store.clone()
            while True:
                ending = self._ending.is_set()
                self._asked = monotonic()
                if self.failure is None:
                    self._beat()
                elif self._hurries and not ending:
                    self.heard = self._store.add("heard", 0)
                self._asked, now = None, monotonic()
                self.clock += 0.0 if last is None else min(now - last, 1.5 * PERIOD)
                last = now
                if ending:
                    return
                # After a failure there is nothing to tell, and the store ends with whoever hosts it.
                pause = None if self.failure is not None else PERIOD
                self._wake.wait(HURRY if self._hurries else pause)
                self._wake.clear()
        except Exception as error:
            # Whatever it is, the monitor must know that nothing more is told here.
            self.lost = first_line(error)
        finally:
            self._asked = None
            self._wrote.set()

    def _beat(self) -> None:
        self._store.set(f"place/{self._job.process}", json.dumps(asdict(self._place())))
        self._wrote.set()
        data = self._store.get("failure") if self._store.check(["failure"]) else b""
        self._hear(data)
        news = None if self.failure is not None else self._news or self._look()
        if news is not None:
            if self._keeps_places:
                # Before the others learn of it, and leave.
                self.places = self.read(self._job.members)
            # The first failure stays; an unreadable record does not count.
            self._hear(self._store.compare_set("failure", data, json.dumps(asdict(news))))

    def _hear(self, data: bytes) -> None:
        failure = read_record(Failure, data)
        if failure is not None:
            self.learn(failure)
            # So that who reported it, or hosts the store, knows when all have.
            self.heard = self.count("heard")
