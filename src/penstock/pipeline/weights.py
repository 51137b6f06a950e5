"""The weights of a pipeline in this process, and those that they share with other stages."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn

from penstock._engine.parallel import local_part
from penstock._engine.placeholders import (
    Location,
    Placeholder,
    Steps,
    is_placeholder,
    optimizers_of,
)
from penstock._engine.transport import Job
from penstock._engine.weights import Init
from penstock._engine.weights.files import digest
from penstock._engine.weights.initialise import initialise
from penstock._engine.weights.norms import all_norms, norms_by_name, sum_over
from penstock._engine.weights.optimizers import OptimizerStates, shared_settings
from penstock._engine.weights.sharing import SharedWeights
from penstock._engine.weights.states import (
    LoadResult,
    Names,
    StageWeights,
    WholeModel,
    gather_optimizer,
    gather_state,
    load_state,
    stream_state,
)
from penstock.errors import UsageError
from penstock.partition import Shared, find_shared, named_tensors
from penstock.stage import PipelineStage

CUT_NOW = "call pipe.cut(...) with the arguments of a batch to cut the model now"
"""What to do where something needs the stages before the first batch has come."""
Listed = list[tuple[str, Placeholder | None]]
"""All parameters of the model by name, in order: placeholders for those of other ranks, and None for ours."""


class ListedWeights(ABC):
    """The weights of a pipeline in this process, and the ranks that save and load theirs together.

    Args:
        job: this process among the others.
        shared: the table of weights that stages share.

    Attributes:
        stage_count: the number of stages whose weights are saved.
    """

    stage_count = 1

    def __init__(self, job: Job, shared: Sequence[Shared]) -> None:
        self.job, self.names = job, Names(shared)

    @property
    @abstractmethod
    def weights(self) -> StageWeights:
        """The parameters and buffers that live in this process."""

    @abstractmethod
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the whole model, each once; those of other ranks are placeholders."""

    @abstractmethod
    def check_filled(self) -> None:
        """Check that the weights have memory.

        Raises:
            UsageError: a tensor is on the meta device.
        """

    @property
    def counting(self) -> Job:
        """The ranks whose weights together are those of the model, each once."""
        return self.job

    @abstractmethod
    def check_equal(self) -> None:
        """Check that ranks that have the same weights have them equal; all ranks call it.

        Raises:
            UsageError: they do not.
        """

    def state_dict(self) -> dict[str, Any]:
        """The whole state dict on rank 0, an empty one on the others; all ranks call it."""
        weights = self.weights
        self.check_equal()
        state = gather_state(self.counting, weights)
        return {} if self.job.rank else state

    def stream(self, bucket_bytes: int, *, to_all: bool) -> Iterator[tuple[str, Tensor]]:
        """The whole weights of the model, a bucket at a time, in the main process or in all."""
        weights = self.weights
        self.check_equal()
        is_wanted = to_all or self.job.is_main_process
        if self.counting is self.job:
            is_wanted = to_all or self.job.is_first_pipeline
        return stream_state(
            self.counting, weights, bucket_bytes=bucket_bytes, to_all=to_all, is_wanted=is_wanted
        )

    def optimizer_state_dict(self, held: Callable[[], OptimizerStates]) -> dict[str, Any]:
        """An optimizer's whole state dict on rank 0, an empty one on the others; all ranks call it."""
        state = gather_optimizer(self.counting, self.names, held)
        return {} if self.job.rank else state

    def norms(self, order: float) -> Tensor:
        """The norms of all gradients of the model."""
        return all_norms(self.counting, self.weights.counted(), self.stage_count, order)

    def norms_by_name(self, order: float) -> dict[str, float]:
        """The norm of each gradient of the model, in the order of the model's weights."""
        self.names.check_apart()
        norms = norms_by_name(self.counting, self.weights.counted(), order)
        return {name: norms[name] for name, _ in self.named_parameters() if name in norms}

    def shared_settings(self) -> dict[str, list[float]]:
        """The numbers in optimizers' groups that all ranks must have alike, of those that have stepped."""
        return {}

    def sum(self, of: Mapping[nn.Parameter, Any]) -> Tensor:
        """The sum of what all ranks bring for their weights."""
        here = self.names_by_identity()
        if any(id(weight) not in here and not is_placeholder(weight) for weight in of):
            raise UsageError(
                "a sum over weights has one that is not the model's; take them from pipe.parameters(), or "
                "from the model's, after they were last replaced"
            )
        return sum_over(self.counting, self.weights.counted(), of)

    def writes(self) -> bool:
        """True if this process saves its part; all ranks call it."""
        return True

    @abstractmethod
    def align(self, level: int = logging.WARNING) -> None:
        """Make the ranks' copies of shared weights equal, and log where they differed."""

    def initialise(self, seed: int, init: Init | None) -> None:
        """Give the weights here their first values."""
        initialise([(module, device) for module, device in self._homes()], seed, init)
        # A shared weight may have been filled differently in each process.
        self.align(logging.DEBUG)

    @abstractmethod
    def _homes(self) -> Iterator[tuple[nn.Module, torch.device]]:
        """The modules whose weights are here, and where they live."""

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for _, parameter in self.named_parameters():
            parameter.grad = None

    def names_by_identity(self) -> dict[int, str]:
        """The name of each parameter that lives in this process, by its ``id``."""
        return {id(parameter): name for name, parameter in self.weights.named_parameters()}

    def load(
        self, read: Callable[[], Mapping[str, Any]], *, strict: bool, any_name: bool
    ) -> LoadResult:
        """Load values by name; with ``any_name``, one of a weight's names is enough."""
        result = load_state(self.job, self.weights, read, strict=strict, any_name=any_name)
        self.align()
        return result


class WholeWeights(ListedWeights):
    """The weights of a model that is not cut yet: each process has all of them.

    Args:
        model: the model.
        job: this process among the others.
        device: where the stages will live.
        waiting: what the weights still wait for, for messages; empty if they are there.
    """

    def __init__(
        self, model: nn.Module, job: Job, device: torch.device, waiting: Callable[[], str]
    ) -> None:
        super().__init__(job, find_shared(model, [model]))
        self._model, self._device, self._waiting = model, device, waiting

    @property
    def weights(self) -> StageWeights:
        """The parameters and buffers of the model."""
        if waiting := self._waiting():
            raise UsageError(f"{waiting}, with the first batch; {CUT_NOW}")
        return StageWeights([WholeModel(self._model)], self.names)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the model."""
        return self._model.named_parameters()

    def check_filled(self) -> None:
        """Check that the model has memory, or will get memory for this process's stages with the cut."""
        if not self._waiting():
            self.weights.check_filled()

    def writes(self) -> bool:
        """True if this process saves the weights."""
        self.check_equal()
        return self.job.rank == 0

    def check_equal(self) -> None:
        """Check that all ranks have the same weights, since each of them will keep only its own part."""
        tensors = [digest(local_part(tensor)) for _, tensor in named_tensors(self._model)]
        mine = sha256(repr(tensors).encode()).hexdigest()
        of_ranks = self.job.meet(lambda: mine, among=self.job.pipeline)
        if len({*of_ranks}) > 1:
            raise UsageError(
                "the ranks have made the model with different weights, and only the cut says which rank's "
                f"count: build it with the same seed on every rank, or {CUT_NOW}"
            )

    def align(self, level: int = logging.WARNING) -> None:
        """Nothing: no stages share weights."""

    @property
    def counting(self) -> Job:
        """This process, which has all weights."""
        return Job()

    def _homes(self) -> Iterator[tuple[nn.Module, torch.device]]:
        yield self._model, self._device


class HeldWeights(ListedWeights):
    """The weights of the stages of this process, and those that they share with other stages.

    Args:
        stages: the stages of this process.
        job: this process among the others.
        shared: the table of weights that stages share.
        rank_of: the rank of each stage.
        named: the parameters of the model that was cut; without them, the ranks tell each other theirs.

    Raises:
        AgreementError: a shared weight has different shapes or types on different ranks.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        job: Job,
        shared: Sequence[Shared],
        rank_of: Sequence[int],
        named: Iterable[tuple[str, nn.Parameter]] | None = None,
    ) -> None:
        super().__init__(job, shared)
        self.stages, self._is_filled = stages, False
        self._rank_of = rank_of
        self.stage_count = len(rank_of)
        self._sharing = SharedWeights(stages, shared, rank_of, job)
        self.align()
        self._listed = self._list_by_hand() if named is None else _listed(named)
        self._steps = Steps(self._norms)
        for absent in self.absent:
            absent.follow(self._steps)

    # ---- the parameters of the whole model

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the whole model, each once; those of other ranks are placeholders."""
        here = defaultdict[str, deque[nn.Parameter]](deque)
        for name, parameter in self.weights.named_parameters():
            here[name].append(parameter)
        for name, absent in self._listed:
            if absent is not None:
                yield name, absent  # type: ignore[misc]  # it passes as an nn.Parameter
            elif here[name]:
                yield name, here[name].popleft()
        for name, added in here.items():
            yield from ((name, parameter) for parameter in added)

    @property
    def absent(self) -> list[Placeholder]:
        """The placeholders for the parameters of other ranks."""
        return [absent for _, absent in self._listed if absent is not None]

    def shared_settings(self) -> dict[str, list[float]]:
        """The numbers in groups of weights here and elsewhere, of all optimizers that have stepped."""
        names = self.names_by_identity()
        each = [shared_settings(one, names) for one in optimizers_of(self.absent)]
        return {name: numbers for of_one in each for name, numbers in of_one.items()}

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for stage in self.stages:
            for parameter in stage.module.parameters():
                parameter.grad = None
        self._steps.drop_gradients()

    def leave_gradients(self) -> None:
        """After a step: leave placeholders as the gradients of the weights of other ranks."""
        self._steps.leave_gradients()

    def _list_by_hand(self) -> Listed:
        """The parameters of stages placed by hand, in the order of the stages."""
        rows = [
            [stage.index, self.names.first(name), list(p.shape), str(p.dtype), p.requires_grad]
            for stage in self.stages
            for name, p in stage.named_parameters()
        ]
        device, listed, seen = self.stages[0].device, Listed(), set[str]()
        saved = [[*stage.state_dict()] for stage in self.stages]
        gathered = self.job.meet(lambda: [rows, saved], among=self.job.pipeline)
        of_ranks = [rows for rows, _ in gathered]
        self.names.find_clashes(names for _, of_rank in gathered for names in of_rank)
        held = {name for _, name, *_ in rows} if len(of_ranks) > 1 else ()
        for index, name, shape, dtype, learns in sorted(row for rows in of_ranks for row in rows):
            rank, shared = self._rank_of[index], self.names.is_shared(name)
            if shared and name in seen:
                continue
            seen.add(name)
            if len(of_ranks) == 1 or rank == self.job.rank or (shared and name in held):
                listed.append((name, None))
                continue
            kind = getattr(torch, dtype.removeprefix("torch."))
            bare = torch.empty(shape, dtype=kind, device="meta", requires_grad=learns)
            listed.append(
                (name, Placeholder.of(bare, Location(name, rank, device), parameter=True))
            )
        return listed

    def _norms(self, order: float, present: int, absent: Sequence[str]) -> Tensor | None:
        """The norms of all gradients, where all ranks ask for them."""
        learning = [
            (name, weight) for name, weight in self.named_parameters() if weight.requires_grad
        ]
        expected = [
            name for name, weight in learning if is_placeholder(weight) and weight.grad is not None
        ]
        here = [w for _, w in learning if not is_placeholder(w) and w.grad is not None]
        if not order or present != len(here) or sorted(absent) != sorted(expected):
            return None
        homes = [self._ranks_with(name, weight) for name, weight in learning]
        # A rank that has all weights which learn computes the norm by itself, and would not join.
        if any(all(rank in home for home in homes) for rank in {*self._rank_of}):
            return None
        return self.norms(order)

    def _ranks_with(self, name: str, weight: Tensor) -> set[int]:
        if self.names.is_shared(name):
            return {self._rank_of[stage] for stage in self.names.stages(name)}
        return {weight.location.rank if is_placeholder(weight) else self.job.rank}

    # ---- those of this process

    def align(self, level: int = logging.WARNING) -> None:
        """Make the ranks' copies of shared weights equal, and log where they differed."""
        self._sharing.align(level)

    def prepare(self) -> None:
        """Before a training step: tie shared weights again, and note the shared buffers."""
        self._sharing.prepare()

    def finish(self) -> None:
        """After a training step: sum the gradients of shared weights over stages."""
        try:
            self._sharing.check_buffers()
            self._sharing.sum_gradients()
        except BaseException as error:
            # One rank alone may find a changed buffer, or lose a peer; the others must learn of it.
            raise self.job.fail(error) from error.__cause__

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
        if not self._is_filled:
            modules = [stage.module for stage in self.stages]
            tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
            if True in [tensor.is_meta for tensor in tensors]:
                self.weights.check_filled()
            self._is_filled = True
        for stage in self.stages:
            stage.follow_memory()

    def check_equal(self) -> None:
        """Nothing: each rank has its own weights, and those that stages share are kept equal."""

    def _homes(self) -> Iterator[tuple[nn.Module, torch.device]]:
        for stage in self.stages:
            yield stage.code, stage.device


def _listed(named: Iterable[tuple[str, nn.Parameter]]) -> Listed:
    return [(name, weight if is_placeholder(weight) else None) for name, weight in named]
