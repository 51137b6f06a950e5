"""What the units of a model cost: whole runs of the model, in which each unit's graph stands alone.

A *section* is a call of a unit, with the author's functions on what it has made. What a section uses of
earlier ones enters as a leaf, as it enters a stage. So after one forward of the model, each section's
backward can run by itself, whole or in halves, like that of a stage. A ``Meter`` counts operations and bytes
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

from penstock._engine.devices import wait_for
from penstock._engine.rng import generators_kept
from penstock._engine.values import map_tensors, tensors_in
from penstock.backward import SplitBackward
from penstock.errors import UsageError
from penstock.partition import Door
from penstock.partition.alike import filled
from penstock.partition.base import count_parameters, home_of
from penstock.partition.doors import opened
from penstock.partition.kept import Kept
from penstock.partition.names import left
from penstock.plan.costs import UnitCost, Units, ValueCost, Work
from penstock.plan.meter import FusedAttention, Meter, Operation, storage_key
from penstock.stage import enter, uncompiled

Loss = Callable[[Any, Any], Any]
"""Computes the scalar that backward starts from, from the model's output and a target."""
HALVES, WHOLE = ("input", "weight"), ("backward",)
KINDS = ("forward", *HALVES, *WHOLE)
UNSEEN = -1
"""In place of the key of memory: all that a section keeps, where nobody may look at what autograd saves."""


def measure_units(
    model: nn.Module,
    paths: Sequence[str],
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
        paths: the units in the order of their calls.
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
    """
    _check_not_scripted(model)
    home = home_of(model)
    fake = None if repeats else FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        stack.enter_context(random_states_kept(model))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_left_as_it_was(model))
        stack.enter_context(uncompiled())
        _put_in(model, _sharing_data if fake is None else partial(_faked, fake, home))
        step = partial(_step, model, _on(home, (tuple(args), dict(kwargs or {}))))
        runs = _Runs(model, paths, partial(step, loss or _sum_up, _on(home, target)))
        counts, clock = runs.counted(Count(fake)), clock_of(home)
        # The first run does not count.
        timed = [runs.timed(clock) for _ in range(repeats + 1 if repeats else 0)][1:]
        # On a GPU, these times hide behind the work launched before.
        once = _spent_once(clock) if repeats and home.type == "cpu" else {}
        places = range(len(paths))
        costs = [runs.cost(place, counts, timed, once) for place in places]
        return Units(tuple(costs), counts.values, tuple(map(counts.work, places)))


def _step(model: nn.Module, call: tuple[Any, Any], loss: Loss, target: Any) -> Any:
    """The loss of one forward, whose arguments nobody else has."""

    def fresh(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    args, kwargs = map_tensors(call, fresh)
    return loss(model(*args, **kwargs), target)


# ---- other tensors in the model for a while, so that measuring does not change it


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Remove the model's hooks; afterwards restore everything."""
    snapshot = Kept(model.modules())
    try:
        tables = [entry for module in model.modules() for entry in vars(module).items()]
        for name, value in tables:
            if "_hooks" in name and isinstance(value, dict):
                value.clear()
        yield
    finally:
        snapshot.restore()


def _put_in(model: nn.Module, stand_in: Callable[[Tensor], Tensor]) -> None:
    """Put other tensors in place of the model's own; weights have gradients, as after the first step."""
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


def _on(device: torch.device, value: Any) -> Any:
    """A value with its tensors on a device; meta tensors become ones."""
    return map_tensors(value, lambda t: filled(t, 1, device) if t.is_meta else t.to(device))


def _sum_up(output: Any, _: Any) -> Any:
    return sum(tensor.float().sum() for tensor in tensors_in(output) if tensor.requires_grad)


@contextmanager
def random_states_kept(model: nn.Module) -> Iterator[None]:
    """A context that restores the states of random generators."""
    python, numbers = random.getstate(), np.random.get_state()
    try:
        with generators_kept([home_of(model)]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)


# ---- one forward, in sections


@dataclass(eq=False)
class Section:
    """A call of a unit, and the functions on what it has made.

    Attributes:
        unit: the unit's place in the order of the units.
        leaves: what it uses of earlier sections and requires gradients.
        entered: what stands in it for tensors of earlier sections, by their identity.
        roots: what later sections use of it, by identity.
        took: the times of its actions, if they were measured.
        work: how often each operation runs in its actions.
        extra: the bytes that actions need beyond those held before or after.
        saved: what its graph keeps, by the key of the memory: the bytes, and whether a function around the
            unit's module keeps it.
        stash: the bytes that its I leaves until W.
        flops: the floating-point operations of its forward.
        before: the bytes that were there when its forward began.
        peak: the most bytes that were there in its forward.
    """

    unit: int
    leaves: list[Tensor] = field(default_factory=list)
    entered: dict[int, Tensor] = field(default_factory=dict)
    roots: dict[int, Tensor] = field(default_factory=dict)
    took: dict[str, float] = field(default_factory=dict)
    work: dict[str, Counter[Operation]] = field(default_factory=lambda: defaultdict(Counter))
    extra: dict[str, float] = field(default_factory=dict)
    saved: dict[int, tuple[int, bool]] = field(default_factory=dict)
    stash: float = 0.0
    flops: float = 0.0
    before: int = -1
    peak: int = 0

    def count_extra(self) -> None:
        """Find out what F needs beyond what it leaves, once ``saved`` is without values between units."""
        sizes = storages(self.roots.values())
        held = sum(size for size, _ in self.saved.values())
        used_later = sum(size for key, size in sizes.items() if key not in self.saved)
        if UNSEEN in self.saved:
            held = max(0, held - used_later)
            self.saved = {UNSEEN: (held, True)}
        self.extra["forward"] = float(max(0, self.peak - self.before - held - used_later))


class Use(NamedTuple):
    """A tensor of a section that later ones use."""

    tensor: Tensor
    source: Section
    users: list[Section]


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The bytes of the memory of tensors, by its key."""
    return {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}


class Gauge(Protocol):
    """Notes what sections do."""

    def __call__(self, section: Section, kind: str, *, module: bool) -> AbstractContextManager[Any]:
        """A context for an action of a section.

        Args:
            section: the section.
            kind: the name of the action.
            module: whether the unit's module runs it, or a function around that.
        """

    def enter(self, tensor: Tensor, leaves: list[Tensor]) -> Tensor:
        """What stands in a section for a tensor of another: one without history, and the leaf behind it."""


class Forward(TorchFunctionMode):
    """A forward of a model, from which each section's backward can run alone.

    Args:
        units: the modules of the units in their order, with their paths; one that stands in several places
            makes its first calls in the first of them.
        gauge: notes what sections do.

    Attributes:
        sections: in the order in which they began.
        uses: what sections use of earlier ones, by identity.
    """

    def __init__(self, units: Sequence[tuple[str, nn.Module]], gauge: Gauge) -> None:
        super().__init__()
        self.sections: list[Section] = []
        self.uses: dict[int, Use] = {}
        self._gauge = gauge
        self._places: dict[int, list[int]] = defaultdict(list)
        for place, (_, module) in enumerate(units):
            self._places[id(module)].append(place)
        self._doors = [Door(units[of[0]][1], units[of[0]][0]) for of in self._places.values()]
        self._section_of: Any = WeakIdKeyDictionary()
        self._now: Any = WeakIdKeyDictionary()
        self._busy = False

    def run(self, step: Callable[[], Any]) -> None:
        """Run the forward with its loss."""
        with opened(self._doors, self._called, {door.path for door in self._doors}), self:
            result = step()
        for tensor in tensors_in(result):
            # What comes from an earlier section travels to the last one.
            root = self._enter(self.sections[-1], tensor)
            self.sections[-1].roots[id(root)] = root

    def _called(self, door: Door, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Answer for a call of a unit."""
        if self._busy:
            return run(*args, **kwargs)
        places = self._places[id(door.module)]
        section = Section(places.pop(0) if len(places) > 1 else places[0])
        self.sections.append(section)
        if getattr(run, "__name__", "") != "forward":
            # A compiled module runs as it was written.
            run = getattr(door.module, "_orig_mod", door.module)._call_impl
        return self._do(section, run, args, kwargs, module=True)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run a function of the author's in the latest section among those of its arguments."""
        tensors = tensors_in((args, kwargs))
        known = [self._section_of[tensor] for tensor in tensors if tensor in self._section_of]
        if not known and not any(isinstance(tensor, nn.Parameter) for tensor in tensors):
            # What depends on the model's arguments alone is computed by each stage.
            return func(*args, **(kwargs or {}))
        if not self.sections:
            self.sections.append(Section(0))
        section = max(known, key=self.sections.index, default=self.sections[0])
        output = self._do(section, func, args, kwargs or {}, module=False)
        name = getattr(func, "__name__", "")
        if name.rstrip("_") != name or name == "__setitem__":
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
                with self._gauge(section, "forward", module=module):
                    output = run(*args, **kwargs)
            finally:
                self._busy = False
            for tensor in tensors_in(output):
                if not isinstance(tensor, nn.Parameter):
                    self._section_of[tensor] = section
        return output

    def _enter(self, section: Section, tensor: Tensor) -> Tensor:
        """What stands in a section for a tensor: one without history, if it is of another section."""
        tensor = self._now.get(tensor, tensor)
        source = self._section_of.get(tensor)
        if source is section or (source is None and (tensor.is_leaf or not tensor.requires_grad)):
            return tensor
        if id(tensor) not in section.entered:
            twin = section.entered[id(tensor)] = self._gauge.enter(tensor, section.leaves)
            self._section_of[twin] = section
            if source is not None:
                source.roots[id(tensor)] = tensor
                use = self.uses.setdefault(id(tensor), Use(tensor, source, []))
                use.users.append(section)
        return section.entered[id(tensor)]


def run_backward(
    split: SplitBackward, section: Section, gauge: Gauge, kinds: Sequence[str]
) -> None:
    """Run a section's backward, whole or in halves."""
    roots = [root for root in section.roots.values() if root.requires_grad]
    seeds = [torch.ones_like(root) for root in roots]
    if not roots:
        return
    if kinds == WHOLE:
        with gauge(section, "backward", module=True):
            split.full(roots, seeds, section.leaves)
        return
    with gauge(section, "input", module=True):
        pending = split.input_half(roots, seeds, section.leaves)[1]
    kept = tensors_in([(use.grad, use.value, use.arguments) for use in pending.uses])
    kept = [tensor for tensor in kept if not isinstance(tensor, nn.Parameter)]
    section.stash = float(sum(storages(kept).values()))
    del kept
    with gauge(section, "weight", module=True):
        split.weight_half(pending)


# ---- gauges


@dataclass(frozen=True)
class Stopwatch:
    """Times actions.

    Args:
        now: waits until the device has finished its work, and returns the time.
    """

    now: Callable[[], float]

    @contextmanager
    def __call__(self, section: Section, kind: str, *, module: bool) -> Iterator[None]:
        """Add the time of the body."""
        start = self.now()
        yield
        section.took[kind] = section.took.get(kind, 0.0) + self.now() - start

    def enter(self, tensor: Tensor, leaves: list[Tensor]) -> Tensor:
        """The tensor as it enters a stage."""
        entered: Tensor = enter(tensor, leaves, copies=False)
        return entered


def clock_of(home: torch.device) -> Stopwatch:
    """A clock for work on a device."""
    if home.type == "cpu":
        # If a single thread does all the work, the time of other programs need not count.
        return Stopwatch(time.thread_time if torch.get_num_threads() == 1 else time.perf_counter)

    def after_all() -> float:
        wait_for(home)
        return time.perf_counter()

    return Stopwatch(after_all)


class Count:
    """Counts the operations and bytes of actions.

    Args:
        fake: the mode of the run without data, if it has none.

    Attributes:
        saves: whether it notes what autograd saves, which forbids a backward in halves.
        unseen: the units in which nobody may look at that.
        unit: the unit that acts.
    """

    def __init__(self, fake: FakeTensorMode | None) -> None:
        self._meter, self._fake = Meter(), fake
        self.saves = True
        self.unseen: set[int] = set()
        self.unit = -1

    @contextmanager
    def __call__(self, section: Section, kind: str, *, module: bool) -> Iterator[None]:
        """Add what the body does."""
        meter, self.unit = self._meter, section.unit
        before, flops, meter.work = meter.live, meter.flops, section.work[kind]
        meter.reset_peak()
        with self._within(), ExitStack() as stack:
            if self.saves and kind == "forward" and section.unit not in self.unseen:
                note = partial(self._note_saved, section, not module)
                stack.enter_context(saved_tensors_hooks(note, lambda tensor: tensor))
            yield
        if kind != "forward":
            section.extra[kind] = float(meter.peak - max(before, meter.live))
            return
        section.flops += meter.flops - flops
        section.before = before if section.before < 0 else section.before
        section.peak = max(section.peak, meter.peak)
        if section.unit in self.unseen:
            section.saved = {UNSEEN: (max(0, meter.live - section.before), True)}

    @contextmanager
    def _within(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._fake is not None:
                for mode in (self._fake, _Answers(self._fake), FusedAttention()):
                    stack.enter_context(mode)
            stack.enter_context(self._meter)
            yield

    def enter(self, tensor: Tensor, leaves: list[Tensor]) -> Tensor:
        """A copy, whose memory goes when its graph does, and whose gradient is not kept."""
        with self._within():
            leaf = tensor.detach()
            if not tensor.requires_grad:
                return leaf.clone()
            leaves.append(leaf.requires_grad_())
            entered: Tensor = cast("Any", _Entered).apply(leaf)
            return entered

    def _note_saved(self, section: Section, around: bool, tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        # What depends on the model's arguments alone, and weights, are there anyway.
        if self._meter.allocated(key):
            _, before = section.saved.get(key, (0, False))
            section.saved[key] = tensor.untyped_storage().nbytes(), around or before
        return tensor


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return None


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
                args, kwargs = map_tensors((args, kwargs or {}), lambda t: filled(t, 1))
                output = func(*args, **kwargs)
            return map_tensors(output, lambda tensor: self._mode.from_tensor(tensor.detach()))


# ---- all runs, and what they show


class _Runs:
    """Runs of a model, each a forward and the backward of its sections.

    Args:
        model: the model.
        paths: its units.
        step: makes the forward, and the loss.
    """

    def __init__(self, model: nn.Module, paths: Sequence[str], step: Callable[[], Any]) -> None:
        self._units = [(path, model.get_submodule(path)) for path in paths]
        self._splits = [SplitBackward(module) for _, module in self._units]
        self._step = step
        self._order: list[int] = []

    def forward(self, gauge: Gauge) -> Forward:
        """A forward, with the same random numbers as all others."""
        torch.manual_seed(0)
        forward = Forward(self._units, gauge)
        forward.run(self._step)
        order = [section.unit for section in forward.sections]
        if idle := [path for place, (path, _) in enumerate(self._units) if place not in order]:
            raise UsageError(
                f"the model does not call these modules with this batch, so their costs are unknown: "
                f"{', '.join(idle[:5])}; give a batch that uses them"
            )
        self._order = self._order or order
        if order != self._order:
            raise UsageError(
                "the model calls other modules in each run with the same batch, so their costs are unknown; "
                "measure it without dropping layers"
            )
        return forward

    def backward(
        self,
        sections: Sequence[Section],
        gauge: Gauge,
        kinds: Sequence[str],
        wanted: Collection[int] | None = None,
    ) -> None:
        """The backward of the sections that are wanted, or of all."""
        for number in reversed(range(len(sections))):
            if wanted is None or number in wanted:
                split = self._splits[sections[number].unit]
                run_backward(split, sections[number], gauge, kinds)

    def timed(self, clock: Stopwatch) -> list[Section]:
        """Sections with the times of all actions; that of F is the mean of two."""
        whole, halves = self.forward(clock).sections, self.forward(clock).sections
        self.backward(halves, clock, HALVES)
        self.backward(whole, clock, WHOLE)
        for one, other in zip(whole, halves, strict=True):
            mean = (one.took["forward"] + other.took["forward"]) / 2
            one.took = {**other.took, **one.took, "forward": mean}
        return whole

    def counted(self, gauge: Count) -> Counts:
        """Sections with all but measured times; of those that are alike, only one has a backward."""
        while True:
            try:
                forward = self.forward(gauge)
                break
            except RuntimeError as error:
                # torch.func forbids hooks on what is saved while it differentiates.
                if "saved tensor hooks" not in str(error) or gauge.unit in gauge.unseen:
                    raise
                gauge.unseen.add(gauge.unit)
        values = self._values([*forward.uses.values()])
        sections, first = forward.sections, dict[Any, int]()
        for section in sections:
            section.count_extra()
        alike = [first.setdefault(self._kind(one), n) for n, one in enumerate(sections)]
        self.backward(sections, gauge, WHOLE, {*alike})
        gauge.saves = False
        halves = self.forward(gauge).sections
        self.backward(halves, gauge, HALVES, {*alike})
        for number in {*alike}:
            one, other = sections[number], halves[number]
            one.stash, one.extra = other.stash, {**other.extra, **one.extra}
            one.work = {**other.work, **one.work}
        return Counts(sections, alike, values)

    def _values(self, uses: Sequence[Use]) -> tuple[ValueCost, ...]:
        """The values between units; takes them out of what graphs of sections hold by themselves.

        Tensors of one unit that the same units use are one value.
        """
        groups: dict[tuple[int, tuple[int, ...], bool], list[Use]] = defaultdict(list)
        kept: dict[int, set[int]] = {}
        held: list[tuple[Section, int]] = []
        for tensor, source, users in uses:
            if all(user.unit == source.unit for user in users):
                continue
            keys = [
                (one, storage_key(one.entered.get(id(tensor), tensor))) for one in (source, *users)
            ]
            kept[id(tensor)] = {one.unit for one, key in keys if key in one.saved}
            held += keys
            # A module that is called twice may use what a later one made: then both are in one stage.
            if targets := tuple(sorted({user.unit for user in users if user.unit > source.unit})):
                groups[source.unit, targets, tensor.requires_grad].append(
                    Use(tensor, source, users)
                )
        for section, key in held:
            section.saved.pop(key, None)
        values: list[ValueCost] = []
        for (unit, targets, gradient), of in sorted(groups.items(), key=lambda group: group[0]):
            keepers = sorted(set[int]().union(*(kept[id(use.tensor)] for use in of)))
            size = float(sum(use.tensor.nbytes for use in of))
            name = f"{self._units[unit][0]}:{len(values)}"
            values.append(ValueCost(name, unit, targets, size, gradient, tuple(keepers)))
        return tuple(values)

    def _kind(self, section: Section) -> Any:
        """A key that is the same for sections that cost the same."""
        module = self._units[section.unit][1]
        weights = [(weight.shape, weight.requires_grad) for weight in module.parameters()]
        sizes, work = sorted(section.saved.values()), sorted(section.work["forward"].items())
        ends, extra = (len(section.leaves), len(section.roots)), section.extra["forward"]
        return type(module), *weights, *ends, section.flops, extra, *sizes, *work

    def cost(
        self,
        unit: int,
        counts: Counts,
        runs: Sequence[Sequence[Section]],
        once: Mapping[str, float],
    ) -> UnitCost:
        """What a unit costs.

        Args:
            unit: the place of the unit.
            counts: what was counted.
            runs: the sections of runs that were timed.
            once: the times that actions take with hardly any work, which a stage spends once.
        """
        path, module = self._units[unit]
        mine, ran = counts.sections_of(unit), counts.which_ran(unit)
        took = [{kind: counts.times(n, kind, runs) for kind in KINDS} for n in mine]
        saved = [one for n in mine for one in counts.sections[n].saved.values()]
        tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}.values()
        return UnitCost(
            path,
            **{kind: sum(median(each[kind]) for each in took) for kind in KINDS},
            **{f"{kind}_once": seconds for kind, seconds in once.items()},
            spread=max(_spread(times) for each in took for times in each.values()),
            held=float(sum(size for size, _ in saved)),
            around=float(sum(size for size, is_around in saved if is_around)),
            stash=sum(section.stash for section in ran),
            **{f"{kind}_extra": max(one.extra.get(kind, 0.0) for one in ran) for kind in KINDS},
            parameters=sum(tensor.nbytes for tensor in tensors),
            trained=sum(tensor.nbytes for tensor in tensors if tensor.requires_grad),
            numbers=count_parameters(module),
            flops=sum(section.flops for section in ran),
        )


class Counts(NamedTuple):
    """What was counted.

    Attributes:
        sections: the sections of a forward.
        alike: for each, the first that is like it, which has had a backward.
        values: the values between units.
    """

    sections: list[Section]
    alike: list[int]
    values: tuple[ValueCost, ...]

    def sections_of(self, unit: int) -> list[int]:
        """The numbers of a unit's sections."""
        return [n for n, section in enumerate(self.sections) if section.unit == unit]

    def which_ran(self, unit: int) -> list[Section]:
        """For each of a unit's sections, the one like it that has had a backward."""
        return [self.sections[self.alike[n]] for n in self.sections_of(unit)]

    def work(self, unit: int) -> Work:
        """How often each operation runs in the actions of a unit."""
        work: dict[str, Counter[Operation]] = {kind: Counter() for kind in KINDS}
        for section in self.which_ran(unit):
            # A section that no later one uses has no backward.
            for kind, operations in section.work.items():
                work[kind] += operations
        return work

    def times(self, number: int, kind: str, runs: Sequence[Sequence[Section]]) -> list[float]:
        """The times of an action in all sections that are like one."""
        like = [n for n, first in enumerate(self.alike) if first == self.alike[number]]
        took = [run[n].took for run in runs for n in like]
        return [each[kind] for each in took if kind in each] or [0.0]


def _spent_once(clock: Stopwatch) -> dict[str, float]:
    """The times of backward and its halves with hardly any work in them."""
    module = nn.Linear(1, 1, device="cpu")
    split, sections = SplitBackward(module), [Section(0) for _ in range(30)]
    for section in sections:
        for kinds in (WHOLE, HALVES):
            section.leaves = [torch.ones(1, 1, requires_grad=True, device="cpu")]
            section.roots = {0: module(section.leaves[0])}
            run_backward(split, section, clock, kinds)
    return {kind: median(section.took[kind] for section in sections) for kind in KINDS[1:]}


def _spread(times: Sequence[float]) -> float:
    """Half the interquartile range, as a share of the median."""
    if len(times) < 3 or not median(times):
        return 0.0
    low, _, high = quantiles(times, n=4)
    return (high - low) / 2 / median(times)
