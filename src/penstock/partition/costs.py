"""What the stages of a partition cost, measured by running them in turn, and a table of that."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from penstock.errors import PartitionError, UsageError
from penstock.partition.base import Example, Partition, count_parameters
from penstock.values import (
    ValueSpec,
    attributes_kept,
    flatten,
    isolate_hooks,
    randomness_kept,
    spec_of_arguments,
    unflatten,
)

Measure = Literal["time", "flops", "parameters", "memory"]
REPEATS = 3
"""How often a time is measured; the shortest counts."""
_KEPT_A_WEIGHT = 4
"""The weight, its gradient and the two moments of an optimizer like AdamW."""


@dataclass(frozen=True)
class StageCost:
    """What a stage costs for one microbatch.

    Args:
        parameters: how many numbers its parameters hold; shared weights count in each of their stages.
        held: the bytes of its parameters and buffers.
        trained: how many of these bytes get gradients.
        flops: the floating-point operations of its forward.
        saved: the bytes that forward saves for backward.
        forward: the seconds of its forward, or 0 where time was not measured.
        backward_input: the seconds for the gradients of its inputs, likewise.
        backward_weight: the seconds for the gradients of its weights, likewise.
    """

    parameters: int
    held: int
    trained: int
    flops: int
    saved: int
    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0

    @property
    def seconds(self) -> float:
        """Forward and backward together."""
        return self.forward + self.backward_input + self.backward_weight

    def by(self, measure: Measure) -> float:
        """The number to balance by.

        ``"memory"`` counts trained weights four times, for their gradients and the state of an optimizer like
        AdamW, and adds what one microbatch saves for backward.
        """
        numbers: dict[Measure, float] = {
            "time": self.seconds,
            "flops": self.flops,
            "parameters": self.parameters,
            "memory": self.held + (_KEPT_A_WEIGHT - 1) * self.trained + self.saved,
        }
        return numbers[measure]


def check_measure(measure: object) -> None:
    """Check that ``measure`` is something by which stages can be balanced.

    Raises:
        UsageError: it is not.
    """
    if measure not in get_args(Measure):
        raise UsageError(f"balance={measure!r}: must be one of {', '.join(get_args(Measure))}")


def stage_costs(
    partition: Partition,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    repeats: int = 0,
) -> tuple[StageCost, ...]:
    """What each stage costs.

    Parameters, buffers, attributes, gradients and random states stay as they were, and hooks that only
    observe are not called.

    Args:
        partition: the stages; each runs where its weights are.
        args: the model's positional arguments for one microbatch.
        kwargs: its arguments by name.
        repeats: how often time is measured; the shortest counts. By default it is not measured.

    Raises:
        UsageError: time is to be measured on the meta device.
    """
    if repeats and any(p.is_meta for m in partition.modules for p in m.parameters()):
        raise UsageError(
            "balance='time' cannot measure a model on the meta device; "
            "balance it by flops, parameters or memory"
        )
    homes = (parameter.device for module in partition.modules for parameter in module.parameters())
    home = next(homes, None)
    run = _Run(tuple(args), dict(kwargs or {}), repeats, home)
    with untouched(partition.modules, home):
        return tuple(map(run.stage, partition.modules))


def weigh_units(
    model: nn.Module,
    units: Sequence[str],
    balance: str | Sequence[float] | None,
    example: Example | None,
    fine: Callable[[], Partition],
) -> list[float]:
    """The weights of the modules that can be placed, by which stages are made equal.

    Args:
        model: the whole model.
        units: the paths of the modules.
        balance: the weights, or what they are, see :func:`penstock.partition.partition`.
        example: arguments to measure with.
        fine: makes the partition in which each module is a stage of its own.

    Raises:
        PartitionError: the weights are not one for each module, or what they are cannot be measured.
        UsageError: there is no such measure.
    """
    if balance is None or balance == "parameters":
        modules = map(model.get_submodule, units)
        return [float(count_parameters(module)) for module in modules]
    if isinstance(balance, Sequence) and not isinstance(balance, str):
        if len(balance) != len(units):
            raise PartitionError(
                f"balance= has {len(balance)} weights for {len(units)} modules: {', '.join(units)}"
            )
        return [float(weight) for weight in balance]
    check_measure(balance)
    if example is None:
        raise PartitionError(
            f"balance={balance!r} needs a call of the model to measure: give example=(args, kwargs)"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise PartitionError(
            f"balance={balance!r} runs the model, which has no data: balance it by parameters, give a weight "
            'for each module, or cut it by how="traced", which measures all but time without data'
        )
    costs = stage_costs(fine(), *example, repeats=REPEATS if balance == "time" else 0)
    return [cost.by(cast("Measure", balance)) for cost in costs]


@contextlib.contextmanager
def untouched(modules: Sequence[nn.Module], home: torch.device | None) -> Iterator[None]:
    """Leave no trace of what runs inside: keep buffers and attributes, call no hooks that only observe."""
    buffers = [buffer for module in modules for buffer in module.buffers() if not buffer.is_meta]
    before = [buffer.clone() for buffer in buffers]
    with contextlib.ExitStack() as stack:
        stack.enter_context(randomness_kept(home or torch.device("cpu")))
        # Stages that are cut by calls all stand for one model.
        for module in dict.fromkeys(getattr(module, "stands_for", module) for module in modules):
            stack.enter_context(attributes_kept(module))
            isolate_hooks(module, {id(part): part for part in module.modules()})
            for part in module.modules():
                part._backward_hooks.clear()
                part._backward_pre_hooks.clear()
        yield
    with torch.no_grad():
        for buffer, kept in zip(buffers, before, strict=True):
            buffer.copy_(kept)


class _Run:
    """Runs stages in turn, and hands on what each returns."""

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        repeats: int,
        home: torch.device | None,
    ) -> None:
        self._call = args, kwargs
        self._home = home
        self._repeats = repeats
        self._values: dict[str, Any] = {}
        self._last: Any = args

    def stage(self, module: nn.Module) -> StageCost:
        """Run one, and measure it."""
        saved: dict[int, int] = {}
        try:
            output, flops = self._counted(module, _noted(saved))
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            # torch.func allows no such hooks while it differentiates: only what was saved before it counts.
            output, flops = self._counted(module, contextlib.nullcontext())
        times = [self._timed(module) for _ in range(self._repeats)]
        self._keep(module, output)
        forward, inputs, weights = (
            (min(each) for each in zip(*times, strict=True)) if times else (0.0,) * 3
        )
        own = [*module.parameters(), *module.buffers()]
        return StageCost(
            parameters=count_parameters(module),
            held=sum(map(_bytes, own)),
            trained=sum(_bytes(tensor) for tensor in own if tensor.requires_grad),
            flops=flops,
            saved=sum(saved.values()),
            forward=forward,
            backward_input=inputs,
            backward_weight=weights,
        )

    def _counted(
        self, module: nn.Module, around: contextlib.AbstractContextManager[None]
    ) -> tuple[Any, int]:
        """What a stage returns, and the number of operations that takes."""
        _, (args, kwargs) = self._arguments(module)
        with torch.enable_grad(), FlopCounterMode(display=False) as counter, around:
            output = module(*args, **kwargs)
        return output, counter.get_total_flops()

    def _arguments(self, module: nn.Module) -> tuple[list[Tensor], tuple[tuple[Any, ...], Any]]:
        # A stage without parameters runs where the rest of the model does.
        device = next((p.device for p in module.parameters()), self._home)
        if getattr(module, "wired", False):
            leaves, (values, args, kwargs) = _fresh((self._values, *self._call), device)
            return leaves, ((values, args, kwargs), {})
        first = self._last is self._call[0]
        given = self._last if isinstance(self._last, tuple) else (self._last,)
        leaves, (args, kwargs) = _fresh((given, self._call[1] if first else {}), device)
        return leaves, (args, kwargs)

    def _keep(self, module: nn.Module, output: Any) -> None:
        self._last = output
        if getattr(module, "wired", False) and type(output) is dict:
            self._values.update(output)

    def _timed(self, module: nn.Module) -> tuple[float, float, float]:
        """The seconds of forward, of backward to the inputs, and those that the weights' gradients add."""
        leaves, call = self._arguments(module)
        clock = _Clock(leaves)
        with torch.enable_grad():
            output = module(*call[0], **call[1])
        forward = clock.lap()
        roots = [tensor for tensor in flatten(output)[0] if tensor.requires_grad]
        starts = [torch.ones_like(tensor) for tensor in roots]
        inputs = [leaf for leaf in leaves if leaf.requires_grad]
        weights = [p for p in module.parameters() if p.requires_grad]
        laps = []
        for wanted in (inputs, [*inputs, *weights]):
            clock.lap()
            if roots and wanted:
                torch.autograd.grad(roots, wanted, starts, retain_graph=True, allow_unused=True)
            laps.append(clock.lap())
        return forward, laps[0], max(laps[1] - laps[0], 0.0)


class _Clock:
    """Measures the time between calls, including the work of devices."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        devices = {tensor.device for tensor in tensors}
        self._devices = [device for device in devices if device.type not in ("cpu", "meta")]
        self._last = 0.0
        self.lap()

    def lap(self) -> float:
        """Seconds since the last call."""
        for device in self._devices:
            torch.accelerator.synchronize(device)
        last, self._last = self._last, time.perf_counter()
        return self._last - last


def _fresh(value: Any, device: torch.device | None) -> tuple[list[Tensor], Any]:
    """Leaves made from the tensors of a value, and the value as a stage gets it from another."""
    tensors, structure = flatten(value)
    leaves = [
        (tensor if device is None else tensor.to(device))
        .detach()
        .requires_grad_(tensor.requires_grad)
        for tensor in tensors
    ]
    # Clones: a stage may change them in place, which is forbidden for leaves and would reach the caller.
    entered = [leaf.clone() for leaf in leaves]
    return leaves, unflatten(structure, entered)


@contextlib.contextmanager
def _noted(saved: dict[int, int]) -> Iterator[None]:
    """Note the bytes of what forward saves, except for leaves such as weights."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        base = tensor._base if tensor._base is not None else tensor
        if not (base.is_leaf and base.requires_grad) and id(base) not in saved:
            kept.append(base)
            saved[id(base)] = _bytes(base)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# ---- a partition as a table: what each stage holds, computes and sends


@dataclass(frozen=True)
class Row:
    """A stage in the table.

    Args:
        modules: the paths of the modules whose weights it holds; items of a list by their numbers.
        cost: what the stage costs for one microbatch.
        sent: the bytes of the values that it sends to other stages.
    """

    modules: tuple[str, ...]
    cost: StageCost
    sent: int


@dataclass(frozen=True)
class Table:
    """A row for each stage; ``str`` gives it as text."""

    rows: tuple[Row, ...]

    def __str__(self) -> str:
        head = ["stage", "modules", "parameters", "held", "flops", "saved", "sent"]
        timed = any(row.cost.seconds for row in self.rows)
        lines = [head + (["forward", "backward"] if timed else [])]
        lines += [_cells(index, row, timed) for index, row in enumerate(self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(_line(line, widths) for line in lines)


def table(
    partition: Partition,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    repeats: int = 0,
) -> Table:
    """What each stage holds, computes and sends.

    Args:
        partition: the stages.
        args: the model's positional arguments for one microbatch.
        kwargs: its arguments by name.
        repeats: how often time is measured; by default it is not.
    """
    costs = stage_costs(partition, args, kwargs, repeats=repeats)
    sent = _sent(partition, spec_of_arguments(tuple(args), dict(kwargs or {})))
    rows = zip(partition.modules, costs, sent, strict=True)
    return Table(tuple(Row(tuple(module_paths(m)), cost, size) for m, cost, size in rows))


def _sent(partition: Partition, call: ValueSpec) -> list[int]:
    sizes = [0] * len(partition.modules)
    if partition.describe is not None:
        edges, specs = partition.describe(call, True)
        for edge in edges:
            sizes[edge.source] += sum(
                math.prod(spec.shape) * torch.empty(0, dtype=spec.torch_dtype).element_size()
                for spec in specs[edge.value].tensors
            )
    return sizes


def module_paths(module: nn.Module) -> list[str]:
    """The modules that hold the weights of a stage: children of the model, or items of lists."""
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    return spans(dict.fromkeys(_place(name) for name in names))


def _place(name: str) -> str:
    """The path up to the first number in it, else up to the model's grandchild."""
    numbered = re.match(r"(.*?\.|)\d+(?=\.)", name)
    return numbered.group() if numbered else ".".join(name.split(".")[:-1][:2] or [name])


def spans(paths: Iterable[str]) -> list[str]:
    """Paths, where neighbours that differ only in the last number become one: ``blocks.0-3``."""
    runs = [list(run) for _, run in groupby(paths, lambda path: re.sub(r"\d+$", "", path))]
    return [r[0] if len(r) == 1 else f"{r[0]}-{re.sub('.*[^0-9]', '', r[-1])}" for r in runs]


def _cells(index: int, row: Row, timed: bool) -> list[str]:
    cost = row.cost
    numbers = [cost.held, cost.flops, cost.saved, row.sent]
    cells = [str(index), ", ".join(row.modules), _short(cost.parameters), *map(_short, numbers)]
    backward = cost.backward_input + cost.backward_weight
    return cells + ([f"{t * 1e3:.2f} ms" for t in (cost.forward, backward)] if timed else [])


def _short(number: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if number < 1000:
            return f"{number:.3g}{unit}" if unit else str(number)
        number /= 1000
    return f"{number:.3g}P"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    # Names of modules are aligned to the left, numbers to the right.
    return "  ".join(
        cell.ljust(width) if column == 1 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ).rstrip()
