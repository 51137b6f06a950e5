"""A board on which the ranks of a pipeline leave messages, apart from connections that may be blocked.

Each rank has a page, which it alone writes and all ranks read: its latest word on each topic, and its
reports of failures. On one machine the pages are shared memory: no port is open, no full or lost disk
matters, and nothing is left behind. Across machines they are keys in the process group's store. A separate
thread talks to the store, since a store that cannot be reached blocks its caller.
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
"""The header of a page in memory: how often it was written, and its length."""
_SLATE = 128
_SLOT = 256 * 1024
"""The bytes of memory for each rank: far more than its longest traces and stacks need, compressed."""
_LONGEST = 8 * _SLOT
_POLL = 0.1
_DELIVERY = 0.5
"""Seconds in which a report usually reaches the store, which numbers it."""


class BoardLostError(PenstockError, RuntimeError):
    """The board cannot be reached any more."""


class Page:
    """What a rank has left: words by topic, and numbered reports. An unreadable page counts as empty."""

    def __init__(self, data: bytes = b"") -> None:
        self.words: dict[str, Any] = {}
        self.reports: list[tuple[float, Any]] = []
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, zlib.error):
            found = json.loads(zlib.decompressobj().decompress(data, _LONGEST))
            self.reports = [(float(number), report) for number, report in found["reports"]]
            self.words = dict(found["words"])

    def to_bytes(self) -> bytes:
        """The page as it is written; one that is torn or cut off cannot be read."""
        return zlib.compress(json.dumps(vars(self)).encode(), 1)


class Board(ABC):
    """The pages of all ranks, as seen by one of them; two threads of a process may use it.

    Args:
        rank: the rank of this process.
        ranks: the number of ranks.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank = rank
        self._own = Page()
        self._pages = {other: Page() for other in range(ranks)} | {rank: self._own}
        self._lock = threading.RLock()

    def post(self, topic: str, word: Any) -> None:
        """Leave a word, which is JSON data; it replaces this rank's earlier word on the topic."""
        with self._lock:
            self._own.words[topic] = word
            self._publish()

    def read(self, topic: str, rank: int) -> Any:
        """A rank's word on a topic; None if there is none."""
        return self._page(rank).words.get(topic)

    def report(self, report: Any) -> None:
        """Add a report, which is JSON data, to those of all ranks."""
        with self._lock:
            self._own.reports.append((self._number(), report))
            self._publish()

    def reports(self) -> list[Any]:
        """The reports of all ranks, in the order in which they were made."""
        found = [pair for rank in self._pages for pair in self._page(rank).reports]
        return [report for _, report in sorted(found, key=lambda pair: pair[0])]

    @property
    def unanswered(self) -> float:
        """Seconds that a request for the others' pages has been without an answer."""
        return 0.0

    def slate(self, rank: int) -> Slate | None:
        """Where a rank notes its actions, if the others can read that."""
        return None

    @abstractmethod
    def flush(self, seconds: float) -> None:
        """Wait until the others can read what was written, but no longer than this."""

    @abstractmethod
    def close(self) -> None:
        """Stop writing and reading."""

    @abstractmethod
    def _page(self, rank: int) -> Page: ...

    @abstractmethod
    def _publish(self) -> None:
        """Make this rank's page visible to the others; called with the lock held."""

    @abstractmethod
    def _number(self) -> float:
        """A number for a new report that is larger than those of all earlier reports."""


class SharedBoard(Board):
    """Memory that the ranks of one machine share.

    Args:
        rank: the rank of this process.
        ranks: the number of ranks.
        file: a descriptor of the file that :meth:`make` has made.
    """

    def __init__(self, rank: int, ranks: int, file: int) -> None:
        super().__init__(rank, ranks)
        self._memory = mmap.mmap(file, ranks * _SLOT)
        self._counts = dict.fromkeys(range(ranks), 0)
        self._written = 0

    @staticmethod
    def make(ranks: int) -> Path:
        """Make its file, which only this user may open, and which is removed once all ranks have opened it.

        Raises:
            OSError: there is no room for it anywhere.
        """
        try:
            return _allocated("/dev/shm", ranks * _SLOT)
        except OSError:
            return _allocated(tempfile.gettempdir(), ranks * _SLOT)

    @classmethod
    def opened(cls, rank: int, ranks: int, path: Path) -> SharedBoard:
        """Open the board in a file.

        Raises:
            OSError, ValueError: the file is missing, or of another size.
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
        """Does nothing: memory can be read at once."""

    def close(self) -> None:
        """Does nothing: the memory is freed when no process has it open."""

    def _page(self, rank: int) -> Page:
        start = rank * _SLOT + _SLATE
        count, length = _HEAD.unpack_from(self._memory, start)
        if rank != self._rank and count != self._counts[rank]:
            begin = start + _HEAD.size
            found = Page(self._memory[begin : begin + max(0, min(length, _SLOT))])
            # A page that is being written right now is read the next time.
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
        # All processes of a machine have the same clock.
        return monotonic_ns()


def _allocated(folder: str, size: int) -> Path:
    """A file whose space is really allocated: touching mapped memory without space would kill the process."""
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
    """Keys in a store of ``torch.distributed``, which a separate thread talks to.

    Args:
        rank: the rank of this process.
        ranks: the number of ranks.
        store: the same store for all ranks, in which these names are not used for anything else.
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
        """Make a rank's key, since the others read it from the start."""
        pages: Any = PrefixStore("board", store)
        pages.set(f"page-{rank}", Page().to_bytes())

    @property
    def unanswered(self) -> float:
        """Seconds that the store has not answered."""
        asked = self._asked
        return 0.0 if asked is None else monotonic() - asked

    def flush(self, seconds: float) -> None:
        """Wait until the store has this rank's page."""
        self._delivered.wait(seconds)

    def close(self) -> None:
        """End the thread.

        An interpreter that exits while the thread is in a call of the store would abort.
        """
        self._ended.set()
        self._news.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_DELIVERY)

    def report(self, report: Any) -> None:
        """Add a report, and wait a moment for its number, which tells all ranks which report was first."""
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
        # Behind all others, until the store has numbered it.
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


# ---- what a rank is doing, where others can read it even if the rank itself is stuck

_FORM = struct.Struct("=qqqdB64s")
_OUTSIDE, _INSIDE, _MAKING = range(3)
_ACTION = re.compile(r"(\d+)[A-Z_]+(\d+)?")


class Slate:
    """The action that a rank began last, in memory that others can read; written at every action.

    Args:
        memory: the memory.
        start: the offset of the first byte.
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
        """An action begins, a call begins or ends, or a part of the set-up begins.

        Args:
            progress: the count of everything that was done.
            calls: the count of calls.
            step: the count of steps.
            since: when it began, on the machine's monotonic clock.
            inside: whether it is inside a call.
            doing: the :meth:`text` of what is done.
            making: whether it is a part of the set-up.
        """
        state = _MAKING if making else _INSIDE if inside else _OUTSIDE
        _FORM.pack_into(self._memory, self._start, progress, calls, step, since, state, doing)

    def writer(self, action: Any) -> Callable[[int, int, int, float], None]:
        """A fast :meth:`write` for one action that runs many times."""
        pack, memory, start = _FORM.pack_into, self._memory, self._start
        doing = self.text(action)

        def write(progress: int, calls: int, step: int, since: float) -> None:
            pack(memory, start, progress, calls, step, since, _INSIDE, doing)

        return write

    @staticmethod
    def text(doing: Any) -> bytes:
        """The text of an action, of a part of the set-up, or of nothing, cut to the size of the field."""
        return str(doing or "").encode()[:64]

    def read(self) -> dict[str, Any]:
        """What was written, with the keys of a heartbeat; empty if nothing was."""
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
