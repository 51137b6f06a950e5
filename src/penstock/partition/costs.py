"""The costs of a model's units: the one measurement behind ``balance=``, `table` and plans.

One trace of the model's forward shows which calls and functions belong to a unit, and which values travel
between units. Then each unit runs alone: forward, backward in halves and backward whole. Without data this
happens on fake tensors, and a `Meter` counts operations and bytes; with data the same runs are timed. Of
units that are alike, only one runs.
"""

from __future__ import annotations

import random
import re
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import groupby
from statistics import median, quantiles
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from penstock.backward import SplitBackward
from penstock.errors import InternalError, PartitionError, UsageError
from penstock.partition.base import count_parameters
from penstock.partition.held import Held, look_at_call
from penstock.partition.meter import FusedAttention, Meter, Rate
from penstock.partition.seen import Door
from penstock.partition.trace import Event, Trace, Value, as_written, home_of, record
from penstock.partition.units import once
from penstock.values import located, map_tensors, plain_in, tensors_in

Measure = Literal["time", "flops", "parameters", "memory"]
REPEATS = 3
"""How often ``balance="time"`` measures each unit, after a first run that does not count."""
COPIES = 4
"""The copies of a trained weight in memory: itself, its gradient and the two moments of AdamW."""
Loss = Callable[[Any, Any], Any]
"""Computes the scalar that backward starts from, from the model's output and a target."""


@dataclass(frozen=True)
class UnitCost:
    """What one unit costs for one microbatch, in seconds and bytes.

    Args:
        path: The path of its module.
        forward: The time of F.
        input: The time of I, which computes the gradients of its inputs.
        weight: The time of W, which computes the gradients of its weights.
        backward: The time of B, which computes both.
        input_once: The part of I that a stage spends once, however many units it has.
        weight_once: The same for W.
        spread: Half the interquartile range of its times, as a share of their median; 0 if predicted.
        held: The bytes that F leaves until I or B, apart from the values that units pass on.
        around: The part of `held` from operations around its module, which checkpointing does not free.
        stash: The bytes that I leaves until W.
        forward_extra: The bytes that F needs while it runs, beyond those held before or after it.
        input_extra: The same for I.
        weight_extra: The same for W.
        backward_extra: The same for B.
        parameters: The bytes of its weights and buffers.
        trained: How many of these bytes get gradients.
        numbers: The number of elements in its weights.
        flops: The floating-point operations of its forward.
    """

    path: str
    forward: float
    input: float
    weight: float
    backward: float
    input_once: float = 0.0
    weight_once: float = 0.0
    spread: float = 0.0
    held: float = 0.0
    around: float = 0.0
    stash: float = 0.0
    forward_extra: float = 0.0
    input_extra: float = 0.0
    weight_extra: float = 0.0
    backward_extra: float = 0.0
    parameters: int = 0
    trained: int = 0
    numbers: int = 0
    flops: float = 0.0

    def by(self, measure: Measure) -> float:
        """The number by which stages are balanced.

        ``"memory"`` counts trained weights four times, for their gradients and the state of an optimizer like
        AdamW, and adds what forward holds for one microbatch.
        """
        numbers: dict[Measure, float] = {
            "time": self.forward + self.backward,
            "flops": self.flops,
            "parameters": float(self.numbers),
            "memory": self.parameters + (COPIES - 1) * self.trained + self.held,
        }
        return numbers[measure]


@dataclass(frozen=True)
class ValueCost:
    """Tensors that one unit makes, and that the same later units use.

    Args:
        name: Its name, unique among the values.
        source: The unit that makes it.
        targets: The units that use it, in ascending order.
        bytes: Its size in bytes.
        gradient: Whether a gradient comes back.
        kept: The units whose graphs keep it until backward.
    """

    name: str
    source: int
    targets: tuple[int, ...]
    bytes: float
    gradient: bool = True
    kept: tuple[int, ...] = ()


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
        repeats: How often times are measured on the model's device, after a run that does not count. If 0,
            nothing runs with data, and times come from `rate`.

    Raises:
        UsageError: A unit is not called with these arguments, or times of a model without data are wanted.
    """
    if repeats and any(parameter.is_meta for parameter in model.parameters()):
        raise UsageError(
            "the times of a model on the meta device cannot be measured; balance it by flops, parameters or "
            'memory, or predict its times: penstock.plan.predict(model, ..., device="h100")'
        )
    _check_not_scripted(model)
    home = home_of(model)
    with _random_states_kept(home), torch.enable_grad(), _left_as_it_was(model):
        doors = [Door(model.get_submodule(path), path) for path in once(model, paths)]
        call = tuple(args), dict(kwargs or {})
        has_data = not any(tensor.is_meta for tensor in tensors_in(call))
        trace = record(model, model, doors, call, call if has_data else None)
        units, values = _shared_out(trace, model, paths)
        _add_loss(units[-1], trace, loss or _sum_up, _on(home, target))
        _put_in(model, _sharing_data if repeats else _fake(trace.mode, home))
        replay = _Replay(trace, model)
        if not repeats:
            return _costs(units, values, _predicted(units, replay, trace.mode, rate))
        return _costs(units, values, _timed(units, replay, home, repeats))


def _predicted(
    units: Sequence[_Unit], replay: _Replay, mode: FakeTensorMode, rate: Rate | None
) -> list[_Probe]:
    """The probes of the units, run without data."""

    def fake(tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)

    for event in [event for unit in units for event in unit.events]:
        event.call = map_tensors(event.call, fake)
    with as_written(), mode, FusedAttention():
        return _probes(units, replay, rate, None)


def _timed(
    units: Sequence[_Unit], replay: _Replay, home: torch.device, repeats: int
) -> list[_Probe]:
    """The probes of the units, run with data and timed."""
    clock = _clock(home)
    with as_written():
        replay.run_all()
        probes = _probes(units, replay, None, clock)
        # In turns: the speed of a device varies, and its caches still hold what ran just before.
        for probe in list(dict.fromkeys(probes)) * repeats:
            probe.run(probe.times)
        if home.type == "cpu":
            # On a GPU, these times hide behind the work launched before.
            once = _spent_once(clock)
            for probe in probes:
                probe.once = once
    return probes


def _spent_once(clock: Callable[[], float]) -> dict[str, float]:
    """The times of I and W with hardly any work in them, which a stage spends once for all its units."""
    module = nn.Linear(1, 1)
    split, times = SplitBackward(module), defaultdict[str, list[float]](list)
    for _ in range(10 * REPEATS):
        leaf = torch.ones(1, 1, requires_grad=True)
        output, gradient = module(leaf), torch.ones(1, 1)
        start = clock()
        _, pending = split.input_half([output], [gradient], [leaf])
        middle = clock()
        split.weight_half(pending)
        times["input_once"].append(middle - start)
        times["weight_once"].append(clock() - middle)
    return {kind: median(several) for kind, several in times.items()}


def _costs(
    units: Sequence[_Unit], values: Sequence[ValueCost], probes: Sequence[_Probe]
) -> tuple[tuple[UnitCost, ...], tuple[ValueCost, ...]]:
    """The costs of the units, and the values with the units whose graphs keep them."""
    keepers: dict[str, list[int]] = defaultdict(list)
    for number, (unit, probe) in enumerate(zip(units, probes, strict=True)):
        # The probe may have run another unit that is alike; the places are the same.
        for name in {unit.names[unit.ends[place]] for place in probe.kept}:
            keepers[name].append(number)
    costs = (replace(p.cost(), path=unit.path) for unit, p in zip(units, probes, strict=True))
    kept = (replace(value, kept=tuple(keepers[value.name])) for value in values)
    return tuple(costs), tuple(kept)


def weigh_units(
    model: nn.Module,
    paths: Sequence[str],
    balance: str | Sequence[float] | None,
    example: tuple[Sequence[Any], Mapping[str, Any]] | None = None,
) -> list[float]:
    """The weights of units, by which stages are balanced.

    Args:
        model: The whole model.
        paths: The units in the order of their calls.
        balance: A number for each unit, or the measure: ``"parameters"``, which is the default, ``"flops"``,
            ``"memory"`` or ``"time"``.
        example: The model's arguments for one microbatch; not needed for parameters.

    Raises:
        PartitionError: There is not one number for each unit, or there is no example to measure with.
        UsageError: There is no such measure, or the times of a model without data are wanted.
    """
    if isinstance(balance, Sequence) and not isinstance(balance, str):
        if len(balance) != len(paths):
            raise PartitionError(
                f"balance= has {len(balance)} weights for {len(paths)} modules: {', '.join(paths)}"
            )
        return [float(weight) for weight in balance]
    if balance is None or balance == "parameters":
        return [float(count_parameters(model.get_submodule(path))) for path in paths]
    if balance not in get_args(Measure):
        raise UsageError(f"balance={balance!r}: must be one of {', '.join(get_args(Measure))}")
    if example is None:
        raise PartitionError(
            f"balance={balance!r} needs a call of the model to measure: give example=(args, kwargs)"
        )
    repeats = REPEATS if balance == "time" else 0
    units, _ = measure_units(model, paths, *example, repeats=repeats)
    return [unit.by(balance) for unit in units]  # type: ignore[arg-type] # checked above


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
    """Puts other tensors in place of the model's own."""
    known: dict[int, Tensor] = {}

    def put(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            known[id(tensor)] = stand_in(tensor)
        return known[id(tensor)]

    for module in model.modules():
        state = vars(module)
        for name, value in list(state.items()):
            if name in ("_parameters", "_buffers"):
                value.update(map_tensors(dict(value), put))
            elif name != "_modules" and tensors_in(value):
                state[name] = map_tensors(value, put)


def _check_not_scripted(model: nn.Module) -> None:
    for path, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise UsageError(
                f"{path!r} is scripted, so its costs cannot be measured: balance by parameters, give a "
                "number for each module, or measure the module as it was before torch.jit.script"
            )


def _on(device: torch.device, value: Any) -> Any:
    """A value with its tensors on a device; meta tensors become ones."""
    return map_tensors(
        value,
        lambda t: torch.ones(t.shape, dtype=t.dtype, device=device) if t.is_meta else t.to(device),
    )


def _sharing_data(tensor: Tensor) -> Tensor:
    """A parameter with the same data and its own gradient; a copy of any other tensor."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach(), tensor.requires_grad)
    return tensor.detach().clone()


def _fake(mode: FakeTensorMode, device: torch.device) -> Callable[[Tensor], Tensor]:
    def fake(tensor: Tensor) -> Tensor:
        with mode:
            twin = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
            )
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(twin, tensor.requires_grad)
        return twin.requires_grad_(tensor.requires_grad)

    return fake


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


def _clock(home: torch.device) -> Callable[[], float]:
    """A function that waits for the device to finish its work, and returns the time."""
    if home.type == "cpu":
        # If a single thread does all the work, the time of other programs need not count.
        return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def after_all() -> float:
        torch.accelerator.synchronize(home)
        return time.perf_counter()

    return after_all


# ---- units: the events of a trace that belong to each, and the values between them


@dataclass
class _Unit:
    """A unit and its events, which can run again with other tensors in place of its inputs.

    Attributes:
        inputs: The values of the trace that it uses from other units.
        outputs: The values that other units use from it; for the last unit, the loss.
        names: For each value, the name of the `ValueCost` that contains it.
    """

    path: str
    module: nn.Module
    events: list[Event] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)

    @property
    def ends(self) -> list[int]:
        """The inputs and outputs."""
        return [*self.inputs, *self.outputs]


def _shared_out(
    trace: Trace, model: nn.Module, paths: Sequence[str]
) -> tuple[list[_Unit], list[ValueCost]]:
    """The units with their events, and the values between them.

    Raises:
        UsageError: A unit is not called.
    """
    units = [_Unit(path, model.get_submodule(path)) for path in paths]
    owners = _owners(trace, model, units)
    for event, owner in zip(trace.events, owners, strict=True):
        units[owner].events.append(event)
    idle = [unit.path for unit in units if not any(event.is_unit for event in unit.events)]
    if idle:
        raise UsageError(
            f"the model does not call these modules with this batch, so their costs are unknown: "
            f"{', '.join(idle[:5])}; give a batch that uses them"
        )
    return units, _link(trace, owners, units)


def _owners(trace: Trace, model: nn.Module, units: Sequence[_Unit]) -> list[int]:
    """The unit of each event; a function belongs to the latest unit among those of its inputs."""
    places: dict[int, list[int]] = defaultdict(list)
    for index, unit in enumerate(units):
        places[id(unit.module)].append(index)
    owners: list[int] = []

    def home(value: Value) -> int:
        if value.event is not None:
            return owners[value.event]
        name = value.parameter or ""
        holders = (i for i, unit in enumerate(units) if name.startswith(f"{unit.path}."))
        return next(holders, 0)

    for event in trace.events:
        if event.is_unit:
            # If a module is listed twice, its first call goes to its first unit, and so on.
            mine = places[id(model.get_submodule(event.what))]
            owners.append(mine[min(event.number, len(mine) - 1)])
        else:
            owners.append(max((home(trace.values[n]) for _, n in event.inputs), default=0))
    return owners


def _link(trace: Trace, owners: Sequence[int], units: Sequence[_Unit]) -> list[ValueCost]:
    """Sets the units' inputs and outputs; tensors of one unit that the same units use are one value."""
    users: dict[int, set[int]] = {number: {len(units) - 1} for number in trace.slots if number}
    for event, owner in zip(trace.events, owners, strict=True):
        for _, number in event.inputs:
            users.setdefault(number, set()).add(owner)
    groups: dict[tuple[int, tuple[int, ...], bool], list[int]] = defaultdict(list)
    for number, using in users.items():
        value = trace.values[number]
        if value.event is None:
            continue
        source = owners[value.event]
        for user in using - {source}:
            units[user].inputs.append(number)
        # A module that is called twice may use what a later one made: then both are in one stage.
        if later := tuple(sorted(user for user in using if user > source)):
            groups[source, later, value.requires_grad].append(number)
    values: list[ValueCost] = []
    for (source, targets, gradient), numbers in sorted(groups.items(), key=lambda each: each[0]):
        name = f"{units[source].path}:{len(values)}"
        size = float(sum(trace.values[number].tensor.nbytes for number in numbers))
        values.append(ValueCost(name, source, targets, size, gradient))
        units[source].outputs += numbers
        for end in (source, *targets):
            units[end].names.update(dict.fromkeys(numbers, name))
    return values


def _add_loss(unit: _Unit, trace: Trace, loss: Loss, target: Any) -> None:
    """Appends the loss of the model's output to the last unit's events."""
    call: tuple[Any, Any] = ((trace.output, target), {})
    ends = [
        (place, number)
        for place, number in zip(located(call), trace.slots, strict=False)
        if number is not None
    ]
    number = len(trace.values)
    unit.events.append(Event(loss, "the loss", "", inputs=ends, slots=[number], call=call))
    unit.outputs = [number]


def _sum_up(output: Any, _: Any) -> Any:
    return sum(tensor.float().sum() for tensor in tensors_in(output) if tensor.requires_grad)


class _Replay:
    """Runs events of a trace again, with the modules and parameters that the model has now.

    Attributes:
        values: The tensors of the trace's values, by number; without data until `run_all`.
    """

    def __init__(self, trace: Trace, model: nn.Module) -> None:
        self._trace, self._model = trace, model
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.values = {
            number: named.get(trace.values[value.root].parameter or "", value.tensor)
            for number, value in enumerate(trace.values)
        }

    def run_all(self) -> None:
        """Computes the values with data."""
        for event in self._trace.events:
            now = dict(self.values)
            self.run(event, now)
            for number, tensor in now.items():
                if tensor is not self.values[number]:
                    # A copy of a leaf: code may change it in place, which a leaf forbids.
                    leaf = tensor.detach().requires_grad_(tensor.requires_grad)
                    self.values[number] = leaf.clone()

    def run(self, event: Event, now: dict[int, Tensor]) -> None:
        """Runs an event on the values in ``now``, and adds its results and changes there."""
        if event.objects is not None:
            event.objects.restore()
        places = located(event.call)
        put = {id(places[place]): now[number] for place, number in event.inputs}
        args, kwargs = map_tensors(event.call, lambda tensor: put.get(id(tensor), tensor))
        run = event.what
        if event.is_unit:
            module = self._model.get_submodule(event.what)
            run = getattr(module, "_orig_mod", module)._call_impl
        elif isinstance(run, type) and issubclass(run, Function):
            run = run.apply
        things = look_at_call(args, kwargs) if event.left else None
        results = tensors_in(run(*args, **kwargs))
        if things is not None:
            changes = {thing.place: thing.change() for thing in things.changed()}
            results += tensors_in([changes.get(place) for place in event.left])
        for slot, tensor in zip(event.slots, results, strict=True):
            if isinstance(slot, int):
                now[slot] = tensor
        for change in event.changes:
            if change.argument is not None:
                now[change.new] = put.get(id(places[change.argument]), places[change.argument])
            elif change.old is not None:
                now[change.new] = now[change.old]


# ---- units that are alike


_POSITIONS = {"layer_idx", "layer_number", "layer_id", "index", "idx", "training"}
"""Attributes that differ between layers that are otherwise alike."""


def _kind(unit: _Unit) -> Any:
    """A key that is the same for units that cost the same."""
    calls = [
        (
            None if event.is_unit else event.what,
            _shapes(tensors_in(event.call)),
            *plain_in(event.call),
        )
        for event in unit.events
    ]
    parts = [
        (
            type(part),
            part.extra_repr(),
            *((n, v) for n, v in vars(part).items() if type(v) in _PLAIN and n not in _POSITIONS),
            _shapes(part.parameters(recurse=False)),
        )
        for part in unit.module.modules()
    ]
    return *calls, *parts, len(unit.inputs), len(unit.outputs)


_PLAIN = {int, float, str, bool}


def _shapes(tensors: Iterable[Tensor]) -> tuple[Any, ...]:
    return tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors)


# ---- running one unit


class _Probe:
    """Runs a unit alone, and finds its memory, and its times by the clock or else by the rate.

    Attributes:
        times: The times of F, I, W and B, in the order of the runs.
        once: The times that I and W spend once in a stage.
        kept: The places of those of the unit's ends that its graph keeps.
    """

    def __init__(
        self,
        unit: _Unit,
        replay: _Replay,
        rate: Rate | None,
        clock: Callable[[], float] | None,
    ) -> None:
        self._unit, self._replay = unit, replay
        self._split = SplitBackward(unit.module)
        self.times: dict[str, list[float]] = defaultdict(list)
        self.once: dict[str, float] = {}
        self._stash = 0.0
        self._extra: dict[str, float] = defaultdict(float)
        self._held, self.kept, self._flops = self._hold()
        self._around = self._left_around()
        # The first run allocates the gradients, which exist already in all steps but the first.
        self._clock = clock or (lambda: 0.0)
        self.run(defaultdict(list))
        with Meter(rate) as meter:
            self._clock = clock or (lambda: meter.seconds)
            self.run(self.times if clock is None else defaultdict(list), meter)

    def _enter(self) -> tuple[list[Tensor], list[Tensor]]:
        """Fresh inputs: leaves, and copies of them that the unit may change in place."""
        tensors = [self._replay.values[number] for number in self._unit.inputs]
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        return leaves, [leaf.clone() for leaf in leaves]

    def _results(self, entered: Sequence[Tensor], *, dropping: bool = False) -> list[Tensor]:
        """Runs the events; returns the outputs. If ``dropping``, the module keeps nothing for backward."""
        now = {**self._replay.values, **dict(zip(self._unit.inputs, entered, strict=True))}
        for event in self._unit.events:
            drops = dropping and event.is_unit
            with saved_tensors_hooks(lambda _: None, _never) if drops else nullcontext():
                self._replay.run(event, now)
        return [now[number] for number in self._unit.outputs]

    def run(self, times: dict[str, list[float]], meter: Meter | None = None) -> None:
        """Runs F, I and W, and then F and B."""
        meter = meter or Meter()
        base = meter.live
        leaves, outputs, gradients = self._forward(times, meter)
        with self._noted("input", times, meter):
            # A stage sends the gradients of the inputs away, so they are dropped.
            pending = self._split.input_half(outputs, gradients, leaves)[1] if outputs else None
            outputs, gradients = [], []
        self._stash = max(self._stash, float(meter.live - base))
        with self._noted("weight", times, meter):
            if pending is not None:
                self._split.weight_half(pending)
            leaves, pending = [], None
        leaves, outputs, gradients = self._forward(times, meter)
        with self._noted("backward", times, meter):
            if outputs:
                torch.autograd.backward(outputs, gradients)
            leaves, outputs, gradients = [], [], []

    def _forward(self, times: dict[str, list[float]], meter: Meter) -> tuple[list[Tensor], ...]:
        """Runs F; returns the leaves behind the inputs, and the outputs with their gradients."""
        leaves, entered = self._enter()
        with self._noted("forward", times, meter):
            outputs = [tensor for tensor in self._results(entered) if tensor.requires_grad]
            entered = []
        return leaves, outputs, [torch.ones_like(tensor) for tensor in outputs]

    @contextmanager
    def _noted(self, kind: str, times: dict[str, list[float]], meter: Meter) -> Iterator[None]:
        """Notes the time of the body, and its peak memory beyond that before or after it."""
        before = meter.live
        meter.reset_peak()
        start = self._clock()
        yield
        times[kind].append(self._clock() - start)
        extra = float(meter.peak - max(before, meter.live))
        self._extra[f"{kind}_extra"] = max(self._extra[f"{kind}_extra"], extra)

    def _hold(self, *, dropping: bool = False) -> tuple[float, list[int], float]:
        """The bytes that its graph keeps besides values, the values that it keeps, and F's operations."""
        with Meter() as meter:
            _, entered = self._enter()
            outputs = self._results(entered, dropping=dropping)
            graph = [tensor.grad_fn for tensor in outputs]
            # The loss is not a value.
            ends = enumerate(zip(self._unit.ends, (*entered, *outputs), strict=True))
            refs = [
                (place, weakref.ref(tensor.untyped_storage()), tensor.nbytes)
                for place, (number, tensor) in ends
                if number in self._unit.names
            ]
            del entered, outputs, ends
            alive = {id(s): size for _, ref, size in refs if (s := ref()) is not None}
            kept = [place for place, ref, _ in refs if ref() is not None]
            held = meter.live - sum(alive.values())
            del graph
        return max(float(held), 0.0), kept, float(meter.flops)

    def _left_around(self) -> float:
        try:
            return min(self._hold(dropping=True)[0], self._held)
        except RuntimeError as error:
            # torch.func forbids such hooks while it differentiates.
            if "saved tensor hooks" not in str(error):
                raise
            return self._held

    def cost(self) -> UnitCost:
        """The costs that the runs have shown."""
        module = self._unit.module
        held = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}.values()
        return UnitCost(
            path=self._unit.path,
            **{kind: median(times) for kind, times in self.times.items()},
            **self.once,
            spread=max(_spread(self.times[kind]) for kind in ("forward", "input", "backward")),
            held=self._held,
            around=self._around,
            stash=self._stash,
            **self._extra,
            parameters=sum(tensor.nbytes for tensor in held),
            trained=sum(tensor.nbytes for tensor in held if tensor.requires_grad),
            numbers=count_parameters(module),
            flops=self._flops,
        )


def _never(_: Any) -> Tensor:
    raise InternalError("no backward follows this forward")


def _probes(
    units: Sequence[_Unit],
    replay: _Replay,
    rate: Rate | None,
    clock: Callable[[], float] | None,
) -> list[_Probe]:
    """A probe for each unit; units that are alike share one."""
    known: dict[Any, _Probe] = {}
    probes = []
    for unit in units:
        kind = unit.path if unit is units[-1] else _kind(unit)
        if kind not in known:
            known[kind] = _Probe(unit, replay, rate, clock)
        probes.append(known[kind])
    return probes


def _spread(times: Sequence[float]) -> float:
    if len(times) < 3 or not median(times):
        return 0.0
    low, _, high = quantiles(times, n=4)
    return (high - low) / 2 / median(times)


# ---- a cut as a table: what each stage holds, computes and sends


@dataclass(frozen=True)
class StageRow:
    """A stage in the table, for one microbatch.

    Args:
        modules: The paths of its units; neighbours that differ only in their number are merged.
        parameters: The number of elements in its weights.
        held: The bytes of its weights and buffers.
        flops: The floating-point operations of its forward.
        saved: The bytes that forward holds for backward, apart from what travels.
        sent: The bytes of the values that it sends to other stages.
        forward: The seconds of its forward, or 0 where time was not measured.
        backward: The seconds of its backward, likewise.
    """

    modules: tuple[str, ...]
    parameters: int
    held: int
    flops: float
    saved: float
    sent: float
    forward: float
    backward: float


@dataclass(frozen=True)
class StageTable:
    """A row for each stage; ``str`` renders it as text."""

    rows: tuple[StageRow, ...]

    def __str__(self) -> str:
        head = ["stage", "modules", "parameters", "held", "flops", "saved", "sent"]
        timed = any(row.forward for row in self.rows)
        lines = [head + (["forward", "backward"] if timed else [])]
        for index, row in enumerate(self.rows):
            numbers = [row.parameters, row.held, row.flops, row.saved, row.sent]
            times = [f"{t * 1e3:.2f} ms" for t in (row.forward, row.backward)] if timed else []
            lines.append([str(index), ", ".join(row.modules), *map(_short, numbers), *times])
        return aligned(lines, words=(1,))


def aligned(rows: Sequence[Sequence[str]], words: Collection[int]) -> str:
    """Rows of cells as lines: columns of words are aligned to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in words else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def table(
    model: nn.Module,
    stages: Sequence[Sequence[str]],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    repeats: int = 0,
) -> StageTable:
    """What each stage of a cut holds, computes and sends for one microbatch.

    Args:
        model: The whole model.
        stages: For each stage the paths of its modules, in the order of their calls.
        args: The model's positional arguments for one microbatch.
        kwargs: Its arguments by name.
        repeats: How often times are measured; by default they are not, and the model needs no data.

    Raises:
        UsageError: As for `measure_units`.
    """
    paths = [path for run in stages for path in run]
    units, values = measure_units(model, paths, args, kwargs, repeats=repeats)
    stage_of = [stage for stage, run in enumerate(stages) for _ in run]
    rows = []
    for stage, run in enumerate(stages):
        mine = [unit for unit, home in zip(units, stage_of, strict=True) if home == stage]
        sent = (
            value.bytes
            for value in values
            if stage_of[value.source] == stage and {stage_of[t] for t in value.targets} != {stage}
        )
        rows.append(
            StageRow(
                tuple(spans(run)),
                sum(unit.numbers for unit in mine),
                sum(unit.parameters for unit in mine),
                sum(unit.flops for unit in mine),
                sum(unit.held for unit in mine),
                sum(sent),
                sum(unit.forward for unit in mine) if repeats else 0.0,
                sum(unit.backward for unit in mine) if repeats else 0.0,
            )
        )
    return StageTable(tuple(rows))


def spans(paths: Iterable[str]) -> list[str]:
    """Paths, with neighbours that differ only in the last number merged: ``blocks.0-3``."""
    runs = [list(run) for _, run in groupby(paths, lambda path: re.sub(r"\d+$", "", path))]
    return [r[0] if len(r) == 1 else f"{r[0]}-{re.sub('.*[^0-9]', '', r[-1])}" for r in runs]


def _short(number: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}P"
