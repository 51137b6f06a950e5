"""The weights of a pipeline in this process, and those that they share with other stages."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.parallel import average_gradients
from penstock.partition import Shared
from penstock.runtime import Runner
from penstock.stage import PipelineStage
from penstock.weights.optimizers import (
    remember_names,
)
from penstock.weights.sharing import SharedWeights
from penstock.weights.states import (
    LoadResult,
    Names,
    StageWeights,
    load_state,
)


class HeldWeights:
    """The weights of the stages of this process, and those that they share with other stages.

    Args:
        stages: the stages of this process.
        ranks: the runner, through which this process reaches the others.
        shared: the table of weights that stages share.
        rank_of: the rank of each stage.
        replicas: the process group over which gradients are averaged, if any.

    Raises:
        AgreementError: a shared weight has different shapes or types on different ranks.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        ranks: Runner,
        shared: Sequence[Shared],
        rank_of: Sequence[int],
        replicas: Any = None,
    ) -> None:
        self.stages = stages
        self._replicas = replicas
        self.ranks = ranks
        self.stage_count = len(rank_of)
        self.names = Names(shared)
        self._sharing = SharedWeights(stages, shared, rank_of, ranks)
        self.align()
        remember_names(self.weights.named_parameters())

    def align(self, level: int = logging.WARNING) -> None:
        """Make the ranks' copies of shared weights equal, and log where they differed."""
        self._sharing.align(level)

    @contextmanager
    def training(self) -> Iterator[None]:
        """A context for a training step; its exit sums gradients over stages, averages over replicas."""
        self._sharing.prepare()
        yield
        try:
            self._sharing.check_buffers()
            self._sharing.sum_gradients()
            if self._replicas is not None:
                average_gradients([stage.module for stage in self.stages], self._replicas)
        except BaseException as error:
            # One rank alone may find a changed buffer, or lose a replica; the others must learn of it.
            raise self.ranks.fail(error) from error.__cause__

    @property
    def weights(self) -> StageWeights:
        """The parameters and buffers that live in this process."""
        self._sharing.tie_again()
        return StageWeights(self.stages, self.names)

    def check_filled(self) -> None:
        """Check that the stages have memory; tensors are looked up by name only on failure.

        Raises:
            UsageError: a tensor is on the meta device.
        """
        modules = [stage.module for stage in self.stages]
        tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
        if True in [tensor.is_meta for tensor in tensors]:
            self.weights.check_filled()
        for stage in self.stages:
            stage.follow_memory()

    def names_by_identity(self) -> dict[int, str]:
        """The name of each parameter that lives in this process, by its ``id``."""
        return {id(parameter): name for name, parameter in self.weights.named_parameters()}

    def load(self, state: Mapping[str, Any], *, strict: bool, any_name: bool) -> LoadResult:
        """Load values by name; with ``any_name``, one of a weight's names is enough."""
        result = load_state(
            self.ranks, self.weights, self.names, state, strict=strict, any_name=any_name
        )
        self.align()
        return result
