"""Let all programs run as far as they come, and say who waits for whom where they stop."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from penstock.schedule.action import SEND_OPS
from penstock.schedule.packed import NOWHERE, Column, Packed
from penstock.schedule.wiring import Wiring


@dataclass(frozen=True)
class Progress:
    """How far the ranks came.

    Attributes:
        reached: for each rank the number of the action it stands at, or one past its last.
        waits_for: for each rank that stands, the action it waits for.
        complete: whether all ranks came to their end.
    """

    reached: list[int]
    waits_for: dict[int, int]
    complete: bool


@dataclass(frozen=True)
class _Waits:
    """One wait a line, by rank and place: ``after[i]`` may start once ``before[i]`` is past."""

    after: list[int]
    before: list[int]
    holder: list[int]
    """The rank of ``before[i]``."""
    first: list[int]
    """For each rank its first line, and one past the last rank's last."""


def run(wiring: Wiring, *, blocking_sends: bool = False) -> Progress:
    """Run all programs under the meaning of SEND and RECV, or with sends that wait for their RECV.

    A need that nothing meets counts as met: it is a finding of its own, and others shall still be found.
    """
    packed = wiring.packed
    waits = _waits(wiring, blocking_sends)
    lines = waits.first[:-1]
    ends = waits.first[1:]
    reached = packed.starts[:-1].tolist()
    last = packed.starts[1:].tolist()
    sleepers: list[list[tuple[int, int]]] = [[] for _ in reached]
    stands: dict[int, int] = {}
    ready = deque(range(len(reached)))
    while ready:
        rank = ready.popleft()
        stands.pop(rank, None)
        line = _advance(rank, waits, lines[rank], ends[rank], reached)
        lines[rank] = line
        reached[rank] = last[rank] if line == ends[rank] else waits.after[line]
        if line < ends[rank]:
            stands[rank] = waits.before[line]
            heappush(sleepers[waits.holder[line]], (waits.before[line], rank))
        asleep = sleepers[rank]
        while asleep and asleep[0][0] < reached[rank]:
            ready.append(heappop(asleep)[1])
    return Progress(reached, stands, not stands)


def _advance(rank: int, waits: _Waits, line: int, end: int, reached: list[int]) -> int:
    """The first wait of a rank, from ``line`` on, that is not over yet."""
    before, holder = waits.before, waits.holder
    while line < end:
        holds = holder[line]
        if before[line] >= reached[holds] and (holds != rank or before[line] >= waits.after[line]):
            break
        line += 1
    return line


def _waits(wiring: Wiring, blocking_sends: bool) -> _Waits:
    packed = wiring.packed
    columns = [*wiring.waits, *([_blocking(packed)] if blocking_sends else [])]
    after = [np.flatnonzero(column != NOWHERE) for column in columns]
    before = [column[at] for column, at in zip(columns, after, strict=True)]
    ends = [_other_end(wiring, numbers) for numbers in before]
    afters, befores = _concatenate(after), _concatenate(ends)
    met = befores != NOWHERE
    afters, befores = afters[met], befores[met]
    if len(columns) > 1:
        order = np.argsort(afters, kind="stable")
        afters, befores = afters[order], befores[order]
    return _Waits(
        afters.tolist(),
        befores.tolist(),
        packed.rank[befores].tolist(),
        np.searchsorted(afters, packed.starts).tolist(),
    )


def _concatenate(parts: list[Column] | list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate([*parts, np.empty(0, np.int64)]).astype(np.int64)


def _blocking(packed: Packed) -> Column:
    sends = packed.having(SEND_OPS)
    return np.where(sends, np.arange(len(packed), dtype=np.int32), np.int32(NOWHERE))


def _other_end(wiring: Wiring, numbers: Column) -> Column:
    """What a wait is for: of a message the end at the other rank, else the action itself."""
    return np.where(wiring.packed.messages[numbers], wiring.partner[numbers], numbers)


def circle(packed: Packed, progress: Progress) -> tuple[int, list[str]]:
    """A circle of ranks that wait for each other: where its first rank stands, and the way round in words."""
    rank = next(iter(progress.waits_for))
    seen: list[int] = []
    while rank not in seen:
        seen.append(rank)
        rank = int(packed.rank[progress.waits_for[rank]])
    around = seen[seen.index(rank) :]
    return progress.reached[rank], list(_tell(packed, progress, around))


def _tell(packed: Packed, progress: Progress, ranks: list[int]) -> Iterator[str]:
    for rank in ranks:
        stands = packed.action(progress.reached[rank])
        awaited = progress.waits_for[rank]
        yield f"rank {rank} at {stands} waits for {packed.action(awaited)} of rank {packed.rank[awaited]}"
