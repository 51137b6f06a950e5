"""Accelerate with a pipeline: an ``Accelerator`` that knows that the ranks of one share their batches."""

from __future__ import annotations

from collections.abc import Iterable
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
        "penstock.integrations.accelerate needs Accelerate: pip install 'penstock[transformers]'"
    ) from error

from penstock.errors import UsageError
from penstock.integrations.module import PipelineModule
from penstock.parallel import replicated_mesh
from penstock.pipeline import Pipeline
from penstock.values import map_tensors


class PipelineAccelerator(Accelerator):  # type: ignore[misc] # Accelerate has no types
    """An ``Accelerator`` for a :class:`~penstock.PipelineModule`.

    ::

        accelerator = PipelineAccelerator(pipe, gradient_accumulation_steps=2)
        model, optimizer, loader = accelerator.prepare(PipelineModule(pipe), optimizer, loader)

    Ranks of one pipeline get the same batches, and replicas different ones. ``clip_grad_norm_`` measures the
    whole model, ``gather`` and ``reduce`` count each pipeline once, and a scheduler steps once for each step
    of the optimizer. ``save_state`` writes the weights of the unsplit model, and ``load_state`` reads them
    with any schedule and number of ranks.

    Args:
        pipe: the pipeline.
        options: of ``Accelerator``.
    """

    def __init__(self, pipe: Pipeline, **options: Any) -> None:
        super().__init__(**options)
        self.pipe = pipe
        self._ranks = pipe.schedule.ranks if self.num_processes > 1 else 1
        if self._ranks > 1:
            # How Accelerate tells processes that share a batch from replicas.
            replicas, names = pipe.replicas.number, ("dp_replicate", "tp")
            kind = pipe.device.type
            self.state.device_mesh = replicated_mesh(kind, replicas, self._ranks, names=names)
        self.register_for_checkpointing(pipe.randomness)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Put the module under autocast, and nothing else: the pipeline has placed its stages.

        Raises:
            UsageError: it is not a module of this pipeline.
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
        """Wrap an optimizer of the module's parameters, so that its states are saved for any layout."""
        if isinstance(optimizer, AcceleratedOptimizer):
            return optimizer
        prepared = _PipelineOptimizer(optimizer, device_placement=False, scaler=self.scaler)
        prepared.pipe = self.pipe
        self._optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Wrap a scheduler, which steps once for each step of the optimizer."""
        prepared = super().prepare_scheduler(scheduler)
        # Otherwise it would step once for each process.
        prepared.split_batches = True
        return prepared

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """Scale the gradients of the whole model; the norm before, the same on every rank.

        Raises:
            UsageError: some of the parameters that have a gradient here are missing.
        """
        some = {id(parameter) for parameter in parameters}
        missing = [
            n for n, p in self.pipe.named_parameters() if p.grad is not None and id(p) not in some
        ]
        if missing:
            raise UsageError(
                f"clip_grad_norm_ was not given {missing[0]}, which has a gradient; a pipeline clips the "
                "gradients of the whole model, model.parameters()"
            )
        self.unscale_gradients()
        return torch.tensor(self.pipe.clip_grad_norm_(max_norm, norm_type))

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The state dict of the unsplit model on rank 0, an empty one on others; every rank calls it."""
        return self.pipe.state_dict(full=True)

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Load what :meth:`save_state` wrote, with any layout."""
        super().load_state(input_dir, *args, **kwargs)
        # Samplers draw from torch's generator, whose state more ranks than there were do not find.
        first = self.pipe.agree(torch.get_rng_state().tolist())[0]
        torch.set_rng_state(torch.tensor(first, dtype=torch.uint8))

    def gather(self, tensor: Any) -> Any:
        """Tensors of all pipelines, each once."""

        def one_of_each(joined: Tensor) -> Tensor:
            rows: Tensor = joined.unflatten(0, (self.num_processes, -1))
            return rows[:: self._ranks].flatten(0, 1)

        return map_tensors(super().gather(tensor), one_of_each)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum or mean over all pipelines."""

        def once(total: Tensor) -> Tensor:
            return total / self._ranks if total.is_floating_point() else total // self._ranks

        total = super().reduce(tensor, reduction, scale)
        return map_tensors(total, once) if reduction == "sum" else total


class _PipelineOptimizer(AcceleratedOptimizer):  # type: ignore[misc] # Accelerate has no types
    """An optimizer whose state dict is that of all ranks, by the names of the unsplit model."""

    pipe: Pipeline

    def state_dict(self) -> dict[str, Any]:
        return self.pipe.optimizer_state_dict(self.optimizer, full=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.pipe.load_optimizer_state_dict(self.optimizer, state_dict)
