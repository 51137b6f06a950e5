"""A model that a Pipeline has not cut yet, and all that is to be done when it is."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from torch.optim import Optimizer

from penstock._engine.devices import is_accelerator, memory_of
from penstock._engine.microbatches import MISSING
from penstock._engine.placeholders import is_placeholder
from penstock._engine.runtime import without_data
from penstock._engine.transport import Job
from penstock._engine.weights import Init, load_partition
from penstock._engine.weights.folders import check_folder
from penstock._engine.weights.initialise import initialise
from penstock.errors import UsageError
from penstock.partition import Cutting, Example, Partition, Room, explained, find_shared
from penstock.pipeline.plan import Layout, ProvenSchedules, in_flight
from penstock.pipeline.settings import Settings
from penstock.pipeline.setup import make_equal, wrap_stages
from penstock.plan import Plan
from penstock.stage import PipelineStage

CUT_NOW = "call pipe.cut(...) with the arguments of a batch to cut the model now"
"""What to do where something needs the stages before the first batch has come."""
_SHARE = 0.9
"""The part of a device's memory that a stage may fill."""


class UncutModel:
    """A model that waits for its cut.

    Args:
        settings: what the user says of the model and its stages.
        schedules: the schedules of the pipeline, which a plan may decide with the cut.
        transport: this process's end, if each rank is a process.
        replicas: the pipelines that train the same weights.
        done: called with the stages of this process and the partition.

    Raises:
        PartitionError: the model cannot be cut this way, whatever it is called with.

    Attributes:
        was_asked: whether the user asked for the cut, so that no optimizer was made before it.
    """

    def __init__(
        self,
        settings: Settings,
        schedules: ProvenSchedules,
        job: Job,
        done: Callable[[Sequence[PipelineStage], Partition], None],
    ) -> None:
        assert settings.model is not None
        self.model = settings.model
        self._settings, self._schedules = settings, schedules
        self._job, self._done = job, done
        self.device = settings.home
        self._partition: Partition | None = None
        self._cutting: Cutting | None = None
        self._where: Any = None
        self._call: Example | None = None
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._first_values: tuple[int, Init | None] | None = None
        self._folder: str | PathLike[str] | None = None
        self.was_asked = False
        stages = settings.layout.stages
        if isinstance(stages, Partition):
            self._partition = replace(stages, shared=find_shared(self.model, stages.modules))
            self._partition.check_covers(self.model)
        elif not self._waits_for_plan:
            self._prepare(settings.layout)

    @property
    def _waits_for_plan(self) -> bool:
        return self._settings.layout.schedule == "auto"

    def _prepare(self, layout: Layout) -> None:
        stages = self._schedules.stages if layout.stages is None else layout.stages
        assert not isinstance(stages, Partition)
        self._cutting = Cutting(self.model, stages, recompute=layout.recompute, room=self._room())

    def _room(self) -> Room | None:
        """The memory of the stages, where each rank has a device of its own."""
        if self._job.transport is None or not is_accelerator(self.device):
            return None
        nbytes = memory_of(self.device)
        if not nbytes:
            return None
        placement = self._schedules.training.placement
        here = max(len(placement.stages_on(rank)) for rank in range(placement.ranks))
        return Room(_SHARE * nbytes / here, in_flight(self._schedules.training))

    @property
    def needs_call(self) -> bool:
        """Whether only a call shows where to cut."""
        if self._cutting is None:
            return self._partition is None
        return self._cutting.needs_call

    @property
    def is_bare(self) -> bool:
        """Whether the model is on the meta device, so that its weights may still be read with the cut."""
        return any(t.is_meta for t in (*self.model.parameters(), *self.model.buffers()))

    # ---- until then

    @property
    def waiting(self) -> str:
        """What the weights still wait for, for messages; empty if they are there."""
        if self._folder is not None:
            return f"the weights of {self._folder} are read when the model is cut"
        return "the weights get values when the model is cut" if self._first_values else ""

    def fill_later(self, seed: int, init: Init | None) -> bool:
        """Let a model on the meta device get its first values with the cut; False if it has memory."""
        if self._has_memory():
            return False
        self._first_values = seed, init
        return True

    def load_later(self, folder: str | PathLike[str], *, strict: bool) -> bool:
        """Let a model on the meta device get weights from a folder with the cut; False if it has memory."""
        if self._has_memory():
            return False
        if not strict:
            raise UsageError(f"strict=False, and the model is on the meta device: {CUT_NOW}")
        check_folder(self.model, folder)
        self._folder = folder
        return True

    def drop_later(self, optimizer: Optimizer) -> None:
        """With the cut, drop what an optimizer keeps for weights that then lie on other ranks."""
        self._optimizers.append(weakref.ref(optimizer))

    def _has_memory(self) -> bool:
        """Tell if the model has memory; if not, its stages live on the CPU, unless the user says where."""
        if not self.is_bare:
            return True
        if self.device.type == "meta":
            self.device = torch.device("cpu")
        return False

    # ---- the cut

    def cut_now(self) -> None:
        """Cut the model before any call, where no call is needed; all processes of the job call this."""
        self.agree(lambda: (0, None, MISSING))
        self.take_stages()

    def agree(self, bring: Callable[[], tuple[int, Example | None, Any]]) -> None:
        """Let all ranks of the job cut at the same places: where the first rank with arguments would.

        The stages are made, but nothing is moved or freed.

        Args:
            bring: returns the first rank that was given arguments, and a microbatch's arguments and target.

        Raises:
            PenstockError: a rank cannot cut; nothing is changed.
        """
        job = self._job

        def decide() -> Any:
            first, call, target = bring()
            # One rank measures the model, where that decides the schedule.
            plans = job.transport is None or job.rank == first
            return [plans, self._decide(call, target, plans=plans)]

        decisions = job.meet(decide, among=job.whole)
        where = next(decision for plans, decision in decisions if plans)
        if any(decision != where for _, decision in decisions):
            job.meet(lambda: self._adopt(where), among=job.whole)

    def _decide(self, call: Example | None, target: Any, *, plans: bool) -> Any:
        """Return where to cut, as JSON data."""
        self._call = call
        if self._waits_for_plan:
            if not plans:
                return None
            assert call is not None
            known = self._schedules
            plan = self._settings.fastest_plan(call, target, known.ranks, known.microbatches)
            self._follow(plan)
        cutting = self._cutting
        if cutting is None:
            return None

        def cut() -> Any:
            where = cutting.decide(call)
            self._partition, self._where = cutting.make(where, call), where
            return where

        plan_text = None if self._schedules.plan is None else self._schedules.plan.to_json()
        return [plan_text, self._run_without_data(cut)]

    def _follow(self, plan: Plan) -> None:
        self._schedules.follow(self._settings.schedules(None, plan))
        self._prepare(Layout.of(plan))

    def _run_without_data(self, cut: Callable[[], Any]) -> Any:
        """Run the model without data, in the first call."""
        if self.needs_call:
            return without_data(cut, trains=torch.is_grad_enabled())
        with explained(self.model):
            return cut()

    def _adopt(self, decision: Any) -> None:
        """Cut where another rank does."""
        plan_text, where = decision
        if self._waits_for_plan:
            self._follow(Plan.from_json(plan_text))
        if where == self._where:
            return
        cutting = self._cutting
        assert cutting is not None

        def cut() -> None:
            self._partition, self._where = cutting.make(where, self._call), where

        self._run_without_data(cut)

    def take_stages(self) -> None:
        """Take the stages of this process, and free the others."""
        partition, placement = self._partition, self._schedules.training.placement
        assert partition is not None
        alone = self._job.transport is None
        here = range(placement.stages) if alone else placement.stages_on(self._job.rank)
        # Only these stages are moved to the device, where the others may not fit.
        partition.keep(here, placement.rank_of, self.device)
        self._fill(partition, here)
        stages = [
            PipelineStage(
                partition.modules[i],
                i,
                placement.stages,
                self._settings.device,
                compile=self._settings.compile,
            )
            for i in here
        ]
        # After weights are loaded, and before anything looks at the stages' parameters.
        make_equal(stages, self._job.replicas, self._job.transport)
        before = {id(p): name for stage in stages for name, p in stage.named_parameters()}
        wrap_stages(stages, self._settings.wrap)
        after = {id(p) for stage in stages for _, p in stage.named_parameters()}
        replaced = [name for key, name in before.items() if key not in after]
        if replaced and self.needs_call and not self.was_asked:
            raise UsageError(
                f"wrap= has replaced {replaced[0]!r} and other parameters by new ones, as fully_shard does, "
                "and an optimizer that was made before would train nothing; cut the model by "
                "pipe.cut(...), with the arguments of a batch, and make the optimizer after it"
            )
        self._done(stages, partition)
        for optimizer in filter(None, (of() for of in self._optimizers)):
            for parameter in filter(is_placeholder, list(optimizer.state)):
                del optimizer.state[parameter]
        self._cutting = self._partition = None

    def _fill(self, partition: Partition, here: Sequence[int]) -> None:
        """Give the stages here their weights, where they wait for them."""
        seen = self._job.activity.prepare
        if self._first_values is not None:
            homes = [(partition.modules[i], self.device) for i in here]
            initialise(homes, *self._first_values)
        if self._folder is not None:
            device = self.device
            load_partition(partition, list(here), self._folder, device=device, seen=seen)
