"""The Trainer of transformers on a pipeline."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

try:
    from accelerate.utils import convert_to_fp32
    from transformers import PreTrainedModel, Trainer, TrainerCallback
    from transformers.trainer import TRAINER_STATE_NAME
except ImportError as error:
    raise ImportError(
        "penstock.integrations.transformers needs transformers and accelerate: "
        "pip install 'penstock-pipeline[transformers]'"
    ) from error

from penstock._engine.parallel import side_by_side
from penstock._engine.runtime import Loss
from penstock._engine.values import tensors_in
from penstock.checkpoint import Checkpoints
from penstock.errors import UsageError
from penstock.integrations.accelerate import (
    PIPELINE,
    CountsPipelines,
    by_number,
    share_batches,
)
from penstock.integrations.module import PipelineModel, PipelineModule
from penstock.pipeline import Pipeline, own_loss


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

    model: Any

    def __init__(
        self, *args: Any, pipeline: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        _refuse(self)
        model: Any = self.model
        self._foreign = _foreign_loss(type(self))
        # These need the whole model.
        self._decays: list[str] = super().get_decay_parameter_names(model)
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
        models_loss = self.compute_loss_func is None and self.label_smoother is None
        divides = self.model_accepts_loss_kwargs and module.divides
        self._divides = divides or not models_loss
        self._loss_only = False
        self.add_callback(_StopsTogether(self.pipe))
        if self.args.world_size > 1:
            # The Trainer has made its accelerator itself.
            self.accelerator.__class__ = CountsPipelines
            self.accelerator.ranks = self.pipe.job.ranks
            share_batches(self.accelerator, self.pipe)
            _check_groups(self.args, self.accelerator.num_processes)

    def _options(self, model: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
        """Options of the Pipeline: its loss, and its place among the processes."""
        options = {"loss_fn": self._loss_of(model), "device": self.args.device, **options}
        world = self.args.world_size
        if world == 1 and os.environ.get("WORLD_SIZE", "1") != "1":
            raise UsageError(
                "TrainingArguments was made before WORLD_SIZE was set: set RANK, WORLD_SIZE and LOCAL_RANK "
                "before the program starts, as torchrun does"
            )
        if world == 1 or "mesh" in options:
            return options
        ranks = options.setdefault("ranks", world)
        return options | side_by_side(self.args.device, world, ranks)

    def _loss_of(self, model: nn.Module) -> Loss:
        """The model's own loss, or the one that the Trainer was given."""
        models_loss = own_loss(model)
        if self.compute_loss_func is not None:
            function, weight = self.compute_loss_func, cast("Any", models_loss.weight)
            return replace(
                models_loss,
                function=_outside(
                    lambda output, labels: function(
                        output, labels, num_items_in_batch=weight(labels)
                    )
                ),
            )
        if self.label_smoother is not None:
            smoother, shifts = self.label_smoother, self._loss_shifts_labels
            return replace(
                models_loss,
                function=_outside(
                    lambda output, labels: smoother(output, labels, shift_labels=shifts)
                ),
            )
        return models_loss

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train, as the Trainer does.

        Args:
            resume_from_checkpoint: as the Trainer's; or ``"auto"``: the newest checkpoint of the output
                folder that is complete, or a new run if there is none.
            args: the Trainer's, by position.
            kwargs: the Trainer's, by name.
        """
        if resume_from_checkpoint == "auto":
            # A file system may show other processes older files.
            resume_from_checkpoint = self.pipe.job.meet(
                lambda: None, lambda _: self._newest(), "resume"
            )
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _newest(self) -> str | None:
        """The newest complete checkpoint: the Trainer writes its state last."""
        folders = by_number(Path(str(self.args.output_dir)).glob("checkpoint-*"))
        complete = {number: path for number, path in folders.items() if _is_complete(path)}
        return str(complete[max(complete)]) if complete else None

    # ---- a step

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """The loss of a batch over all replicas; its outputs too, if asked for."""
        if self._foreign is not None:
            return super().compute_loss(model, inputs, *args, **kwargs)
        return self._loss_in_stages(model, inputs, *args, **kwargs)

    def _loss_in_stages(
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
        # Another trainer's loss is that of a replica, of which the Trainer keeps rows.
        if self._foreign is None:
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
        return torch.tensor(self.pipe.clip_grad_norm_(self.args.max_grad_norm), device="cpu")

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return (
            torch.tensor(self.pipe.weights.grad_norm(), device="cpu")
            if grad_norm is None
            else grad_norm
        )

    # ---- properties of the whole model

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """The names of the whole model's parameters that decay."""
        return self._decays

    def get_total_train_batch_size(self, args: Any) -> int:
        """The samples of a step of the optimizer, over all replicas."""
        each: int = self._train_batch_size * args.gradient_accumulation_steps
        return each * int(self.accelerator.num_processes)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """This rank's share of a batch's floating-point operations."""
        model: Any = self.model
        main = inputs.get(model.main_input_name) if isinstance(inputs, Mapping) else None
        if main is None:
            return 0
        here = len(self.pipe.local_ranks) / self.pipe.job.ranks
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
            with self.pipe.job.calling("save_model"):
                # Of a model with adapters, these alone are saved, as transformers does.
                adapters = getattr(self.model, "_hf_peft_config_loaded", False)
                if isinstance(self.model, PreTrainedModel) and not adapters:
                    # Each rank writes its part; the first one, what the Trainer writes beside it.
                    files = _TrainerFiles(partial(super()._save, state_dict={}))
                    self.pipe.weights.save(output_dir or str(self.args.output_dir), files)
                    return
                state = self.pipe.weights.state_dict(full=True)
            if self.args.should_save:  # the others have no weights to give to PEFT
                super()._save(output_dir, state_dict=state)
        finally:
            self.model = module

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with Checkpoints(Path(output_dir, PIPELINE)) as checkpoints:
            checkpoints.save(self.state.global_step, pipe=self.pipe, **self._states())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        with Checkpoints(Path(checkpoint, PIPELINE)) as checkpoints:
            if checkpoints.load(pipe=self.pipe, **self._states()) is None:
                raise UsageError(
                    f"{checkpoint} has no whole run in a folder {PIPELINE!r}, since it was saved by another "
                    "Trainer, with save_only_model=True or not to the end, so that its optimizer cannot be "
                    "resumed; resume from another one, or give its weights to from_pretrained for a new run"
                )

    def _states(self) -> dict[str, Any]:
        prepared: Any = self.optimizer
        return {"optimizer": prepared.optimizer, "scheduler": self.lr_scheduler}

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Do nothing yet: the weights come with the optimizer's state."""

    def _load_best_model(self) -> None:
        folder = Path(str(self.state.best_model_checkpoint))
        with Checkpoints(folder / PIPELINE) as checkpoints:
            if checkpoints.load(pipe=self.pipe) is None:  # saved with save_only_model=True
                self.pipe.weights.load(folder)


class _TrainerFiles(NamedTuple):
    """What a Trainer writes beside the weights."""

    save_pretrained: Callable[[str], None]


class _StopsTogether(TrainerCallback):
    """Saves and stops after a step, where all ranks have agreed to: see :class:`penstock.GracefulStop`."""

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._pipe.stopping:
            control.should_save = control.should_training_stop = True


def _is_complete(path: Path) -> bool:
    try:
        json.loads((path / TRAINER_STATE_NAME).read_text())
    except (OSError, ValueError):
        return False
    return bool(Checkpoints(path / PIPELINE).steps())


def _foreign_loss(kind: type) -> type | None:
    """The first class with a ``compute_loss`` that is neither this module's nor the Trainer's."""
    classes = (base for base in kind.__mro__ if "compute_loss" in vars(base))
    return next((base for base in classes if base not in (PipelineTrainer, Trainer)), None)


def _check_groups(args: Any, replicas: int) -> None:
    """Refuse groups of TRL's samples that would be spread over replicas."""
    group = getattr(args, "num_generations", 1) or 1
    steps = getattr(args, "steps_per_generation", None) or args.gradient_accumulation_steps
    each = args.per_device_train_batch_size * steps
    if replicas > 1 and each % group:
        raise UsageError(
            f"num_generations={group}: with {replicas} replicas of a pipeline, each must have whole groups "
            f"of completions, and it has {each} of them at a time; make per_device_train_batch_size times "
            "steps_per_generation a multiple of it"
        )


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
        "enable_jit_checkpoint": (
            args.enable_jit_checkpoint,
            "put penstock.GracefulStop() around trainer.train(), so that all ranks save after the same step",
        ),
        "neftune_noise_alpha": (args.neftune_noise_alpha, "leave it out"),
        "use_liger_kernel": (args.use_liger_kernel, "apply it to the model before"),
        "eval_use_gather_object": (args.eval_use_gather_object, "pad the batches instead"),
        "save_on_each_node": (args.save_on_each_node, "the first process writes the whole model"),
        "average_tokens_across_devices=False": (
            not args.average_tokens_across_devices,
            "the loss is that of all replicas",
        ),
    }
    if use := _use_of_head(type(trainer)):
        wrong[use] = (True, "take a trainer whose loss uses the logits, as TRL's GKDTrainer does")
    for name, (is_set, instead) in wrong.items():
        if is_set:
            raise UsageError(f"{name} cannot be used with a pipeline: {instead}")


def _use_of_head(kind: type) -> str:
    """Return what says that a trainer multiplies by the weights of the head itself, which lie on one rank."""
    for base in kind.__mro__[: kind.__mro__.index(Trainer)]:
        for name, function in vars(base).items():
            code = (
                getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
            )
            if name != "__init__" and code and "get_output_embeddings" in code.co_names:
                return (
                    f"{base.__name__}, whose {name}() uses the weights of get_output_embeddings(),"
                )
    return ""
