"""Run single units to find what they cost, whether that is measured or predicted.

Either way each unit runs alone as a :class:`~penstock.stage.PipelineStage`, as it will in a pipeline, once
with its backward whole and once in halves. When measured, it is a stage of the finest partition of the model
and gets what the stages before it return. When predicted, the model is copied without its data, which takes
no memory however large it is; a forward shows what each unit is given. Of units that are alike one is run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import InternalError, UsageError
from penstock.partition import unit_paths
from penstock.plan.costs import UnitCost, ValueCost
from penstock.plan.devices import Device, Meter, shapes
from penstock.schedule import Edge
from penstock.stage import PipelineStage
from penstock.values import (
    MISSING,
    Rules,
    flatten,
    split_batch,
    unflatten,
)

LossFunction = Callable[..., Any]


# ---- the model and its batch


@dataclass(frozen=True)
class Work:
    """A model and a batch that it is trained with.

    Args:
        model: any module.
        args: its positional arguments for a batch.
        kwargs: its arguments by name.
        target: what the loss compares with.
        loss_fn: ``(output, target) -> scalar``; by default the sum of the model's output.
        rules: how the batch is split, as for a Pipeline.
        units: the paths of the modules that are placed as wholes, in the order of their calls.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any
    loss_fn: LossFunction | None
    rules: Rules | None
    units: tuple[str, ...]

    def part(self, samples: int) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """The arguments and the target of a microbatch of so many samples."""
        count = max(1, self.samples // samples)
        batch = split_batch(self.args, self.kwargs, self.target, self.rules, count)
        if not batch.parts:
            raise UsageError("give the arguments of the model for a batch")
        found = batch.parts[0]
        if found.samples != samples:
            raise UsageError(
                f"a batch of {self.samples} samples has no part of {samples}; give a batch that has one"
            )
        target = batch.targets[0] if batch.targets is not None else MISSING
        return found.args, found.kwargs, target

    @property
    def samples(self) -> int:
        """The samples of the batch."""
        whole = split_batch(self.args, self.kwargs, MISSING, self.rules, 1).samples
        return whole[0] if whole else 1

    def root(self, output: Any, target: Any) -> Any:
        """The scalar that backward starts from."""
        if self.loss_fn is not None:
            return self.loss_fn(output, target) if target is not MISSING else self.loss_fn(output)
        return sum(t.float().sum() for t in flatten(output)[0] if t.requires_grad)


def work_of(  # noqa: PLR0913 - the arguments of a step, by name
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    target: Any,
    loss_fn: LossFunction | None,
    rules: Rules | None,
    stages: int,
) -> Work:
    """A model and a batch, with the units for so many stages."""
    call = tuple(args), dict(kwargs or {})
    example = None if any(t.is_meta for t in flatten(call)[0]) else call
    units = unit_paths(model, stages, example=example)
    return Work(model, *call, target, loss_fn, rules, tuple(units))


# ---- one unit, run as a stage


@dataclass(frozen=True)
class Subject:
    """A unit, and what it is run with.

    Args:
        path: the path of its module.
        module: what runs.
        arguments: its positional arguments, whose tensors are replaced by fresh ones in each run.
        keywords: its arguments by name, likewise.
        names: for each tensor among these, in order, the value to which it belongs; None for the batch.
        given: the values that it makes.
        loss: makes a scalar of the output; for the last unit only.
        calls: how often the model calls it.
    """

    path: str
    module: nn.Module
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    names: tuple[str | None, ...]
    given: tuple[str, ...]
    loss: Callable[[Any], Any] | None = None
    calls: int = 1

    def fresh(self, *, leaf: bool) -> tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]:
        """Arguments that nothing else holds; those that need gradients are leaves, or made from one."""
        tensors, structure = flatten((self.arguments, dict(self.keywords)))
        made = []
        for tensor in tensors:
            own = tensor.detach().clone().requires_grad_(tensor.requires_grad and leaf)
            if tensor.requires_grad and not leaf:
                # Then the graph reaches a leaf, but holds the memory of this tensor only if it saves it.
                own = _anchor(own.device) + own
            made.append(own)
        args, kwargs = unflatten(structure, made)
        return args, kwargs, made


@cache
def _anchor(device: torch.device) -> Tensor:
    """A leaf in which graphs end; it must be made while no meter counts."""
    return torch.zeros((), device=device, requires_grad=True)


@dataclass(frozen=True)
class Holding:
    """What a unit's forward leaves: bytes, how many of these are not its module's, and the values kept."""

    inner: float
    around: float
    kept: frozenset[str]


def holding_of(subject: Subject, module: nn.Module) -> Holding:
    """Which values the graph of a unit keeps, and how many bytes besides.

    Args:
        subject: the unit.
        module: its module; what runs around that, such as a pooling after it, is not computed again with it.
    """
    for tensor in flatten((subject.arguments, dict(subject.keywords)))[0]:
        _anchor(tensor.device)
    whole, kept = _held(subject)
    with _computed_again(module):
        around, _ = _held(subject)
    return Holding(whole, min(around, whole), kept)


@contextmanager
def _computed_again(module: nn.Module) -> Iterator[None]:
    """Let the module keep its arguments, but nothing that its operations save for backward."""
    own = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, _nothing_back)
    given = []

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        given.append((args, kwargs))
        own.__enter__()

    handles = (
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(lambda *_: own.__exit__(), always_call=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _nothing_back(_: Any) -> Tensor:
    raise InternalError("no backward follows this forward")


def _held(subject: Subject) -> tuple[float, frozenset[str]]:
    """What the graph of a unit keeps: bytes, and apart from these values."""
    with Meter() as meter, torch.enable_grad():
        before = meter.live
        args, kwargs, made = subject.fresh(leaf=False)
        known = [
            (name, weakref.ref(tensor.untyped_storage()), tensor.nbytes)
            for name, tensor in zip(subject.names, made, strict=True)
        ]
        output = subject.module(*args, **kwargs)
        root = subject.loss(output) if subject.loss is not None else None
        tensors = flatten(output)[0]
        names = _names_of(output, subject.given, len(tensors))
        known += [
            (name, weakref.ref(tensor.untyped_storage()), tensor.nbytes)
            for name, tensor in zip(names, tensors, strict=True)
        ]
        graph = [t.grad_fn for t in ([root] if root is not None else tensors)]
        del args, kwargs, made, output, tensors, root
        alive = [(name, size) for name, storage, size in known if storage() is not None]
        held = meter.live - before
        # The output to which a loss is applied does not travel: it counts as the unit's own.
        outside = {n for n in subject.names if n} | (
            set(subject.given) if subject.loss is None else set()
        )
        seen: dict[int, float] = {
            id(s): size
            for name, ref, size in known
            if (s := ref()) is not None and (name in outside or name is None)
        }
        del graph
    return max(held - sum(seen.values()), 0.0), frozenset(name for name, _ in alive if name)


def _names_of(output: Any, given: Sequence[str], tensors: int) -> list[str | None]:
    """The value to which each tensor of an output belongs."""
    if isinstance(output, Mapping) and set(given) <= set(output):
        return [
            name if name in given else None
            for name, item in output.items()
            for _ in flatten(item)[0]
        ]
    if len(given) == 1:
        return [given[0]] * tensors
    return [given[i] if i < len(given) else None for i in range(tensors)]


@dataclass
class Laps:
    """The times of the runs of a unit, in halves and whole; and the memory that it takes meanwhile."""

    forward: list[float] = field(default_factory=list)
    input: list[float] = field(default_factory=list)
    weight: list[float] = field(default_factory=list)
    backward: list[float] = field(default_factory=list)
    stash: float = 0.0
    extra: dict[str, float] = field(default_factory=dict)

    def needed(self, kind: str, extra: float) -> None:
        """Note how much more memory an F, I, W or B takes while it runs than before or after it."""
        self.extra[kind] = max(self.extra.get(kind, 0.0), extra)


class Bench:
    """Runs units as stages, and takes their times.

    Args:
        clock: tells the time.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def run(self, subject: Subject, laps: Laps, meter: Meter | None = None) -> None:
        """Run a unit once in halves and once whole."""
        for in_halves in True, False:
            stage = PipelineStage(subject.module, 0, 2)
            laps_of = _Peaks(meter)
            args, kwargs, given = subject.fresh(leaf=True)
            laps_of.beyond()
            start = self._clock()
            output = stage.forward(0, args, kwargs, subject.loss)
            laps.forward.append(self._clock() - start)
            gradients = _gradients(subject, output)
            del output, args, kwargs, given
            laps.needed("forward", laps_of.beyond())
            if in_halves:
                self._halves(stage, gradients, laps, laps_of)
            else:
                start = self._clock()
                found = stage.backward(0, gradients)
                laps.backward.append(self._clock() - start)
                del found
                gradients = None
                laps.needed("backward", laps_of.beyond())

    def _halves(
        self,
        stage: PipelineStage,
        gradients: list[Tensor | None] | None,
        laps: Laps,
        peaks: _Peaks,
    ) -> None:
        start = self._clock()
        found = stage.backward_input(0, None if gradients is None else list(gradients))
        laps.input.append(self._clock() - start)
        # Whatever is alive from here on is held by the stage.
        del found
        if gradients is not None:
            gradients.clear()
        laps.needed("input", peaks.beyond())
        laps.stash = peaks.live
        start = self._clock()
        stage.backward_weight(0)
        laps.weight.append(self._clock() - start)
        laps.needed("weight", peaks.beyond())


class _Peaks:
    """Tells how much more memory something takes while it runs than before or after it."""

    def __init__(self, meter: Meter | None) -> None:
        self._meter = meter or Meter()
        self._base = self._before = self._meter.live
        self._meter.reset_peak()

    @property
    def live(self) -> float:
        """How much more is held now than at first."""
        return float(max(self._meter.live - self._base, 0))

    def beyond(self) -> float:
        """The extra memory of what ran since the last call."""
        found = self._meter.peak - max(self._before, self._meter.live)
        self._before = self._meter.live
        self._meter.reset_peak()
        return float(max(found, 0))


def _gradients(subject: Subject, output: Any) -> list[Tensor | None] | None:
    """The gradients that come back for an output."""
    if subject.loss is not None:
        return None
    return [torch.ones_like(t) if t.requires_grad else None for t in flatten(output)[0]]


def cost_of(subject: Subject, laps: Laps, holding: Holding, flops: float) -> UnitCost:
    """What a unit costs, from the times and memory of its runs."""
    own = {id(t): t for t in (*subject.module.parameters(), *subject.module.buffers())}.values()
    spreads = [_spread(times) for times in (laps.forward, laps.input, laps.backward)]
    return UnitCost(
        path=subject.path,
        forward=median(laps.forward),
        input=median(laps.input),
        weight=median(laps.weight),
        backward=median(laps.backward),
        spread=max(spreads),
        held=holding.inner,
        around=holding.around,
        stash=laps.stash,
        **{f"{kind}_extra": extra for kind, extra in laps.extra.items()},
        parameters=sum(tensor.nbytes for tensor in own),
        trained=sum(tensor.nbytes for tensor in own if tensor.requires_grad),
        numbers=sum(p.numel() for p in subject.module.parameters()),
        flops=flops,
    )


def _spread(times: Sequence[float]) -> float:
    if len(times) < 3 or not median(times):
        return 0.0
    low, _, high = quantiles(times, n=4)
    return (high - low) / 2 / median(times)


class Known:
    """Collects the costs of units; of several that are alike only one is looked at.

    Attributes:
        units: the cost of each unit.
    """

    def __init__(self) -> None:
        self.units: list[UnitCost] = []
        self._kept: list[frozenset[str]] = []
        self._kinds: dict[Any, tuple[UnitCost, list[bool], list[bool]]] = {}

    def add(
        self, subject: Subject, module: nn.Module, cost: Callable[[], tuple[UnitCost, Holding]]
    ) -> None:
        """Add a unit.

        Args:
            subject: the unit.
            module: its module in the model.
            cost: finds its cost.
        """
        kind = kind_of(subject, module)
        if kind not in self._kinds:
            found, holding = cost()
            takes = [name in holding.kept for name in subject.names]
            gives = [name in holding.kept for name in subject.given]
            self._kinds[kind] = found, takes, gives
        found, takes, gives = self._kinds[kind]
        self.units.append(replace(found, path=subject.path))
        names = (*zip(subject.names, takes, strict=True), *zip(subject.given, gives, strict=True))
        self._kept.append(frozenset(name for name, kept in names if name and kept))

    def with_keepers(self, values: Sequence[ValueCost]) -> tuple[ValueCost, ...]:
        """The values, with the units that keep them."""
        return tuple(
            replace(
                value,
                kept=tuple(unit for unit, names in enumerate(self._kept) if value.name in names),
            )
            for value in values
        )


_POSITIONS = {"layer_idx", "layer_number", "layer_id", "index", "idx", "training"}
"""Attributes that differ between layers that are otherwise alike."""


def kind_of(subject: Subject, module: nn.Module) -> Any:
    """A key that is the same for units that cost the same."""
    if subject.loss is not None:
        return subject.path
    tensors = shapes(flatten((subject.arguments, dict(subject.keywords)))[0])
    roles = tuple(name is not None for name in subject.names), len(subject.given), subject.calls
    return parts_of(module), tensors, roles


def parts_of(module: nn.Module) -> Any:
    """A key that is the same for modules that are alike."""
    return tuple(
        (
            type(part),
            part.extra_repr(),
            tuple(
                (name, value)
                for name, value in vars(part).items()
                if isinstance(value, int | float | str | bool) and name not in _POSITIONS
            ),
            tuple(
                (name, tuple(p.shape), p.dtype, p.requires_grad)
                for name, p in part._parameters.items()
                if p is not None
            ),
        )
        for part in module.modules()
    )


@contextmanager
def gradients_kept(module: nn.Module) -> Iterator[None]:
    """Set the parameters' ``.grad`` aside, and put it back afterwards."""
    before = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def flops_of(subject: Subject) -> float:
    """The floating-point operations of a unit's forward."""
    args, kwargs, _ = subject.fresh(leaf=True)
    with Meter(_ANY) as meter, torch.enable_grad():
        subject.module(*args, **kwargs)
    return float(meter.flops)


_ANY = Device("any", {"float32": 1.0}, 1.0, 1.0)


def chain_edges(count: int) -> list[Edge]:
    """The edges of units of which each feeds the next."""
    return [Edge(f"unit{index}", index, (index + 1,)) for index in range(count - 1)]
