"""A step of a ``LightningModule`` as the forward that is cut.

What a step does besides its loss is done once, after it, on every rank, with the values of the whole batch:
it logs, hands values to metrics of torchmetrics, appends to lists. In the stages, stand-ins note what the
author's code asks for. Numbers without dimensions are averaged over the microbatches like the loss; other
tensors leave with the output of the last stage, and are put together along their first dimension.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from penstock._engine.runtime import StepResult, add_loss
from penstock._engine.values import flatten, tensors_in, unflatten
from penstock.errors import UsageError
from penstock.pipeline import Pipeline

_LOGGED = "log "
"""The prefix of the names of logged values among the losses that a step reports."""
_KEPT = "kept "
"""The prefix of the names of other numbers without dimensions among these losses."""


class Later:
    """The value of a metric for a batch, which is known after the step."""

    def __init__(self, path: str, key: str | None = None) -> None:
        self.path, self.key = path, key

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            f"the value of self.{self.path} was used in a step; a pipeline hands a metric the whole batch "
            "after the step, so pass its value to self.log and nothing else"
        )

    __torch_function__ = classmethod(lambda cls, *_, **__: cls("metric")._refuse())
    __float__ = __int__ = __bool__ = __add__ = __radd__ = __sub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __lt__ = __gt__ = __neg__ = item = detach = cpu = mean = to = _refuse


class MetricStandIn:
    """Stands in for a metric while a step runs in stages."""

    def __init__(self, metric: Any, path: str, note: Callable[..., Any]) -> None:
        self._metric, self._path, self._note = metric, path, note

    @property
    def path(self) -> str:
        """The path of the metric in the module."""
        return self._path

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Note values for the metric."""
        self._note("update", self._path, args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Note values for the metric; what it returns can be logged."""
        self._note("forward", self._path, args, kwargs)
        return self._later()

    __call__ = forward

    def compute(self) -> Any:
        """The value of the metric, which can be logged."""
        self._note("compute", self._path, (), {})
        return self._later()

    def reset(self) -> None:
        """Note that the metric begins anew."""
        self._note("reset", self._path, (), {})

    def _later(self) -> Any:
        if not isinstance(self._metric, Mapping | nn.ModuleDict):
            return Later(self._path)
        # The dictionaries of torchmetrics take this; torch's own do not say so.
        metrics: Any = self._metric
        return {key: Later(self._path, key) for key in metrics.keys(keep_base=False)}

    def items(self, **options: Any) -> list[tuple[str, Any]]:
        """The metrics of a collection."""
        names = {id(metric): name for name, metric in self._metric.named_modules()}
        return [
            (key, MetricStandIn(metric, f"{self._path}.{names[id(metric)]}", self._note))
            for key, metric in self._metric.items(**options)
        ]

    def __getitem__(self, key: str) -> MetricStandIn:
        metric: MetricStandIn = dict(self.items())[key]
        return metric

    def __getattr__(self, name: str) -> Any:
        return getattr(self._metric, name)


class Appended(list[Any]):
    """Stands in for a list of the module while a step runs in stages."""

    def __init__(self, values: list[Any], name: str, note: Callable[..., Any]) -> None:
        super().__init__(values)
        self._name, self._note = name, note

    def append(self, value: Any) -> None:
        """Note a value for the list."""
        self._note("append", self._name, (value,), {})

    def extend(self, values: Any) -> None:
        """Note values for the list."""
        self._note("extend", self._name, (values,), {})

    def clear(self) -> None:
        """Note that the list becomes empty."""
        self._note("clear", self._name, (), {})


class Number(int):
    """A number such as ``batch_idx``, which notes what the author's code asks about it.

    The number changes with every call, and each value would be a new kind of call. So only the answers to
    what was asked, as in ``if batch_idx % 100 == 0``, belong to the kind.
    """

    _text: str
    _of: Callable[[int], Any]
    _asked: dict[str, tuple[str, Callable[[int], bool]]]
    _source: str

    @classmethod
    def of(
        cls, value: int, source: str, asked: dict[str, tuple[str, Callable[[int], bool]]]
    ) -> Number:
        """A number from a source, with the questions asked about it so far."""
        return cls._derived(value, source, source, lambda number: number, asked)

    @classmethod
    def _derived(cls, value: int, source: str, text: str, of: Any, asked: Any) -> Number:
        number = cls(value)
        number._source, number._text, number._of, number._asked = source, text, of, asked
        return number

    __hash__ = int.__hash__


def _computes(name: str) -> Any:
    plain = getattr(int, name)

    def method(self: Any, other: Any) -> Any:
        value = plain(self, other)
        if type(value) is not int or type(other) is not int:
            return value
        return Number._derived(
            value,
            self._source,
            f"{name}({self._text}, {other})",
            lambda number, of=self._of: plain(of(number), other),
            self._asked,
        )

    return method


def _asks(name: str) -> Any:
    plain = getattr(int, name)

    def method(self: Any, *others: Any) -> Any:
        answer = plain(int(self), *others)
        if answer is not NotImplemented:
            text = f"{name}({self._text}, {others})"
            self._asked[text] = self._source, lambda number, of=self._of: plain(of(number), *others)
        return answer

    return method


for _name in ("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__mod__", "__floordiv__"):
    setattr(Number, _name, _computes(_name))
for _name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__bool__"):
    setattr(Number, _name, _asks(_name))


class StepLog:
    """What steps ask for besides their loss, and does it after them."""

    # To the pipeline, a number is a loss of weight 0: the stage that computes it adds it, and every rank gets
    # the mean over the microbatches. Options are kept here, since every rank runs the module's code.

    def __init__(self, module: nn.Module) -> None:
        self.step_name = ""
        self.returns: dict[str, type | None] = {}
        # Arguments such as ``batch_idx``, by place or name, and the Trainer's counters.
        self.numbers: Mapping[str, int] = {}
        self.asked: dict[str, tuple[str, Callable[[int], bool]]] = {}
        self._module = module
        self._logs: list[tuple[str, Any, dict[str, Any]]] = []
        self._notes: list[tuple[str, str, Any, Any]] = []
        # By kind of step. Most stages leave a forward before its end; the run without data is whole.
        self._whole: dict[Any, tuple[list[tuple[str, str]], list[tuple[str, Any, dict[str, Any]]]]]
        self._whole = {}
        self._signature = inspect.signature(LightningModule.log)
        self.metrics = _metrics_in(module)

    def place(self, pipe: Pipeline) -> None:
        """Put the metrics where the stages are, and let them count each pipeline's values once."""
        group = pipe.replicas.group
        for metric in self.metrics.values():
            metric.to(pipe.device)
            parts: list[Any] = list(metric.modules())
            for part in parts:
                if hasattr(part, "distributed_available_fn"):
                    several = pipe.replicas.number > 1
                    part.distributed_available_fn = lambda several=several: several
                    part.process_group = group

    def keeps(self, outputs: Any, choices: Any) -> bool:
        """Whether a step left more than numbers: tensors, or calls of metrics and lists."""
        notes, _ = self._whole[self._kind(choices)]
        return bool(notes) or any(leaf is not None for leaf in flatten(outputs)[0])

    def itself(self) -> StepLog:
        """This object."""
        return self

    def begin(self) -> None:
        """Forget what the last forward asked for."""
        self._notes, self._logs = [], []

    def end(self, choices: Any) -> None:
        """Remember what a whole forward of this kind asked for."""
        notes = [(what, path) for what, path, _, _ in self._notes]
        self._whole[self._kind(choices)] = notes, self._logs

    def _kind(self, choices: Any) -> Any:
        return self.step_name, torch.is_grad_enabled(), choices

    def take(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Note a value of a step, in place of ``self.log``."""
        options = dict(self._signature.bind(None, name, value, *args, **kwargs).arguments)
        deferred = isinstance(value, Later | MetricStandIn)
        if not deferred:
            _check_logged(name, value, options)
            home = value.device if isinstance(value, Tensor) else "cpu"
            number = torch.as_tensor(value, dtype=torch.get_default_dtype(), device=home).detach()
            add_loss(_LOGGED + name, number, 0.0)
        kept = options.keys() - {"self", "name", "value", "sync_dist", "batch_size"}
        row = name, value if deferred else None, {key: options[key] for key in kept}
        self._logs.append(row)

    def note(self, what: str, path: str, args: Any, kwargs: Any) -> None:
        """Note a call of a metric or a list."""
        self._notes.append((what, path, args, kwargs))

    @contextmanager
    def without_metrics(self) -> Iterator[None]:
        """A context in which the module has stand-ins in place of its metrics, which are not to be cut."""
        places = [
            (self._module.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2], path)
            for path in self.metrics
        ]
        for parent, name, path in places:
            del parent._modules[name]
            vars(parent)[name] = MetricStandIn(self.metrics[path], path, self.note)
        try:
            yield
        finally:
            for parent, name, path in places:
                vars(parent).pop(name, None)
                parent._modules[name] = self.metrics[path]

    @contextmanager
    def instead(self, step_name: str, numbers: Mapping[str, int]) -> Iterator[None]:
        """A context in which stand-ins replace ``self.log``, metrics, lists and counters of the module."""
        self.step_name, self.numbers, module = step_name, numbers, self._module
        with ExitStack() as stack:
            stack.enter_context(self.without_metrics())
            if isinstance(module, LightningModule):
                vars(module)["log"] = self.take
                stack.callback(vars(module).pop, "log")
                lists = {n: v for n, v in vars(module).items() if type(v) is list}
                for name, values in lists.items():
                    vars(module)[name] = Appended(values, name, self.note)
                stack.callback(vars(module).update, lists)
                for name, (holder, attribute) in _counters(module).items():
                    plain = getattr(holder, attribute)
                    setattr(holder, attribute, Number.of(numbers[name], name, self.asked))
                    stack.callback(setattr, holder, attribute, plain)
            yield

    def leaving(self, returned: Any, rows: int) -> Any:
        """All that leaves the forward besides the loss: numbers are logged, and the rest is returned."""
        notes = [(args, kwargs) for _, _, args, kwargs in self._notes]
        leaves, tree = flatten((returned, notes))
        kept: list[Any] = []
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                kept.append(leaf)
            elif not leaf.dim() and leaf.is_floating_point():
                add_loss(f"{_KEPT}{place}", leaf.detach(), 0.0)
                kept.append(None)
            elif leaf.dim() and rows and leaf.shape[0] % rows == 0:
                kept.append(leaf.detach())
            else:
                raise UsageError(
                    f"{type(self._module).__name__}.{self.step_name} returns a tensor of shape "
                    f"{tuple(leaf.shape)}, or gives one to a metric or a list, and a microbatch has {rows} "
                    "samples; in a pipeline such tensors have the samples in their first dimension, so that "
                    "those of the microbatches can be put together"
                )
        return unflatten(kept, tree)

    def pass_on(self, outputs: Any, result: StepResult, choices: Any) -> Any:
        """Do what the step asked for, with the values of the whole batch; return what it returned."""
        module: Any = self._module
        leaves, tree = flatten(outputs)
        for place, leaf in enumerate(leaves):
            value = result.losses.get(f"{_KEPT}{place}")
            if leaf is None and value is not None:
                leaves[place] = torch.tensor(value, device="cpu")
        returned, notes = unflatten(leaves, tree) if outputs is not None else (None, [])
        values: dict[str, Any] = {}
        calls, logs = self._whole[self._kind(choices)]
        for (what, path), (args, kwargs) in zip(calls, notes, strict=True):
            if path in self.metrics or path.partition(".")[0] in self.metrics:
                values[path] = getattr(module.get_submodule(path), what)(*args, **kwargs)
            else:
                getattr(vars(module)[path], what)(*args)
        for name, value, options in logs:
            if isinstance(value, MetricStandIn):
                value = module.get_submodule(value.path)
            elif isinstance(value, Later):
                value = values[value.path] if value.key is None else values[value.path][value.key]
            else:
                value = result.losses.get(_LOGGED + name)
            if value is not None:
                # So an epoch's value is the mean over all its samples, also those of replicas.
                module.log(name, value, **options, batch_size=round(result.weight))
        return returned


def _check_logged(name: str, value: Any, options: Mapping[str, Any]) -> None:
    if not isinstance(value, Tensor | int | float) or (
        isinstance(value, Tensor) and value.numel() != 1
    ):
        raise UsageError(
            f"self.log({name!r}, ...) was given a {type(value).__name__}; in a pipeline it takes numbers, "
            "scalar tensors, and metrics of torchmetrics that are attributes of the module"
        )
    if options.get("reduce_fx", "mean") not in ("mean", torch.mean):
        raise UsageError(
            f"self.log({name!r}, ...) has reduce_fx={options['reduce_fx']!r}; a pipeline averages the values "
            "of microbatches by their samples, so log a mean"
        )


def _metrics_in(module: nn.Module) -> dict[str, nn.Module]:
    """The outermost metrics and collections of torchmetrics in a module, by path."""
    metrics: dict[str, nn.Module] = {}
    for path, part in module.named_modules():
        kinds = {(base.__module__.partition(".")[0], base.__name__) for base in type(part).__mro__}
        known = {("torchmetrics", "Metric"), ("torchmetrics", "MetricCollection")}
        if path and kinds & known and not any(path.startswith(f"{other}.") for other in metrics):
            metrics[path] = part
    return metrics


def _counters(module: LightningModule) -> dict[str, tuple[Any, str]]:
    """Where the Trainer keeps the numbers that a module reads as its own attributes."""
    trainer: Any = module._trainer
    if trainer is None:
        return {}
    loop = trainer.fit_loop
    steps = loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total
    return {
        "current_epoch": (loop.epoch_progress.current, "completed"),
        "global_step": (steps, "completed"),
    }


class LightningStep(nn.Module):
    """Calls a step of a module."""

    def __init__(self, module: nn.Module, log: StepLog) -> None:
        super().__init__()
        self.module = module
        # A method: it is not state of the model, as the object would be.
        self._log = log.itself
        self.training = module.training

    def forward(
        self, *args: Any, step_name: str, choices: Any = (), predicts: bool = False, **kwargs: Any
    ) -> Any:
        """Run a step; return its loss and the rest of its output, or, where it predicts, its result."""
        log: StepLog = self._log()
        log.begin()
        call = self.module if step_name == "forward" else getattr(self.module, step_name)

        def number(place: int | str, value: Any) -> Any:
            key = str(place)
            return Number.of(log.numbers[key], key, log.asked) if key in log.numbers else value

        passed = [number(place, value) for place, value in enumerate(args)]
        output = call(*passed, **{name: number(name, value) for name, value in kwargs.items()})
        if predicts:
            return output
        trains = torch.is_grad_enabled()
        loss = output.get("loss") if isinstance(output, Mapping) else output
        is_loss = isinstance(loss, Tensor) and loss.numel() == 1
        if trains and not (is_loss and cast("Tensor", loss).requires_grad):
            raise UsageError(
                f"{type(self.module).__name__}.{step_name} returned {_kind_shown(loss)}; in training it "
                "returns the loss, a scalar tensor that requires grad, or a dict with it under 'loss'. In a "
                "pipeline no batch is skipped by returning None, and no loss is computed outside of the step"
            )
        log.returns[step_name] = type(output) if is_loss else None
        rest = output
        if is_loss:
            rest = {k: v for k, v in output.items() if k != "loss"} if output is not loss else None
        rows = next((t.shape[0] for t in tensors_in((args, kwargs)) if t.dim()), 0)
        rest = log.leaving(rest, rows)
        log.end(choices)
        return {"loss": loss if is_loss else None, "rest": rest}


def choices_of(
    numbers: Mapping[str, int], asked: Mapping[str, tuple[str, Callable[[int], bool]]]
) -> tuple[Any, ...]:
    """What the questions asked so far have as answers now."""
    return tuple(
        (t, bool(ask(numbers[s]))) for t, (s, ask) in sorted(asked.items()) if s in numbers
    )


def counters_of(module: nn.Module) -> dict[str, int]:
    """The numbers that a module reads as its own attributes."""
    if not isinstance(module, LightningModule):
        return {}
    return {name: int(getattr(*where)) for name, where in _counters(module).items()}


def described(name: str) -> str:
    """What a number among a step's losses is to the user."""
    if name.startswith(_LOGGED):
        return f"self.log({name.removeprefix(_LOGGED)!r}, ...)"
    return "a number that is returned, or given to a metric or a list,"


def loss_in(output: Any, _: Any) -> Tensor:
    """The loss that the step returned; 0 if an evaluation returned none."""
    loss: Tensor | None = output["loss"]
    return torch.zeros((), device="cpu") if loss is None else loss


def _kind_shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return "None" if value is None else f"a {type(value).__name__}"
    graph = "" if value.requires_grad else " that requires no grad"
    return f"a tensor of shape {tuple(value.shape)}{graph}"
