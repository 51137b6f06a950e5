"""The stages of a traced model: which holds which weights, what each runs, and what it is in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import Any

import torch
from torch import Tensor, fx, nn

from penstock.errors import PartitionError, UsageError
from penstock.partition.base import (
    Description,
    Partition,
    Shared,
    check_paths,
    count_parameters,
    find_shared,
    holder_in,
    named_tensors,
)
from penstock.partition.costs import spans
from penstock.partition.traced.export import ROOT, Skeleton
from penstock.partition.traced.traces import Cuts, Trace, Traces
from penstock.partition.traced.wiring import Program, Slice, argument_in
from penstock.values import TensorSpec, ValueSpec, flatten, spec_of_arguments

# ---- which stage holds which parameter and buffer, and under which names


Share = tuple[dict[str, Tensor], dict[str, str]]
"""What a stage holds by name; and for each name in the model the one by which the stage reads it."""


def share_out(model: nn.Module, trace: Trace, stages: int) -> list[Share]:
    """Give each parameter and buffer to the stages that use it; if none does, to that of a neighbour."""
    shares: list[Share] = [({}, {}) for _ in range(stages)]
    groups = _groups(model)
    users = {group: _users(trace, group) for group in groups}
    used = {name: min(users[group]) for group in groups if users[group] for name in group}
    for group, tensor in groups.items():
        given = _given(group, users[group] or {_neighbour(group[0], used): []})
        for stage, own in given.items():
            tensors, names = shares[stage]
            tensors.update(dict.fromkeys(own, tensor))
            names.update(dict.fromkeys(group, own[0]))
    return shares


def _groups(model: nn.Module) -> dict[tuple[str, ...], Tensor]:
    """Each parameter and buffer by all its names."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in named_tensors(model):
        found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return {tuple(names): tensor for names, tensor in found.values()}


def _users(trace: Trace, group: Iterable[str]) -> dict[int, list[fx.Node]]:
    found: dict[int, list[fx.Node]] = {}
    for name in group:
        for stage, nodes in trace.users(name).items():
            found.setdefault(stage, []).extend(nodes)
    return dict(sorted(found.items()))


def _given(group: Sequence[str], users: Mapping[int, list[fx.Node]]) -> dict[int, list[str]]:
    """The names that each stage gets: those of the modules that use it there; the first gets the rest."""
    given = {stage: [n for n in group if _used_as(n, nodes)] for stage, nodes in users.items()}
    taken = set(chain.from_iterable(given.values()))
    first = min(given)
    given[first] = [name for name in group if name in given[first] or name not in taken]
    return {stage: own or [group[0]] for stage, own in given.items()}


def _used_as(name: str, nodes: Iterable[fx.Node]) -> bool:
    owner = ROOT + name.rpartition(".")[0]
    return any(owner.rstrip(".") in _modules_around(node) for node in nodes)


def _modules_around(node: fx.Node) -> set[str]:
    return {path for path, _ in (node.meta.get("nn_module_stack") or {}).values()}


def _neighbour(name: str, used: Mapping[str, int]) -> int:
    """The stage of the tensor whose name has the most in common with this one."""
    nearest = max(used, key=lambda other: _common(name, other), default=None)
    return 0 if nearest is None else used[nearest]


def _common(one: str, other: str) -> int:
    pairs = zip(one.split("."), other.split("."), strict=False)
    return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))


# ---- a stage


class TracedStage(nn.Module):
    """Runs one stage of a traced model, with its parameters and buffers under the model's names.

    A pipeline calls it ``stage(values, args, kwargs)``. By hand it is called with the model's arguments
    where it is the first stage, and otherwise with what earlier stages gave, followed by those of the
    model's tensors that it uses itself; it returns one value, or a tuple of several.

    Args:
        index: which stage it is.
        traces: the model's graphs.
        tensors: what it holds.
        names: for each name of these tensors in the model, the one in ``tensors``.
        persistent: the names of the tensors that a state dict contains.
        together: the stages of the model so far; this one is appended.
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
        """Look calls up by these arguments: what wraps the stage changes the types of those it gets."""
        self._called_as = args, kwargs
        try:
            yield
        finally:
            self._called_as = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stage, called by a pipeline or by hand."""
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
        """For each name in the model of a tensor held here, the name it has here."""
        return self._names

    def held_tensor(self, name: str) -> Tensor:
        """A parameter or buffer of the stage, by its name here."""
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
        """The stage's part of the first call's graph, as a function of all that it needs."""
        return self._program(self._traces.first).graph_module


def _is_wired(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    kinds = (dict, tuple, dict)
    return not kwargs and len(args) == 3 and all(map(isinstance, args, kinds))


def _device(*tensors: Sequence[Any]) -> torch.device:
    """Where a stage runs: where its tensors are, or if it has none, where its arguments are."""
    every = [t for group in tensors for t in group if isinstance(t, Tensor)]
    real = (tensor.device for tensor in every if not tensor.is_meta)
    return every[0].device if every and every[0].is_meta else next(real, torch.device("cpu"))


def _graft(root: nn.Module, path: str, tensor: Tensor, *, persistent: bool) -> None:
    """Put a parameter or buffer at its path."""
    holder, name = holder_in(root, path)
    if isinstance(tensor, nn.Parameter):
        holder.register_parameter(name, tensor)
    else:
        holder.register_buffer(name, tensor, persistent=persistent)


# ---- the sizes of the model's arguments, from the values of a stage that is called by hand


def sizes_by_hand(trace: Trace, stage: int, values: Sequence[Any]) -> list[Tensor]:
    """Tensors without data that have the sizes of the model's arguments.

    Sizes that are free in the graph, such as that of the batch, are read off the values that the stage was
    given; the others are as traced.
    """
    known: dict[Any, int] = {}
    for node, value in zip(trace.wiring.slices[stage].takes, values, strict=True):
        if isinstance(value, Tensor) and isinstance(node.meta.get("val"), Tensor):
            known.update(_bound(node.meta["val"], value))
    inputs = [node for node in trace.exported.graph.nodes if node.op == "placeholder"]
    specs = trace.exported.call.tensors
    return [
        torch.empty(_shape(node, spec.shape, known), dtype=spec.torch_dtype, device="meta")
        for node, spec in zip(inputs, specs, strict=True)
    ]


def _bound(traced: Tensor, value: Tensor) -> Iterator[tuple[Any, int]]:
    for size, actual in zip(traced.shape, value.shape, strict=False):
        if isinstance(size, torch.SymInt):
            yield str(size), actual


def _shape(node: fx.Node, example: Sequence[int], known: dict[Any, int]) -> list[int]:
    traced = node.meta["val"].shape
    return [known.get(str(size), was) for size, was in zip(traced, example, strict=True)]


# ---- a model that was traced and cut


@dataclass(frozen=True)
class TracedCut:
    """A model that was traced and cut.

    Args:
        traces: its graphs.
        modules: its stages.
        shared: the weights that several stages hold.
    """

    traces: Traces
    modules: tuple[TracedStage, ...]
    shared: tuple[Shared, ...]

    @property
    def partition(self) -> Partition:
        """The stages, as a pipeline takes them."""
        edges = self.traces.first.wiring.edges
        return Partition(self.modules, edges, self.shared, self.modules[0].describe)


def cut_traced(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    cuts: Cuts | None = None,
) -> TracedCut:
    """Cut a model at marks in the graph of a call.

    Args:
        model: any that ``torch.export`` can trace; it is not changed, and shares its parameters with the
            stages.
        args: of a call with one microbatch; only shapes and types count.
        kwargs: its arguments by name.
        cuts: where; by default at each ``pipe_split()`` in its code.

    Raises:
        PartitionError: it cannot be traced, or not be cut there.
    """
    cuts = cuts or Cuts()
    check_paths(model, (point.path for point in cuts.points))
    call = spec_of_arguments(tuple(args), dict(kwargs or {}))
    traces = Traces(Skeleton(model), cuts, call, training=model.training)
    _check_stages(traces)
    return assemble(model, traces)


def assemble(model: nn.Module, traces: Traces) -> TracedCut:
    """The stages of a model whose graphs are cut."""
    shares = share_out(model, traces.first, traces.layout.stages)
    saved = set(model.state_dict(keep_vars=True))
    together: list[TracedStage] = []
    for index, own in enumerate(shares):
        TracedStage(index, traces, *own, saved, together).train(model.training)
    cut = TracedCut(traces, tuple(together), find_shared(model, together))
    cut.partition.check_covers(model)
    return cut


def _check_stages(traces: Traces) -> None:
    if traces.layout.marks and traces.layout.stages == 1:
        raise PartitionError(
            f"the cuts {list(traces.layout.marks)} leave the whole model in one stage; "
            "cut between two modules that compute something"
        )


def summary(cut: TracedCut) -> str:
    """A line for each stage: its modules, its parameters, and what it takes and gives."""
    wiring = cut.traces.first.wiring
    users = {edge.value: ", ".join(map(str, edge.targets)) for edge in wiring.edges}
    return "\n".join(
        f"  stage {index}: {', '.join(_modules(part)) or 'no modules'}; "
        f"{count_parameters(module):,} parameters{_traffic(part, users)}"
        for index, (part, module) in enumerate(zip(wiring.slices, cut.modules, strict=True))
    )


def _traffic(part: Slice, users: dict[str, str]) -> str:
    takes = f"; takes {', '.join(part.takes.values())}" if part.takes else ""
    gives = [f"{name} to stage {users[name]}" for name in part.gives.values()]
    return takes + (f"; gives {', '.join(gives)}" if gives else "")


def _modules(part: Slice) -> list[str]:
    """The paths of the modules that run; those that differ only in a number are put together."""
    return spans(dict.fromkeys(path for node in part.nodes if (path := _path(node))))


def _path(node: fx.Node) -> str:
    """The child of the model that a node is in; of a list of modules, its item."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    steps = stack[-1][0].removeprefix(ROOT.rstrip(".")).strip(".").split(".") if stack else [""]
    return ".".join(_until_number(steps))


def _until_number(steps: Iterable[str]) -> Iterator[str]:
    for index, step in enumerate(steps):
        if index and not step.isdigit():
            return
        yield step
