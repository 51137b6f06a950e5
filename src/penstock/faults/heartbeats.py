"""What the ranks tell each other in the store: heartbeats, the first failure, and stacks.

One thread talks to the store, since a store that cannot be reached blocks its caller.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from time import monotonic
from typing import Any

from penstock.errors import printable
from penstock.faults.failure import Failure
from penstock.faults.meeting import Meeting, first_line
from penstock.faults.silence import LARGEST, LONGEST_TRACE, Place, read_record

PERIOD = 1.0
"""Seconds from one heartbeat to the next."""
HURRY = 0.1
"""The same while this rank waits for the reason of a failure."""


class Heartbeats:
    """A thread that writes this rank's heartbeat and reads the others', once a second.

    Args:
        meeting: the ranks, and their part of the store.
        beat: gives this rank's place.

    Attributes:
        places: the last heartbeat of each other rank.
        heard: when it came, on this process's monotonic clock.
        failure: the first failure, as the store has it.
        stacks: the stacks of the ranks that gave them.
        rounds: how often the store has answered.
        lost: why the store cannot be reached any more; empty while it can.
        hurry: whether to ask more often.
    """

    def __init__(self, meeting: Meeting, beat: Callable[[], Place]) -> None:
        others = [rank for rank in range(meeting.ranks) if rank != meeting.rank]
        self.places = {rank: Place(rank, setup="starts") for rank in others}
        self.heard = dict.fromkeys(others, monotonic())
        self.failure: Failure | None = None
        self.stacks: dict[int, str] = {}
        self.rounds = 0
        self.lost = ""
        self.hurry = False
        self._rank = meeting.rank
        self._store = meeting.store
        self._beat = beat
        self._news: list[tuple[str, str]] = []
        self._asked: float | None = None
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock heartbeats", daemon=True)
        self._thread.start()

    @property
    def unanswered(self) -> float:
        """Seconds that the store has not answered."""
        asked = self._asked
        return 0.0 if asked is None else monotonic() - asked

    def report(self, failure: Failure) -> None:
        """Tell a failure, unless one is known already."""
        self._news.append(("failure", json.dumps(asdict(failure))))
        self._wake.set()

    def give_stacks(self, text: str) -> None:
        """Tell the stacks of this process."""
        self._news.append((f"stacks/{self._rank}", text))
        self._wake.set()

    def now(self) -> None:
        """Send a heartbeat now."""
        self._wake.set()

    def wait_for(self, condition: Callable[[], Any], seconds: float) -> bool:
        """Ask often until a condition holds, but no longer than this; returns whether it does."""
        deadline = monotonic() + seconds
        self.hurry = True
        self._wake.set()
        while not condition() and not self.lost and monotonic() < deadline:
            self._ending.wait(HURRY / 4)
        self.hurry = False
        return bool(condition())

    def close(self, seconds: float) -> None:
        """Send a last heartbeat, and end the thread.

        An interpreter that exits while the thread is in a call of the store would abort.
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
                self.rounds += 1
                self._wake.wait(HURRY if self.hurry else PERIOD)
                self._wake.clear()
        except (OSError, RuntimeError) as error:
            self.lost = first_line(error)
        finally:
            self._asked = None

    def _write(self, store: Any) -> None:
        store.set(f"beat/{self._rank}", json.dumps(asdict(self._beat())))
        while self._news:
            key, text = self._news[0]
            if key == "failure":
                # The first failure stays; what cannot be read is none.
                known = store.get(key)
                if read_record(Failure, known) is None:
                    store.compare_set(key, known, text)
            else:
                store.set(key, text)
            self._news.pop(0)

    def _read(self, store: Any) -> None:
        keys = [
            "failure",
            *(f"beat/{r}" for r in self.places),
            *(f"stacks/{r}" for r in self.places),
        ]
        answers = store.multi_get(keys) if store.has_extended_api() else map(store.get, keys)
        failure, *rest = map(bytes, answers)
        for rank, data, text in zip(
            self.places, rest[: len(self.places)], rest[len(self.places) :], strict=True
        ):
            place = read_record(Place, data)
            # An unreadable heartbeat, or one of somebody else, is none.
            if (
                place is not None
                and place.rank == rank
                and place.number != self.places[rank].number
            ):
                self.heard[rank] = monotonic()
                self.places[rank] = place
            if len(text) > 1 and rank not in self.stacks:
                with suppress(UnicodeDecodeError):
                    self.stacks[rank] = printable(text[:LARGEST].decode())[-LONGEST_TRACE:]
        if self.failure is None:
            self.failure = read_record(Failure, failure)
