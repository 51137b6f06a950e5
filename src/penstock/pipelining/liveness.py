"""Which activations of a rank can take turns in the same memory, with torch 2.15's names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from types import MappingProxyType
from typing import Any, Literal

from penstock.errors import UsageError
from penstock.pipelining.rows import ActionTuple, ComputationType
from penstock.pipelining.running import PipelineSchedule

Granularity = Literal["microbatch", "stage_microbatch"]
Lifetime = tuple[int, int]


@dataclass(frozen=True)
class PipelineActivationLiveness:
    """Numbered slots for the activations of a rank: two that live at the same time have different ones.

    No memory is allocated; a slot is a number that stands for a buffer of the caller's, large enough for
    every activation that has it.

    Attributes:
        pp_rank: the rank of the pipeline whose actions were read.
        granularity: whether each pair of stage and microbatch has a slot, or each microbatch one for all
            stages.
        stage_indices: the stages whose activations count.
        num_microbatches: the number of microbatches of the schedule.
        slot_by_stage_and_microbatch: the slot of each pair of stage and microbatch.
        num_slots: the number of slots.
    """

    pp_rank: int
    granularity: Granularity
    stage_indices: tuple[int, ...]
    num_microbatches: int
    slot_by_stage_and_microbatch: Mapping[tuple[int, int], int]
    num_slots: int
    _lifetimes: Mapping[tuple[int, int], Lifetime] = field(repr=False)

    __hash__ = None  # type: ignore[assignment]

    def slot_for(self, stage_index: int, microbatch_index: int) -> int:
        """Return the slot of a stage's activations of a microbatch.

        Raises:
            UsageError: the stage or the microbatch is not among those that count; it is a ValueError.
        """
        self._check(stage_index, microbatch_index)
        return self.slot_by_stage_and_microbatch[stage_index, microbatch_index]

    def get_activation_lifetime(self, stage_index: int, microbatch_index: int) -> Lifetime:
        """Return the positions in the rank's actions of the forward and of the last use, both inclusive.

        Raises:
            UsageError: as for :meth:`slot_for`.
        """
        self._check(stage_index, microbatch_index)
        return self._lifetimes[stage_index, microbatch_index]

    def _check(self, stage: int, microbatch: int) -> None:
        if (stage, microbatch) not in self._lifetimes:
            raise UsageError(
                f"stage {stage}, microbatch {microbatch} was not analysed; there are the stages "
                f"{list(self.stage_indices)} with {self.num_microbatches} microbatches"
            )


def analyze_pipeline_activation_liveness(
    schedule: PipelineSchedule,
    *,
    pp_rank: int,
    stage_indices: Sequence[int],
    granularity: Granularity,
) -> PipelineActivationLiveness:
    """Find out how long the activations of a rank live, and number slots that they can take turns in.

    A stage's activations of a microbatch live from its forward to its whole backward, or to the weights' half
    of a split one, which still needs them.

    Args:
        schedule: a schedule with several stages per rank.
        pp_rank: the rank of the pipeline, not necessarily that of this process.
        stage_indices: the stages of that rank whose activations count.
        granularity: ``"stage_microbatch"`` for a slot of each stage and microbatch, or ``"microbatch"`` for
            one slot of a microbatch, from its first forward to its last backward in any of the stages.

    Raises:
        UsageError: an argument is wrong, or the rank does not run each of the stages forward and backward
            once for each microbatch; it is a ValueError.
    """
    if granularity not in ("microbatch", "stage_microbatch"):
        raise UsageError(f'granularity={granularity!r}: must be "microbatch" or "stage_microbatch"')
    stages, count = tuple(stage_indices), schedule._n_microbatches
    if not stages or len({*stages}) < len(stages):
        raise UsageError(
            f"stage_indices={list(stages)}: must name each stage once, and at least one"
        )
    spelled = schedule.spells_out_messages
    order = schedule.pipeline_order_with_comms if spelled else schedule.pipeline_order
    if pp_rank not in order:
        raise UsageError(f"pp_rank={pp_rank}: the schedule has the ranks {sorted(order)}")
    uses = _uses(order[pp_rank])
    lives: dict[Any, Lifetime] = {}
    takes = {
        (stage, part): part if granularity == "microbatch" else (stage, part)
        for stage in stages
        for part in range(count)
    }
    for pair, taker in takes.items():
        if len(uses.get(pair, ())) < 2:
            raise UsageError(
                f"rank {pp_rank} does not run stage {pair[0]} forward and backward for microbatch {pair[1]}"
            )
        places = [*uses[pair], *lives.get(taker, ())]
        lives[taker] = min(places), max(places)
    slots = _slots(lives)
    return PipelineActivationLiveness(
        pp_rank,
        granularity,
        stages,
        count,
        MappingProxyType({pair: slots[taker] for pair, taker in takes.items()}),
        1 + max(slots.values()),
        MappingProxyType({pair: lives[taker] for pair, taker in takes.items()}),
    )


def _uses(actions: Sequence[ActionTuple | None]) -> dict[tuple[int, int | None], list[int]]:
    """The positions of the forward and of the last use of each stage's microbatches."""
    kept = (
        ComputationType.FORWARD,
        ComputationType.FULL_BACKWARD,
        ComputationType.BACKWARD_WEIGHT,
    )
    uses = defaultdict[tuple[int, int | None], list[int]](list)
    for position, entry in enumerate(actions):
        for action in () if entry is None else (entry.sub_actions or (entry,)):
            if action.computation_type in kept:
                uses[action.stage_index, action.microbatch_index].append(position)
    return uses


def _slots(lives: Mapping[Any, Lifetime]) -> dict[Any, int]:
    """The slot of each activation, by first fit in the order of their beginnings."""
    free: list[int] = []
    taken: list[tuple[int, int]] = []  # until when, and which
    slots: dict[Any, int] = {}
    for one, (start, end) in sorted(lives.items(), key=lambda item: (item[1], item[0])):
        while taken and taken[0][0] < start:
            heappush(free, heappop(taken)[1])
        # Of those that were ever taken, none is free.
        slots[one] = heappop(free) if free else len(taken)
        heappush(taken, (end, slots[one]))
    return slots
