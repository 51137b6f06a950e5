"""A pipeline as an ``nn.Module``, for loops that call a model and then ``loss.backward()``.

A pipeline with a ``loss_fn`` returns the loss: a training forward runs a whole step, backward included. The
step's gradients are held with the loss; its ``backward()`` multiplies them by the gradient that arrives. A
pipeline without one returns outputs, and so does a model of transformers that is given no labels: a forward
keeps nothing, and ``backward()`` runs forward and backward for the gradients that arrive at the outputs. So,
by the chain rule, a loop may do anything with either.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NoReturn, cast, get_args, get_type_hints

import torch
from torch import Tensor, nn

from penstock._engine.microbatches import MISSING, Rule, split_batch
from penstock._engine.runtime import LossScaler, StepLoss, StepResult
from penstock.errors import UsageError
from penstock.integrations.generation import generate
from penstock.integrations.passes import Pass
from penstock.pipeline import (
    CallArguments,
    Outputs,
    Pipeline,
    author_of,
    is_named,
    label_names,
    own_loss,
)

_OF_STEP = {"target", "microbatches", "loss_weight", "record"}
"""Arguments of a step that are not the model's."""
_FIRST_SCALE = 2.0**16
"""The factor of the first loss in float16: the one that ``torch.amp.GradScaler`` begins with."""


class PipelineModule(nn.Module):
    """A :class:`~penstock.Pipeline` as a module, which every rank calls with the same batch.

    ::

        model = penstock.PipelineModule(pipe)
        for x, y in loader:
            loss = model(x, target=y)
            (loss / 4).backward()
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()

    In training mode ``model(*args, target=target, **kwargs)`` takes the arguments of :meth:`Pipeline.step`,
    runs a step and returns the loss, a scalar tensor, the same on every rank; with ``outputs=True`` also the
    model's outputs. In evaluation mode and without gradients it returns the loss likewise, or, without a
    target, the model's output. A pipeline without ``loss_fn`` returns outputs in training too. Gradients flow
    through all outputs: for them, ``backward`` runs forward and backward of the batch once more.

    For a transformers model it takes that model's arguments and returns its output class; see
    :class:`penstock.integrations.PipelineModel`.

    Parameters, the state dict and modules are those of the whole model, see
    :meth:`Pipeline.named_parameters`.

    In float16, under autocast or with float16 weights, the step scales its loss by the factor of the last
    backward, so that gradients do not vanish in the step although ``torch.amp.GradScaler`` scales the loss
    only afterwards. If gradients become infinite on one rank, they become ``nan`` on all ranks, so that every
    rank's scaler skips the step.

    Args:
        pipe: the pipeline.
    """

    follows_outputs = True
    """Whether gradients flow through outputs that come with a loss."""

    def __new__(cls, pipe: Pipeline) -> PipelineModule:
        """A module of the class that suits the pipeline's model."""
        kind = type(pipe.model)
        if cls is PipelineModule and is_named(kind, "PeftModel"):
            # Others ask isinstance(model, PeftModel), and then switch adapters on and off.
            inner = {"base_model": property(lambda self: self.pipe.model.base_model)}
            return super().__new__(type("PipelinePeftModel", (PipelineModel, kind), inner))
        known = cls is PipelineModule and is_named(kind, "PreTrainedModel")
        return super().__new__(PipelineModel if known else cls)

    def __init__(self, pipe: Pipeline) -> None:
        nn.Module.__init__(self)
        self.pipe = pipe
        self._factor = _FIRST_SCALE
        self._checked = set[str]()
        dtypes = {parameter.dtype for parameter in pipe.parameters()}
        self._has_half_weights = any(
            pipe.job.meet(lambda: torch.float16 in dtypes, among=pipe.job.pipeline)
        )
        self._dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        if pipe.model is not None:
            self._modules.update(pipe.model._modules)
        else:
            for stage in pipe.stages:
                _graft(self, stage.code)
        self.training = any(module.training for module in self.children())

    # ---- calls

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step, or evaluate; see the class.

        Raises:
            UsageError: the call is wrong, see :meth:`Pipeline.step`.
            AgreementError: the ranks of the pipeline were given different batches.
        """
        trains = self.training and torch.is_grad_enabled()
        if "target" not in kwargs and not (trains and self.pipe.computes_loss):
            return self.outputs_of(*args, **kwargs)
        outputs = kwargs.pop("outputs", False)
        _, loss, output = self.run_batch(*args, trains=trains, outputs=outputs, **kwargs)
        return (loss, output) if outputs else loss

    def run_batch(
        self,
        *args: Any,
        trains: bool,
        outputs: bool = False,
        total_weight: float | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> tuple[StepResult, Tensor, Any]:
        """Run a step, or evaluate; return the result, the loss, and the outputs if they are asked for.

        In a step, their backward adds to ``.grad``. ``total_weight`` divides the loss in place of the weight
        of this batch; the others are arguments of :meth:`Pipeline.step`.
        """
        options: dict[str, Any] = {"same_batch": True, "outputs": outputs}
        if not trains:
            with self.pipe.engine.outputs_apart():
                result = self.pipe.evaluate(*args, model_kwargs=model_kwargs, **options, **kwargs)
            output = self._joined(result.outputs) if outputs else None
            return result, self._loss_of(result, total_weight), output
        for name in kwargs.keys() & {"accumulate", "scaler"}:
            raise UsageError(f"{name}= belongs to Pipeline.step; here, divide or scale the loss")
        of_step = {name: kwargs.pop(name) for name in _OF_STEP & kwargs.keys()}
        engine = self.pipe.engine
        target = of_step.pop("target", MISSING)
        batch = engine.arguments(args, kwargs, model_kwargs, target=target)
        engine.cut(batch)
        run = self._pass(batch, again=outputs and self.follows_outputs)
        scale = self._factor if self._computes_in_half else 1.0
        checks = scale != 1.0
        if checks:  # on every rank alike, so that all ask for the norm
            of_step["scaler"] = LossScaler(scale, device=self.pipe.device.type)
        with run.collecting(), engine.outputs_apart():
            result = self.pipe.step(
                *run.batch.args,
                target=run.batch.target,
                accumulate=1,
                total_weight=total_weight,
                model_kwargs=run.batch.kwargs,
                **options,
                **of_step,
            )
            if checks and not math.isfinite(self.pipe.weights.grad_norm()):
                scale = math.nan
        run.scale = scale
        parts = result.outputs.parts if outputs else []
        loss, parts = run.applied(self._loss_of(result, total_weight), parts)
        return result, loss, self._joined(result.outputs, parts) if outputs else None

    def outputs_of(
        self, *args: Any, model_kwargs: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        """The model's output, through which gradients flow if they are enabled.

        The pipeline keeps nothing for the backward: it runs the forward again when gradients arrive.
        """
        engine = self.pipe.engine
        batch = engine.arguments(args, kwargs, model_kwargs, same_batch=True)
        if not self.training and not torch.is_grad_enabled():
            with engine.outputs_apart():
                return self._joined(engine.predict(batch))
        engine.cut(batch)
        run = self._pass(batch, again=torch.is_grad_enabled())
        with torch.no_grad(), engine.outputs_apart():
            outputs = engine.forward(run.batch)
        if self.training:
            self.pipe.randomness.advance()
        return self._joined(outputs, run.applied(None, outputs.parts)[1])

    def _joined(self, outputs: Outputs, parts: list[Any] | None = None) -> Any:
        """The outputs of microbatches put together: their own, or parts like them in autograd's graph."""
        return outputs.joined(outputs.parts if parts is None else parts, self.output_rule(outputs))

    def output_rule(self, outputs: Outputs) -> Rule | None:
        """The rule by which outputs of microbatches are put together: that of the pipeline."""
        return outputs.rule

    def _pass(self, batch: CallArguments, *, again: bool) -> Pass:
        return Pass(
            self.pipe, batch, again=again, in_half=self._computes_in_half, note=self._note_factor,
        )  # fmt: skip

    def _loss_of(self, result: StepResult, total: float | None = None) -> Tensor:
        """The loss of a result on the stages' device, divided by a total in place of its weight."""
        value = result.loss if not total else result.loss * result.weight / total
        return torch.tensor(value, dtype=self._dtype, device=self.pipe.device)

    def check_once(
        self, what: str, loss: StepLoss | None, *args: Any, **kwargs: Any
    ) -> dict[str, tuple[float, float]]:
        """In the first call of ``what``: check that the first microbatch has the losses of its halves.

        For arguments and result see ``Engine.check_in_halves``.
        """
        if what in self._checked:
            return {}
        self._checked.add(what)
        with torch.no_grad():
            target = kwargs.pop("target", MISSING)
            return self.pipe.engine.check_in_halves(loss, CallArguments(args, kwargs, target))

    def _note_factor(self, factor: float) -> None:
        if math.isfinite(factor) and factor > 0:
            self._factor = factor

    @property
    def _computes_in_half(self) -> bool:
        """Whether gradients are computed in float16, where small ones vanish if they are not scaled."""
        kind = self.pipe.device.type
        if torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind) is torch.float16
        return self._has_half_weights

    def train(self, mode: bool = True) -> PipelineModule:
        """Set the mode of the model."""
        super().train(mode)
        if self.pipe.model is not None:
            self.pipe.model.train(mode)
        for stage in self.pipe.stages if self.pipe.is_cut else ():
            stage.module.train(mode)
        return self

    # ---- weights

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of the whole model, see :meth:`Pipeline.named_parameters`."""
        for name, parameter in self.pipe.named_parameters() if recurse else ():
            yield _below(prefix, name), parameter

    def state_dict(  # type: ignore[override] # torch takes more, which it deprecates
        self,
        *,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Parameters and buffers of the whole model, under its names; those of other ranks are placeholders.

        So the dict can be kept, copied and loaded again in this process, and a file of it is refused.
        ``pipe.weights.state_dict(full=True)`` gives rank 0 the numbers.
        """
        destination = {} if destination is None else destination
        model, held = self.pipe.model, self.pipe.weights.state_dict()
        whole = dict(self.pipe.named_parameters()) if model is None else model.state_dict()
        for name, value in {**whole, **held}.items():
            detached = isinstance(value, Tensor) and not keep_vars
            destination[prefix + name] = value.detach() if detached else value
        return destination

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the unsplit model's weights, see :meth:`penstock.ModelWeights.load_state_dict`."""
        return self.pipe.weights.load_state_dict(state_dict, strict)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PipelineModule:
        """Do nothing for ``to()``, ``half()`` and the like, and refuse them if they would change the stages.

        Raises:
            UsageError: the call would move or convert the stages.
        """
        home = self.pipe.device
        for name, parameter in self.pipe.weights.here.named_parameters():
            # Of a model that is not cut yet, this process may hold too much for its device.
            whole = self.pipe.is_cut
            with torch.no_grad():
                probe = parameter if whole else parameter.new_empty((0,) * parameter.dim())
                moved = fn(probe)
            stays = moved.dtype == parameter.dtype and moved.device in (home, parameter.device)
            if moved is not probe and (whole or not stays):
                raise UsageError(
                    f"to(), half() and the like would change {name}, and the pipeline's stages stay as they "
                    "are: say where they live with Pipeline(device=), and convert the model before the cut. "
                    "With Accelerate, use penstock.integrations.accelerate.PipelineAccelerator(pipe)"
                )
        return self

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        # DistributedDataParallel reads this when it wraps a module.
        raise UsageError(
            "DistributedDataParallel around a PipelineModule: its hooks would wait for gradients that come "
            "from the pipeline's step. Give Pipeline(mesh=, replicas=) for replicas of the pipeline, or wrap "
            "each stage with Pipeline(wrap=). With Accelerate, use "
            "penstock.integrations.accelerate.PipelineAccelerator(pipe)"
        )


def clip_whole(
    pipe: Pipeline, parameters: Iterable[Tensor], max_norm: float, **options: Any
) -> Tensor:
    """Clip the gradients of all ranks where a loop clips those of ``parameters``; return the norm before.

    Raises:
        UsageError: a parameter that has a gradient is not among ``parameters``.
    """
    some = {id(parameter) for parameter in parameters}
    for name, parameter in pipe.weights.here.named_parameters():
        if parameter.grad is not None and id(parameter) not in some:
            raise UsageError(
                f"{name.removeprefix('module.')} has a gradient, but is not among the parameters to be "
                "clipped; a pipeline clips the whole model: give its optimizer, or the call that clips, "
                "all of model.parameters(), or set requires_grad_(False) on it"
            )
    return torch.tensor(pipe.clip_grad_norm_(float(max_norm), **options), device="cpu")


# ---- transformers models


class PipelineModel(PipelineModule):
    """A pipeline of a transformers model; :class:`~penstock.PipelineModule` makes it.

    It takes the model's arguments and returns the model's output class, with the loss of the whole batch; by
    the loss that it computes itself, see :func:`own_loss`. The labels go to the model and, as the
    target, to ``loss_fn``. A training forward returns the loss alone, with ``outputs=True`` also the logits,
    through which no gradient flows; in evaluation mode ``outputs=False`` leaves them out. Attributes other
    than methods, such as ``config``, are the model's.

    Args:
        pipe: the pipeline.
    """

    def __init__(self, pipe: Pipeline) -> None:
        super().__init__(pipe)
        assert pipe.model is not None
        author = author_of(pipe.model)
        self.__dict__["_author"] = pipe.model
        forward = type(author).forward
        self._takes_cache = "use_cache" in inspect.signature(forward).parameters
        self._labels = label_names(pipe.model)
        # Some models take num_items_in_batch and ignore it.
        self.divides = "loss_function" in inspect.unwrap(forward).__code__.co_names
        self.follows = False
        hint = get_type_hints(forward).get("return")
        kinds = [kind for kind in (hint, *get_args(hint)) if isinstance(kind, type)]
        outputs = [kind for kind in kinds if is_named(kind, "ModelOutput")]
        self._output_class = outputs[0] if outputs else dict

    def __getattr__(self, name: str) -> Any:
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            value = getattr(self.__dict__.get("_author"), name, None)
            if value is None or (callable(value) and not isinstance(value, nn.Module)):
                raise
            return value

    def forward(
        self,
        *args: Any,
        num_items_in_batch: float | Tensor | None = None,
        outputs: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a step, or evaluate; see the class.

        Args:
            args: the model's arguments, for the whole batch on every rank.
            num_items_in_batch: the divisor of the sum of the labels' losses, in place of the number of labels
                of this batch: for a batch that is part of a larger one.
            outputs: whether every rank gets the logits beside a loss; by default only in evaluation.
            kwargs: the model's arguments by name, labels among them. Without labels, the output is that of
                the model, and gradients flow through it.

        Raises:
            UsageError: the call is wrong.
            AgreementError: the ranks of the pipeline were given different batches.
        """
        trains = self.training and torch.is_grad_enabled()
        outputs = not trains if outputs is None else outputs
        if self._takes_cache:
            kwargs.setdefault("use_cache", False)
        labels = {name: kwargs[name] for name in self._labels if kwargs.get(name) is not None}
        if "target" in kwargs:
            labels = kwargs.pop("target")
        elif [*labels] == ["labels"]:
            labels = labels["labels"]
        if self.follows or labels is None or len(labels) == 0:
            return self._followed(args, kwargs, labels, num_items_in_batch)
        total = None if num_items_in_batch is None else float(num_items_in_batch)
        _, loss, output = self.run_batch(
            *args, trains=trains, target=labels, outputs=outputs, total_weight=total, **kwargs
        )
        if not outputs:
            return self._output_class(loss=loss)
        self._weigh_losses(output, args, kwargs, labels)
        output["loss"] = loss
        return output

    def output_rule(self, outputs: Outputs) -> Rule | None:
        """The rule of the pipeline; losses that the model computes come as one of each microbatch."""
        rule, output = outputs.rule, outputs.parts[0]
        if not isinstance(rule, Mapping | None) or not isinstance(output, Mapping):
            return rule
        losses: list[str] = [
            name
            for name, value in output.items()
            if isinstance(value, Tensor) and name.endswith("loss") and not value.dim()
        ]
        return {**dict.fromkeys(losses, lambda parts, sizes: torch.stack(parts)), **(rule or {})}

    def _followed(self, args: Any, kwargs: Any, labels: Any, items: Any) -> Any:
        """The model's output, whose loss is that of the whole batch; gradients flow through all of it."""
        divided = items is not None and self.divides
        if divided:
            kwargs["num_items_in_batch"] = items
        output = self.outputs_of(*args, **kwargs)
        self._check(output, labels, args, kwargs)
        if isinstance(output, MutableMapping):
            self._weigh_losses(output, args, kwargs, labels, adds_up=divided)
        return output

    def _weigh_losses(
        self,
        output: MutableMapping[str, Any],
        args: Any,
        kwargs: Any,
        labels: Any,
        *,
        adds_up: bool = False,
    ) -> None:
        """Put the losses of the batch into the place of those of microbatches; ``loss`` may add up."""
        for name, value in output.items():
            if isinstance(value, Tensor) and name.endswith("loss") and value.dim() == 1:
                shares = self._shares(args, kwargs, labels, value)
                output[name] = value.sum() if adds_up and name == "loss" else value @ shares

    def _check(self, output: Any, labels: Any, args: Any, kwargs: Any) -> None:
        """Check, once, that a loss that the model computes without labels is a mean over samples."""
        value = output.get("loss") if isinstance(output, Mapping) else None
        computes = isinstance(value, Tensor) and value.dim() == 1 and len(value) > 1
        known = labels is not None and len(labels) > 0
        if known or not computes or output.get("aux_loss") is not None or not self.training:
            return
        loss = StepLoss(lambda output, _: output["loss"], replicas=self.pipe.replicas)
        self.check_once("forward", loss, *args, **kwargs)

    def _shares(self, args: Any, kwargs: Any, labels: Any, losses: Tensor) -> Tensor:
        """Return how much the loss of each microbatch counts in that of the batch."""
        count = len(losses)
        if labels is None or len(labels) == 0:
            return losses.new_full((count,), 1 / count)
        weight = cast("Any", own_loss(self._author).weight)
        parts = split_batch(args, kwargs, labels, None, count, fewer=True).targets or ()
        counts = [float(weight(part)) for part in parts]
        return losses.new_tensor(counts) / max(sum(counts), 1.0)

    def activation_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """Recompute layers in backward, as the model's own method does."""
        self._author.activation_checkpointing_enable(*args, **kwargs)

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """The model's ``save_pretrained``, with the weights of all ranks; every rank calls it.

        Args:
            save_directory: the folder, which the main process writes.
            kwargs: the arguments of the model's method; ``is_main_process``, ``state_dict`` and
                ``save_function`` have no effect, since the pipeline knows.
        """
        with self.pipe.job.calling("save_pretrained"):
            state = self.pipe.weights.state_dict(full=True)
        if self.pipe.is_main_process:
            for name in ("is_main_process", "state_dict", "save_function"):
                kwargs.pop(name, None)
            self._author.save_pretrained(save_directory, state_dict=state, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's ``generate``: the tokens that the unsplit model gives, on every rank.

        All ranks call it with the same arguments, and draw the random numbers of rank 0. Each rank keeps the
        cache of its own layers, and sends their results to the others, token by token.

        Args:
            args: the arguments of the model's ``generate``.
            kwargs: its arguments by name.

        Raises:
            UsageError: weights are sharded, or the model's cache cannot be split.
            AgreementError: the ranks were given different arguments.
        """
        with self.pipe.job.calling("generate"):
            return generate(self.pipe, args, kwargs)


# ---- the modules of several stages as one tree


def _graft(root: nn.Module, module: nn.Module) -> None:
    """Put a module's submodules under the same paths in the root; plain containers are copied."""
    for name, child in module.named_children():
        if type(child) is not nn.Module:
            root._modules[name] = child
            continue
        if name not in root._modules:
            root._modules[name] = nn.Module()
        holder = root._modules[name]
        assert holder is not None
        holder._parameters.update(child._parameters)
        _graft(holder, child)


def _below(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
