"""Which weights learn: the same on all replicas, or gradients of different weights would be averaged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from zlib import crc32

from penstock._engine.parallel import ranks_in
from penstock._engine.transport import Group, Replicas
from penstock.errors import AgreementError, listed
from penstock.stage import PipelineStage, StageModule

_BITS = 32
"""Of a mark, those that tell which weights learn."""


def mark_of(stages: Iterable[PipelineStage], replicas: Replicas, *, averages: bool) -> int:
    """Return a number that tells with whom gradients are averaged, and of which weights; 0 for no average."""
    if replicas.group is None:
        return 0
    flags = [p.requires_grad for stage in stages for p in stage.module.parameters()]
    return (1 + min(ranks_in(replicas.group)) << _BITS) + crc32(bytes([averages, *flags]))


def check_learning(group: Group, marks: Sequence[int], stages: Iterable[PipelineStage]) -> None:
    """Check that the same weights learn in all stages that are averaged; all processes of the job call this.

    Args:
        group: the processes.
        marks: the mark of each.
        stages: the stages of this process.

    Raises:
        AgreementError: they do not; the message lists those that learn in one replica alone.
    """
    averaged: dict[int, list[int]] = {}
    for place, mark in enumerate(marks):
        averaged.setdefault(mark >> _BITS, []).append(place)
    unlike = [of for of in averaged.values() if len({marks[place] for place in of}) > 1]
    if not unlike:
        return
    here = [
        name if isinstance(stage.code, StageModule) else f"{name} of stage {stage.index}"
        for stage in stages
        for name, parameter in stage.named_parameters()
        if parameter.requires_grad
    ]
    rows = group.meet(lambda: here)
    alone: dict[tuple[int, int], list[str]] = {}
    for of in unlike:
        for replica, place in enumerate(of[1:], start=1):
            first, other = dict.fromkeys(rows[of[0]]), dict.fromkeys(rows[place])
            alone.setdefault((0, replica), []).extend(n for n in first if n not in other)
            alone.setdefault((replica, 0), []).extend(n for n in other if n not in first)
    texts = [
        f"replica {one} trains {listed(names, 5)}, and replica {two} does not"
        for (one, two), names in alone.items()
        if names
    ]
    if not texts:
        raise AgreementError(
            "some replicas call step inside pipe.no_sync(), and others do not; enter it on every rank of "
            "every replica for the same steps"
        )
    raise AgreementError(
        f"the replicas train different weights, whose gradients cannot be averaged: {'; '.join(texts[:2])}; "
        "give requires_grad the same values on every replica"
    )
