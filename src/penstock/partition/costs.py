"""What the units of a model cost: the one measurer behind ``balance=``, `table` and plans.

The model runs once, and each call of a unit is recorded with what the author's code computes around it. After
that each unit runs alone: forward, backward in halves and backward whole. Without data this happens on fake
tensors, and a `Meter` counts operations and bytes; with data the same runs are timed. Of units that are alike
one runs.
"""

from __future__ import annotations

import copy
import random
import re
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from statistics import median, quantiles
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

# torch has no public name for its pytrees. As of torch 2.13.
from torch.utils._pytree import tree_leaves, tree_map

from penstock.backward import SplitBackward
from penstock.errors import InternalError, PartitionError, UsageError
from penstock.partition.meter import FusedAttention, Meter, Rate

Measure = Literal["time", "flops", "parameters", "memory"]
REPEATS = 3
"""How often ``balance="time"`` measures each unit, after a first run that does not count."""
COPIES = 4
"""A trained weight counts so often in memory: itself, its gradient and the two moments of AdamW."""
Loss = Callable[[Any, Any], Any]
"""Makes the scalar that backward starts from, of the model's output and a target."""


@dataclass(frozen=True)
class UnitCost:
    """What one unit costs for one microbatch, in seconds and bytes.

    Args:
        path: The path of its module.
        forward: The time of F.
        input: The time of I, which computes the gradients of its inputs.
        weight: The time of W, which computes the gradients of its weights.
        backward: The time of B, which computes both.
        spread: Half of the range between the quartiles of its times, as a share of these; 0 if predicted.
        held: What F leaves until I or B, apart from the values that units hand on.
        around: The part of this that operations around its module leave, which checkpointing does not free.
        stash: What I leaves until W.
        forward_extra: What F needs while it runs, beyond what is held before or after it.
        input_extra: The same for I.
        weight_extra: The same for W.
        backward_extra: The same for B.
        parameters: The bytes of its weights and buffers.
        trained: How many of these bytes get gradients.
        numbers: How many numbers its weights hold.
        flops: The floating-point operations of its forward.
    """

    path: str
    forward: float
    input: float
    weight: float
    backward: float
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
    """Tensors that one unit makes and the same later units use.

    Args:
        name: Its name, unique among the values.
        source: The unit that makes it.
        targets: The units that use it, in ascending order.
        bytes: Its size.
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
    """Finds what the units of a model cost for one microbatch.

    A copy of the model runs, so that its gradients, buffers, attributes and hooks stay as they are, and the
    states of random generators are restored.

    Args:
        model: Any module. It needs data only if time is measured.
        paths: The units in the order of their calls.
        args: The model's positional arguments for one microbatch; without `repeats` only their shapes count.
        kwargs: Its arguments by name.
        target: The second argument of `loss`.
        loss: Makes the scalar that backward starts from; it counts for the last unit. By default the sum of
            the output.
        rate: How long a device takes for an operation, to predict times without data.
        repeats: How often times are measured on the model's device, after a run that does not count. With 0
            nothing runs with data, and times are those of `rate`.

    Raises:
        UsageError: A unit is not called with these arguments, or times of a model without data are wanted.
    """
    if repeats and any(parameter.is_meta for parameter in model.parameters()):
        raise UsageError(
            "the times of a model on the meta device cannot be measured; balance it by flops, parameters or "
            'memory, or predict its times: penstock.plan.predict(model, ..., device="h100")'
        )
    call = tuple(args), dict(kwargs or {}), target
    home = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with _random_states_kept(home):
        if not repeats:
            units, values = _record_without_data(model, paths, call, loss)
            with FusedAttention():
                return _costs(units, values, _probes(units, rate, None))
        args, kwargs, target = tree_map(
            lambda leaf: leaf.to(home) if isinstance(leaf, Tensor) else leaf, call
        )
        copied = _copy_model(model, _sharing_data)
        units, values = record_units(copied, paths, args, kwargs, target=target, loss=loss)
        probes = _probes(units, None, _clock(home))
        # In turns: the speed of a device varies, and what ran just before is still in its caches.
        for _ in range(repeats):
            for probe in {id(probe): probe for probe in probes}.values():
                probe.run(probe.times)
        return _costs(units, values, probes)


def _costs(
    units: Sequence[UnitRun], values: Sequence[ValueCost], probes: Sequence[_Probe]
) -> tuple[tuple[UnitCost, ...], tuple[ValueCost, ...]]:
    """The costs of the units, and the values with the units whose graphs keep them."""
    keepers: dict[str, set[int]] = defaultdict(set)
    for number, (unit, probe) in enumerate(zip(units, probes, strict=True)):
        # The names are those of the unit that was looked at; the places are the same.
        ends = zip(
            (*unit.inputs, *unit.outputs), (*probe.unit.inputs, *probe.unit.outputs), strict=True
        )
        for name in (name for (name, _), (theirs, _) in ends if theirs in probe.kept):
            keepers[name].add(number)
    costs = (replace(p.cost(), path=unit.path) for unit, p in zip(units, probes, strict=True))
    kept = (replace(value, kept=tuple(sorted(keepers[value.name]))) for value in values)
    return tuple(costs), tuple(kept)


def weigh_units(
    model: nn.Module,
    paths: Sequence[str],
    balance: str | Sequence[float] | None,
    example: tuple[Sequence[Any], Mapping[str, Any]] | None = None,
) -> list[float]:
    """The weights of units, by which stages are made equal.

    Args:
        model: The whole model.
        paths: The units in the order of their calls.
        balance: A number for each unit, or what they are measured by: ``"parameters"``, which is the default,
            ``"flops"``, ``"memory"`` or ``"time"``.
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
        return [float(_count(model.get_submodule(path))) for path in paths]
    if balance not in get_args(Measure):
        raise UsageError(f"balance={balance!r}: must be one of {', '.join(get_args(Measure))}")
    if example is None:
        raise PartitionError(
            f"balance={balance!r} needs a call of the model to measure: give example=(args, kwargs)"
        )
    repeats = REPEATS if balance == "time" else 0
    units, _ = measure_units(model, paths, *example, repeats=repeats)
    return [unit.by(balance) for unit in units]  # type: ignore[arg-type] # checked above


# ---- a copy of the model, and random states, so that measuring leaves no trace


def _copy_model(model: nn.Module, tensor: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy without hooks, whose parameters, buffers and plain tensors are what `tensor` makes of them."""
    memo: dict[int, Any] = {}
    for path, part in model.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise UsageError(
                f"{path!r} is scripted, so its costs cannot be measured: balance by parameters, give a "
                "number for each module, or measure the module as it was before torch.jit.script"
            )
        memo[id(part)] = object.__new__(type(part))
    held = [value for part in model.modules() for value in vars(part).values()]
    for value in (*model.parameters(), *model.buffers(), *held):
        if isinstance(value, Tensor) and id(value) not in memo:
            memo[id(value)] = tensor(value)
    for part in model.modules():
        vars(memo[id(part)]).update(
            {
                name: _copied(name, value, memo)
                for name, value in vars(part).items()
                if name != "forward"  # it would run the original
            }
        )
    return memo[id(model)]  # type: ignore[no-any-return]


def _copied(name: str, value: Any, memo: dict[int, Any]) -> Any:
    if "_hooks" in name and isinstance(value, dict):
        return type(value)()
    if name == "_compiled_call_impl":
        return None  # it would run the original
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # whatever cannot be copied, such as a lock or a process group, is shared
        return value


def _sharing_data(tensor: Tensor) -> Tensor:
    """A weight with the same data and a gradient of its own; anything else is a copy."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach(), tensor.requires_grad)
    return tensor.detach().clone()


class _Placeholders:
    """Makes tensors that have shapes but no data; the same for the same tensor.

    Args:
        device: Where they claim to be; under a FakeTensorMode that need not be the meta device.
        known: Tensors that have a placeholder already.
    """

    def __init__(self, device: str, known: Iterable[tuple[Tensor, Tensor]] = ()) -> None:
        self._device = device
        self._known = {id(tensor): (tensor, placeholder) for tensor, placeholder in known}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device(self._device)
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._known:
            made = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=self._device
            )
            if isinstance(value, nn.Parameter):
                made = nn.Parameter(made, value.requires_grad)
            self._known[id(value)] = value, made.requires_grad_(value.requires_grad)
        return self._known[id(value)][1]


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
    """A function that tells the time once the device has done its work."""
    if home.type == "cpu":
        # If a single thread does all the work, the time of other programs need not count.
        return time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def after_all() -> float:
        torch.accelerator.synchronize(home)
        return time.perf_counter()

    return after_all


# ---- recording: which calls belong to a unit, and what travels between units


class UnitStep(NamedTuple):
    """A call of a unit, or of a function on tensors between units.

    Attributes:
        run: The module or the function.
        args: Its arguments.
        kwargs: Its arguments by name.
        outputs: The tensors it returned, in order.
    """

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: list[Tensor]


@dataclass
class UnitRun:
    """A unit and what belongs to it: steps that can run again with other tensors in place of its inputs.

    Attributes:
        path: The path of its module.
        module: The module.
        steps: In the order in which they ran.
        inputs: The tensors it uses of other units, each with the name of its value.
        outputs: The tensors that other units use of it, likewise; of the last unit the loss, without a name.
    """

    path: str
    module: nn.Module
    steps: list[UnitStep] = field(default_factory=list)
    inputs: list[tuple[str, Tensor]] = field(default_factory=list)
    outputs: list[tuple[str, Tensor]] = field(default_factory=list)

    def enter(self) -> tuple[list[Tensor], list[Tensor]]:
        """Fresh inputs: leaves, and copies of them that the unit may change in place."""
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for _, tensor in self.inputs]
        return leaves, [leaf.clone() for leaf in leaves]

    def run(self, entered: Sequence[Tensor], *, dropping: bool = False) -> list[Tensor]:
        """Runs the steps, and returns the outputs.

        Args:
            entered: The inputs.
            dropping: Whether the module keeps nothing for backward, as if it were checkpointed.
        """
        now = {id(old): new for (_, old), new in zip(self.inputs, entered, strict=True)}

        def current(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return now.get(id(leaf), leaf if leaf.grad_fn is None else leaf.detach())

        for step in self.steps:
            args, kwargs = tree_map(current, (step.args, step.kwargs))
            drops = dropping and step.run is self.module
            with saved_tensors_hooks(lambda _: None, _never) if drops else nullcontext():
                result = step.run(*args, **kwargs)
            now.update(zip(map(id, step.outputs), _tensors(result), strict=True))
        return [now[id(tensor)] for _, tensor in self.outputs]


def _never(_: Any) -> Tensor:
    raise InternalError("no backward follows this forward")


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def record_units(  # noqa: PLR0913 - as measure_units
    model: nn.Module,
    paths: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    target: Any = None,
    loss: Loss | None = None,
    skip_alike: bool = False,
) -> tuple[list[UnitRun], list[ValueCost]]:
    """Runs a model once, and records what each unit is called with and what runs between the units.

    A function on tensors belongs to the latest unit among its inputs, and the loss to the last unit. What
    depends on no unit is taken as it is.

    Args:
        model: A copy that may be changed; under a FakeTensorMode it needs no data.
        paths: The units in the order of their calls.
        args: The model's positional arguments.
        kwargs: Its arguments by name.
        target: The second argument of the loss.
        loss: See `measure_units`.
        skip_alike: Whether units like an earlier one answer with tensors of its shapes and do not run.

    Raises:
        UsageError: A unit is not called.
    """
    units = [UnitRun(path, model.get_submodule(path)) for path in paths]
    recorder = _UnitRecorder(units, skip_alike=skip_alike)
    for module in {id(unit.module): unit.module for unit in units}.values():
        module.forward = partial(recorder.call, module, module.forward)
    try:
        with torch.enable_grad(), recorder:
            output = model(*args, **kwargs)
            recorder.run(len(units) - 1, loss or _sum_up, (output, target), {})
    finally:
        for unit in units:
            vars(unit.module).pop("forward", None)
    idle = [unit.path for index, unit in enumerate(units) if index not in recorder.called]
    if idle:
        raise UsageError(
            f"the model does not call these modules with this batch, so their costs are unknown: "
            f"{', '.join(idle[:5])}; give a batch that uses them"
        )
    return units, recorder.link()


def _record_without_data(
    model: nn.Module, paths: Sequence[str], call: Any, loss: Loss | None
) -> tuple[list[UnitRun], list[ValueCost]]:
    """Records units on fake tensors, and moves what is to run again to the meta device, where that is quick.

    The run of the whole model takes fake tensors because code between the units may ask for a device, or for
    numbers of tensors that it makes itself.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        copied = _copy_model(model, fakes := _Placeholders("cpu"))
        args, kwargs, target = tree_map(fakes, call)
        units, values = record_units(
            copied, paths, args, kwargs, target=target, loss=loss, skip_alike=True
        )
    metas = _Placeholders("meta")
    moved = _copy_model(copied, metas)
    for unit in units:
        module, unit.module = unit.module, moved.get_submodule(unit.path)
        unit.inputs = [(name, metas(tensor)) for name, tensor in unit.inputs]
        unit.outputs = [(name, metas(tensor)) for name, tensor in unit.outputs]
        unit.steps = [
            UnitStep(
                unit.module if step.run is module else step.run,
                *tree_map(metas, (step.args, step.kwargs, step.outputs)),
            )
            for step in unit.steps
        ]
    return units, values


def _sum_up(output: Any, _: Any) -> Any:
    return sum(tensor.float().sum() for tensor in _tensors(output) if tensor.requires_grad)


class _UnitRecorder(TorchFunctionMode):
    """Follows tensors from unit to unit.

    Attributes:
        called: The units that were called.
    """

    def __init__(self, units: Sequence[UnitRun], *, skip_alike: bool) -> None:
        super().__init__()
        self.called: set[int] = set()
        self._units = units
        self._alike: dict[Any, tuple[list[Tensor], Any]] | None = {} if skip_alike else None
        self._inside = False
        self._owner: dict[int, int] = {}
        self._users: dict[int, set[int]] = defaultdict(set)
        # All tensors stay alive meanwhile, so that no new one gets the id of an old one.
        self._seen: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [] if self._inside else _tensors((args, kwargs))
        owners = [self._owner[id(tensor)] for tensor in inputs if id(tensor) in self._owner]
        if not owners or getattr(func, "__name__", "") in _QUESTIONS:
            return func(*args, **kwargs)
        return self.run(max(owners), func, args, kwargs)

    def call(
        self, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Stands in for the forward of a unit; the calls of a module that is listed twice are shared out."""
        if self._inside:
            return forward(*args, **kwargs)
        places = [index for index, unit in enumerate(self._units) if unit.module is module]
        index = next((each for each in places if each not in self.called), places[-1])
        self.called.add(index)
        return self.run(index, module, args, kwargs, forward)

    def run(
        self,
        index: int,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        forward: Callable[..., Any] | None = None,
    ) -> Any:
        """Runs something as a step of a unit; a module is run by its true `forward`."""
        inputs = _tensors((args, kwargs))
        for tensor in inputs:
            # A module that is called twice may use what a later one made: then both are in one stage.
            if self._owner.get(id(tensor), index) < index:
                self._users[id(tensor)].add(index)
        self._inside = True
        try:
            if forward is None:
                result = run(*args, **kwargs)
            else:
                result = self._of_unit(self._units[index].module, forward, args, kwargs)
        finally:
            self._inside = False
        outputs = _tensors(result)
        passed = set(map(id, inputs))
        self._owner.update((id(tensor), index) for tensor in outputs if id(tensor) not in passed)
        self._seen.update((id(tensor), tensor) for tensor in (*inputs, *outputs))
        if outputs or getattr(run, "__name__", "") == "__setitem__":
            self._units[index].steps.append(UnitStep(run, args, kwargs, outputs))
        return result

    def _of_unit(self, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """What a unit returns, without its graph; of several that are alike only the first is asked."""
        if self._alike is None:
            return tree_map(_cut_off, forward(*args, **kwargs))
        key, inputs = (_kind_of(module), _shapes((args, kwargs))), _tensors((args, kwargs))
        if key not in self._alike:
            self._alike[key] = inputs, tree_map(_cut_off, forward(*args, **kwargs))
            return self._alike[key][1]
        earlier, result = self._alike[key]
        return tree_map(_Placeholders("cpu", zip(earlier, inputs, strict=True)), result)

    def link(self) -> list[ValueCost]:
        """Tells units what they use and make; tensors of one unit that the same units use are one value."""
        groups: dict[tuple[int, tuple[int, ...], bool], list[Tensor]] = defaultdict(list)
        for key, users in self._users.items():
            tensor = self._seen[key]
            groups[self._owner[key], tuple(sorted(users)), tensor.requires_grad].append(tensor)
        values: list[ValueCost] = []
        for (source, targets, gradient), tensors in sorted(
            groups.items(), key=lambda each: each[0]
        ):
            name = f"{self._units[source].path}:{len(values)}"
            size = float(sum(tensor.nbytes for tensor in tensors))
            values.append(ValueCost(name, source, targets, size, gradient))
            self._units[source].outputs += [(name, tensor) for tensor in tensors]
            for target in targets:
                self._units[target].inputs += [(name, tensor) for tensor in tensors]
        last = self._units[-1]
        last.outputs = [("", tensor) for tensor in last.steps[-1].outputs]
        return values


_QUESTIONS = {"__get__", "size", "dim", "__len__"}
"""Functions that only look at a tensor's shape or attributes."""


def _cut_off(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
        # A copy: code between the units may change it in place, which a leaf forbids.
        return leaf.detach().requires_grad_().clone()
    return leaf


# ---- units that are alike


_POSITIONS = {"layer_idx", "layer_number", "layer_id", "index", "idx", "training"}
"""Attributes that differ between layers that are otherwise alike."""


def _kind_of(module: nn.Module) -> Any:
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
                for name, p in part.named_parameters(recurse=False)
            ),
        )
        for part in module.modules()
    )


def _shapes(value: Any) -> tuple[Any, ...]:
    """What of arguments decides the cost of a call: shapes, types and plain values."""
    return tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else leaf
        if isinstance(leaf, int | float | str | None)
        else type(leaf)
        for leaf in tree_leaves(value)
    )


def _kind_of_unit(unit: UnitRun, *, is_last: bool) -> Any:
    """A key that is the same for units that cost the same."""
    if is_last:
        return unit.path
    steps = tuple(
        (step.run if step.run is not unit.module else None, _shapes((step.args, step.kwargs)))
        for step in unit.steps
    )
    return _kind_of(unit.module), steps, len(unit.inputs), len(unit.outputs)


# ---- running one unit


class _Probe:
    """Runs a unit alone, and finds its times and its memory.

    Args:
        unit: The unit.
        rate: How long a device takes for an operation.
        clock: Tells the time; without one, times are those of `rate`.

    Attributes:
        times: The times of F, I, W and B, in the order of the runs.
    """

    def __init__(self, unit: UnitRun, rate: Rate | None, clock: Callable[[], float] | None) -> None:
        self.unit = unit
        self._split = SplitBackward(unit.module)
        self.times: dict[str, list[float]] = defaultdict(list)
        self._stash = 0.0
        self._extra: dict[str, float] = {}
        self._held, self.kept = self._hold()
        self._around = self._left_around()
        # The first run makes the gradients, which are there already in all steps but the first.
        self._clock = clock or (lambda: 0.0)
        self.run(defaultdict(list))
        with Meter(rate) as meter:
            self._clock = clock or (lambda: meter.seconds)
            self.run(self.times if clock is None else defaultdict(list), meter)
        with Meter() as meter, torch.enable_grad():
            unit.run(unit.enter()[1])
        self._flops = float(meter.flops)

    def run(self, times: dict[str, list[float]], meter: Meter | None = None) -> None:
        """Runs F, I and W, and then F and B."""
        peaks = _Peaks(meter, self._extra)
        leaves, outputs, gradients = self._forward(times, peaks)
        with self._timed(times["input"]):
            # The gradients of the inputs are sent away.
            pending = self._split.input_half(outputs, gradients, leaves)[1] if outputs else None
        del outputs, gradients
        peaks.note("input")
        self._stash = max(self._stash, peaks.live)
        with self._timed(times["weight"]):
            if pending is not None:
                self._split.weight_half(pending)
        del pending, leaves
        peaks.note("weight")
        leaves, outputs, gradients = self._forward(times, peaks)
        with self._timed(times["backward"]):
            if outputs:
                torch.autograd.backward(outputs, gradients)
        del leaves, outputs, gradients
        peaks.note("backward")

    def _forward(self, times: dict[str, list[float]], peaks: _Peaks) -> tuple[list[Tensor], ...]:
        """Runs F; returns the leaves behind the inputs, and the outputs with their gradients."""
        leaves, entered = self.unit.enter()
        peaks.note("")
        with torch.enable_grad(), self._timed(times["forward"]):
            outputs = [tensor for tensor in self.unit.run(entered) if tensor.requires_grad]
        gradients = [torch.ones_like(tensor) for tensor in outputs]
        del entered
        peaks.note("forward")
        return leaves, outputs, gradients

    @contextmanager
    def _timed(self, times: list[float]) -> Iterator[None]:
        start = self._clock()
        yield
        times.append(self._clock() - start)

    def _hold(self, *, dropping: bool = False) -> tuple[float, frozenset[str]]:
        """What the graph of the unit keeps: bytes besides the values, and which of these."""
        with Meter() as meter, torch.enable_grad():
            _, entered = self.unit.enter()
            outputs = self.unit.run(entered, dropping=dropping)
            graph = [tensor.grad_fn for tensor in outputs]
            named = [
                (name, weakref.ref(tensor.untyped_storage()), tensor.nbytes)
                for (name, _), tensor in zip(
                    (*self.unit.inputs, *self.unit.outputs), (*entered, *outputs), strict=True
                )
                if name
            ]
            del entered, outputs
            alive = {id(s): (name, size) for name, ref, size in named if (s := ref()) is not None}
            kept = frozenset(name for name, ref, _ in named if ref() is not None)
            held = meter.live - sum(size for _, size in alive.values())
            del graph
        return max(float(held), 0.0), kept

    def _left_around(self) -> float:
        try:
            return min(self._hold(dropping=True)[0], self._held)
        except RuntimeError as error:
            # torch.func forbids such hooks while it differentiates.
            if "saved tensor hooks" not in str(error):
                raise
            return self._held

    def cost(self) -> UnitCost:
        """What was found."""
        module = self.unit.module
        held = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}.values()
        return UnitCost(
            path=self.unit.path,
            **{
                kind: median(self.times[kind])
                for kind in ("forward", "input", "weight", "backward")
            },
            spread=max(_spread(self.times[kind]) for kind in ("forward", "input", "backward")),
            held=self._held,
            around=self._around,
            stash=self._stash,
            **{f"{kind}_extra": extra for kind, extra in self._extra.items()},
            parameters=sum(tensor.nbytes for tensor in held),
            trained=sum(tensor.nbytes for tensor in held if tensor.requires_grad),
            numbers=_count(module),
            flops=self._flops,
        )


class _Peaks:
    """Notes how much more memory something takes while it runs than before or after it."""

    def __init__(self, meter: Meter | None, extra: dict[str, float]) -> None:
        self._meter, self._extra = meter or Meter(), extra
        self._base = self._before = self._meter.live

    @property
    def live(self) -> float:
        """How much more is held now than at first."""
        return float(max(self._meter.live - self._base, 0))

    def note(self, kind: str) -> None:
        """Notes what ran since the last call; without a kind, only that it did."""
        meter = self._meter
        if kind:
            extra = float(meter.peak - max(self._before, meter.live))
            self._extra[kind] = max(self._extra.get(kind, 0.0), extra)
        self._before = meter.live
        meter.reset_peak()


def _probes(
    units: Sequence[UnitRun], rate: Rate | None, clock: Callable[[], float] | None
) -> list[_Probe]:
    """A probe for each unit; units that are alike share one."""
    known: dict[Any, _Probe] = {}
    probes = []
    for unit in units:
        kind = _kind_of_unit(unit, is_last=unit is units[-1])
        if kind not in known:
            known[kind] = _Probe(unit, rate, clock)
        probes.append(known[kind])
    return probes


def _spread(times: Sequence[float]) -> float:
    if len(times) < 3 or not median(times):
        return 0.0
    low, _, high = quantiles(times, n=4)
    return (high - low) / 2 / median(times)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# ---- a cut as a table: what each stage holds, computes and sends


@dataclass(frozen=True)
class StageRow:
    """A stage in the table, for one microbatch.

    Args:
        modules: The paths of its units; neighbours that differ only in their number are one.
        parameters: How many numbers its weights hold.
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
    """A row for each stage; ``str`` gives it as text."""

    rows: tuple[StageRow, ...]

    def __str__(self) -> str:
        head = ["stage", "modules", "parameters", "held", "flops", "saved", "sent"]
        timed = any(row.forward for row in self.rows)
        lines = [head + (["forward", "backward"] if timed else [])]
        for index, row in enumerate(self.rows):
            numbers = [row.parameters, row.held, row.flops, row.saved, row.sent]
            times = [f"{t * 1e3:.2f} ms" for t in (row.forward, row.backward)] if timed else []
            lines.append([str(index), ", ".join(row.modules), *map(_short, numbers), *times])
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(
                # Names of modules are aligned to the left, numbers to the right.
                cell.ljust(width) if column == 1 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
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
        UsageError: As `measure_units`.
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
    """Paths, where neighbours that differ only in the last number become one: ``blocks.0-3``."""
    runs = [list(run) for _, run in groupby(paths, lambda path: re.sub(r"\d+$", "", path))]
    return [r[0] if len(r) == 1 else f"{r[0]}-{re.sub('.*[^0-9]', '', r[-1])}" for r in runs]


def _short(number: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}P"
