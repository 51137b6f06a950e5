"""Where the ranks of a pipeline leave word for each other, beside the wires that may be blocked.

On one machine it is a folder that only its owner may enter: nothing listens, and it outlives every rank.
Across machines it is the store of the process group, over a connection of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore

from penstock.errors import PenstockError
from penstock.faults.slate import Slate


class BoardLostError(PenstockError, RuntimeError):
    """The board cannot be reached any more."""


class Board(ABC):
    """Latest words by topic and rank, and a list of reports in the order of their coming."""

    @abstractmethod
    def post(self, topic: str, rank: int, text: str) -> None:
        """Leave a word; it replaces the rank's earlier one on this topic."""

    @abstractmethod
    def read(self, topic: str, rank: int) -> str | None:
        """A rank's word on a topic, where there is one."""

    @abstractmethod
    def report(self, text: str) -> None:
        """Add a report to the list."""

    @abstractmethod
    def reports(self, start: int) -> list[str]:
        """The list from an index on."""

    def slate(self, rank: int) -> Slate | None:
        """Where a rank writes down its actions, if the others can read that; made by the rank itself."""
        return None

    @abstractmethod
    def remove(self) -> None:
        """Take it down; nobody reads it any more."""


class FolderBoard(Board):
    """A file a word, replaced as a whole.

    Args:
        path: a folder that all ranks see.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def new(cls) -> FolderBoard:
        """One in a folder of its own that only this user may enter."""
        return cls(Path(tempfile.mkdtemp(prefix="penstock-")))

    @property
    def path(self) -> Path:
        """Its folder."""
        return self._path

    def post(self, topic: str, rank: int, text: str) -> None:
        """Write beside, then replace: a reader never sees half a word."""
        with _reachable():
            draft = self._draft(f"{topic}-{rank}", text)
            draft.replace(self._path / f"{topic}-{rank}")

    def read(self, topic: str, rank: int) -> str | None:
        """The file's text."""
        return self._text(f"{topic}-{rank}")

    def report(self, text: str) -> None:
        """Take the first number that nobody has."""
        with _reachable():
            draft = self._draft("report", text)
            for number in itertools.count():
                with contextlib.suppress(FileExistsError):
                    os.link(draft, self._path / f"report-{number}")
                    break
            draft.unlink()

    def reports(self, start: int) -> list[str]:
        """The files from a number on."""
        texts = (self._text(f"report-{number}") for number in itertools.count(start))
        return list(itertools.takewhile(lambda text: text is not None, texts))  # type: ignore[arg-type]

    def slate(self, rank: int) -> Slate | None:
        """A file of the folder, as memory."""
        with _reachable():
            return Slate(self._path / f"slate-{rank}")

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._path, ignore_errors=True)

    def _draft(self, name: str, text: str) -> Path:
        draft = self._path / f".{name}-{os.getpid()}-{threading.get_ident()}"
        draft.write_text(text, encoding="utf-8")
        return draft

    def _text(self, name: str) -> str | None:
        try:
            return (self._path / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise BoardLostError(str(error)) from error


class StoreBoard(Board):
    """Keys of a store of ``torch.distributed``.

    Args:
        store: a connection that nobody else uses.
    """

    def __init__(self, store: Any) -> None:
        self._store = PrefixStore("penstock/faults", store)

    def post(self, topic: str, rank: int, text: str) -> None:
        """Set a key."""
        with _reachable():
            self._store.set(f"{topic}-{rank}", text)

    def read(self, topic: str, rank: int) -> str | None:
        """The key's value; asked for only where it is set, since to get waits for it."""
        return self._text(f"{topic}-{rank}")

    def report(self, text: str) -> None:
        """Set the key of the next number."""
        with _reachable():
            number = self._store.add("reports", 1) - 1
            self._store.set(f"report-{number}", text)

    def reports(self, start: int) -> list[str]:
        """Those that are numbered and set."""
        with _reachable():
            count = self._store.add("reports", 0)
        texts = (self._text(f"report-{number}") for number in range(start, count))
        return list(itertools.takewhile(lambda text: text is not None, texts))  # type: ignore[arg-type]

    def remove(self) -> None:
        """It ends with the store."""

    def _text(self, key: str) -> str | None:
        with _reachable():
            if not self._store.check([key]):
                return None
            return bytes(self._store.get(key)).decode(errors="replace")


@contextlib.contextmanager
def _reachable() -> Any:
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise BoardLostError(str(error)) from error
