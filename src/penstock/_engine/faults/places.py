"""Where each process is, by what it wrote last, and for whom it waits."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, TypeVar

from penstock.errors import printable

T = TypeVar("T")

LARGEST = 400_000
"""The largest record of another process that is read, in bytes."""
LONGEST_LINE = 1000
LONGEST_TRACE = 20_000
LONGEST_GROUPS = 20_000


def name_of(rank: int, process: int, replica: int | None) -> str:
    """A process's name in messages: its rank, and what tells it from ranks of the same number."""
    if replica is not None:
        return f"replica {replica}, rank {rank}, global rank {process}"
    return f"rank {rank}" + ("" if rank == process else f", global rank {process}")


@lru_cache(1024)
def ranges(ranks: Sequence[int]) -> str:
    """Global ranks as a short text, such as ``"0-12/4"`` for 0, 4, 8 and 12, or ``"0,1,5"``."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if step > 0 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, step)):
        return f"{ranks[0]}-{ranks[-1]}/{step}"
    return ",".join(map(str, ranks))


def in_ranges(text: str, known: Iterable[int]) -> list[int]:
    """The global ranks of a text that :func:`ranges` made, as far as they are known ones."""
    try:
        if "/" not in text:
            ranks: Sequence[int] | set[int] = {int(one) for one in text.split(",") if one}
        else:
            bounds, _, step = text.partition("/")
            first, _, last = bounds.partition("-")
            ranks = range(int(first), int(last) + 1, int(step))
    except ValueError:
        return []
    return [one for one in known if one in ranks]


@dataclass(frozen=True)
class Where:
    """What names a process and the point that it has reached.

    Args:
        rank: its rank in its pipeline.
        process: its rank among all processes.
        replica: the number of its pipeline, where the job has several.
        step: the current training step, counted from 1, or the last one.
        stage: the stage of the current action, if there is one.
        microbatch: the microbatch of the current action.
        action: the current action, or the last one.
    """

    rank: int
    process: int = 0
    replica: int | None = None
    step: int = 0
    stage: int | None = None
    microbatch: int | None = None
    action: str | None = None

    @property
    def name(self) -> str:
        """The process's name in messages."""
        return name_of(self.rank, self.process, self.replica)


@dataclass(frozen=True)
class Place(Where):
    """Where a process is: what it writes into the store once a second.

    Args:
        number: how many places it has written.
        status: ``runs``, ``stops`` (with an error) or ``left`` (it is done).
        calls: how many steps and evaluations it has begun.
        inside: whether it is in a step or an evaluation.
        setup: the part of the set-up that it is in; ``None`` once its pipeline is made.
        waits: what it waits for; ``None`` while it works.
        awaited: the global ranks that it waits for, as :func:`ranges` writes them; empty if anybody may be
            waited for.
        call: the call of the user's that it is in and that every rank must make; empty for none.
        collective: the number of the collective of these that it waits for; ``None`` for another wait.
        arrived: for each group of processes, to how many of its collectives this one has come.
        age: seconds from its last progress until it wrote this.
        slack: seconds without progress that it has asked for.
    """

    number: int = 0
    status: str = "runs"
    calls: int = 0
    inside: bool = True
    setup: str | None = None
    waits: str | None = None
    awaited: str = ""
    call: str = ""
    collective: int | None = None
    arrived: str = ""
    age: float = 0.0
    slack: float = 0.0

    def __str__(self) -> str:
        return f"{self.name} {self.doing} for {self.age:.1f} s"

    @property
    def doing(self) -> str:
        """A description of what the process is doing."""
        if self.setup is not None:
            return f"is making its pipeline ({self.waits or self.setup})"
        if self.waits is not None:
            return f"waits for {self.waits}{self._source}"
        if not self.inside:
            after = f"step {self.step}" if self.step else f"call {self.calls}"
            begun = self.step or self.calls
            steps = f"between steps, after {after}" if begun else "before its first step"
            return f"is {steps}, in {self.call or 'its own code'}"
        return f"is in {self.action}" if self.action else "prepares a step"

    @property
    def _source(self) -> str:
        if self.collective is not None:
            return f" of global ranks {self.awaited} (number {self.collective})"
        return f" from global rank {self.awaited}" if self.awaited.isdecimal() else ""

    def has_come_to(self, group: str, number: int) -> bool:
        """Tell whether it has come to a collective of a group."""
        counts = dict(entry.split("=", 1) for entry in self.arrived.split() if "=" in entry)
        try:
            return int(counts.get(group, "0")) >= number
        except ValueError:
            return False


def read_record(kind: type[T], data: bytes) -> T | None:
    """Read a dataclass from JSON that another process wrote; ``None`` if it is anything else.

    Any process that reaches the store may have written it, so its size, its depth and the type of each field
    are checked, and what the class itself demands; and texts are cut and escaped, so that they cannot control
    a terminal.
    """
    if len(data) > LARGEST:
        return None
    try:
        record = json.loads(data)
        values = {f.name: _checked(record[f.name], str(f.type), f.name) for f in fields(kind)}  # type: ignore[arg-type]
        return kind(**values)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def read_text(data: bytes) -> str:
    """A text that another process wrote, for a message."""
    return clipped(data.decode(errors="replace"))


_LONGEST = {"trace": LONGEST_TRACE, "awaited": LONGEST_GROUPS, "arrived": LONGEST_GROUPS}


def clipped(text: str, name: str = "") -> str:
    """A text of a record, escaped and cut: the record is told whatever its texts hold."""
    most = _LONGEST.get(name, LONGEST_LINE)
    # A traceback says most at its end.
    return printable(text)[-most:] if name == "trace" else printable(text)[:most]


def _checked(value: Any, kinds: str, name: str) -> Any:
    kind = type(value).__name__
    if value is None and "None" in kinds:
        return None
    if kind == "str" and kinds.startswith("str"):
        return clipped(value, name)
    if kind == "int" and kinds.startswith(("int", "float")) and abs(value) < 2**53:
        return value
    if kind == kinds and kind in ("bool", "float"):
        return value
    raise TypeError(name)
