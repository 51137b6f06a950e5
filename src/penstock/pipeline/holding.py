"""What this process holds of a model: all of it until the cut, then the stages of its ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from penstock._engine.runtime import Runner
from penstock.errors import UsageError
from penstock.partition import Partition, Shared
from penstock.pipeline.plan import ProvenSchedules
from penstock.pipeline.setup import check_shared, check_spread, described_stages, modules_in
from penstock.pipeline.uncut import UncutModel
from penstock.pipeline.weights import CUT_NOW, HeldWeights, ListedWeights, WholeWeights
from penstock.stage import PipelineStage


class HeldModel:
    """The part of a pipeline's model in this process.

    Args:
        runner: gets the stages.
        schedules: the schedules of the pipeline.
        model: the model; None for stages placed by hand.
        weighted: whether the loss has weights.

    Attributes:
        model: the model, of which this process has the stages alone once it is cut.
        uncut: the model, while it waits for its cut.
        partition: how the model was cut, if it was.
        stages: the stages of this process, in order; none before the cut.
        weights: the weights in this process.
        stage_weights: the same, once there are stages.
    """

    weights: ListedWeights
    stage_weights: HeldWeights

    def __init__(
        self,
        runner: Runner,
        schedules: ProvenSchedules,
        model: nn.Module | None,
        *,
        weighted: bool,
    ) -> None:
        self._runner, self._job, self._schedules = runner, runner.job, schedules
        self._weighted = weighted
        self.model = model
        self.uncut: UncutModel | None = None
        self.partition: Partition | None = None
        self.stages: tuple[PipelineStage, ...] = ()
        self._shown: dict[int, str] = {}

    def wait(self, uncut: UncutModel) -> None:
        """Let the first call cut the model; until then, each process has all of it."""
        self.uncut = uncut
        self.weights = WholeWeights(uncut.model, self._job, uncut.device, lambda: uncut.waiting)

    def cut_now(self) -> None:
        """Cut a model that needs no call for it; all processes of the job call this."""
        if self.uncut is not None:
            self._runner.cut_now(self.uncut)

    def take_cut(self, stages: Sequence[PipelineStage], partition: Partition) -> None:
        """Take this process's stages of a model that has been cut; see :meth:`take_stages`."""
        self.partition = partition
        if partition.planner is None:
            self.model = None
        named = None if self.model is None else list(self.model.named_parameters())
        modules = dict(enumerate(partition.modules))
        self.take_stages(stages, partition.shared, modules, named)

    def take_stages(
        self,
        stages: Sequence[PipelineStage],
        shared: Sequence[Shared],
        modules: Mapping[int, nn.Module],
        named: Sequence[tuple[str, nn.Parameter]] | None = None,
    ) -> None:
        """Take the stages of this process, and check that they fit those of the others.

        Args:
            stages: the stages.
            shared: the table of weights that stages share.
            modules: the modules of all stages that are known here, by index.
            named: the parameters of the model that was cut.
        """
        runner = self._runner
        runner.hold(stages)
        self.stages = tuple(runner.stages[index] for index in sorted(runner.stages))
        self._shown = {index: modules_in(module) for index, module in modules.items()}
        self.check_spread(weighted=self._weighted)
        check_shared(self.stages, shared, self._job)
        rank_of = self._schedules.training.placement.rank_of
        self.stage_weights = HeldWeights(self.stages, self._job, shared, rank_of, named)
        self.weights = self.stage_weights
        self.uncut = None

    def check_spread(self, *, weighted: bool) -> None:
        """Refuse wrappers that reduce gradients over processes other than the replicas."""
        check_spread(self.stages, self._job, weighted=weighted)

    def check_cut(self) -> None:
        """Check that there are stages.

        Raises:
            UsageError: the model is not cut yet.
        """
        if self.uncut is not None:
            raise UsageError(f"there are no stages yet: the first batch cuts the model; {CUT_NOW}")

    @property
    def device(self) -> torch.device:
        """The device of this process's stages."""
        return self.stages[0].device if self.uncut is None else self.uncut.device

    def rows(self) -> list[str]:
        """What there is, in lines for the user."""
        if self.uncut is not None:
            return [f"  not cut yet: the first batch cuts the {type(self.uncut.model).__name__}"]
        return described_stages(self._schedules.training, self._shown, self.partition)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context in evaluation mode, which restores each module's own mode."""
        uncut = self.uncut
        if uncut is not None:
            roots, modules = [uncut.model], list(uncut.model.modules())
        else:
            roots = [stage.module for stage in self.stages]
            modules = [m for stage in self.stages for m in stage.called_modules()]
        modes = [(module, module.training) for module in modules]
        for root in roots:
            root.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            if uncut is not None:
                # Stages that were made in here.
                for stage in self.stages:
                    stage.follow_mode(training=uncut.model.training)
