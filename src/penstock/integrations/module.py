"""A pipeline as an ``nn.Module``, for loops that call a model and then ``loss.backward()``.

A training forward runs a whole step of the pipeline, backward included. The step's gradients are held with
the loss; its ``backward()`` multiplies them by the gradient that arrives, and adds them to ``.grad``. So, by
the chain rule, a loop may do anything with the loss.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, TypedDict, cast, get_args, get_type_hints

import torch
from torch import Tensor, nn

from penstock.errors import UsageError
from penstock.integrations.generation import generate
from penstock.parallel import local_part
from penstock.pipeline import Pipeline
from penstock.runtime import LossFunction, LossScaler, LossWeight, StepResult
from penstock.values import map_tensors, tensors_in

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
    model's outputs, through which no gradient flows. In evaluation mode and without gradients it returns the
    loss likewise, or, without a target, the model's output.

    For a transformers model it takes that model's arguments and returns its output class; see
    :class:`penstock.integrations.PipelineModel`.

    Parameters, modules and the state dict are those of the stages that live in this process, under their
    names in the unsplit model. ``torch.nn.utils.clip_grad_norm_`` measures the gradients of this process
    alone; :meth:`Pipeline.clip_grad_norm_` measures those of all ranks.

    In float16, under autocast or with float16 weights, the step scales its loss by the factor of the last
    backward, so that gradients do not vanish in the step although ``torch.amp.GradScaler`` scales the loss
    only afterwards. If gradients become infinite on one rank, they become ``nan`` on all ranks, so that every
    rank's scaler skips the step.

    Args:
        pipe: the pipeline.
    """

    def __new__(cls, pipe: Pipeline) -> PipelineModule:
        """A module of the class that suits the pipeline's model."""
        known = cls is PipelineModule and _is_named(type(pipe.model), "PreTrainedModel")
        return super().__new__(PipelineModel if known else cls)

    def __init__(self, pipe: Pipeline) -> None:
        super().__init__()
        self.pipe = pipe
        self.__dict__["_anchor"] = torch.zeros((), requires_grad=True)
        self._factor = _FIRST_SCALE
        dtypes = {parameter.dtype for parameter in pipe.parameters()}
        self._has_half_weights = any(pipe.agree(torch.float16 in dtypes))
        self._dtype = torch.float64 if torch.float64 in dtypes else torch.float32
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
        if self.training and torch.is_grad_enabled():
            result, loss = self.run_step(*args, **kwargs)
        elif "target" not in kwargs:
            return self.pipe.predict(*args, same_batch=True, **kwargs)
        else:
            result = self.pipe.eval(*args, same_batch=True, **kwargs)
            loss = self.loss_of(result)
        return (loss, self.guarded(result.outputs)) if kwargs.get("outputs") else loss

    def run_step(self, *args: Any, **kwargs: Any) -> tuple[StepResult, Tensor]:
        """Run a step; return its result, and its loss, whose backward adds the gradients to ``.grad``."""
        for name in kwargs.keys() & {"accumulate", "scaler"}:
            raise UsageError(f"{name}= belongs to Pipeline.step; here, divide or scale the loss")
        parameters = list(self.pipe.parameters())
        inputs = {id(t): t for t in tensors_in((args, kwargs)) if t.requires_grad}
        copies = {key: tensor.detach().requires_grad_() for key, tensor in inputs.items()}
        if inputs:
            args, kwargs = map_tensors((args, kwargs), lambda t: copies.get(id(t), t))
        scale = self._factor if self._computes_in_half() else 1.0
        checks = scale != 1.0
        if checks:  # on every rank alike, so that all ask for the norm
            kwargs["scaler"] = LossScaler(scale, device=self.pipe.device.type)
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            result = self.pipe.step(*args, accumulate=1, same_batch=True, **kwargs)
            if checks and not math.isfinite(self.pipe.grad_norm()):
                scale = math.nan
            gradients = [(p, p.grad) for p in parameters if p.grad is not None]
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
        pending = _Pending(gradients, list(copies.values()), scale, self._note_factor)
        anchor = self.__dict__["_anchor"]
        value, of_inputs = self.loss_of(result, kwargs.get("total_weight")), inputs.values()
        loss: Tensor = cast("Any", _Loss).apply(pending, value, anchor, *of_inputs)
        return result, loss

    def loss_of(self, result: StepResult, total: float | None = None) -> Tensor:
        """The loss of a result on the stages' device, divided by a total in place of its weight."""
        value = result.loss if not total else result.loss * result.weight / total
        return torch.tensor(value, dtype=self._dtype, device=self.pipe.device)

    def guarded(self, outputs: Any) -> Any:
        """Outputs of a step; the backward of a loss that is made of them is refused."""
        anchor = self.__dict__["_anchor"]
        return map_tensors(
            outputs, lambda t: cast("Any", _Output).apply(t, anchor) if t.is_floating_point() else t
        )

    def _note_factor(self, factor: float) -> None:
        if math.isfinite(factor) and factor > 0:
            self._factor = factor

    def _computes_in_half(self) -> bool:
        """Whether gradients are computed in float16, where small ones vanish if they are not scaled."""
        kind = self.pipe.device.type
        if torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind) is torch.float16
        return self._has_half_weights

    def train(self, mode: bool = True) -> PipelineModule:
        """Set the mode of this process's stages."""
        super().train(mode)
        for stage in self.pipe.stages:
            stage.module.train(mode)
        return self

    # ---- weights

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that live in this process, each once, under their names in the unsplit model."""
        for name, parameter in self.pipe.named_parameters() if recurse else ():
            yield _below(prefix, name), parameter

    def state_dict(  # type: ignore[override] # torch takes more, which it deprecates
        self,
        *,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Parameters and buffers that live in this process, under their names in the unsplit model."""
        destination = {} if destination is None else destination
        for name, value in self.pipe.state_dict().items():
            detached = isinstance(value, Tensor) and not keep_vars
            destination[prefix + name] = value.detach() if detached else value
        return destination

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the unsplit model's weights, see :meth:`Pipeline.load_state_dict`. Every rank calls it."""
        return self.pipe.load_state_dict(state_dict, strict)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PipelineModule:
        """Do nothing for ``to()``, ``half()`` and the like, and refuse them if they would change the stages.

        Raises:
            UsageError: the call would move or convert the stages.
        """
        for name, parameter in self.pipe.named_parameters():
            with torch.no_grad():
                changed = fn(parameter) is not parameter
            if changed:
                raise UsageError(
                    f"to(), half() and the like would change {name}, and the pipeline's stages stay as they "
                    "are: say where they live with Pipeline(device=), and convert the model before it is cut"
                )
        return self

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        # DistributedDataParallel reads this when it wraps a module.
        raise UsageError(
            "DistributedDataParallel around a PipelineModule: its hooks would wait for gradients that come "
            "from the pipeline's step. Give Pipeline(mesh=, replicas=) for replicas of the pipeline, or wrap "
            "each stage with Pipeline(wrap=)"
        )


def clip_whole(
    pipe: Pipeline, parameters: Iterable[Tensor], max_norm: float, **options: Any
) -> Tensor:
    """Clip the gradients of all ranks where a loop clips those of ``parameters``; return the norm before.

    Raises:
        UsageError: a parameter that has a gradient is not among ``parameters``.
    """
    some = {id(parameter) for parameter in parameters}
    for name, parameter in pipe.named_parameters():
        if parameter.grad is not None and id(parameter) not in some:
            raise UsageError(
                f"{name.removeprefix('module.')} has a gradient, but is not among the parameters to be "
                "clipped; a pipeline clips the whole model: give its optimizer, or the call that clips, "
                "all of model.parameters(), or set requires_grad_(False) on it"
            )
    return torch.tensor(pipe.clip_grad_norm_(float(max_norm), **options))


# ---- transformers models


class OwnLoss(TypedDict):
    """The options that :func:`own_loss` returns."""

    loss_fn: LossFunction
    loss_weight: LossWeight


def own_loss(model: nn.Module) -> OwnLoss:
    """Options for a Pipeline that trains with the loss that a transformers model computes from labels.

    ::

        pipe = penstock.Pipeline(model, schedule="ZB-V", **own_loss(model))
        loss = penstock.PipelineModule(pipe)(input_ids=tokens, labels=labels).loss

    That loss is a mean over the labels that count, so each microbatch is weighted by their number: the loss
    of the batch is the mean over all its labels, as without a pipeline.

    Args:
        model: the model.
    """
    shifts = _shifts_labels(model)

    def weight(labels: Any) -> Any:
        """The number of labels that the loss averages over."""
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return len(labels)
        return ((labels[..., 1:] if shifts and labels.dim() > 1 else labels) != -100).sum()

    return {"loss_fn": lambda output, labels: output.loss, "loss_weight": weight}


def _shifts_labels(model: Any) -> bool:
    """Whether the model predicts each label from the tokens before it, and so never the first."""
    function = getattr(model, "loss_function", None)
    causal = getattr(function, "__name__", "") == "ForCausalLMLoss"
    return causal and not getattr(model.config, "is_encoder_decoder", False)


def _is_named(kind: type, name: str) -> bool:
    """Whether a class is or extends transformers' class of this name; this does not import transformers."""
    return any(
        base.__name__ == name and base.__module__.startswith("transformers.")
        for base in kind.__mro__
    )


class PipelineModel(PipelineModule):
    """A pipeline of a transformers model; :class:`~penstock.PipelineModule` makes it.

    It takes the model's arguments and returns the model's output class, with the loss of the whole batch; see
    :func:`own_loss` for the options that the Pipeline needs for this. The labels go to the model and, as the
    target, to ``loss_fn``. A training forward returns the loss alone, with ``outputs=True`` also the logits,
    through which no gradient flows; in evaluation mode ``outputs=False`` leaves them out. Attributes other
    than methods, such as ``config``, are the model's.

    Args:
        pipe: the pipeline.
    """

    def __init__(self, pipe: Pipeline) -> None:
        super().__init__(pipe)
        assert pipe.model is not None
        self.__dict__["_author"] = pipe.model
        self._takes_cache = "use_cache" in inspect.signature(pipe.model.forward).parameters
        hint = get_type_hints(type(pipe.model).forward).get("return")
        kinds = [kind for kind in (hint, *get_args(hint)) if isinstance(kind, type)]
        outputs = [kind for kind in kinds if _is_named(kind, "ModelOutput")]
        self._output_class = outputs[0] if outputs else dict

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            value = getattr(self.__dict__.get("_author"), name, None)
            if value is None or callable(value):
                raise
            return value

    def forward(
        self,
        *args: Any,
        labels: Any = None,
        num_items_in_batch: float | Tensor | None = None,
        outputs: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run a step, or evaluate; see the class.

        Args:
            args: the model's arguments, for the whole batch on every rank.
            labels: the labels that the model is to predict.
            num_items_in_batch: the divisor of the sum of the labels' losses, in place of the number of labels
                of this batch: for a batch that is part of a larger one.
            outputs: whether every rank gets the logits; by default only in evaluation.
            kwargs: the model's arguments by name.

        Raises:
            UsageError: the call is wrong, such as one without labels.
            AgreementError: the ranks of the pipeline were given different batches.
        """
        trains = self.training and torch.is_grad_enabled()
        outputs = not trains if outputs is None else outputs
        if labels is not None:
            kwargs = {"target": labels, **kwargs, "labels": labels}
        if self._takes_cache:
            kwargs.setdefault("use_cache", False)
        total = None if num_items_in_batch is None else float(num_items_in_batch)
        if trains:
            result, loss = self.run_step(*args, total_weight=total, outputs=outputs, **kwargs)
        elif "target" not in kwargs:
            return self.pipe.predict(*args, same_batch=True, **kwargs)
        else:
            result = self.pipe.eval(*args, outputs=outputs, same_batch=True, **kwargs)
            loss = self.loss_of(result, total)
        if not outputs:
            return self._output_class(loss=loss)
        output = self.guarded(result.outputs) if trains else result.outputs
        output["loss"] = loss
        return output

    def activation_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """Recompute layers in backward, as the model's own method does."""
        self._author.activation_checkpointing_enable(*args, **kwargs)

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
        return generate(self.pipe, args, kwargs)


# ---- the modules of several stages as one tree


def _graft(root: nn.Module, module: nn.Module) -> None:
    """Put a module's submodules under the same paths in the root; plain containers are copied."""
    for name, child in module.named_children():
        if type(child) is not nn.Module:
            root.add_module(name, child)
            continue
        if name not in root._modules:
            root.add_module(name, nn.Module())
        holder = root.get_submodule(name)
        holder._parameters.update(child._parameters)
        _graft(holder, child)


def _below(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


# ---- gradients that wait for the backward of their loss


class _Pending:
    """A step's gradients, held until the backward of its loss; a scale of nan makes all of them nan."""

    def __init__(
        self,
        gradients: list[tuple[nn.Parameter, Tensor]],
        inputs: list[Tensor],
        scale: float,
        note: Callable[[float], None],
    ) -> None:
        self._gradients: list[tuple[nn.Parameter, Tensor]] | None = gradients
        self._inputs, self._scale, self._note = inputs, scale, note

    def release(self, arriving: Tensor) -> list[Tensor | None]:
        """Add the gradients to ``.grad``, and return those of the arguments.

        Raises:
            UsageError: this is the second backward, or a derivative of the gradients is asked for.
        """
        if torch.is_grad_enabled():
            raise UsageError(
                "backward with create_graph=True of a pipeline's loss: its gradients were computed by the "
                "step, and have no derivative; put the term that needs one into loss_fn"
            )
        if self._gradients is None:
            raise UsageError(
                "backward was called a second time for one forward of a pipeline; its gradients have been "
                "added to .grad already. Call the model again, or add up the losses before one backward"
            )
        gradients, self._gradients = self._gradients, None
        factor = float(arriving) / self._scale
        # If gradients are not finite, a scaler is about to halve its factor too.
        self._note(float(arriving) / (2.0 if math.isnan(self._scale) else 1.0))
        while gradients:
            _add(*gradients.pop(), factor)
        return [None if t.grad is None else t.grad * factor for t in self._inputs]


def _add(parameter: nn.Parameter, gradient: Tensor, factor: float) -> None:
    """Scale a gradient in place, and add it to a parameter's; a first one becomes ``.grad`` itself."""
    if factor != 1.0:
        local_part(gradient).mul_(factor)
    if parameter.grad is None:
        parameter.grad = gradient
    elif parameter.grad.is_sparse or gradient.is_sparse:
        parameter.grad = parameter.grad + gradient
    else:
        local_part(parameter.grad).add_(local_part(gradient))


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: _Pending, loss: Tensor, *inputs: Tensor) -> Tensor:
        ctx.pending = pending
        return loss

    @staticmethod
    def backward(ctx: Any, *arriving: Any) -> Any:
        # The anchor gets no gradient; it only makes autograd come here.
        return None, None, None, *ctx.pending.release(arriving[0])


class _Output(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *arriving: Any) -> Any:
        raise UsageError(
            "a loss was made of the outputs of a pipeline, and no gradient flows through these: the "
            "pipeline's loss_fn computes the gradients while the step runs. Put the change into loss_fn"
        )
