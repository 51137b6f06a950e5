"""DualPipeV: forwards and backwards of different microbatches overlapped, on half of DualPipe's ranks.

DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.1, for DualPipe; Qi et al., "DualPipe could be
better without the Dual", 2025, for the cut in half: rank ``r`` of ``p`` holds stages ``r`` and
``2p - 1 - r``.
A pair of F and B runs at the same time, so that each hides the other's communication.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import ScheduleError
from penstock.schedule.action import Entry
from penstock.schedule.base import Schedule
from penstock.schedule.edges import v_shaped
from penstock.schedule.library._v_writer import VWriter


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """Overlapped F and B; two stages per rank in a V, at least twice as many microbatches as ranks."""
    if microbatches < 2 * ranks:
        raise ScheduleError(
            f"DualPipeV on ranks={ranks} needs microbatches={2 * ranks} or more, not {microbatches}: "
            "with fewer there is nothing to overlap; take ZB-V, or more microbatches"
        )
    programs = (tuple(_program(VWriter(rank, ranks), ranks, microbatches)) for rank in range(ranks))
    return Schedule("DualPipeV", v_shaped(ranks), microbatches, tuple(programs))


def _program(rank: VWriter, ranks: int, microbatches: int) -> Iterator[Entry]:
    for _ in range(2 * rank.below):
        yield rank.forward(rank.down)
    for _ in range(rank.rank + 1):
        yield from (rank.forward(rank.down), rank.forward(rank.up))
    for _ in range(rank.below):
        yield from (rank.input(rank.up), *rank.weight(), rank.forward(rank.up))
    yield from _steady(rank, microbatches - 2 * ranks + rank.rank + 1)
    for _ in range(rank.below):
        yield from (rank.full(rank.up), rank.pair(rank.up, rank.down))
    yield from _end(rank)


def _steady(rank: VWriter, turns: int) -> Iterator[Entry]:
    for turn in range(turns):
        if turn == 0 and rank.below == 0:
            # The stages at the tip of the V wait for each other here, overlapped or not.
            yield from (rank.forward(rank.down), rank.full(rank.up))
        else:
            yield rank.pair(rank.down, rank.up)
        yield rank.pair(rank.up, rank.down)


def _end(rank: VWriter) -> Iterator[Entry]:
    """The last backwards: whole for the first half, then split, the weight halves filling the end."""
    for turn in range(2 * (rank.rank + 1)):
        stage = rank.down if turn % 2 else rank.up
        yield rank.input(stage) if turn > rank.rank else rank.full(stage)
    for _ in range(rank.below):
        yield from (*rank.weight(), rank.input(rank.down))
    yield from rank.weights()
