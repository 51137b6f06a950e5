"""A stage of a traced model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from penstock.errors import UsageError
from penstock.partition.base import Description
from penstock.partition.traced.by_hand import sizes_by_hand
from penstock.partition.traced.program import Program
from penstock.partition.traced.trace import Trace
from penstock.partition.traced.traces import Traces
from penstock.partition.traced.wiring import argument_in
from penstock.values import TensorSpec, ValueSpec, flatten


class TracedStage(nn.Module):
    """Runs one stage of a traced model, with its parameters and buffers under the model's names.

    A pipeline calls it ``stage(values, args, kwargs)``. By hand it is called with the model's arguments
    where it is the first stage, and else with what the stages before gave and then the model's tensors
    that it uses itself; it gives one value, or a tuple of them.

    Args:
        index: which stage it is.
        traces: the model's graphs.
        tensors: what it holds.
        names: for each name of what it holds the one it is read by here.
        persistent: the names of what is saved.
        together: all stages of the model, to which this one is added.
    """

    wired = True

    def __init__(
        self,
        index: int,
        traces: Traces,
        tensors: Mapping[str, Tensor],
        names: Mapping[str, str],
        persistent: set[str],
        together: list[TracedStage],
    ) -> None:
        super().__init__()
        self._index, self._traces, self._names = index, traces, dict(names)
        self._together = together
        self._called_as: tuple[Any, Any] | None = None
        together.append(self)
        for name, tensor in tensors.items():
            _graft(self, name, tensor, persistent=name in persistent)

    @contextmanager
    def called_as(self, args: Any, kwargs: Any) -> Iterator[None]:
        """Something around the stage changes the types of arguments; the call is still known by these."""
        self._called_as = args, kwargs
        try:
            yield
        finally:
            self._called_as = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stage, as a pipeline does or by hand."""
        if _is_wired(args, kwargs):
            return self._wired(*args)
        return self._by_hand(args, kwargs)

    def _wired(self, values: Mapping[str, Any], args: Any, kwargs: Any) -> Any:
        trace, tensors = self._find(args, kwargs)
        program = self._program(trace)
        given = self._run(program, [values[name] for name in program.takes], tensors)
        if self._is_last:
            return trace.exported.output(given)
        return dict(zip(program.gives, given, strict=True))

    def _by_hand(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self._index == 0:
            trace, tensors = self._find(tuple(args), dict(kwargs))
            values: list[Any] = []
        else:
            trace = self._traces.example(self.training)
            values, tensors = self._given_by_hand(trace, args, kwargs)
        program = self._program(trace)
        given = self._run(program, values, tensors)
        if self._is_last:
            return trace.exported.output(given)
        pairs = zip(program.gives, given, strict=True)
        made = [value for name, value in pairs if argument_in(name) is None]
        return made[0] if len(made) == 1 else tuple(made)

    def _given_by_hand(
        self, trace: Trace, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], list[Tensor]]:
        program = self._program(trace)
        takes = [name for name in program.takes if argument_in(name) is None]
        handed = [p for name in program.takes if (p := argument_in(name)) is not None]
        positions = [*program.inputs, *handed]
        values, direct = list(args[: len(takes)]), [*args[len(takes) :], *kwargs.values()]
        if len(values) != len(takes) or len(direct) != len(positions):
            raise UsageError(
                f"stage {self._index} takes {len(takes)} values of earlier stages "
                f"({', '.join(takes)}) and then {len(positions)} tensors of the model's "
                f"arguments, not {len(args) + len(kwargs)} arguments"
            )
        found = dict(zip(takes, values, strict=True))
        arguments = dict(zip(positions, direct, strict=True))
        every = [
            found[name] if (p := argument_in(name)) is None else arguments[p]
            for name in program.takes
        ]
        tensors = sizes_by_hand(trace, self._index, every)
        for position, tensor in arguments.items():
            tensors[position] = tensor
        return every, tensors

    @property
    def _is_last(self) -> bool:
        return self._index == self._traces.layout.stages - 1

    def _find(self, args: Any, kwargs: Any) -> tuple[Trace, list[Tensor]]:
        tensors, structure = flatten((args, kwargs))
        known = tensors if self._called_as is None else flatten(self._called_as)[0]
        call = ValueSpec(tuple(map(TensorSpec.of, known)), structure)
        return self._traces.find(call, self.training), tensors

    def _program(self, trace: Trace) -> Program:
        return trace.program(self._index, self._names, self._traces.device)

    def _run(self, program: Program, values: Sequence[Any], tensors: Sequence[Tensor]) -> list[Any]:
        own = [self.held_tensor(name) for name in program.tensors]
        return program(_device(own, values, tensors), values, tensors, own)

    @property
    def held_names(self) -> Mapping[str, str]:
        """For each name in the model of what it holds the one it is read by here."""
        return self._names

    def held_tensor(self, name: str) -> Tensor:
        """A parameter or buffer of it."""
        *way, last = name.split(".")
        found: Any = self
        for step in way:
            found = found._modules[step]
        return getattr(found, last)  # type: ignore[no-any-return]

    @property
    def traits(self) -> tuple[str, ...]:
        """The modules of the user's model that are in another mode than when it was traced."""
        return self._traces.changed_modes

    def describe(self, call: ValueSpec, gradients: bool) -> Description:
        """What travels between the model's stages for a call, see :class:`penstock.partition.Partition`."""
        if gradients and (changed := self.traits):
            raise UsageError(
                f"{changed[0] or 'the model'} was put into another mode by train() or eval() after it was "
                "traced, which its graphs do not follow: call train() or eval() on the partition's modules, "
                "or trace the model in that mode"
            )
        # A stage that its user put into evaluation mode is to train as it is.
        training = gradients and all(stage.training for stage in self._together)
        trace = self._traces.find(call, training)
        with torch.set_grad_enabled(gradients):
            return self._traces.describe(trace, call, self._together)

    @property
    def graph_module(self) -> fx.GraphModule:
        """The code of the first call's graph, as a function of all that the stage needs."""
        return self._program(self._traces.first).graph_module


def _is_wired(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    kinds = (dict, tuple, dict)
    return not kwargs and len(args) == 3 and all(map(isinstance, args, kinds))


def _device(*tensors: Sequence[Any]) -> torch.device:
    """Where a stage lives: with what it holds, else with what it is given."""
    every = [t for group in tensors for t in group if isinstance(t, Tensor)]
    real = (tensor.device for tensor in every if not tensor.is_meta)
    return every[0].device if every and every[0].is_meta else next(real, torch.device("cpu"))


def _graft(root: nn.Module, name: str, tensor: Tensor, *, persistent: bool) -> None:
    """Put a parameter or buffer at its name, with empty modules on the way."""
    *way, last = name.split(".")
    holder = root
    for step in way:
        if step not in holder._modules:
            holder.add_module(step, nn.Module())
        holder = holder.get_submodule(step)
    if isinstance(tensor, nn.Parameter):
        holder.register_parameter(last, tensor)
    else:
        holder.register_buffer(last, tensor, persistent=persistent)
