"""The Trainer of transformers on a pipeline."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

try:
    from accelerate.utils import convert_to_fp32, gather
    from transformers import Trainer
except ImportError as error:
    raise ImportError(
        "penstock.integrations.transformers needs transformers and accelerate: "
        "pip install 'penstock-pipeline[transformers]'"
    ) from error

from penstock.checkpoint import Checkpoints
from penstock.errors import StateDictError, UsageError
from penstock.integrations.accelerate import one_of_each, share_batches
from penstock.integrations.module import PipelineModel, PipelineModule, own_loss
from penstock.launchers import read_launcher
from penstock.parallel import side_by_side
from penstock.pipeline import Pipeline
from penstock.values import tensors_in

_FOLDER = "penstock"
"""The folder in a Trainer's checkpoint that holds the whole run, for any layout."""


class PipelineTrainer(Trainer):
    """A ``transformers.Trainer`` that trains its model as a pipeline.

    ::

        trainer = PipelineTrainer(model=model, args=args, train_dataset=data, pipeline={"schedule": "ZB-V"})
        trainer.train()

    The arguments and ``TrainingArguments`` are the Trainer's. Under ``torchrun`` the processes form one
    pipeline, or with ``pipeline={"ranks": n}`` replicas of pipelines of n ranks, which average gradients.
    ``per_device_train_batch_size`` is the batch of a pipeline, which it splits into microbatches.
    In one process the pipeline's ranks take turns.

    A checkpoint holds the weights as ``from_pretrained`` reads them, and in its folder ``penstock`` the whole
    run, which resumes with any schedule and number of ranks. ``bf16=True`` computes under autocast, as in the
    Trainer. To train with another trainer, make it a second base: ``class PipelineSFTTrainer(PipelineTrainer,
    SFTTrainer)``; the loss is then the model's, and metrics that the other trainer computes from a training
    step's logits are left out.

    Args:
        args: the Trainer's, by position.
        pipeline: options of :class:`penstock.Pipeline`, such as ``schedule``, ``ranks`` and ``microbatches``.
        kwargs: the Trainer's, by name.

    Attributes:
        pipe: the pipeline.

    Raises:
        UsageError: an argument cannot be used with a pipeline; the message says what to do instead.
    """

    def __init__(
        self, *args: Any, pipeline: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        _refuse(self)
        model: Any = self.model
        self._foreign = _foreign_loss(type(self))
        # These need the whole model.
        self._decays = super().get_decay_parameter_names(model)
        self._set_signature_columns_if_needed()
        counts = hasattr(model, "num_parameters")
        self._weights = model.num_parameters(exclude_embeddings=True) if counts else 0
        self.pipe = Pipeline(model, **self._options(model, dict(pipeline or {})))
        module = PipelineModule(self.pipe)
        if not isinstance(module, PipelineModel):
            raise UsageError(
                f"PipelineTrainer trains models of transformers, not a {type(model).__name__}; train it "
                "with penstock.PipelineModule in a loop of your own"
            )
        self.model = self.model_wrapped = self.callback_handler.model = module
        # The Trainer then leaves placement, replicas and the gathering of weights to the model.
        self.is_distributed_loading_by_transformers = True
        module.follows = self._foreign is not None
        # Some models take num_items_in_batch and ignore it; then so does the pipeline.
        own = self.compute_loss_func is None and self.label_smoother is None
        self._divides = not own or (self.model_accepts_loss_kwargs and module.divides)
        self._loss_only = False
        if self.args.world_size > 1:
            share_batches(self.accelerator, self.pipe)
            self.accelerator.gather = self._gather

    def _options(self, model: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
        """Options of the Pipeline: its loss, and its place among the processes."""
        options = {**self._loss_options(model), "device": self.args.device, **options}
        world = self.args.world_size
        read_launcher()
        if world == 1 and os.environ.get("WORLD_SIZE", "1") != "1":
            raise UsageError(
                "TrainingArguments was made before this process knew of the others: call "
                "penstock.read_launcher() at the top of the program"
            )
        if world == 1 or "mesh" in options or "group" in options:
            return options
        ranks = options.setdefault("ranks", world)
        return options | side_by_side(self.args.device.type, world, ranks)

    def _loss_options(self, model: nn.Module) -> dict[str, Any]:
        """The model's own loss, or the one that the Trainer was given."""
        options: dict[str, Any] = dict(own_loss(model))
        weight = options["loss_weight"]
        if self.compute_loss_func is not None:
            function = self.compute_loss_func
            options["loss_fn"] = _outside(
                lambda output, labels: function(output, labels, num_items_in_batch=weight(labels))
            )
        elif self.label_smoother is not None:
            smoother, shifts = self.label_smoother, self._loss_shifts_labels
            options["loss_fn"] = _outside(
                lambda output, labels: smoother(output, labels, shift_labels=shifts)
            )
        return options

    # ---- a step

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """The loss of a batch over all replicas; its outputs too, if asked for."""
        if self._foreign is not None:
            return super().compute_loss(model, inputs, *args, **kwargs)
        return self._own_loss(model, inputs, *args, **kwargs)

    def _own_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss that the pipeline's stages compute while they run."""
        outputs = model(
            **inputs,
            num_items_in_batch=num_items_in_batch if self._divides else None,
            outputs=return_outputs and not self._loss_only,
        )
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> Any:
        """As the Trainer's, but all ranks get the logits only where they are asked for."""
        self._loss_only = prediction_loss_only
        inputs = self._without_repeated(inputs)
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)
        finally:
            self._loss_only = False

    def _without_repeated(self, inputs: Any) -> Any:
        """Remove the labels of rows that only fill the last batch of an evaluation up for all replicas."""
        state = self.accelerator.gradient_state
        labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
        if not state.end_of_dataloader or state.remainder <= 0 or not isinstance(labels, Tensor):
            return inputs
        rows = max(0, state.remainder - self.pipe.replicas.index * len(labels))
        if rows >= len(labels) or labels.is_floating_point():
            return inputs
        labels = labels.clone()
        labels[rows:] = -100
        return {**inputs, "labels": labels}

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        self.accelerator.unscale_gradients()
        return torch.tensor(self.pipe.clip_grad_norm_(self.args.max_grad_norm))

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return torch.tensor(self.pipe.grad_norm()) if grad_norm is None else grad_norm

    def _gather(self, tensor: Any) -> Any:
        """Gather tensors of all replicas, each replica's once."""
        return one_of_each(gather(tensor), self.pipe.schedule.ranks)

    # ---- properties of the whole model

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """The names of the whole model's parameters that decay."""
        return self._decays

    def get_tp_size(self) -> int:
        """The number of processes that share a batch: those of one pipeline."""
        pipe = vars(self).get("pipe")
        return 1 if pipe is None else pipe.schedule.ranks // len(pipe.ranks)

    def _get_num_items_in_batch(self, *args: Any) -> Any:
        """The number of labels over all replicas, each counted once."""
        items = super()._get_num_items_in_batch(*args)
        # Transformers divides by the processes that share a batch, and gather counts one of them.
        return items * self.get_tp_size() if isinstance(items, Tensor) else items

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """This rank's share of a batch's floating-point operations."""
        model: Any = self.model
        main = inputs.get(model.main_input_name) if isinstance(inputs, Mapping) else None
        if main is None:
            return 0
        here = len(self.pipe.ranks) / self.pipe.schedule.ranks
        return int(6 * main.numel() * self._weights * here)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: the pipeline moves its stages."""

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """Do nothing: replicas begin with the same weights."""

    # ---- files

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the weights and the files with them, as ``from_pretrained`` reads them."""
        module, self.model = self.model, self.pipe.model
        try:
            with self.pipe.calling("save_model"):
                state = self.pipe.state_dict(full=True)
            super()._save(output_dir, state_dict=state)
        finally:
            self.model = module

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with Checkpoints(Path(output_dir, _FOLDER)) as checkpoints:
            checkpoints.save(self.state.global_step, pipe=self.pipe, **self._states())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint, _FOLDER)
        if not folder.is_dir():
            raise UsageError(
                f"{checkpoint} has no folder {_FOLDER!r}, since it was saved by another Trainer or with "
                "save_only_model=True, so that its optimizer cannot be resumed; give its weights to "
                "from_pretrained, and begin a new run"
            )
        with Checkpoints(folder) as checkpoints:
            checkpoints.load(pipe=self.pipe, **self._states())

    def _states(self) -> dict[str, Any]:
        prepared: Any = self.optimizer
        return {"optimizer": prepared.optimizer, "scheduler": self.lr_scheduler}

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Do nothing yet: the weights come with the optimizer's state."""

    def _load_best_model(self) -> None:
        folder = Path(str(self.state.best_model_checkpoint))
        try:
            self.pipe.load(folder)
        except StateDictError:
            # Some models save weights under other names than their own.
            if not (folder / _FOLDER).is_dir():
                raise
            with Checkpoints(folder / _FOLDER) as checkpoints:
                checkpoints.load(pipe=self.pipe)


def _foreign_loss(kind: type) -> type | None:
    """The first class with a ``compute_loss`` that is neither this module's nor the Trainer's."""
    classes = (base for base in kind.__mro__ if "compute_loss" in vars(base))
    return next((base for base in classes if base not in (PipelineTrainer, Trainer)), None)


def _outside(loss_fn: Any) -> Any:
    """A loss as the Trainer computes it: outside of autocast, of outputs in float32."""

    def computed(output: Any, labels: Any) -> Any:
        kind = next((t.device.type for t in tensors_in(output)), "cpu")
        if not torch.is_autocast_enabled(kind):
            return loss_fn(output, labels)
        with torch.autocast(kind, enabled=False):
            return loss_fn(convert_to_fp32(output), labels)

    return computed


def _refuse(trainer: Trainer) -> None:
    """Refuse options that a pipeline cannot honour."""
    args = trainer.args
    wrong = {
        "model_init=": (trainer.model_init, "give model="),
        "optimizers=(optimizer, ...)": (
            trainer.optimizer,
            "its parameters are those of the whole model; give optimizer_cls_and_kwargs=",
        ),
        "several GPUs in one process": (
            args.n_gpu > 1,
            "start one process for each with torchrun",
        ),
        "deepspeed": (args.deepspeed, "the pipeline takes its place"),
        "fsdp": (args.fsdp, "shard the stages with pipeline={'wrap': ...}"),
        "torch_compile": (args.torch_compile, "give pipeline={'compile': True}"),
        "auto_find_batch_size": (args.auto_find_batch_size, "choose a batch size"),
        "neftune_noise_alpha": (args.neftune_noise_alpha, "leave it out"),
        "use_liger_kernel": (args.use_liger_kernel, "apply it to the model before"),
        "eval_use_gather_object": (args.eval_use_gather_object, "pad the batches instead"),
        "average_tokens_across_devices=False": (
            not args.average_tokens_across_devices,
            "the loss is that of all replicas",
        ),
    }
    for name, (given, instead) in wrong.items():
        if given:
            raise UsageError(f"{name} cannot be used with a pipeline: {instead}")
