"""What the units of a model cost: the model is cut so that each call of a unit is a stage of its own.

Such a stage plays its lines of the score, as it does in a pipeline: the unit, and the author's functions on
what it has made. So its forward, its backward and both halves of that can run alone. A ``Meter`` counts their
operations and bytes, on fake tensors or with data; without it, runs with data are timed.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import median, quantiles
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils._python_dispatch import TorchDispatchMode

from penstock._engine.devices import wait_for
from penstock._engine.faults import failing_module
from penstock._engine.rng import generators_kept
from penstock._engine.values import map_tensors, storage_key, tensors_in
from penstock.backward import SplitBackward
from penstock.backward.nodes import edge_of
from penstock.errors import PenstockError, UsageError
from penstock.partition import CallPlan, partition
from penstock.partition.alike import filled, without_data
from penstock.partition.base import home_of
from penstock.partition.names import FakeTensorMode, without_modes
from penstock.partition.snapshot import Snapshot
from penstock.plan.costs import UnitCost, Units, ValueCost
from penstock.plan.meter import FusedAttention, Meter, Operation
from penstock.schedule import Edge
from penstock.stage import StageCall, enter, uncompiled

Loss = Callable[[Any, Any], Any]
"""Computes the scalar that backward starts from, from the model's output and a target."""
HALVES, WHOLE = ("input", "weight"), ("backward",)
KINDS = ("forward", *HALVES, *WHOLE)


def measure_units(
    model: nn.Module,
    calls: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: Any = None,
    loss: Loss | None = None,
    repeats: int = 0,
) -> Units:
    """Find what the units of a model do for one microbatch, and with data how long that takes.

    The model's gradients, buffers, attributes and hooks stay as they are, and so do the states of random
    generators.

    Args:
        model: any module. It needs data only if time is measured.
        calls: the units in the order of their calls, each as often as it is called.
        args: the model's positional arguments for one microbatch; if they are on the meta device, ones stand
            for their numbers.
        kwargs: its arguments by name.
        target: the second argument of ``loss``.
        loss: computes the scalar that backward starts from; its cost counts for the last unit. By default
            the sum of the output.
        repeats: how often times are measured on the model's device, after a run that does not count. If 0,
            nothing runs with data, and all times are 0.

    Raises:
        UsageError: a unit is not called with these arguments, or cannot be measured.
        PartitionError: the model cannot be cut between these calls.
    """
    _check_not_scripted(model)
    home = home_of(model)
    fake = None if repeats else FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        stack.enter_context(generators_kept([home]))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_left_as_it_was(model))
        stack.enter_context(uncompiled())
        units_of = {path: model.get_submodule(path) for path in calls}
        _put_in(
            model,
            [*units_of.values()],
            _sharing_data if fake is None else partial(_faked, fake, home),
        )
        call, target = _on(home, ((tuple(args), dict(kwargs or {})), target))
        take = _same if fake is None else fake.from_tensor
        loss, target = loss or _sum_up, map_tensors(target, take)
        runs = _Runs(model, calls, call, lambda output: loss(output, target), take)
        try:
            counts, values = runs.counted(Gauge(fake=fake))
        except Exception as error:
            if fake is None or isinstance(error, PenstockError):
                raise
            raise UsageError(
                f"{failing_module(error) or 'the model'} does not run without data ({type(error).__name__}: "
                f"{error}), so its costs cannot be predicted; penstock.plan.measure runs it with data"
            ) from error
        clock = Gauge(clock_of(home))
        # The first run does not count.
        timed = [runs.timed(clock) for _ in range(repeats + 1 if repeats else 0)][1:]
        # On a GPU, these times hide behind the work launched before.
        once = _spent_once(clock) if repeats and home.type == "cpu" else {}

        def times(number: int, kind: str) -> list[float]:
            """The times of an action in all sections that are like one."""
            like = [n for n, section in enumerate(counts) if section is counts[number]]
            return [run[n][kind] for run in timed for n in like if kind in run[n]] or [0.0]

        costs, works = list[UnitCost](), list[Mapping[str, Counter[Operation]]]()
        for path in dict.fromkeys(calls):
            mine = [number for number, of in enumerate(calls) if of == path]
            took = {kind: [times(number, kind) for number in mine] for kind in KINDS}
            sections = [counts[number] for number in mine]
            # A stage holds its unit, and parameters that no unit does.
            held = [
                t for n in mine for t in (*runs.stages[n].parameters(), *units_of[path].buffers())
            ]
            costs.append(_cost(path, held, sections, took, once))
            # A section that no later one uses has no backward.
            works.append(
                {k: sum((s.work.get(k, Counter()) for s in sections), Counter()) for k in KINDS}
            )
        return Units(tuple(costs), values, tuple(works))


# ---- other tensors in the model for a while, so that measuring does not change it


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Remove the model's hooks; afterwards restore everything."""
    snapshot = Snapshot(model.modules(), code=True, data=False)
    try:
        tables = [entry for module in model.modules() for entry in vars(module).items()]
        for name, value in tables:
            if "_hooks" in name and isinstance(value, dict):
                value.clear()
        yield
    finally:
        snapshot.restore()


def _put_in(
    model: nn.Module, units: Sequence[nn.Module], stand_in: Callable[[Tensor], Tensor]
) -> None:
    """Put other tensors in place of the model's own; weights have gradients, as after the first step.

    Args:
        model: the model.
        units: what of it is placed as a whole. Author's code around them may read the numbers of buffers.
        stand_in: makes another tensor for a weight, and for any tensor of a unit.
    """
    known: dict[int, Tensor] = {}
    inside = {id(part) for unit in units for part in unit.modules()}
    home = home_of(model)

    def put(module: nn.Module, tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            is_weight = isinstance(tensor, nn.Parameter)
            by_numbers = not is_weight and id(module) not in inside
            twin = known[id(tensor)] = _fresh(_on(home, tensor)) if by_numbers else stand_in(tensor)
            if is_weight and twin.requires_grad:
                twin.grad = torch.zeros_like(twin)
        return known[id(tensor)]

    for module in model.modules():
        state = vars(module)
        for name, value in list(state.items()):
            if name in ("_parameters", "_buffers"):
                value.update(map_tensors(dict(value), partial(put, module)))
            elif name != "_modules" and tensors_in(value):
                state[name] = map_tensors(value, partial(put, module))


def _sharing_data(tensor: Tensor) -> Tensor:
    """A parameter with the same data and its own gradient; a copy of any other tensor."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach(), tensor.requires_grad)
    return _fresh(tensor)


def _faked(mode: FakeTensorMode, device: torch.device, tensor: Tensor) -> Tensor:
    is_weight, learns = isinstance(tensor, nn.Parameter), tensor.requires_grad
    look = tensor.shape, tensor.stride(), tensor.dtype, device, learns and not is_weight
    twin = without_data(mode, look)
    return nn.Parameter(twin, learns) if is_weight else twin


def _check_not_scripted(model: nn.Module) -> None:
    for path, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise UsageError(
                f"{path!r} is scripted, so its costs cannot be measured; measure the module as it was before "
                "torch.jit.script"
            )


def _on(device: torch.device, value: Any) -> Any:
    """A value with its tensors on a device; meta tensors become ones."""
    return map_tensors(value, lambda t: filled(t, 1, device) if t.is_meta else t.to(device))


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _fresh(tensor: Tensor) -> Tensor:
    """A tensor that nobody else has."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _sum_up(output: Any, target: Any) -> Any:
    return sum(tensor.float().sum() for tensor in tensors_in(output) if tensor.requires_grad)


# ---- one call of a unit, as a stage


@dataclass(eq=False)
class Section:
    """What one call of a unit does in a run, and what it costs.

    Attributes:
        unit: the unit.
        split: runs its backward.
        leaves: what it uses of earlier sections and requires gradients.
        roots: where its backward starts, each with the shape, type and device of the gradient there.
        took: the times of its actions, if they were measured.
        work: how often each operation runs in its actions.
        extra: the bytes that actions need beyond those held before or after.
        kept: the values that its graph keeps, by their edges.
        held: the bytes that its graph keeps, without these values.
        inside: the bytes of its unit's own graph among them.
        stash: the bytes that its I leaves until W.
        flops: the floating-point operations of its forward.
    """

    unit: nn.Module
    split: SplitBackward
    leaves: list[Tensor] = field(default_factory=list)
    roots: list[tuple[GradientEdge, Any]] = field(default_factory=list)
    took: dict[str, float] = field(default_factory=dict)
    work: dict[str, Counter[Operation]] = field(default_factory=lambda: defaultdict(Counter))
    extra: dict[str, float] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    held: float = 0.0
    inside: float = 0.0
    stash: float = 0.0
    flops: float = 0.0

    def start_from(self, value: Any) -> None:
        """Let backward start from the tensors in a value, which may go if the graph does not keep them."""
        for tensor in tensors_in(value):
            if tensor.requires_grad:
                self.roots.append((edge_of(tensor), (tensor.shape, tensor.dtype, tensor.device)))

    def backward(self, gauge: Gauge, kinds: Sequence[str]) -> None:
        """Run the backward, whole or in halves."""
        if not self.roots:
            return
        roots = [edge for edge, _ in self.roots]
        with gauge.within():
            seeds = [torch.ones(shape, dtype=of, device=on) for _, (shape, of, on) in self.roots]
        self.roots.clear()
        with gauge(self, kinds[0]):
            if kinds == WHOLE:
                self.split.full(roots, seeds, self.leaves)
            else:
                pending = self.split.input_half(roots, seeds, self.leaves)[1]
            del roots, seeds
        if kinds == HALVES:
            with gauge(self, "weight"):
                self.split.weight_half(pending)
                del pending


# ---- gauges


class Gauge:
    """Notes what actions of sections take: by a clock their times; without one their operations and bytes.

    Args:
        now: waits until the device has finished its work, and returns the time.
        fake: the mode of a run without data.
    """

    def __init__(
        self, now: Callable[[], float] | None = None, fake: FakeTensorMode | None = None
    ) -> None:
        self._now, self._fake, self._meter = now, fake, Meter()

    @property
    def live(self) -> int:
        """The bytes that are allocated, if they are counted."""
        return self._meter.live

    def alive(self, memory: Mapping[int, int]) -> int:
        """Return how many of these bytes of memory, by its key, are allocated, if they are counted."""
        return sum(size for key, size in memory.items() if self._meter.allocated(key))

    @contextmanager
    def within(self) -> Iterator[None]:
        """Count what is allocated in the body, for an action."""
        with ExitStack() as stack:
            if self._fake is not None:
                for mode in (self._fake, _Answers(self._fake), FusedAttention()):
                    stack.enter_context(mode)
            if self._now is None:
                stack.enter_context(self._meter)
            yield

    @contextmanager
    def __call__(self, section: Section, kind: str) -> Iterator[None]:
        """Note what the body does, which is an action of a section, by its name."""
        if self._now is not None:
            start = self._now()
            yield
            section.took[kind] = self._now() - start
            return
        meter = self._meter
        before, flops, meter.work = meter.live, meter.flops, section.work[kind]
        meter.reset_peak()
        with self.within(), self._inside(section) if kind == "forward" else nullcontext():
            yield
        meter.work = Counter()
        section.extra[kind] = float(meter.peak - max(before, meter.live))
        if kind == "forward":
            section.flops = meter.flops - flops
        # What the halves leave for later is there until W.
        section.stash += {"input": meter.live, "weight": -meter.live}.get(kind, 0)

    @contextmanager
    def _inside(self, section: Section) -> Iterator[None]:
        """Note what the unit's own graph holds, beside what it gives."""
        before = 0

        def begin(*_: Any) -> None:
            nonlocal before
            before = self.live

        def end(module: nn.Module, args: Any, output: Any) -> None:
            section.inside = max(0.0, self.live - before - self.alive(_memory(output)))

        hooks = (
            section.unit.register_forward_pre_hook(begin),
            section.unit.register_forward_hook(end),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def enter(self, tensor: Tensor, leaves: list[Tensor]) -> Tensor:
        """What stands in a section for a tensor of another: one without history, and the leaf behind it.

        Where bytes are counted, a copy, whose memory goes with its graph, and whose gradient is not kept.
        """
        if self._now is not None:
            return cast("Tensor", enter(tensor, leaves, copies=False))
        if tensor.requires_grad:
            # The leaf has hardly any memory of its own, and that is not counted.
            leaves.append(tensor.new_zeros(()).expand(tensor.shape).requires_grad_())
        with self.within():
            if not tensor.requires_grad:
                return tensor.detach().clone()
            entered: Tensor = cast("Any", _Entered).apply(leaves[-1], tensor.detach())
            return entered


def clock_of(home: torch.device) -> Callable[[], float]:
    """A clock for work on a device."""
    if home.type == "cpu":
        # If a single thread does all the work, the time of other programs need not count.
        return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def after_all() -> float:
        wait_for(home)
        return time.perf_counter()

    return after_all


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None, None


class _Answers(TorchDispatchMode):
    """Runs an operation on ones if it needs a tensor's numbers, and there are none."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            with without_modes():
                args, kwargs = map_tensors((args, kwargs or {}), lambda t: filled(t, 1))
                output = func(*args, **kwargs)
            return map_tensors(output, lambda tensor: self._mode.from_tensor(tensor.detach()))


def _memory(value: Any) -> dict[int, int]:
    """The bytes of the memory of a value's tensors, by its key."""
    return {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors_in(value)}


# ---- all runs, and what they show


class _Runs:
    """Runs of a model, each a forward and the backward of its sections.

    Args:
        model: the model.
        calls: its units in the order of their calls.
        call: its arguments by position and by name.
        loss: computes the scalar that backward starts from.
        take: what sections get for a tensor of the arguments.
    """

    def __init__(
        self,
        model: nn.Module,
        calls: Sequence[str],
        call: Any,
        loss: Callable[[Any], Any],
        take: Callable[[Tensor], Tensor],
    ) -> None:
        self._calls, self._call, self._loss, self._take = calls, call, loss, take
        self._units = [model.get_submodule(path) for path in calls]
        stages = partition(model, [[path] for path in calls], example=call).modules
        self.stages: Sequence[Any] = stages
        self._splits = [SplitBackward(stage) for stage in stages]
        self._plan: CallPlan | None = None
        self._sizes: dict[str, int] = {}

    def forward(self, gauge: Gauge) -> list[Section]:
        """A forward, with the same random numbers as all others."""
        torch.manual_seed(0)
        args, kwargs = map_tensors(self._call, _fresh)
        first = self.stages[0]
        score = first.scores([(args, kwargs, None)])[0]
        plan: CallPlan = first.plan(score)
        self._check(plan)
        args, kwargs = map_tensors(
            (args, kwargs) if score is None else (score.batch, {}), self._take
        )
        call, values, sections = StageCall(plan, 0, score), dict[str, Any](), list[Section]()
        for place, stage in enumerate(self.stages):
            section = Section(self._units[place], self._splits[place])
            sections.append(section)
            before = gauge.live
            come_in = partial(gauge.enter, leaves=section.leaves)
            arrived = {
                edge.value: map_tensors(values[edge.value], come_in)
                for edge in plan.edges
                if place in edge.targets
            }
            entered = {name: _memory(value) for name, value in arrived.items()}
            if score is not None:
                kwargs["given"] = [self._take(tensor) for tensor in stage.given(score, plan)]
            with gauge(section, "forward"):
                output, sent = stage(call, dict(arrived), *args, **kwargs)
                if stage is self.stages[-1]:
                    output = self._loss(output)
            section.start_from((output, sent))
            values |= sent
            made = gauge.alive(_memory(sent))
            del arrived, output, sent
            section.kept = {name for name, memory in entered.items() if gauge.alive(memory)}
            kept = sum(gauge.alive(memory) for memory in entered.values())
            section.held = max(0.0, gauge.live - before - made - kept)
            for edge in plan.edges:
                if place == max(edge.targets):
                    memory = _memory(values[edge.value])
                    self._sizes[edge.value] = sum(
                        t.nbytes for t in tensors_in(values.pop(edge.value))
                    )
                    if gauge.alive(memory):
                        sections[edge.source].kept.add(edge.value)
        return sections

    def _check(self, plan: CallPlan) -> None:
        """Check that this run uses all units, and calls those that all others call."""
        uses = zip(self._units, plan.mine, plan.sends, strict=False)
        used = [unit for unit, lines, sends in uses if lines or sends]
        known = {id(weight) for unit in used for weight in unit.parameters()}
        idle = {
            path
            for path, unit in zip(self._calls, self._units, strict=True)
            # The weights of one that is not used may be those of others.
            if any(id(weight) not in known for weight in unit.parameters())
        }
        if plan.mine and idle:
            raise UsageError(
                f"the model does not use these modules with this batch, so their costs are unknown: "
                f"{', '.join(sorted(idle)[:5])}; give a batch that uses them, or take out of the model what "
                "no batch uses"
            )
        self._plan = self._plan or plan
        if plan.owners != self._plan.owners:
            raise UsageError(
                "the model calls other modules in each run with the same batch, so their costs are unknown; "
                "measure it without dropping layers"
            )

    def timed(self, clock: Gauge) -> list[Mapping[str, float]]:
        """The times of the actions of each section; that of F is the mean of two."""
        whole, halves = self.forward(clock), self.forward(clock)
        for section in reversed(halves):
            section.backward(clock, HALVES)
        for section in reversed(whole):
            section.backward(clock, WHOLE)
        return [
            {
                **other.took,
                **one.took,
                "forward": (one.took["forward"] + other.took["forward"]) / 2,
            }
            for one, other in zip(whole, halves, strict=True)
        ]

    def counted(self, gauge: Gauge) -> tuple[list[Section], tuple[ValueCost, ...]]:
        """Return what was counted of each section, and the values between units.

        Of sections that are alike, one has a backward, and stands for all of them.
        """
        sections, first = self.forward(gauge), dict[Any, int]()
        values = self._values(sections)
        alike = [first.setdefault(_kind(section), n) for n, section in enumerate(sections)]
        for number in reversed(first.values()):
            sections[number].backward(gauge, WHOLE)
        halves = self.forward(gauge)
        for number in reversed(first.values()):
            one, other = sections[number], halves[number]
            other.backward(gauge, HALVES)
            one.stash, one.extra = other.stash, {**other.extra, **one.extra}
            one.work = {**other.work, **one.work}
        return [sections[number] for number in alike], values

    def _values(self, sections: Sequence[Section]) -> tuple[ValueCost, ...]:
        """The values between units; tensors of one unit that the same units use are one value."""
        paths = list(dict.fromkeys(self._calls))
        units = [paths.index(path) for path in self._calls]
        groups: dict[tuple[int, tuple[int, ...], bool], list[Edge]] = defaultdict(list)
        assert self._plan is not None
        for edge in self._plan.edges:
            source, users = units[edge.source], {units[target] for target in edge.targets}
            if users == {source}:
                for place in (edge.source, *edge.targets):
                    if edge.value in sections[place].kept:
                        sections[place].held += self._sizes[edge.value]
            # A module that is called twice may use what a later one made: then both are in one stage.
            elif targets := tuple(sorted(user for user in users if user > source)):
                groups[source, targets, edge.gradient].append(edge)
        values: list[ValueCost] = []
        for (unit, targets, gradient), edges in sorted(groups.items(), key=lambda group: group[0]):
            keepers = {
                units[place]
                for edge in edges
                for place in (edge.source, *edge.targets)
                if edge.value in sections[place].kept
            }
            size = float(sum(self._sizes[edge.value] for edge in edges))
            name = f"{paths[unit]}:{len(values)}"
            values.append(ValueCost(name, unit, targets, size, gradient, tuple(sorted(keepers))))
        return tuple(values)


def _kind(section: Section) -> Any:
    """A key that is the same for sections that cost the same."""
    weights = [(weight.shape, weight.requires_grad) for weight in section.unit.parameters()]
    numbers = len(section.leaves), len(section.roots), section.flops, section.held, section.inside
    work = sorted(section.work["forward"].items())
    return type(section.unit), *weights, *numbers, section.extra["forward"], *work


def _cost(
    path: str,
    weights: Iterable[Tensor],
    sections: Sequence[Section],
    took: Mapping[str, Sequence[Sequence[float]]],
    once: Mapping[str, float],
) -> UnitCost:
    """Return what a unit costs.

    Args:
        path: the path of the unit.
        weights: its parameters and buffers, and those parameters around it that its stage holds.
        sections: what was counted of its calls.
        took: for each action, the times of each of these.
        once: the times that actions take with hardly any work, which a stage spends once.
    """
    tensors = {id(tensor): tensor for tensor in weights}.values()
    held = sum(section.held for section in sections)
    seconds = {kind: sum(map(median, times)) for kind, times in took.items()}
    return UnitCost(
        path,
        **seconds,
        once={kind: min(least, seconds[kind]) for kind, least in once.items()},
        spread=max(_spread(times) for each in took.values() for times in each),
        held=held,
        around=sum(max(0.0, section.held - section.inside) for section in sections),
        stash=sum(section.stash for section in sections),
        extra={kind: max(one.extra.get(kind, 0.0) for one in sections) for kind in KINDS},
        parameters=sum(tensor.nbytes for tensor in tensors),
        trained=sum(tensor.nbytes for tensor in tensors if tensor.requires_grad),
        numbers=sum(t.numel() for t in tensors if isinstance(t, nn.Parameter)),
        flops=sum(section.flops for section in sections),
    )


def _spent_once(clock: Gauge) -> dict[str, float]:
    """The times of a stage's actions with hardly any work in them."""
    model = nn.Sequential(*(nn.Linear(1, 1, device="cpu") for _ in range(3)))
    x = torch.ones(1, 1, device="cpu")
    runs = _Runs(model, ["0", "1", "2"], ((x,), {}), torch.sum, _same)
    took = [runs.timed(clock)[1] for _ in range(30)]
    return {kind: median(times[kind] for times in took) for kind in KINDS}


def _spread(times: Sequence[float]) -> float:
    """Half the interquartile range, as a share of the median."""
    if len(times) < 3 or not median(times):
        return 0.0
    low, _, high = quantiles(times, n=4)
    return (high - low) / 2 / median(times)
