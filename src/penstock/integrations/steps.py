"""A step of a ``LightningModule`` as the forward that is cut.

A step computes: it runs once for each microbatch, and its lines in the stages that have their values. It
returns a loss and may return more, which every rank gets for the whole batch, and it may log numbers, which
are averaged over the microbatches like the loss. What is done with a batch's values besides that, such as
feeding metrics and filling lists, belongs into the hook that Lightning calls after the step.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from penstock._engine.runtime import LossWeight, StepResult, add_loss
from penstock._engine.values import flatten, tensors_in, unflatten
from penstock.errors import UsageError
from penstock.pipeline import Pipeline

_LOGGED = "log "
"""The prefix of the names of logged values among the losses that a step reports."""
_KEPT = "kept "
"""The prefix of the names of other numbers without dimensions among these losses."""


class StepLog:
    """What a step logs and returns, between its run in stages and Lightning."""

    # To the pipeline, a number is a loss of weight 0: the stage that computes it adds it, and every rank gets
    # the mean over the microbatches. Options are kept here, since every rank runs the module's code.

    def __init__(self, module: nn.Module) -> None:
        self.step_name = ""
        self.returned: type | None = None
        self._module = module
        self._logged: dict[str, dict[str, Any]] = {}
        self._signature = inspect.signature(LightningModule.log)
        self._metrics = _metrics_in(module)

    def itself(self) -> StepLog:
        """This object."""
        return self

    def place(self, pipe: Pipeline) -> None:
        """Put the metrics where the stages are, and let them count each pipeline's values once."""
        for metric in self._metrics.values():
            metric.to(pipe.device)
            parts: list[Any] = list(metric.modules())
            for part in parts:
                if hasattr(part, "distributed_available_fn"):
                    several = pipe.replicas.number > 1
                    part.distributed_available_fn = lambda several=several: several
                    part.process_group = pipe.replicas.group

    @contextmanager
    def during(self, step_name: str) -> Iterator[None]:
        """A context in which ``self.log`` of the module leads here, and its metrics refuse to be used."""
        self.step_name, self._logged, module = step_name, {}, self._module
        logs = isinstance(module, LightningModule)
        with self.without_metrics():
            if logs:
                vars(module)["log"] = self._log
            try:
                yield
            finally:
                if logs:
                    del vars(module)["log"]

    @contextmanager
    def without_metrics(self) -> Iterator[None]:
        """A context in which the module has its metrics not as submodules, which would be cut."""
        places = [
            (self._module.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2], path)
            for path in self._metrics
        ]
        for parent, name, path in places:
            del parent._modules[name]
            vars(parent)[name] = _MetricInStep(self, path)
        try:
            yield
        finally:
            for parent, name, path in places:
                vars(parent).pop(name, None)
                parent._modules[name] = self._metrics[path]

    def belongs_into_hook(self, what: str, does: str) -> UsageError:
        """The error of a step that does with a microbatch's values what its hook does with the batch's."""
        kind = self.step_name.removesuffix("_step").replace("training", "train")
        hook = f"on_{kind}_batch_end"
        return UsageError(
            f"{what} in {self.step_name}, which runs in stages, once for each microbatch. Return what it "
            f'takes, as in return {{"loss": loss, "logits": logits.detach()}}, and {does} in '
            f"{hook}(self, outputs, batch, batch_idx), or with Fabric after the step: there every rank has "
            "the values of the whole batch"
        )

    def _log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Note a value of a step, in place of ``self.log``."""
        options = dict(self._signature.bind(None, name, value, *args, **kwargs).arguments)
        if isinstance(value, _MetricInStep):
            value.refuse()
        if not isinstance(value, Tensor | int | float) or (
            isinstance(value, Tensor) and value.numel() != 1
        ):
            raise UsageError(
                f"self.log({name!r}, ...) was given a {type(value).__name__}; in a pipeline a step logs "
                "numbers and scalar tensors"
            )
        if options.get("reduce_fx", "mean") not in ("mean", torch.mean):
            raise UsageError(
                f"self.log({name!r}, ...) has reduce_fx={options['reduce_fx']!r}; a pipeline averages the "
                "values of microbatches by their samples, so log a mean"
            )
        home = value.device if isinstance(value, Tensor) else "cpu"
        number = torch.as_tensor(value, dtype=torch.get_default_dtype(), device=home).detach()
        add_loss(_LOGGED + name, number, 0.0)
        kept = options.keys() - {"self", "name", "value", "sync_dist", "batch_size"}
        self._logged[name] = {key: options[key] for key in kept}

    def leaving(self, returned: Any, rows: int) -> Any:
        """What leaves the forward besides the loss: numbers are averaged like it, and rows are returned."""
        leaves, tree = flatten(returned)
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                continue
            if not leaf.dim() and leaf.is_floating_point():
                add_loss(f"{_KEPT}{place}", leaf.detach(), 0.0)
                leaves[place] = None
            elif leaf.dim() and rows and leaf.shape[0] % rows == 0:
                leaves[place] = leaf.detach()
            else:
                raise UsageError(
                    f"{type(self._module).__name__}.{self.step_name} returns a tensor of shape "
                    f"{tuple(leaf.shape)}, and a microbatch has {rows} samples; in a pipeline such tensors "
                    "have the samples in their first dimension, so that those of the microbatches can be put "
                    "together"
                )
        return unflatten(leaves, tree)

    def pass_on(self, outputs: Any, result: StepResult, samples: int) -> Any:
        """Log the numbers of a batch of so many samples; return what the step returned besides its loss."""
        leaves, tree = flatten(outputs)
        for place, leaf in enumerate(leaves):
            value = result.losses.get(f"{_KEPT}{place}")
            if leaf is None and value is not None:
                leaves[place] = torch.tensor(value, device="cpu")
        module: Any = self._module
        for name, options in self._logged.items():
            # Over an epoch Lightning weighs the values of batches by their samples, whatever the loss counts.
            module.log(name, result.losses[_LOGGED + name], **options, batch_size=samples)
        return unflatten(leaves, tree)


class _MetricInStep:
    """Stands where a metric is while a step runs in stages, and refuses to be used."""

    def __init__(self, log: StepLog, path: str) -> None:
        vars(self).update(_log=log, _path=path)

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse to be used."""
        log, path = vars(self)["_log"], vars(self)["_path"]
        raise log.belongs_into_hook(f"the metric self.{path} is used", "update and log the metric")

    __call__ = __getitem__ = __iter__ = refuse

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse()


def _metrics_in(module: nn.Module) -> dict[str, nn.Module]:
    """The outermost metrics and collections of torchmetrics in a module, by path."""
    metrics: dict[str, nn.Module] = {}
    for path, part in module.named_modules():
        kinds = {(base.__module__.partition(".")[0], base.__name__) for base in type(part).__mro__}
        known = {("torchmetrics", "Metric"), ("torchmetrics", "MetricCollection")}
        if path and kinds & known and not any(path.startswith(f"{other}.") for other in metrics):
            metrics[path] = part
    return metrics


class LightningStep(nn.Module):
    """Calls a step of a module."""

    def __init__(self, module: nn.Module, log: StepLog) -> None:
        super().__init__()
        self.module = module
        # A method: it is not state of the model, as the object would be.
        self._log = log.itself
        self.training = module.training

    def forward(self, *args: Any, step_name: str, predicts: bool = False, **kwargs: Any) -> Any:
        """Run a step; return its loss and the rest of its output, or, where it predicts, its result."""
        log: StepLog = self._log()
        before = _lengths(self.module)
        call = self.module if step_name == "forward" else getattr(self.module, step_name)
        output = call(*args, **kwargs)
        for name, length in _lengths(self.module).items():
            if length > before.get(name, length):
                raise log.belongs_into_hook(f"the list self.{name} gets longer", "append it")
        if predicts:
            return output
        loss = output.get("loss") if isinstance(output, Mapping) else output
        is_loss = isinstance(loss, Tensor) and loss.numel() == 1
        if torch.is_grad_enabled() and not (is_loss and cast("Tensor", loss).requires_grad):
            raise UsageError(
                f"{type(self.module).__name__}.{step_name} returned {_kind_shown(loss)}; in training it "
                "returns the loss, a scalar tensor that requires grad, or a dict with it under 'loss'. In a "
                "pipeline no batch is skipped by returning None, and no loss is computed outside of the step"
            )
        log.returned = type(output) if is_loss else None
        rest = output
        if is_loss:
            rest = {k: v for k, v in output.items() if k != "loss"} if output is not loss else None
        rows = samples_in(args, kwargs)
        return {"loss": loss if is_loss else None, "rest": log.leaving(rest, rows)}


def samples_in(args: Any, kwargs: Any) -> int:
    """The samples that a step is called with: the rows of its first tensor."""
    return next((t.shape[0] for t in tensors_in((args, kwargs)) if t.dim()), 0)


def _lengths(module: nn.Module) -> dict[str, int]:
    """Return how long the lists of a module are."""
    return {name: len(value) for name, value in vars(module).items() if type(value) is list}


def weights_by_name(weight: LossWeight | None) -> LossWeight | None:
    """The weights of losses, of which those of logged values are given by the names in ``self.log``."""
    if not isinstance(weight, Mapping):
        return weight
    return {name if name == "main" else _LOGGED + name: of for name, of in weight.items()}


def described(name: str) -> str:
    """Return what a number among a step's losses is to the user."""
    if name.startswith(_LOGGED):
        return f"self.log({name.removeprefix(_LOGGED)!r}, ...)"
    return "a number that is returned"


def loss_in(output: Any, _: Any) -> Tensor:
    """The loss that the step returned; 0 if an evaluation returned none."""
    loss: Tensor | None = output["loss"]
    return torch.zeros((), device="cpu") if loss is None else loss


def _kind_shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return "None" if value is None else f"a {type(value).__name__}"
    graph = "" if value.requires_grad else " that requires no grad"
    return f"a tensor of shape {tuple(value.shape)}{graph}"
