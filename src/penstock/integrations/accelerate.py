"""Accelerate with a pipeline: an ``Accelerator`` for ranks that share their batches."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler
except ImportError as error:
    raise ImportError(
        "penstock.integrations.accelerate needs Accelerate: pip install 'penstock-pipeline[transformers]'"
    ) from error

from penstock._engine.parallel import replicated_mesh
from penstock._engine.values import flatten, map_tensors
from penstock.checkpoint import Checkpoints
from penstock.errors import UsageError
from penstock.integrations.module import PipelineModule, clip_whole
from penstock.pipeline import Pipeline

PIPELINE = "penstock"
"""The folder, in what another library saves, with weights and states of optimizers for any layout."""


def by_number(folders: Iterable[Path]) -> dict[int, Path]:
    """The folders whose names end with a number, by this number."""
    numbers = {path: re.search(r"\d+$", path.name) for path in folders}
    return {int(number[0]): path for path, number in numbers.items() if number}


def share_batches(accelerator: Any, pipe: Pipeline) -> None:
    """Tell Accelerate that the ranks of a pipeline share a batch, and replicas do not.

    Raises:
        UsageError: batches are read by one process for all, or replicas may get different numbers of them.
    """
    replicas, ranks = pipe.replicas.number, pipe.job.ranks
    loaders = accelerator.dataloader_config
    if loaders.dispatch_batches and replicas > 1:
        raise UsageError(
            "dispatch_batches=True sends the batches that one process reads to all, and so all replicas of a "
            "pipeline would train on the same ones; leave it out, so that each reads its own share"
        )
    if not loaders.even_batches and replicas > 1:
        raise UsageError(
            "even_batches=False lets one replica of a pipeline have a batch more than another, which would "
            "wait for its gradients for ever; leave it out, or drop_last=True in the DataLoader"
        )
    if replicas > 1:
        loaders.dispatch_batches = False
    names = ("dp_replicate", "tp")
    mesh = replicated_mesh(pipe.device, replicas, ranks, names=names)
    accelerator.state.device_mesh = mesh


class CountsPipelines(Accelerator):  # type: ignore[misc] # Accelerate has no types
    """An ``Accelerator`` to which the processes of one pipeline are one."""

    ranks = 1
    """The number of processes in each pipeline."""

    @property
    def num_processes(self) -> int:
        """The number of processes that have batches of their own: that of pipelines."""
        return int(self.state.num_processes) // self.ranks

    def gather(self, tensor: Any) -> Any:
        """Gather tensors of all pipelines, each pipeline's once."""

        def pick(joined: Tensor) -> Tensor:
            rows: Tensor = joined.unflatten(0, (self.state.num_processes, -1))
            return rows[:: self.ranks].flatten(0, 1)

        gathered = super().gather(tensor)
        return gathered if self.ranks == 1 else map_tensors(gathered, pick)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather values of all pipelines, each pipeline's once, without those that only fill a batch up."""
        tensors = not use_gather_object and all(
            isinstance(leaf, Tensor) for leaf in flatten(input_data)[0]
        )
        if not tensors and self.ranks > 1:
            first = self.process_index % self.ranks == 0
            return super().gather_for_metrics(input_data if first else [], use_gather_object=True)
        return super().gather_for_metrics(input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum or mean over all pipelines."""

        def once(total: Tensor) -> Tensor:
            return total / self.ranks if total.is_floating_point() else total // self.ranks

        total = super().reduce(tensor, reduction, scale)
        return map_tensors(total, once) if reduction == "sum" else total


class PipelineAccelerator(CountsPipelines):
    """An ``Accelerator`` for a :class:`~penstock.PipelineModule`.

    ::

        accelerator = PipelineAccelerator(pipe, gradient_accumulation_steps=2)
        model, optimizer, loader = accelerator.prepare(PipelineModule(pipe), optimizer, loader)

    Ranks of one pipeline get the same batches, and replicas different ones. ``clip_grad_norm_`` measures the
    whole model, ``num_processes``, ``gather`` and ``reduce`` count each pipeline once, and so a scheduler
    steps as often as with so many processes of Accelerate. ``save_state`` lets each process write its part
    into the folder ``penstock``, and ``load_state`` reads it with any schedule and number of ranks.

    Args:
        pipe: the pipeline.
        options: the arguments of ``Accelerator``.
    """

    def __init__(self, pipe: Pipeline, **options: Any) -> None:
        super().__init__(**options)
        self.pipe = pipe
        if self.state.num_processes > 1:
            self.ranks = pipe.job.ranks
            share_batches(self, pipe)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Put the module under autocast, and nothing else: the pipeline has placed its stages.

        Raises:
            UsageError: the module is not one of this pipeline.
        """
        if not isinstance(model, PipelineModule) or model.pipe is not self.pipe:
            raise UsageError(
                f"PipelineAccelerator.prepare was given a {type(model).__name__}; give it "
                "PipelineModule(pipe), of the pipeline that the accelerator was made with"
            )
        prepared: nn.Module = super().prepare_model(model, False, evaluation_mode=True)
        return prepared

    def prepare_optimizer(
        self, optimizer: Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Wrap an optimizer of the module's parameters, so that its state is saved for any layout."""
        if isinstance(optimizer, AcceleratedOptimizer):
            return optimizer
        prepared = _PipelineOptimizer(optimizer, device_placement=False, scaler=self.scaler)
        prepared.pipe = self.pipe
        self._optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Wrap a scheduler, which steps once for each pipeline at each step of the optimizer."""
        prepared = super().prepare_scheduler(scheduler)
        if self.ranks > 1 and not prepared.split_batches:
            # It would step once for each process.
            prepared.split_batches, step = True, prepared.step

            def step_for_each(*args: Any, **kwargs: Any) -> None:
                for _ in range(self.num_processes):
                    # As Accelerate does: a schedule of fixed length may end between two of these.
                    if getattr(scheduler, "_step_count", 0) <= getattr(
                        scheduler, "total_steps", inf
                    ):
                        step(*args, **kwargs)

            prepared.step = step_for_each
        return prepared

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """Clip the gradients of the whole model; return the norm before, the same on every rank.

        Raises:
            UsageError: some of the parameters that have a gradient here are missing.
        """
        self.unscale_gradients()
        return clip_whole(self.pipe, parameters, max_norm, norm_type=norm_type)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The state dict of the unsplit model on rank 0, an empty one on the others; every rank calls it."""
        return dict(self.pipe.weights.state_dict(full=True))

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Save the run; every process writes its part, and rank 0 what Accelerate keeps beside it."""
        with self._pipeline_apart():
            folder = super().save_state(output_dir, *args, **kwargs)
        with Checkpoints(Path(folder, PIPELINE), keep=1) as checkpoints:
            checkpoints.save(self.step, pipe=self.pipe, **self._states())
        return folder

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> bool:
        """Load what :meth:`save_state` wrote, with any layout.

        Args:
            input_dir: the folder; by default the newest one that automatic naming made. ``"auto"`` is the
                newest one that is complete, if there is any; others are renamed to ``incomplete_*``.
            args: those of ``Accelerator.load_state``, by position.
            kwargs: those of ``Accelerator.load_state``, by name.

        Returns:
            Whether there was something to load.

        Raises:
            UsageError: another Accelerator has saved it.
        """
        if input_dir == "auto":
            # A file system may show other processes older files.
            number = self.pipe.job.meet(lambda: None, lambda _: self._newest_complete(), "resume")
            if number is None:
                return False
            self.project_configuration.iteration = number + 1
            input_dir = str(self._named_folders / f"checkpoint_{number}")
        if input_dir is None:
            folders = by_number(self._named_folders.glob("checkpoint_*"))
            input_dir = str(folders[max(folders)])
        with Checkpoints(Path(input_dir, PIPELINE)) as checkpoints:
            if checkpoints.load(pipe=self.pipe, **self._states()) is None:
                raise UsageError(
                    f"{input_dir} has no folder {PIPELINE!r} with a checkpoint, since another Accelerator "
                    "has saved it; load the weights with pipe.weights.load, and begin a new run"
                )
        with self._pipeline_apart():
            super().load_state(input_dir, *args, **kwargs)
        # Samplers draw from torch's generator; with more ranks than were saved, some find no state of it.
        torch.set_rng_state(self.pipe.job.share(torch.get_rng_state(), 0).cpu())
        return True

    def _newest_complete(self) -> int | None:
        """The number of the newest complete state that automatic naming made; puts others aside.

        Accelerate refuses to write over them, and counts them in its ``total_limit``.
        """
        folders = by_number(self._named_folders.glob("checkpoint_*"))
        # The pipeline's part is written last.
        complete = [
            number for number, folder in folders.items() if Checkpoints(folder / PIPELINE).steps()
        ]
        for number in folders.keys() - complete:
            aside = self._named_folders / f"incomplete_{number}"
            shutil.rmtree(aside, ignore_errors=True)
            folders[number].rename(aside)
        return max(complete, default=None)

    @property
    def _named_folders(self) -> Path:
        """Where automatic naming puts states."""
        return Path(self.project_dir, "checkpoints")

    def _states(self) -> dict[str, Any]:
        """Return what is saved with the pipeline, under the names that it has in its folder."""
        optimizers: dict[str, Any] = {
            f"optimizer{i}": one.optimizer for i, one in enumerate(self._optimizers)
        }
        return optimizers | {
            f"scheduler{i}": one.scheduler for i, one in enumerate(self._schedulers)
        }

    @contextmanager
    def _pipeline_apart(self) -> Iterator[None]:
        """A context in which Accelerate neither saves nor loads what the pipeline's folder holds."""
        names = ("_models", "_optimizers", "_schedulers")
        kept = {name: getattr(self, name) for name in names}
        for name in names:
            setattr(self, name, [])
        try:
            yield
        finally:
            for name, objects in kept.items():
                setattr(self, name, objects)


class _PipelineOptimizer(AcceleratedOptimizer):  # type: ignore[misc] # Accelerate has no types
    """An optimizer whose state dict covers all ranks, by the names of the unsplit model."""

    pipe: Pipeline

    def state_dict(self) -> dict[str, Any]:
        return self.pipe.weights.optimizer_state_dict(self.optimizer, full=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.pipe.weights.load_optimizer_state_dict(self.optimizer, state_dict)
