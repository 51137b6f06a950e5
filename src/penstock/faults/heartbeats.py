"""The messages that ranks leave in the store: heartbeats and the first failure.

A thread of its own uses the store, since an unreachable store blocks its caller.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import asdict
from time import monotonic
from typing import Any

from penstock.faults.failure import Failure
from penstock.faults.meeting import Meeting, first_line
from penstock.faults.places import Place, read_record

PERIOD = 1.0
"""Seconds from one heartbeat to the next."""
HURRY = 0.1
"""The same, while this rank waits for the cause of a failure."""


class Heartbeats:
    """A thread that writes this rank's heartbeat and reads the others', once a second.

    Args:
        meeting: the ranks, and their part of the store.
        beat: returns this rank's place.

    Attributes:
        places: the last heartbeat of each other rank.
        heard: when each of them arrived, on this process's monotonic clock.
        failure: the first failure in the store, or None.
        lost: why the store can no longer be reached; empty while it can.
    """

    def __init__(self, meeting: Meeting, beat: Callable[[], Place]) -> None:
        others = [rank for rank in range(meeting.ranks) if rank != meeting.rank]
        self.places = {rank: Place(rank, setup="starts") for rank in others}
        self.heard = dict.fromkeys(others, monotonic())
        self.failure: Failure | None = None
        self.lost = ""
        self._rank = meeting.rank
        self._store = meeting.store
        self._beat = beat
        self._news: Failure | None = None
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
        """Send a heartbeat now."""
        self._wake.set()

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
        """Send a last heartbeat, and end the thread.

        An interpreter that exits while the thread is in a call to the store would abort.
        """
        self._ending.set()
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _run(self) -> None:
        try:
            self._asked = monotonic()
            store = self._store.clone()
            while True:
                ending = self._ending.is_set()
                self._asked = monotonic()
                self._write(store)
                if ending:
                    return
                self._read(store)
                self._asked = None
                self._wake.wait(self._period)
                self._wake.clear()
        except (OSError, RuntimeError) as error:
            self.lost = first_line(error)
        finally:
            self._asked = None

    def _write(self, store: Any) -> None:
        store.set(f"beat/{self._rank}", json.dumps(asdict(self._beat())))
        if self._news is not None:
            # The first failure stays; an unreadable record does not count.
            known = store.get("failure")
            if read_record(Failure, known) is None:
                store.compare_set("failure", known, json.dumps(asdict(self._news)))
            self._news = None

    def _read(self, store: Any) -> None:
        keys = ["failure", *(f"beat/{rank}" for rank in self.places)]
        answers = store.multi_get(keys) if store.has_extended_api() else map(store.get, keys)
        failure, *beats = map(bytes, answers)
        for rank, data in zip(self.places, beats, strict=True):
            place = read_record(Place, data)
            if place is None or place.rank != rank:
                continue  # garbage, or another rank's heartbeat
            if place.number != self.places[rank].number:
                self.heard[rank] = monotonic()
                self.places[rank] = place
        if self.failure is None:
            self.failure = read_record(Failure, failure)
