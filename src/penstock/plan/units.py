"""What the units of a model cost: whole runs of the model, in which each unit's graph stands alone.

A *section* is a call of a unit, with the author's functions on what it has made. What a section uses of
earlier ones enters as a leaf, as it enters a stage. So after one forward of the model, each section's
backward can run by itself, whole or in halves, like that of a stage. A `Meter` counts operations and bytes
of such runs, on fake tensors or with data; without it, runs with data are timed.
"""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from statistics import median, quantiles
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from penstock.backward import SplitBackward
from penstock.backward.pending import WeightUse
from penstock.errors import UsageError
from penstock.partition import Door
from penstock.partition.base import count_parameters
from penstock.partition.held import Held
from penstock.partition.meter import FusedAttention, Meter, Rate, storage_key
from penstock.partition.seen import left, opened
from penstock.partition.trace import as_written, home_of
from penstock.plan.costs import UnitCost, ValueCost
from penstock.stage import enter
from penstock.values import map_tensors, tensors_in

Loss = Callable[[Any, Any], Any]
"""Computes the scalar that backward starts from, from the model's output and a target."""
_HALVES, _WHOLE = ("input", "weight"), ("backward",)
_KINDS = ("forward", *_HALVES, *_WHOLE)


def measure_units(  # noqa: PLR0913 - the arguments of a step, by name
    model: nn.Module,
    paths: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: Any = None,
    loss: Loss | None = None,
    rate: Rate | None = None,
    repeats: int = 0,
) -> tuple[tuple[UnitCost, ...], tuple[ValueCost, ...]]:
    """Measures or predicts what the units of a model cost for one microbatch.

    The model's gradients, buffers, attributes and hooks stay as they are, and so do the states of random
    generators.

    Args:
        model: Any module. It needs data only if time is measured.
        paths: The units in the order of their calls.
        args: The model's positional arguments for one microbatch; if they are on the meta device, ones stand
            for their numbers.
        kwargs: Its arguments by name.
        target: The second argument of `loss`.
        loss: Computes the scalar that backward starts from; its cost counts for the last unit. By default
            the sum of the output.
        rate: How long a device takes for an operation, to predict times without data.
        repeats: How often times are measured on the model's device, after runs that do not count. If 0,
            nothing runs with data, and times come from `rate`.

    Raises:
        UsageError: A unit is not called with these arguments, or cannot be measured.
    """
    _check_not_scripted(model)
    home = home_of(model)
    fake = None if repeats else FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        stack.enter_context(_random_states_kept(home))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_left_as_it_was(model))
        stack.enter_context(as_written())
        _put_in(model, _sharing_data if fake is None else partial(_faked, fake, home))
        step = partial(_step, model, _on(home, (tuple(args), dict(kwargs or {}))))
        runs = _Runs(model, paths, partial(step, loss or _sum_up, _on(home, target)))
        counts = runs.counted(fake, rate)
        times = runs.timed(home, repeats) if repeats else None
        # On a GPU, these times hide behind the work launched before.
        spent = _spent_once(_clock(home)) if repeats and home.type == "cpu" else {}
    return runs.costs(counts, times, spent), runs.values(counts)


def _step(model: nn.Module, call: tuple[Any, Any], loss: Loss, target: Any) -> Any:
    """The loss of one forward, whose arguments nobody else has."""

    def fresh(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    args, kwargs = map_tensors(call, fresh)
    return loss(model(*args, **kwargs), target)


# ---- other tensors in the model for a while, so that measuring does not change it


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Removes the model's hooks; afterwards restores everything."""
    snapshot = Held(model, {})
    try:
        tables = [entry for module in model.modules() for entry in vars(module).items()]
        for name, value in tables:
            if "_hooks" in name and isinstance(value, dict):
                value.clear()
        yield
    finally:
        snapshot.restore()


def _put_in(model: nn.Module, stand_in: Callable[[Tensor], Tensor]) -> None:
    """Puts other tensors in place of the model's own; weights have gradients, as after the first step."""
    known: dict[int, Tensor] = {}

    def put(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            twin = known[id(tensor)] = stand_in(tensor)
            if isinstance(twin, nn.Parameter) and twin.requires_grad:
                twin.grad = torch.zeros_like(twin)
        return known[id(tensor)]

    for module in model.modules():
        state = vars(module)
        for name, value in list(state.items()):
            if name in ("_parameters", "_buffers"):
                value.update(map_tensors(dict(value), put))
            elif name != "_modules" and tensors_in(value):
                state[name] = map_tensors(value, put)


def _sharing_data(tensor: Tensor) -> Tensor:
    """A parameter with the same data and its own gradient; a copy of any other tensor."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach(), tensor.requires_grad)
    return tensor.detach().clone()


def _faked(mode: FakeTensorMode, device: torch.device, tensor: Tensor) -> Tensor:
    with mode:
        twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(twin, tensor.requires_grad)
    return twin.requires_grad_(tensor.requires_grad)


def _check_not_scripted(model: nn.Module) -> None:
    for path, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise UsageError(
                f"{path!r} is scripted, so its costs cannot be measured; measure the module as it was before "
                "torch.jit.script"
            )


def _ones(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    shape, strides, home = tensor.shape, tensor.stride(), device or tensor.device
    return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=home).fill_(1)


def _on(device: torch.device, value: Any) -> Any:
    """A value with its tensors on a device; meta tensors become ones."""
    return map_tensors(value, lambda t: _ones(t, device) if t.is_meta else t.to(device))


def _sum_up(output: Any, _: Any) -> Any:
    return sum(tensor.float().sum() for tensor in tensors_in(output) if tensor.requires_grad)


@contextmanager
def _random_states_kept(home: torch.device) -> Iterator[None]:
    python, numbers = random.getstate(), np.random.get_state()
    devices = [home] if home.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)


# ---- one forward, in sections


@dataclass(eq=False)
class Section:
    """A call of a unit, and the functions on what it has made.

    Attributes:
        unit: The unit's place in the order of the units.
        leaves: What it uses of earlier sections and requires gradients.
        entered: All that it uses of earlier sections: by identity, the tensor and the one in its place.
        roots: What later sections use of it, by identity.
        saved: The bytes of what its graph saves, and whether a function around the unit's module saves it,
            by the number of the memory.
        took: The times of its actions so far.
        extra: The bytes that actions need beyond those held before or after.
        flops: The floating-point operations of its forward.
        stash: The bytes that its I leaves until W.
        grown: The bytes that its forward has left, while nothing that it made was dropped.
        peak: The most bytes that its forward had beyond those before it.
    """

    unit: int
    leaves: list[Tensor] = field(default_factory=list)
    entered: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    roots: dict[int, Tensor] = field(default_factory=dict)
    saved: dict[int, tuple[int, bool]] = field(default_factory=dict)
    took: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    extra: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    flops: float = 0.0
    stash: float = 0.0
    grown: int = 0
    peak: int = 0


class Gauge(Protocol):
    """Notes what sections do."""

    def __call__(self, section: Section, kind: str, module: bool) -> AbstractContextManager[None]:
        """A context for an action of a section.

        Args:
            section: The section.
            kind: The name of the action.
            module: Whether the unit's module runs it, or a function around that.
        """

    def enter(self, tensor: Tensor, section: Section) -> Tensor:
        """What a section has in place of a tensor of another: one without history."""


class Forward(TorchFunctionMode):
    """A forward of a model, from which each section's backward can run alone.

    Args:
        units: The modules of the units, in their order; one that stands in several places makes its first
            calls in the first of them.
        gauge: Notes what sections do.

    Attributes:
        sections: In the order in which they began.
        uses: What sections use of earlier ones, by identity: the tensor, its section, and those that use it.
    """

    def __init__(self, units: Sequence[tuple[str, nn.Module]], gauge: Gauge) -> None:
        super().__init__()
        self.sections: list[Section] = []
        self.uses: dict[int, tuple[Tensor, Section, list[Section]]] = {}
        self._gauge, self._units = gauge, units
        self._places: dict[int, list[int]] = defaultdict(list)
        for place, (_, module) in enumerate(units):
            self._places[id(module)].append(place)
        self._calls: Counter[int] = Counter()
        self._made: Any = WeakIdKeyDictionary()
        self._now: Any = WeakIdKeyDictionary()
        self._busy = False

    def run(self, step: Callable[[], Any]) -> None:
        """Runs the forward with its loss."""
        known: dict[int, str] = {id(module): path for path, module in reversed(self._units)}
        modules = {id(module): module for _, module in self._units}
        doors = [Door(modules[key], path) for key, path in known.items()]
        with opened(doors, self._called, {door.path for door in doors}), self:
            result = step()
        last = self.sections[-1]
        for tensor in tensors_in(result):
            # What comes from an earlier section travels to the last one.
            root = self._enter(last, tensor)
            last.roots[id(root)] = root

    def _called(self, door: Door, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Answers for a call of a unit."""
        if self._busy:
            return run(*args, **kwargs)
        key = id(door.module)
        places = self._places[key]
        section = Section(places[min(self._calls[key], len(places) - 1)])
        self._calls[key] += 1
        self.sections.append(section)
        if getattr(run, "__name__", "") != "forward":
            # A compiled module runs as it was written.
            run = getattr(door.module, "_orig_mod", door.module)._call_impl
        return self._do(section, run, args, kwargs, module=True)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs a function of the author's in the latest section among those of its arguments."""
        given = args, kwargs or {}
        tensors = tensors_in(given)
        known = [self._made[tensor] for tensor in tensors if tensor in self._made]
        if not known:
            if not any(isinstance(tensor, nn.Parameter) for tensor in tensors):
                # What depends on the model's arguments alone is computed by each stage.
                return func(*given[0], **given[1])
            if not self.sections:
                self.sections.append(Section(0))
            known = self.sections[:1]
        section = max(known, key=self.sections.index)
        output = self._do(section, func, *given, module=False)
        name = getattr(func, "__name__", "")
        if tensors and (name.rstrip("_") != name or name == "__setitem__"):
            # From now on, what was changed in place is what the function has made of it.
            changed = self._enter(section, tensors[0])
            if changed is not tensors[0]:
                self._now[tensors[0]] = changed
        return output

    def _do(
        self, section: Section, run: Callable[..., Any], args: Any, kwargs: Any, *, module: bool
    ) -> Any:
        with left(self):
            args, kwargs = map_tensors((args, kwargs), partial(self._enter, section))
            self._busy = True
            try:
                with self._gauge(section, "forward", module):
                    output = run(*args, **kwargs)
            finally:
                self._busy = False
            for tensor in tensors_in(output):
                if not isinstance(tensor, nn.Parameter):
                    self._made[tensor] = section
        return output

    def _enter(self, section: Section, tensor: Tensor) -> Tensor:
        """What a section has in place of a tensor: one without history, if it comes from another section."""
        tensor = self._now.get(tensor, tensor)
        source = self._made.get(tensor)
        if source is section or (source is None and (tensor.is_leaf or not tensor.requires_grad)):
            return tensor
        if id(tensor) not in section.entered:
            twin = self._gauge.enter(tensor, section)
            section.entered[id(tensor)] = tensor, twin
            self._made[twin] = section
            if source is not None:
                source.roots[id(tensor)] = tensor
                self.uses.setdefault(id(tensor), (tensor, source, []))[2].append(section)
        return section.entered[id(tensor)][1]

    def others(self, section: Section) -> Iterator[tuple[int, Tensor]]:
        """The tensors that travel to or from a section, by the identity of the original."""
        for key, (tensor, source, users) in self.uses.items():
            if any(user.unit != source.unit for user in users):
                yield key, tensor
                if key in section.entered:
                    # Without data it has memory of its own.
                    yield key, section.entered[key][1]


# ---- gauges


@dataclass(eq=False)
class _Clock:
    """Times actions.

    Args:
        now: Waits until the device has finished its work, and returns the time.
    """

    now: Callable[[], float]

    @contextmanager
    def __call__(self, section: Section, kind: str, module: bool) -> Iterator[None]:
        start = self.now()
        yield
        section.took[kind] += self.now() - start

    def enter(self, tensor: Tensor, section: Section) -> Tensor:
        """A tensor with a leaf behind it, as it enters a stage."""
        entered: Tensor = enter(tensor, section.leaves, copies=False)
        return entered


def _clock(home: torch.device) -> Callable[[], float]:
    if home.type == "cpu":
        # If a single thread does all the work, the time of other programs need not count.
        return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def after_all() -> float:
        torch.accelerator.synchronize(home)
        return time.perf_counter()

    return after_all


class _Answers(TorchDispatchMode):
    """Runs an operation on ones if it needs a tensor's numbers, and there are none."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            with _disable_current_modes():
                given = map_tensors((args, kwargs or {}), _ones)
                output = func(*given[0], **given[1])
            return map_tensors(output, lambda tensor: self._mode.from_tensor(tensor.detach()))


class _Count:
    """Counts operations and bytes of actions.

    Args:
        fake: The mode of the run without data, if it has none.
        rate: How long a device takes for an operation.

    Attributes:
        saves: Whether it notes what autograd saves, which forbids backward in halves.
        unseen: The units in which nobody may look at what autograd saves.
        current: The section that acts.
    """

    def __init__(self, fake: FakeTensorMode | None, rate: Rate | None) -> None:
        self._meter = Meter(rate)
        self._fake = fake
        self._since: dict[Section, tuple[int, int]] = {}
        self.saves = False
        self.unseen: set[int] = set()
        self.current: Section | None = None

    @contextmanager
    def __call__(self, section: Section, kind: str, module: bool) -> Iterator[None]:
        meter, self.current = self._meter, section
        before, seconds, flops = meter.live, meter.seconds, meter.flops
        meter.reset_peak()
        with ExitStack() as stack:
            stack.enter_context(self._watched())
            if self.saves and kind == "forward" and section.unit not in self.unseen:
                note = partial(self._note, section, not module)
                stack.enter_context(saved_tensors_hooks(note, _same))
            yield
        section.took[kind] += meter.seconds - seconds
        peak = meter.peak
        if kind == "forward":
            section.flops += meter.flops - flops
            # A forward is a unit and several functions: what it needs is beyond its beginning and its end.
            before, most = self._since.get(section, (before, 0))
            peak = max(peak, most)
            self._since[section] = before, peak
            section.peak = peak - before
            section.grown = meter.live - before
        else:
            section.extra[kind] = float(peak - max(before, meter.live))

    @contextmanager
    def _watched(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._fake is not None:
                for mode in (self._fake, _Answers(self._fake), FusedAttention()):
                    stack.enter_context(mode)
            stack.enter_context(self._meter)
            yield

    def enter(self, tensor: Tensor, section: Section) -> Tensor:
        """A copy, whose memory goes when its graph does, and whose gradient is not kept."""
        with self._watched():
            leaf = tensor.detach()
            if not tensor.requires_grad:
                return leaf.clone()
            section.leaves.append(leaf.requires_grad_())
            entered: Tensor = cast("Any", _Entered).apply(leaf)
            return entered

    def _note(self, section: Section, around: bool, tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        _, before = section.saved.get(key, (0, False))
        section.saved[key] = tensor.untyped_storage().nbytes(), around or before
        return tensor

    def allocated(self, key: int) -> bool:
        """Whether memory, by its `storage_key`, was allocated by an action."""
        return self._meter.allocated(key)


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None


def _same(tensor: Tensor) -> Tensor:
    return tensor


def run_backward(
    split: SplitBackward, section: Section, gauge: Gauge, kinds: Sequence[str]
) -> None:
    """Runs a section's backward, whole or in halves."""
    roots = [root for root in section.roots.values() if root.requires_grad]
    seeds = [torch.ones_like(root) for root in roots]
    if not roots:
        return
    if kinds == _WHOLE:
        with gauge(section, "backward", True):
            split.full(roots, seeds, section.leaves)
        return
    with gauge(section, "input", True):
        pending = split.input_half(roots, seeds, section.leaves)[1]
    section.stash = float(sum(_storages(chain.from_iterable(map(_kept, pending.uses))).values()))
    with gauge(section, "weight", True):
        split.weight_half(pending)
        del pending


def _kept(use: WeightUse) -> list[Tensor]:
    """What a use of a weight keeps for W."""
    return [
        t
        for t in tensors_in((use.grad, use.value, use.arguments))
        if not isinstance(t, nn.Parameter)
    ]


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The bytes of the memory of tensors, by its key."""
    return {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}


# ---- all runs, and what they show


@dataclass(frozen=True)
class _Seen:
    """What a section's forward has shown.

    Attributes:
        held: As in `UnitCost`.
        around: As in `UnitCost`.
        kind: The same for sections that are alike.
        kept: The uses that its graph keeps, by the identity of the tensor.
    """

    held: float
    around: float
    kind: Any
    kept: frozenset[int]


class _Runs:
    """Runs of a model, each a forward and the backward of every section.

    Args:
        model: The model.
        paths: Its units.
        step: Makes the forward, and the loss.
    """

    def __init__(self, model: nn.Module, paths: Sequence[str], step: Callable[[], Any]) -> None:
        first = {id(model.get_submodule(path)): path for path in reversed(paths)}
        modules = [model.get_submodule(path) for path in paths]
        self._paths = paths
        self._units = [(first[id(module)], module) for module in modules]
        self._splits = [SplitBackward(module) for module in modules]
        self._step = step

    def _run(
        self, gauge: Gauge, kinds: Sequence[str], wanted: Collection[int] | None = None
    ) -> list[Section]:
        """The sections of a forward after the backward of those that are wanted, or of all."""
        sections = self._forward(gauge).sections
        for number, section in reversed([*enumerate(sections)]):
            if wanted is None or number in wanted:
                self._backward(section, gauge, kinds)
        return sections

    def _forward(self, gauge: Gauge) -> Forward:
        torch.manual_seed(0)
        forward = Forward(self._units, gauge)
        forward.run(self._step)
        called = {section.unit for section in forward.sections}
        idle = [path for place, path in enumerate(self._paths) if place not in called]
        if idle:
            raise UsageError(
                f"the model does not call these modules with this batch, so their costs are unknown: "
                f"{', '.join(idle[:5])}; give a batch that uses them"
            )
        return forward

    def _backward(self, section: Section, gauge: Gauge, kinds: Sequence[str]) -> None:
        run_backward(self._splits[section.unit], section, gauge, kinds)

    # ---- counting

    def counted(self, fake: FakeTensorMode | None, rate: Rate | None) -> _Counted:
        """Counts what actions do; of sections that are alike, only one has a backward."""
        gauge = _Count(fake, rate)
        forward = self._saving(gauge)
        sections = forward.sections
        seen = [self._look_at(section, forward, gauge) for section in sections]
        first: dict[Any, int] = {}
        alike = [first.setdefault(one.kind, number) for number, one in enumerate(seen)]
        for number in sorted(set(alike), reverse=True):
            self._backward(sections[number], gauge, _WHOLE)
        gauge.saves = False
        halves = self._run(gauge, _HALVES, set(alike))
        _check_same(sections, halves)
        for number in set(alike):
            one, other = sections[number], halves[number]
            one.stash = other.stash
            for kind in _HALVES:
                one.took[kind], one.extra[kind] = other.took[kind], other.extra[kind]
        return _Counted(sections, seen, alike, [*forward.uses.values()])

    def _saving(self, gauge: _Count) -> Forward:
        """A forward that notes what autograd saves, wherever one may look at it."""
        gauge.saves = True
        while True:
            try:
                return self._forward(gauge)
            except RuntimeError as error:
                # torch.func forbids such hooks while it differentiates.
                unit = None if gauge.current is None else gauge.current.unit
                if "saved tensor hooks" not in str(error) or unit is None or unit in gauge.unseen:
                    raise
                gauge.unseen.add(unit)

    def _look_at(self, section: Section, forward: Forward, gauge: _Count) -> _Seen:
        """What a section holds, while all that the forward has made is there."""
        ends = {storage_key(tensor): key for key, tensor in forward.others(section)}
        # What depends on the model's arguments alone, and weights, are there anyway.
        inside = {
            k: one for k, one in section.saved.items() if k not in ends and gauge.allocated(k)
        }
        held = sum(size for size, _ in inside.values())
        around = sum(size for size, is_around in inside.values() if is_around)
        made = _storages(section.roots.values())
        if section.unit in gauge.unseen:
            held = around = max(0, section.grown - sum(made.values()))
        left = held + sum(size for key, size in made.items() if key not in inside)
        section.extra["forward"] = float(max(0, section.peak - max(0, left)))
        module = self._units[section.unit][1]
        weights = [(weight.shape, weight.requires_grad) for weight in module.parameters()]
        kind = (
            *(type(module), *weights, len(section.leaves), len(section.roots)),
            *(section.flops, section.took["forward"], section.extra["forward"]),
            *sorted(inside.values()),
        )
        kept = frozenset(ends[key] for key in section.saved if key in ends)
        return _Seen(float(held), float(around), kind, kept)

    # ---- timing

    def timed(self, home: torch.device, repeats: int) -> list[list[dict[str, float]]]:
        """The times of every section's actions, for each run; a first run does not count."""
        gauge = _Clock(_clock(home))
        return [self._timed_once(gauge) for _ in range(repeats + 1)][1:]

    def _timed_once(self, gauge: _Clock) -> list[dict[str, float]]:
        whole, halves = self._run(gauge, _WHOLE), self._run(gauge, _HALVES)
        _check_same(whole, halves)
        # The forward of both: their mean.
        both = zip(whole, halves, strict=True)
        return [
            {**a.took, **b.took, "forward": (a.took["forward"] + b.took["forward"]) / 2}
            for a, b in both
        ]

    # ---- both together

    def costs(
        self,
        counts: _Counted,
        times: list[list[dict[str, float]]] | None,
        spent_once: dict[str, float],
    ) -> tuple[UnitCost, ...]:
        """The costs of the units.

        Args:
            counts: What was counted.
            times: What was timed; by default times come from the counts.
            spent_once: The times that actions take with hardly any work, which a stage spends once.
        """
        alike: dict[int, list[int]] = defaultdict(list)
        for number, first in enumerate(counts.alike):
            alike[first].append(number)
        took: dict[int, dict[str, list[float]]] = {}
        for first, numbers in alike.items():
            runs = (
                [run[n] for run in times for n in numbers]
                if times
                else [counts.sections[first].took]
            )
            took[first] = {kind: [run.get(kind, 0.0) for run in runs] for kind in _KINDS}
        return tuple(self._cost(unit, counts, took, spent_once) for unit in range(len(self._units)))

    def _cost(
        self,
        unit: int,
        counts: _Counted,
        took: Mapping[int, Mapping[str, Sequence[float]]],
        spent_once: Mapping[str, float],
    ) -> UnitCost:
        numbers = [n for n, section in enumerate(counts.sections) if section.unit == unit]
        ran = [counts.sections[counts.alike[n]] for n in numbers]
        several = [took[counts.alike[n]] for n in numbers]
        module = self._units[unit][1]
        tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}.values()
        return UnitCost(
            self._paths[unit],
            **{kind: sum(median(each[kind]) for each in several) for kind in _KINDS},
            **{f"{kind}_once": seconds for kind, seconds in spent_once.items()},
            spread=max(_spread(each[kind]) for each in several for kind in _KINDS),
            held=sum(counts.seen[n].held for n in numbers),
            around=sum(counts.seen[n].around for n in numbers),
            stash=sum(section.stash for section in ran),
            **{f"{kind}_extra": max(section.extra[kind] for section in ran) for kind in _KINDS},
            parameters=sum(tensor.nbytes for tensor in tensors),
            trained=sum(tensor.nbytes for tensor in tensors if tensor.requires_grad),
            numbers=count_parameters(module),
            flops=sum(section.flops for section in ran),
        )

    def values(self, counts: _Counted) -> tuple[ValueCost, ...]:
        """The values between units: tensors of one unit that the same units use are one value."""
        groups: dict[tuple[int, tuple[int, ...], bool], list[Tensor]] = defaultdict(list)
        for tensor, source, users in counts.uses:
            # A module that is called twice may use what a later one made: then both are in one stage.
            targets = tuple(sorted({user.unit for user in users if user.unit > source.unit}))
            if targets:
                groups[source.unit, targets, tensor.requires_grad].append(tensor)
        return tuple(
            ValueCost(
                f"{self._paths[source]}:{number}",
                source,
                targets,
                float(sum(tensor.nbytes for tensor in tensors)),
                gradient,
                counts.keepers(tensors),
            )
            for number, ((source, targets, gradient), tensors) in enumerate(
                sorted(groups.items(), key=lambda group: group[0])
            )
        )


class _Counted(NamedTuple):
    """What was counted.

    Attributes:
        sections: The sections of a forward.
        seen: What the forward of each has shown.
        alike: For each, the first that is like it, which has had a backward.
        uses: The tensors that sections use of others, with their section and those that use it.
    """

    sections: list[Section]
    seen: list[_Seen]
    alike: list[int]
    uses: list[tuple[Tensor, Section, list[Section]]]

    def keepers(self, tensors: Sequence[Tensor]) -> tuple[int, ...]:
        """The units whose graphs keep one of these tensors."""
        keys = {id(tensor) for tensor in tensors}
        both = zip(self.sections, self.seen, strict=True)
        return tuple(sorted({section.unit for section, seen in both if seen.kept & keys}))


def _check_same(one: Sequence[Section], other: Sequence[Section]) -> None:
    if [section.unit for section in one] != [section.unit for section in other]:
        raise UsageError(
            "the model calls other modules in each run with the same batch, so their costs are unknown; "
            "measure it without dropping layers"
        )


def _spent_once(now: Callable[[], float]) -> dict[str, float]:
    """The times of backward and its halves with hardly any work in them."""
    module = nn.Linear(1, 1)
    split, clock, each = SplitBackward(module), _Clock(now), []
    for _ in range(30):
        section = Section(0)
        for kinds in (_WHOLE, _HALVES):
            leaf = torch.ones(1, 1, requires_grad=True)
            output = module(leaf)
            section.leaves, section.roots = [leaf], {id(output): output}
            run_backward(split, section, clock, kinds)
        each.append(section.took)
    return {kind: median(took[kind] for took in each) for kind in (*_HALVES, *_WHOLE)}


def _spread(times: Sequence[float]) -> float:
    """Half the interquartile range, as a share of the median."""
    if len(times) < 3 or not median(times):
        return 0.0
    low, _, high = quantiles(times, n=4)
    return (high - low) / 2 / median(times)
