"""Where to cut a row of blocks into stages, so that the heaviest rank is as light as can be.

A *cut* is the list of the blocks that stages start with. Each stage is a run of at least one block, and
the cost of a rank is the sum of those of its stages. With one stage per rank the cut that is found is the
best. For other placements a good cut is improved by a search, which proves most of its results to be the best
and gives up after a while.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import PartitionError, UsageError
from penstock.schedule import Placement

Cut = tuple[int, ...]
Array = npt.NDArray[Any]
_PATIENCE = 200_000
"""After how many tries the search for a better cut gives up."""
_HALVINGS = 60
"""How often the interval between a limit that is too low and one that is not is halved."""


def choose_cuts(costs: Sequence[float], stages: int, placement: Placement | None = None) -> Cut:
    """The blocks that stages start with, beginning with block 0.

    Args:
        costs: the cost of each block, in the order in which they run.
        stages: how many stages to make.
        placement: which rank holds which stage; by default each rank holds one.

    Raises:
        PartitionError: there are more stages than blocks.
        UsageError: a cost is negative or not finite, or the placement is for another number of stages.
    """
    _check(costs, stages, placement)
    weights = list(map(float, costs)) if any(costs) else [1.0] * len(costs)
    sums = [0.0, *accumulate(weights)]
    if placement is None or placement.ranks == stages:
        return _one_a_rank(sums, stages)
    known = _one_a_rank(sums, stages)
    if placement.rank_of == (*range(stages // 2), *reversed(range(stages // 2))):
        known = _down_and_up(sums, stages // 2)
    return _searched(sums, placement.rank_of, known)


def _check(costs: Sequence[float], stages: int, placement: Placement | None) -> None:
    if not 1 <= stages <= len(costs):
        raise PartitionError(
            f"{len(costs)} blocks cannot be cut into {stages} stages; {use_up_to(len(costs))}"
        )
    wrong = [cost for cost in costs if not (math.isfinite(cost) and cost >= 0)]
    if wrong:
        raise UsageError(f"costs must be numbers from 0 up, not {wrong[0]}")
    if placement is not None and placement.stages != stages:
        raise UsageError(f"the placement is for {placement.stages} stages, not {stages}")


def use_up_to(most: int) -> str:
    """Tells the user which numbers of stages can be asked for."""
    return f"use from 1 to {most}" if most > 1 else "it can be one stage: ranks=1"


def loads(costs: Sequence[float], starts: Cut, placement: Placement | None = None) -> list[float]:
    """The cost of each rank under a cut."""
    sums = [0.0, *accumulate(map(float, costs))]
    return _loads(sums, starts, placement.rank_of if placement else tuple(range(len(starts))))


def _loads(sums: Sequence[float], starts: Cut, rank_of: Sequence[int]) -> list[float]:
    found = [0.0] * (max(rank_of) + 1)
    for rank, (start, stop) in zip(rank_of, pairwise((*starts, len(sums) - 1)), strict=True):
        found[rank] += sums[stop] - sums[start]
    return found


# ---- one stage per rank: dynamic programming over the best cuts of each prefix


def _one_a_rank(sums: Sequence[float], stages: int) -> Cut:
    """Among the cuts with the lightest heaviest stage, the most even one."""
    prefix = np.array(sums)
    later = ~np.tri(len(prefix), dtype=bool)
    costs = np.where(later, prefix - prefix[:, None], math.inf)
    heaviest, _ = _best(costs, stages, np.maximum)
    costs[costs > heaviest * (1 + 1e-12)] = math.inf
    _, cut = _best(costs * costs, stages, np.add)
    return cut


def _best(prices: Array, stages: int, join: Callable[[Array, Array], Array]) -> tuple[float, Cut]:
    """The cut for which the joint price of all stages is least, with that price.

    Args:
        prices: the price of a stage from one block (row) up to just before another (column).
        stages: how many stages to make.
        join: makes one price of two.
    """
    blocks = len(prices) - 1
    best: Array = np.full(blocks + 1, math.inf)
    best[0] = 0.0
    starts: list[Array] = []
    for _ in range(stages):
        joined = join(best[:, None], prices)
        starts.append(joined.argmin(axis=0))
        best = joined.min(axis=0)
    return float(best[blocks]), tuple(_back(starts, blocks))[::-1]


def _back(starts: Sequence[Array], stop: int) -> Iterator[int]:
    for start in reversed(starts):
        stop = int(start[stop])
        yield stop


# ---- down the ranks and back up: a rank takes a run from each end of what is left


def _down_and_up(sums: Sequence[float], ranks: int) -> Cut:
    prefix = np.array(sums)
    rank_of = (*range(ranks), *reversed(range(ranks)))
    low, best = sums[-1] / ranks, _fit(prefix, ranks, math.inf)
    assert best is not None
    high = max(_loads(sums, best, rank_of))
    for _ in range(_HALVINGS):
        if high - low <= 1e-12 * high:
            break
        middle = (low + high) / 2
        found = _fit(prefix, ranks, middle)
        if found is None:
            low = middle
        else:
            best, high = found, max(_loads(sums, found, rank_of))
    return best


def _fit(prefix: Array, ranks: int, limit: float) -> Cut | None:
    """A cut in which no rank costs more than a limit, if one is found.

    For each end of the runs at the front, only the runs at the back that reach farthest are considered. They
    leave the least work to later ranks, but may take a light block that a later stage needs to have any.
    """
    blocks = len(prefix) - 1
    back = np.full(blocks + 1, blocks + 1)
    back[0] = blocks
    steps: list[Array] = []
    for rank in range(ranks - 1):
        back, step = _next(prefix, back, limit, 2 * (ranks - 1 - rank))
        steps.append(step)
    left = [
        front
        for front in range(blocks + 1)
        if back[front] <= blocks
        and back[front] - front >= 2
        and prefix[back[front]] - prefix[front] <= limit
    ]
    return _unwound(steps, left[0], int(back[left[0]])) if left else None


def _next(prefix: Array, back: Array, limit: float, needed: int) -> tuple[Array, Array]:
    """The runs at the back that reach farthest after one more rank, and where they came from."""
    blocks = len(prefix) - 1
    found, came = np.full(blocks + 1, blocks + 1), np.zeros((blocks + 1, 2), dtype=int)
    for front in range(blocks + 1):
        stop = int(back[front])
        if stop > blocks:
            continue
        fronts = np.arange(front + 1, stop - needed)
        lowest = prefix[stop] + (prefix[fronts] - prefix[front]) - limit
        backs = np.searchsorted(prefix, lowest)
        backs = np.maximum(backs, fronts + needed)
        better = (backs < stop) & (backs < found[fronts])
        found[fronts[better]] = backs[better]
        came[fronts[better]] = front, stop
    return found, came


def _unwound(steps: Sequence[Array], front: int, back: int) -> Cut:
    middle = (front + back) // 2
    fronts, backs = [front, middle], [back]
    for step in reversed(steps):
        front, back = (int(found) for found in step[front])
        fronts.insert(0, front)
        backs.append(back)
    return (*fronts, *backs[:-1])


# ---- any placement


def _searched(sums: Sequence[float], rank_of: Sequence[int], known: Cut) -> Cut:
    cut = _improved(sums, rank_of, known)
    least = _least(sums, max(rank_of) + 1)
    if max(_loads(sums, cut, rank_of)) <= least * (1 + 1e-12):
        return cut
    return _Search(sums, rank_of).better_than(cut)


def _least(sums: Sequence[float], ranks: int) -> float:
    """A lower bound for the heaviest rank: of n * ranks + 1 blocks, some rank has n + 1."""
    costs = sorted((b - a for a, b in pairwise(sums)), reverse=True)
    packed = (
        sum(costs[n * ranks + 1 - (n + 1) : n * ranks + 1])
        for n in range((len(costs) - 1) // ranks + 1)
    )
    return max(sums[-1] / ranks, *packed)


def _improved(sums: Sequence[float], rank_of: Sequence[int], cut: Cut) -> Cut:
    """Pass single blocks from stage to stage for as long as that makes the ranks more even."""
    while True:
        found = _more_even(np.array(sums), np.array(rank_of), np.array(cut))
        if found is None:
            return cut
        cut = found


def _more_even(prefix: Array, rank_of: Array, cut: Array) -> Cut | None:
    """The most even of the cuts in which one stage has a block more and another one less.

    None where the given cut is the most even.
    """
    ends, tiny = np.append(cut, len(prefix) - 1), prefix[-1] * 1e-12
    base = np.zeros(rank_of.max() + 1)
    np.add.at(base, rank_of, np.diff(prefix[ends]))
    best, found = np.sort(base)[::-1], None
    moves = ((s, move) for s in (-1, 1) for move in _moved(prefix, rank_of, ends, base, s))
    for step, (first, stops, loads) in moves:
        for which in np.flatnonzero(loads.max(axis=1, initial=0.0) <= best[0] + tiny):
            order = np.sort(loads[which])[::-1]
            differ = np.flatnonzero(np.abs(order - best) > tiny)
            if len(differ) and order[differ[0]] < best[differ[0]]:
                best, found = order, cut.copy()
                found[first : stops[which]] += step
    return None if found is None else tuple(found.tolist())


def _moved(
    prefix: Array, rank_of: Array, ends: Array, base: Array, step: int
) -> Iterator[tuple[int, Array, Array]]:
    """The costs of ranks when the starts of stages from a first up to each stop move by one block."""
    stages = len(rank_of)
    change = np.zeros(stages + 1)
    change[1:-1] = prefix[ends[1:-1] + step] - prefix[ends[1:-1]]
    # What ranks gain by the stages up to each, if both ends of those move.
    gains = np.zeros((stages + 1, len(base)))
    gains[np.arange(1, stages + 1), rank_of] = np.diff(change)
    along = gains.cumsum(axis=0)
    for first in range(1, stages):
        if step < 0 and ends[first] - 1 == ends[first - 1]:
            continue
        stops = np.arange(first + 1, stages + 1)
        stops = stops[(step < 0) | (ends[stops - 1] + 1 < ends[stops])]
        loads = base + along[stops - 1] - along[first]
        loads[:, rank_of[first - 1]] += change[first]
        loads[np.arange(len(stops)), rank_of[stops - 1]] -= change[stops - 1]
        yield first, stops, loads


class _Search:
    """Tries all cuts that may be better than a known one, stage by stage."""

    def __init__(self, sums: Sequence[float], rank_of: Sequence[int]) -> None:
        self._sums, self._rank_of = sums, rank_of
        self._left = _PATIENCE
        self._best: Cut = ()
        self._limit = math.inf

    def better_than(self, cut: Cut) -> Cut:
        """The best cut, or the best that was found before patience ran out."""
        self._best, self._limit = cut, max(_loads(self._sums, cut, self._rank_of))
        self._extend((0,), [0.0] * (max(self._rank_of) + 1))
        return self._best

    def _extend(self, starts: Cut, load: list[float]) -> None:
        stage, blocks = len(starts) - 1, len(self._sums) - 1
        rank, begin = self._rank_of[stage], starts[-1]
        if stage == len(self._rank_of) - 1:
            self._finish(starts, load, self._sums[blocks] - self._sums[begin])
            return
        farthest = bisect_right(self._sums, self._sums[begin] + self._limit - load[rank]) - 1
        for stop in range(min(farthest, blocks - (len(self._rank_of) - 1 - stage)), begin, -1):
            self._left -= 1
            cost = self._sums[stop] - self._sums[begin]
            if self._left < 0 or not self._has_room(stage, stop, load, cost):
                return
            held = load[rank]
            load[rank] += cost
            if load[rank] < self._limit:
                self._extend((*starts, stop), load)
            load[rank] = held

    def _has_room(self, stage: int, stop: int, load: Sequence[float], cost: float) -> bool:
        """Whether the ranks of later stages have room for the rest; the shorter a stage, the more is left."""
        rank = self._rank_of[stage]
        later = set(self._rank_of[stage + 1 :])
        room = sum(self._limit - load[r] - (cost if r == rank else 0.0) for r in later)
        return self._sums[-1] - self._sums[stop] < room

    def _finish(self, starts: Cut, load: Sequence[float], cost: float) -> None:
        rank = self._rank_of[-1]
        worst = max(*load[:rank], load[rank] + cost, *load[rank + 1 :], 0.0)
        if worst < self._limit:
            self._best, self._limit = starts, worst
