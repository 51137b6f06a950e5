"""Where the ranks of a pipeline leave word for each other, beside the wires that may be blocked.

Each rank has a page, which it alone writes and all read: its latest words by topic, and its reports of
failures. On one machine the pages are memory that the ranks share: nothing listens, no disk can be full or
gone, and nothing is left behind. Across machines they are keys of the process group's store, which a thread
of its own asks, since a store that cannot be reached holds up whoever does.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import struct
import tempfile
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from time import monotonic, monotonic_ns
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from penstock.errors import PenstockError

_HEAD = struct.Struct("=qi")
"""Before a page in memory: how often it was written, and how long it is."""
_SLATE = 128
_SLOT = 256 * 1024
"""Bytes that a rank has in memory: far more than its longest traces and stacks, compressed, can need."""
_LONGEST = 8 * _SLOT
_POLL = 0.1
_DELIVERY = 0.5
"""Seconds until a report is as a rule with the store, which numbers it."""


class BoardLostError(PenstockError, RuntimeError):
    """The board cannot be reached any more."""


class Page:
    """What a rank has left: words by topic, and numbered reports. A page that makes no sense is empty."""

    def __init__(self, data: bytes = b"") -> None:
        self.words: dict[str, Any] = {}
        self.reports: list[tuple[float, Any]] = []
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, zlib.error):
            found = json.loads(zlib.decompressobj().decompress(data, _LONGEST))
            self.reports = [(float(number), report) for number, report in found["reports"]]
            self.words = dict(found["words"])

    def to_bytes(self) -> bytes:
        """As it is written; what is torn or cut off cannot be read."""
        return zlib.compress(json.dumps(vars(self)).encode(), 1)


class Board(ABC):
    """The pages of all ranks as one of them sees them; two threads of a process may use it.

    Args:
        rank: whose this process is.
        ranks: how many there are.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._own = Page()
        self._pages = {other: Page() for other in range(ranks)} | {rank: self._own}
        self._lock = threading.RLock()

    def post(self, topic: str, word: Any) -> None:
        """Leave a word of JSON data; it replaces this rank's earlier one on the topic."""
        with self._lock:
            self._own.words[topic] = word
            self._publish()

    def read(self, topic: str, rank: int) -> Any:
        """A rank's word on a topic, None where there is none."""
        return self._page(rank).words.get(topic)

    def report(self, report: Any) -> None:
        """Add a report, JSON data, to those of all ranks."""
        with self._lock:
            self._own.reports.append((self._number(), report))
            self._publish()

    def reports(self) -> list[Any]:
        """The reports of all ranks, in the order in which they were made."""
        found = [pair for rank in self._pages for pair in self._page(rank).reports]
        return [report for _, report in sorted(found, key=lambda pair: pair[0])]

    @property
    def unanswered(self) -> float:
        """Seconds since the others' pages were asked for, while there is no answer."""
        return 0.0

    def slate(self, rank: int) -> Slate | None:
        """Where a rank writes down its actions, if the others can read that."""
        return None

    @abstractmethod
    def flush(self, seconds: float) -> None:
        """Wait, but no longer than this, until what was written can be read by the others."""

    @abstractmethod
    def close(self) -> None:
        """This rank writes and reads no more."""

    @abstractmethod
    def _page(self, rank: int) -> Page: ...

    @abstractmethod
    def _publish(self) -> None:
        """Let the others see this rank's page; called with the lock held."""

    @abstractmethod
    def _number(self) -> float:
        """A report's, by which it stands after all earlier ones."""


class SharedBoard(Board):
    """Memory that the ranks of one machine share.

    Args:
        rank: whose this process is.
        ranks: how many there are.
        file: what :meth:`make` made, or another rank opened.
    """

    def __init__(self, rank: int, ranks: int, file: int) -> None:
        super().__init__(rank, ranks)
        self._memory = mmap.mmap(file, ranks * _SLOT)
        self._counts = dict.fromkeys(range(ranks), 0)
        self._written = 0

    @staticmethod
    def make(ranks: int) -> Path:
        """A file for it that only this user may open; to be removed once all ranks have it open.

        Raises:
            OSError: there is no room for it anywhere.
        """
        try:
            return _allocated("/dev/shm", ranks * _SLOT)
        except OSError:
            return _allocated(tempfile.gettempdir(), ranks * _SLOT)

    @classmethod
    def opened(cls, rank: int, ranks: int, path: Path) -> SharedBoard:
        """The board in a file.

        Raises:
            OSError, ValueError: it is not there, or is another.
        """
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0))
        try:
            return cls(rank, ranks, file)
        finally:
            os.close(file)

    def slate(self, rank: int) -> Slate:
        """The first bytes of a rank's memory."""
        return Slate(self._memory, rank * _SLOT)

    def flush(self, seconds: float) -> None:
        """It can be read at once."""

    def close(self) -> None:
        """The memory goes when nobody has it open."""

    def _page(self, rank: int) -> Page:
        start = rank * _SLOT + _SLATE
        count, length = _HEAD.unpack_from(self._memory, start)
        if rank != self._rank and count != self._counts[rank]:
            begin = start + _HEAD.size
            found = Page(self._memory[begin : begin + max(0, min(length, _SLOT))])
            # One that is being written right now is read the next time.
            if found.words or found.reports:
                self._pages[rank], self._counts[rank] = found, count
        return self._pages[rank]

    def _publish(self) -> None:
        data, start = self._own.to_bytes(), self._rank * _SLOT + _SLATE
        if len(data) > _SLOT - _SLATE - _HEAD.size:
            raise BoardLostError(f"a page of {len(data)} bytes is too long for it")
        self._written += 1
        begin = start + _HEAD.size
        self._memory[begin : begin + len(data)] = data
        _HEAD.pack_into(self._memory, start, self._written, len(data))

    def _number(self) -> float:
        # One clock for all processes of a machine.
        return monotonic_ns()


def _allocated(folder: str, size: int) -> Path:
    """A file whose room on its disk is certain: a page of it that has none would kill who touches it."""
    file, name = tempfile.mkstemp(prefix="penstock-", dir=folder)
    try:
        while size > 0:
            size -= os.write(file, bytes(size))
    except OSError:
        os.unlink(name)
        raise
    finally:
        os.close(file)
    return Path(name)


class StoreBoard(Board):
    """Keys of a store of ``torch.distributed``; a thread of its own asks it.

    Args:
        rank: whose this process is.
        ranks: how many there are.
        store: the same for all, and used for nothing else under these names.
    """

    def __init__(self, rank: int, ranks: int, store: Any) -> None:
        super().__init__(rank, ranks)
        self._store = store
        self._asked: float | None = None
        self._news = threading.Event()
        self._delivered = threading.Event()
        self._ended = threading.Event()
        self._lost = ""
        self._thread = threading.Thread(target=self._run, name="penstock board", daemon=True)
        self._thread.start()

    @staticmethod
    def prepare(rank: int, store: Any) -> None:
        """Make a rank's key, which all others ask for from the start."""
        pages: Any = PrefixStore("board", store)
        pages.set(f"page-{rank}", Page().to_bytes())

    @property
    def unanswered(self) -> float:
        """Seconds since the store was asked, while it has not answered."""
        asked = self._asked
        return 0.0 if asked is None else monotonic() - asked

    def flush(self, seconds: float) -> None:
        """Wait until the store has this rank's page."""
        self._delivered.wait(seconds)

    def close(self) -> None:
        """End the thread; an interpreter that ends while it hears from the store would be aborted."""
        self._ended.set()
        self._news.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_DELIVERY)

    def report(self, report: Any) -> None:
        """Add a report, and wait a moment for its number, by which all know the first one."""
        super().report(report)
        self.flush(_DELIVERY)

    def _page(self, rank: int) -> Page:
        self._check()
        return self._pages[rank]

    def _publish(self) -> None:
        self._check()
        self._delivered.clear()
        self._news.set()

    def _number(self) -> float:
        # After all others until the store has numbered it.
        return float("inf")

    def _check(self) -> None:
        if self._lost:
            raise BoardLostError(self._lost)

    def _run(self) -> None:
        try:
            self._asked = monotonic()
            store = PrefixStore("board", self._store.clone())
            while not self._ended.is_set():
                self._asked = monotonic()
                self._deliver(store)
                self._collect(store)
                self._asked = None
                self._news.wait(_POLL)
        except (OSError, RuntimeError) as error:
            self._lost = str(error).strip().partition("\n")[0] or type(error).__name__
            self._asked = None
            self._delivered.set()

    def _deliver(self, store: Any) -> None:
        if not self._news.is_set():
            return
        with self._lock:
            self._news.clear()
            fresh = [index for index, (n, _) in enumerate(self._own.reports) if n == float("inf")]
        numbers = [store.add("reports", 1) for _ in fresh]
        with self._lock:
            for index, number in zip(fresh, numbers, strict=True):
                self._own.reports[index] = (number, self._own.reports[index][1])
            data = self._own.to_bytes()
        store.set(f"page-{self._rank}", data)
        if not self._news.is_set():
            self._delivered.set()

    def _collect(self, store: Any) -> None:
        others = [rank for rank in self._pages if rank != self._rank]
        keys = [f"page-{rank}" for rank in others]
        found = store.multi_get(keys) if store.has_extended_api() else map(store.get, keys)
        for rank, data in zip(others, found, strict=True):
            self._pages[rank] = Page(bytes(data))


# ---- what a rank does, when it can no longer tell

_FORM = struct.Struct("=qqqdB64s")
_OUTSIDE, _INSIDE, _MAKING = range(3)
_ACTION = re.compile(r"(\d+)[A-Z_]+(\d+)?")


class Slate:
    """The action a rank began last, in memory that others can read; written at every action.

    Args:
        memory: where.
        start: from which byte on.
    """

    def __init__(self, memory: mmap.mmap, start: int) -> None:
        self._memory = memory
        self._start = start

    def write(  # noqa: PLR0913 - a field each; called at every action
        self,
        progress: int,
        calls: int,
        step: int,
        since: float,
        inside: bool,
        doing: bytes,
        *,
        making: bool = False,
    ) -> None:
        """An action begins, or a call begins or ends, or a part of the set-up begins.

        Args:
            progress: a count of all that was done.
            calls: a count of calls.
            step: a count of steps.
            since: when it began, on the machine's monotonic clock.
            inside: whether in a call.
            doing: :meth:`text` of what is done.
            making: whether that is a part of the set-up.
        """
        state = _MAKING if making else _INSIDE if inside else _OUTSIDE
        _FORM.pack_into(self._memory, self._start, progress, calls, step, since, state, doing)

    def writer(self, action: Any) -> Callable[[int, int, int, float], None]:
        """Gives :meth:`write` for an action that runs many times, with what is known of it at hand."""
        pack, memory, start = _FORM.pack_into, self._memory, self._start
        doing = self.text(action)

        def write(progress: int, calls: int, step: int, since: float) -> None:
            pack(memory, start, progress, calls, step, since, _INSIDE, doing)

        return write

    @staticmethod
    def text(doing: Any) -> bytes:
        """An action, a part of the set-up, or nothing, in words that fit."""
        return str(doing or "").encode()[:64]

    def read(self) -> dict[str, Any]:
        """What stands there, in the words of a heartbeat; nothing where nothing was written."""
        progress, calls, step, since, state, data = _FORM.unpack_from(self._memory, self._start)
        text = data.rstrip(b"\0").decode(errors="replace")
        found = _ACTION.match(text) if state == _INSIDE else None
        if not progress or (state == _INSIDE and text and found is None):
            return {}
        stage, microbatch = found.groups() if found else (None, None)
        return {
            "progress": progress,
            "calls": calls,
            "step": step,
            "inside": state == _INSIDE,
            "making": text if state == _MAKING else None,
            "action": text if found else None,
            "stage": None if stage is None else int(stage),
            "microbatch": None if microbatch is None else int(microbatch),
            "waits": None,
            "peers": None,
            "exact": True,
            "age": max(0.0, monotonic() - since),
        }
