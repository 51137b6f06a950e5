"""Cut a row of blocks into stages, so that the heaviest stage is as light as possible.

A *cut* lists the first block of each stage. Each stage is a run of at least one block. Dynamic programming
finds the cut whose heaviest stage is lightest. Where ranks hold several stages, single blocks then move from
stage to stage for as long as that makes the ranks more even.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, combinations, pairwise, product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import PartitionError, UsageError
from penstock.schedule import Placement

Cut = tuple[int, ...]
Array = npt.NDArray[Any]


class Room(NamedTuple):
    """The memory that the stages have.

    Attributes:
        nbytes: how much each stage may hold.
        in_flight: for each stage, how many microbatches it holds at once.
    """

    nbytes: float
    in_flight: Sequence[int]


def choose_cuts(
    costs: Sequence[float],
    stages: int,
    placement: Placement | None = None,
    paces: Sequence[float] = (),
    memory: Sequence[tuple[float, float]] = (),
    room: Room | None = None,
) -> Cut:
    """The first block of each stage, beginning with block 0.

    Args:
        costs: the cost of each block, in the order in which they run.
        stages: how many stages to make.
        placement: which rank holds which stage; by default each rank holds one.
        paces: how many times as much a cost is on each rank; by default, alike.
        memory: the bytes that each block holds, and those that it makes for each microbatch.
        room: the memory of the stages, which no stage exceeds if there is such a cut; if there is none, the
            stages hold equally much.

    Raises:
        PartitionError: there are more stages than blocks.
        UsageError: a cost is negative or not finite, or the placement is for another number of stages.
    """
    if not 1 <= stages <= len(costs):
        raise PartitionError(
            f"{len(costs)} blocks cannot be cut into {stages} stages; {use_up_to(len(costs))}"
        )
    wrong = [cost for cost in costs if not (math.isfinite(cost) and cost >= 0)]
    if wrong:
        raise UsageError(f"costs must be numbers from 0 up, not {wrong[0]}")
    if placement is not None and placement.stages != stages:
        raise UsageError(f"the placement is for {placement.stages} stages, not {stages}")
    sums = (
        [0.0, *accumulate(map(float, costs))]
        if any(costs)
        else [*map(float, range(len(costs) + 1))]
    )
    rank_of = placement.rank_of if placement else tuple(range(stages))
    pace_of = paces or [1.0] * (max(rank_of) + 1)
    stage_paces = [pace_of[rank] for rank in rank_of]
    if room is not None:
        taken = [_taken(memory, flying) for flying in room.in_flight]
        fits: list[Array] = [one <= room.nbytes for one in taken]
        cut = _even_stages(sums, stage_paces, fits)
        return cut if _all_fit(cut, fits) else _best(taken, np.maximum)[1]
    cut = _even_stages(sums, stage_paces)
    if placement is None or placement.ranks == stages:
        return cut
    return _even_ranks(sums, cut, rank_of, pace_of)


def _taken(memory: Sequence[tuple[float, float]], in_flight: int) -> Array:
    """The bytes of a stage from one block (row) up to just before another (column)."""
    sums = np.array(
        [0.0, *accumulate(held + in_flight * activations for held, activations in memory)]
    )
    later = ~np.tri(len(sums), dtype=bool)
    return np.where(later, sums - sums[:, None], math.inf)


def _all_fit(cut: Cut, fits: Sequence[Array]) -> bool:
    stops = (*cut[1:], len(fits[0]) - 1)
    return all(of[a, b] for of, a, b in zip(fits, cut, stops, strict=True))


def use_up_to(most: int) -> str:
    """The part of a message that says which numbers of stages are possible."""
    return f"use from 1 to {most}" if most > 1 else "it can be one stage: ranks=1"


def loads(costs: Sequence[float], cut: Cut, placement: Placement | None = None) -> list[float]:
    """The cost of each rank under a cut."""
    rank_of = placement.rank_of if placement else tuple(range(len(cut)))
    sums = [0.0, *accumulate(map(float, costs))]
    return _loads(sums, cut, rank_of, [1.0] * (max(rank_of) + 1))


def _loads(
    sums: Sequence[float], cut: Cut, rank_of: Sequence[int], paces: Sequence[float]
) -> list[float]:
    result = [0.0] * (max(rank_of) + 1)
    for rank, (start, stop) in zip(rank_of, pairwise((*cut, len(sums) - 1)), strict=True):
        result[rank] += (sums[stop] - sums[start]) * paces[rank]
    return result


# ---- even stages: dynamic programming over the best cuts of each prefix


def _even_stages(sums: Sequence[float], paces: Sequence[float], fits: Sequence[Array] = ()) -> Cut:
    """The most even of the cuts whose heaviest stage is lightest.

    Args:
        sums: the cost of all blocks before each one.
        paces: how many times as much a cost is in each stage.
        fits: for each stage, whether it may go from one block (row) up to just before another (column).
    """
    prefix = np.array(sums)
    later = ~np.tri(len(prefix), dtype=bool)
    costs = np.where(later, prefix - prefix[:, None], math.inf)
    # Alike stages share a table: there may be hundreds.
    alike = {pace: costs * pace for pace in set(paces)}
    prices = [alike[pace] for pace in paces]
    if fits:
        prices = [np.where(fit, price, math.inf) for fit, price in zip(fits, prices, strict=True)]
    heaviest, _ = _best(prices, np.maximum)
    most = heaviest * (1 + 1e-12)
    squares: dict[int, Array] = {}
    for price in prices:
        if id(price) not in squares:
            squares[id(price)] = np.where(price > most, math.inf, price * price)
    _, cut = _best([squares[id(price)] for price in prices], np.add)
    return cut


def _best(prices: Sequence[Array], join: Callable[[Array, Array], Array]) -> tuple[float, Cut]:
    """The lowest joint price of all stages, and its cut.

    Args:
        prices: for each stage, its price from one block (row) up to just before another (column).
        join: combines two prices into one.
    """
    blocks = len(prices[0]) - 1
    best: Array = np.full(blocks + 1, math.inf)
    best[0] = 0.0
    starts: list[Array] = []
    for of_stage in prices:
        joined = join(best[:, None], of_stage)
        starts.append(joined.argmin(axis=0))
        best = joined.min(axis=0)
    return float(best[blocks]), tuple(_back(starts, blocks))[::-1]


def _back(starts: Sequence[Array], stop: int) -> Iterator[int]:
    for start in reversed(starts):
        stop = int(start[stop])
        yield stop


# ---- even ranks: start from even stages, and move one block at a time


def _even_ranks(
    sums: Sequence[float], cut: Cut, rank_of: Sequence[int], paces: Sequence[float]
) -> Cut:
    """Move neighbouring boundaries by one block for as long as the ranks get more even."""
    tiny = sums[-1] * 1e-12

    def unevenness(cut: Cut) -> tuple[float, float]:
        ranks = _loads(sums, cut, rank_of, paces)
        return max(ranks), sum(load * load for load in ranks)

    best = unevenness(cut)
    while True:
        tried = ((unevenness(moved), moved) for moved in _moves(cut, len(sums) - 1))
        score, moved = min(tried, default=(best, cut))
        # What costs nothing, or next to nothing, leaves no room for a tolerance.
        if score[0] > best[0] + tiny or (score[0] >= best[0] - tiny and score[1] >= best[1] - tiny):
            return cut
        best, cut = score, moved


def _moves(cut: Cut, blocks: int) -> Iterator[Cut]:
    """All cuts that give one stage a block more, and another a block less."""
    for (first, last), step in product(combinations(range(1, len(cut) + 1), 2), (-1, 1)):
        moved = (*cut[:first], *(start + step for start in cut[first:last]), *cut[last:])
        if all(a < b for a, b in pairwise((*moved, blocks))):
            yield moved
