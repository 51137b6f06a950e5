"""One process's end of the store: it writes its place and reads whether there is a failure.

A thread of its own uses the store, since an unreachable store blocks its caller.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from time import monotonic
from typing import Any, TypeVar

from penstock.faults.failure import Failure
from penstock.faults.meeting import Meeting, first_line, noticing_gone_machines
from penstock.faults.places import Place, read_record

T = TypeVar("T")

PERIOD = 1.0
"""Seconds from one heartbeat to the next."""
HURRY = 0.1
"""The same, while this process waits for the cause of a failure."""
ANSWER = 2.0
"""Seconds to wait for the store's answer to a question."""


class Desk:
    """A thread that writes this process's place and reads the key ``failure``, once a second.

    Nothing else is read unless it is asked for, so what a process costs the store does not depend on how many
    there are.

    Args:
        meeting: the processes, and their part of the store.
        place: returns this process's place.

    Attributes:
        failure: the first failure in the store, or None.
        lost: why the store can no longer be reached; empty while it can.
        clock: the seconds in which the store has answered. Whether a process still writes is judged by
            this clock, so that nobody seems dead because the store, or this process, was stopped for a while.
    """

    def __init__(self, meeting: Meeting, place: Callable[[], Place]) -> None:
        self.failure: Failure | None = None
        self.lost = ""
        self.clock = 0.0
        self._process = meeting.process
        self._store = meeting.room
        self._place = place
        self._news: Failure | None = None
        self._questions: deque[tuple[Callable[[Any], Any], Future[Any]]] = deque()
        self._period = PERIOD
        self._asked: float | None = None
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock heartbeats", daemon=True)
        self._thread.start()

    @property
    def unanswered(self) -> float:
        """Seconds for which the store has left a request unanswered."""
        asked = self._asked
        return 0.0 if asked is None else monotonic() - asked

    def report(self, failure: Failure) -> None:
        """Write a failure to the store, unless it holds one already."""
        self._news = failure
        self._wake.set()

    def now(self) -> None:
        """Write this process's place now."""
        self._wake.set()

    def ask(self, question: Callable[[Any], T], seconds: float = ANSWER) -> T | None:
        """Call a function with the store, in the desk's thread; None if there is no answer in time."""
        future: Future[T] = Future()
        self._questions.append((question, future))
        self._wake.set()
        try:
            return None if self.lost else future.result(seconds)
        except TimeoutError:
            return None

    def places(self, processes: Sequence[int], seconds: float = ANSWER) -> dict[int, Place] | None:
        """Read the places of processes; None if there is no answer in time."""
        keys = [f"place/{process}" for process in processes]

        def read(store: Any) -> dict[int, Place]:
            answers = store.multi_get(keys) if store.has_extended_api() else map(store.get, keys)
            records = [read_record(Place, bytes(data)) for data in answers]
            return {
                process: place
                for process, place in zip(processes, records, strict=True)
                if place is not None and place.process == process
            }

        return self.ask(read, seconds) if keys else {}

    def wait_for(self, condition: Callable[[], Any], seconds: float) -> bool:
        """Poll until a condition holds, for at most this many seconds; return whether it does."""
        deadline = monotonic() + seconds
        self._period = HURRY
        self._wake.set()
        while not condition() and not self.lost and monotonic() < deadline:
            self._ending.wait(HURRY / 4)
        self._period = PERIOD
        return bool(condition())

    def close(self, seconds: float) -> None:
        """Write a last place, and end the thread.

        An interpreter that exits while the thread is in a call to the store would abort.
        """
        self._ending.set()
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _run(self) -> None:
        last = None
        try:
            self._asked = monotonic()
            with noticing_gone_machines():
                store = self._store.clone()
            while True:
                ending = self._ending.is_set()
                if ending and self.failure is not None:
                    return
                self._asked = monotonic()
                store.set(f"place/{self._process}", json.dumps(asdict(self._place())))
                self._exchange_failures(store)
                while self._questions:
                    question, future = self._questions.popleft()
                    future.set_result(question(store))
                self._asked, now = None, monotonic()
                self.clock += 0.0 if last is None else min(now - last, 1.5 * PERIOD)
                last = now
                if ending:
                    return
                # After a failure there is nothing to tell, and the store ends with whoever hosts it.
                self._wake.wait(self._period if self.failure is None else None)
                self._wake.clear()
        except (OSError, RuntimeError) as error:
            self.lost = first_line(error)
        finally:
            self._asked = None

    def _exchange_failures(self, store: Any) -> None:
        if self.failure is None and store.check(["failure"]):
            self.failure = self._heard(store, store.get("failure"))
        if self._news is not None:
            news, self._news = self._news, None
            if self.failure is None:
                # The first failure stays; an unreadable record does not count.
                known = store.get("failure") if store.check(["failure"]) else b""
                data = store.compare_set("failure", known, json.dumps(asdict(news)))
                self.failure = self._heard(store, data)

    def _heard(self, store: Any, data: bytes) -> Failure | None:
        failure = read_record(Failure, data)
        if failure is not None:
            # So that who reported it, or hosts the store, knows when all have.
            store.add("heard", 1)
        return failure
