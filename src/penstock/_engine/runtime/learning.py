"""Which weights learn: the same on all replicas, or gradients of different weights would be averaged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any
from zlib import crc32

from penstock._engine.parallel import ranks_in
from penstock._engine.runtime.loss import Replicas
from penstock.errors import AgreementError, listed
from penstock.stage import PipelineStage, StageModule


def mark_of(stages: Iterable[PipelineStage]) -> int:
    """Return a number that tells which weights of stages learn."""
    flags = [p.requires_grad for stage in stages for p in stage.module.parameters()]
    return crc32(bytes(flags)) + 1


@dataclass(frozen=True)
class Learning:
    """Which weights of a pipeline learn in a step.

    Args:
        marks: the marks of its ranks.
        stages: the stages of this process.
        gather: gathers a JSON value of each of its ranks.
        replicas: the pipelines that train the same weights.
    """

    marks: Sequence[int]
    stages: Iterable[PipelineStage]
    gather: Callable[[Any], list[Any]]
    replicas: Replicas

    @property
    def row(self) -> tuple[int, int]:
        """The number of the replicas' group, by which they find each other, and the mark of the pipeline."""
        group = self.replicas.group
        return (
            (0, 0)
            if group is None
            else (1 + min(ranks_in(group)), crc32(repr(self.marks).encode()))
        )

    def check(self, rows: Iterable[Sequence[int]]) -> AgreementError | None:
        """Return the error for replicas in which other weights learn; all of their ranks call this.

        Args:
            rows: those of the pipelines that begin the step together.
        """
        exchange = self.replicas.exchange
        marks = {mark for number, mark in rows if number == self.row[0]}
        if len(marks) < 2 or exchange is None:
            return None
        here = [
            name if isinstance(stage.code, StageModule) else f"{name} of stage {stage.index}"
            for stage in self.stages
            for name, parameter in stage.named_parameters()
            if parameter.requires_grad
        ]
        replicas = [dict.fromkeys(names) for names in exchange([*chain(*self.gather(here))])]
        other = next(n for n, names in enumerate(replicas) if names.keys() != replicas[0].keys())
        alone = [
            f"replica {one} trains {listed(more, 5)}, and replica {two} does not"
            for one, two in ((0, other), (other, 0))
            if (more := [name for name in replicas[one] if name not in replicas[two]])
        ]
        return AgreementError(
            f"the replicas train different weights, whose gradients cannot be averaged: {'; '.join(alone)}; "
            "give requires_grad the same values on every replica"
        )
