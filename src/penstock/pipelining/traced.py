"""Trace a model by ``torch.export``, and cut it into stages where its graph is marked.

A stage is the part of the graph between two marks, as a module that holds the model's own parameters and
buffers under the model's names. It is traced in both modes, training and evaluation, where these differ.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from penstock.errors import PartitionError, UsageError
from penstock.partition import Shared, find_shared
from penstock.partition.base import check_paths
from penstock.pipelining._utils import CutError, PathError
from penstock.schedule import Edge

Policy = Callable[[fx.GraphModule], fx.GraphModule]


class SplitPoint(Enum):
    """Whether to cut before or after a module."""

    BEGINNING = 1
    END = 2


@torch.library.custom_op("penstock::split", mutates_args=())
def _split_operator() -> None:
    """Mark a cut in a traced graph."""


@_split_operator.register_fake
def _split_without_data() -> None:
    return


aten_pipe_split_alias = torch.ops.penstock.split.default
"""The operator that a split policy inserts into a graph, or finds in one."""
fx.node.has_side_effect(aten_pipe_split_alias)


def pipe_split() -> None:
    """Cut the model here while it is traced; otherwise do nothing."""
    torch.ops.penstock.split()


_MARKS = (pipe_split, aten_pipe_split_alias, torch.ops.penstock.split)

# ---- cuts at modules


def points_of(model: nn.Module, spec: Mapping[str, Any]) -> dict[str, SplitPoint]:
    """Check a split spec, and return its cuts."""
    for path, where in spec.items():
        # By name, so that torch's own SplitPoint is accepted too.
        if getattr(where, "name", where) not in SplitPoint.__members__:
            raise UsageError(
                f"split_spec[{path!r}] is {where!r}: must be SplitPoint.BEGINNING or SplitPoint.END"
            )
    try:
        check_paths(model, spec)
    except PartitionError as error:
        raise PathError(str(error)) from error
    return {path: SplitPoint[where.name] for path, where in spec.items()}


@contextmanager
def _marked(model: nn.Module, points: Mapping[str, SplitPoint]) -> Iterator[None]:
    """Mark a model's modules during a trace, and check that they were called."""
    reached: set[str] = set()
    handles = []
    for path, where in points.items():

        def split(*_: Any, path: str = path) -> None:
            reached.add(path)
            pipe_split()

        module = model.get_submodule(path)
        handles.append(
            module.register_forward_pre_hook(split, prepend=True)
            if where is SplitPoint.BEGINNING
            else module.register_forward_hook(split)
        )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    for path, where in points.items():
        if path not in reached:
            raise CutError(f"{path} ({where.name}): the module was not called with these arguments")


# ---- the trace


@dataclass
class ModelTrace:
    """A model's graph in one mode, and the flat arguments of the trace, whose tensors have no data."""

    module: fx.GraphModule
    in_spec: Any
    out_spec: Any
    examples: list[Any]


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    points: Mapping[str, SplitPoint],
    policy: Policy | None,
) -> ModelTrace:
    """Trace a model in its current mode."""
    with _marked(model, points), _lost() as lost:
        try:
            program = torch.export.export(model, args, dict(kwargs), strict=False)
        except Exception as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise CutError(
                f"torch.export cannot trace this {type(model).__name__}: {lines[0]}; penstock.Pipeline cuts "
                "models without tracing them"
            ) from error
    if lost:
        raise CutError(
            f"the {type(model).__name__} uses {lost[0]}, which a trace would lose; penstock.Pipeline cuts "
            "models without tracing them"
        )
    module: Any = program.module(check_guards=False)
    if policy is not None:
        module = policy(module)
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    examples = [x.detach().to("meta") if isinstance(x, Tensor) else x for x in leaves]
    return ModelTrace(module, program.call_spec.in_spec, program.call_spec.out_spec, examples)


@contextmanager
def _lost() -> Iterator[list[str]]:
    """Collect the calls that a trace would lose: custom backwards, and hooks on gradients."""
    lost: list[str] = []
    apply: Any = vars(torch.autograd.Function)["apply"]
    register: Any = Tensor.register_hook

    def noted_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not cls.__module__.startswith("torch."):
            lost.append(f"{cls.__name__}, with a backward of its own")
        return apply.__get__(None, cls)(*args, **kwargs)

    def noted_register(tensor: Tensor, hook: Any) -> Any:
        lost.append("a hook on the gradient of a tensor")
        return register(tensor, hook)

    torch.autograd.Function.apply = classmethod(noted_apply)  # type: ignore[method-assign,assignment]
    Tensor.register_hook = noted_register  # type: ignore[method-assign]
    try:
        yield lost
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        Tensor.register_hook = register  # type: ignore[method-assign]


# ---- the cut


class Cut:
    """The stage of each node of a graph, and the values that travel between stages."""

    def __init__(self, traced: ModelTrace) -> None:
        self.trace = traced
        graph = traced.module.graph
        self.owner: dict[fx.Node, int] = {}
        self._check_regions()
        stage, busy = 0, {0: False}
        for node in graph.nodes:
            if _is_mark(node):
                stage += 1
                busy[stage] = False
                continue
            # An item of a tuple belongs to the tuple's stage, so that tuples do not travel.
            source = node.args[0] if node.target is operator.getitem else None
            self.owner[node] = self.owner[source] if isinstance(source, fx.Node) else stage
            if node.op in ("placeholder", "get_attr"):
                self.owner[node] = 0
            elif node.op != "output":
                busy[stage] = True
        self.count = stage + 1
        empty = [index for index, works in busy.items() if not works]
        if empty and self.count > 1:
            raise CutError(
                f"these cuts leave stage {empty[0]} of {self.count} without anything to compute, since they "
                "leave the whole model in one stage or meet; move or drop one"
            )
        self.values = self._find_values()
        self._check_writes()

    def _check_regions(self) -> None:
        for path, part in self.trace.module.named_modules():
            graphs = isinstance(part, fx.GraphModule) and path
            if graphs and any(map(_is_mark, part.graph.nodes)):
                raise CutError(
                    f"a cut lies within a region ({path}), such as torch.no_grad() or autocast, which cannot "
                    "end in one stage and begin in another; cut outside of it"
                )

    def _find_values(self) -> dict[fx.Node, tuple[int, ...]]:
        """Map each value that travels to the stages that use it."""
        values = {}
        for node, source in self.owner.items():
            targets = {self.owner[user] for user in node.users} - {source}
            if targets and node.op not in ("get_attr", "output"):
                values[node] = tuple(sorted(targets))
        return values

    @cached_property
    def edges(self) -> tuple[Edge, ...] | None:
        """The values that travel; None if each stage feeds only the next."""
        if all(targets == (self.owner[node] + 1,) for node, targets in self.values.items()):
            return None
        return tuple(
            Edge(self.names[node], self.owner[node], targets, _has_gradient(node))
            for node, targets in self.values.items()
        )

    @cached_property
    def names(self) -> dict[fx.Node, str]:
        """The names of the values that travel."""
        counts = Counter[int]()
        names = {}
        for node in self.values:
            source = self.owner[node]
            names[node] = f"stage{source}_{counts[source]}"
            counts[source] += 1
        return names

    # ---- writes in place

    def _check_writes(self) -> None:
        for node, stage in self.owner.items():
            for target in [value for value, writes in _aliased(node) if writes]:
                base = _base(target)
                if base.op == "get_attr":
                    self._check_buffer(node, stage, base)
                elif self.owner[base] != stage:
                    self._check_value(node, stage, base)

    def _check_buffer(self, node: fx.Node, stage: int, base: fx.Node) -> None:
        same = [n for n in self.owner if n.op == "get_attr" and n.target == base.target]
        others = {self.owner[user] for one in same for user in one.users} - {stage}
        if others:
            raise CutError(
                f"{_shown(node)} in stage {stage} changes {base.target} in place, which stage "
                f"{min(others)} uses too; cut so that one stage has it"
            )

    def _check_value(self, node: fx.Node, stage: int, base: fx.Node) -> None:
        """A stage may change what it receives, unless another value that travels shares its memory."""
        sharing = [
            targets
            for node, targets in self.values.items()
            if self.owner[node] < stage and _base(node) is base
        ]
        if sharing != [(stage,)]:
            raise CutError(
                f"{_shown(node)} in stage {stage} changes a value of stage {self.owner[base]} in place, and "
                "other values that travel share its memory; cut elsewhere, or write not in place"
            )

    # ---- stages

    def graph(self, stage: int) -> fx.Graph:
        """Build a stage's graph, which maps flat arguments or values to values or the flat output."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        if stage == 0:
            for node in self.owner:
                if node.op == "placeholder":
                    copies[node] = graph.placeholder(node.name)
        for node, targets in self.values.items():
            if stage in targets:
                copies[node] = graph.placeholder(self.names[node])

        def copied(node: fx.Node) -> fx.Node:
            if node not in copies:
                copies[node] = graph.node_copy(node, copied)
            return copies[node]

        for node, owner in self.owner.items():
            if owner == stage and node.op not in ("placeholder", "get_attr", "output"):
                copied(node)
        graph.output(self._output(stage, copied))
        return graph

    def _output(self, stage: int, copied: Callable[[fx.Node], fx.Node]) -> Any:
        """Choose a stage's result: the flat output, its only value, or all values in a tuple or by name."""
        if stage == self.count - 1:
            output = next(node for node in self.owner if node.op == "output")
            return fx.map_arg(output.args[0], copied)
        gives = {node: copied(node) for node in self.values if self.owner[node] == stage}
        if len(gives) == 1 or self.edges is None:
            values = tuple(gives.values())
            return values[0] if len(values) == 1 else values
        return {self.names[node]: value for node, value in gives.items()}

    def module(self, stage: int, model: nn.Module) -> fx.GraphModule:
        """Build a stage's code; a tied weight takes the name of the module that uses it here."""
        graph = self.graph(stage)
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        for node in graph.find_nodes(op="get_attr"):
            several = names.get(id(_find(model, node.target)), [])
            used = [path for user in node.users for path, _ in _modules_around(user)]
            for name in several if len(several) > 1 else ():
                if name.rpartition(".")[0] in used:
                    _hold(self.trace.module, name, model, model)
                    node.target = name
        return fx.GraphModule(self.trace.module, graph)


def _has_gradient(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex()


def _modules_around(node: fx.Node) -> list[Any]:
    """Return path and class of the innermost module whose call made a node, if any."""
    return list(node.meta.get("nn_module_stack", {}).values())[-1:]


def _is_mark(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in _MARKS


def _aliased(node: fx.Node) -> list[tuple[fx.Node, bool]]:
    """The arguments whose memory an operation writes to or returns, and whether it writes."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return [(node.args[0], False)]
    schema = getattr(node.target, "_schema", None)
    arguments = [] if schema is None else schema.arguments
    passed = {a.name: value for a, value in zip(arguments, node.args, strict=False)} | node.kwargs
    return [
        (value, a.alias_info.is_write)
        for a in arguments
        if a.alias_info is not None and isinstance(value := passed.get(a.name), fx.Node)
    ]


def _base(node: fx.Node) -> fx.Node:
    """Return the node that allocated a value's memory."""
    while aliased := _aliased(node):
        schema = getattr(node.target, "_schema", None)
        if schema is not None and all(entry.alias_info is None for entry in schema.returns):
            break
        node = aliased[0][0]
    return node


def _shown(node: fx.Node) -> str:
    """Name a node for messages, with the line of the author's code."""
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    where = [line.strip() for line in lines if line.strip().startswith("File ")]
    return f"{node.name} ({where[-1]})" if where else node.name


# ---- a stage


def _alike(leaf: Any, example: Any) -> bool:
    if isinstance(leaf, Tensor) and isinstance(example, Tensor):
        return leaf.shape == example.shape and leaf.dtype == example.dtype
    return type(leaf) is type(example) and bool(leaf == example)


def _look(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return repr(leaf)
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"


class TracedStage(nn.Module):
    """A stage of a traced model, with the model's own parameters and buffers under their names.

    Args:
        graphs: the stage's graph in training (True) and evaluation (False), or in the one traced mode.
        model: the model.
        first: the model's trace, if this is the first stage, which takes the model's arguments.
        last: the model's trace, if this is the last stage, which returns the model's output.
    """

    def __init__(
        self,
        graphs: Mapping[bool, fx.GraphModule],
        model: nn.Module,
        first: ModelTrace | None,
        last: ModelTrace | None,
    ) -> None:
        super().__init__()
        self._forwards = {mode: type(part).forward for mode, part in graphs.items()}
        self._in_spec: Any = None if first is None else first.in_spec
        self._examples = [] if first is None else first.examples
        self._out_spec = None if last is None else last.out_spec
        part = next(iter(graphs.values()))
        self._taken = [node.name for node in part.graph.nodes if node.op == "placeholder"]
        self._code = part.code
        for part in graphs.values():
            for node in part.graph.nodes:
                if node.op in ("get_attr", "call_module"):
                    _hold(self, node.target, model, part)
        self.train(model.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stage on the model's arguments, or on the values of earlier stages."""
        if self.training not in self._forwards:
            mode = "train" if self.training else "eval"
            raise UsageError(
                f"the model could be traced in the other mode only; call {mode}() on it before pipeline()"
            )
        take = self._values if self._in_spec is None else self._arguments
        output = self._forwards[self.training](self, *take(args, kwargs))
        return output if self._out_spec is None else pytree.tree_unflatten(output, self._out_spec)

    def _values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the values of earlier stages; only the first stage takes the model's own arguments."""
        names = self._taken[len(args) :]
        values = [*args, *(kwargs[name] for name in names if name in kwargs)]
        if len(values) != len(self._taken):
            raise UsageError(
                f"this stage takes {len(self._taken)} values ({', '.join(self._taken)}), but got "
                f"{len(values)}"
            )
        return values

    def _arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Flatten the model's arguments, which must look like those of the trace."""
        names = list(self._in_spec.children()[1].context)
        ordered = {name: kwargs[name] for name in names} if set(names) == set(kwargs) else kwargs
        leaves, spec = pytree.tree_flatten((args, dict(ordered)))
        unlike = ["their number or structure"] if spec != self._in_spec else []
        for place, (leaf, example) in enumerate(zip(leaves, self._examples, strict=False)):
            if not _alike(leaf, example):
                unlike.append(f"number {place}: {_look(leaf)} instead of {_look(example)}")
        if unlike:
            raise UsageError(
                f"the model was traced with other arguments ({'; '.join(unlike)}), and its graph holds for "
                "them alone; call pipeline() with arguments of one microbatch as in training"
            )
        return leaves

    def print_readable(self) -> str:
        """Print the stage's code, and return it."""
        print(self._code)  # noqa: T201 - what it is for
        return self._code


def _hold(stage: nn.Module, path: str, model: nn.Module, traced: nn.Module) -> None:
    """Put what a graph uses at a path into a stage: from the model, or else from the trace."""
    *parents, name = path.split(".")
    holder = stage
    for parent in parents:
        if parent not in holder._modules:
            holder.add_module(parent, nn.Module())
        holder = holder.get_submodule(parent)
    if hasattr(holder, name):
        return
    value = _find(model, path)
    lasting = value is not None and name not in _owner(model, parents)._non_persistent_buffers_set
    value = _find(traced, path) if value is None else value
    if isinstance(value, nn.Parameter):
        holder.register_parameter(name, value)
    elif isinstance(value, Tensor):
        holder.register_buffer(name, value, persistent=lasting)
    elif isinstance(value, nn.Module):
        holder.add_module(name, value)
    else:
        setattr(holder, name, value)


def _owner(model: nn.Module, parents: Sequence[str]) -> nn.Module:
    return model.get_submodule(".".join(parents))


def _find(module: nn.Module, path: str) -> Any:
    """Return what a module has at a path; None if there is nothing."""
    value: Any = module
    for step in path.split("."):
        value = getattr(value, step, None)
    return value


# ---- a model in stages


@dataclass
class TracedModel:
    """A traced and cut model: its stages, the edges between them, shared weights, and the whole graph."""

    stages: list[TracedStage]
    edges: tuple[Edge, ...] | None
    shared: tuple[Shared, ...]
    graph: fx.Graph


def cut_traced(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    points: Mapping[str, SplitPoint],
    policy: Policy | None,
) -> TracedModel:
    """Trace a model in both modes, and cut it where it is marked."""

    def cut() -> Cut:
        return Cut(trace(model, args, kwargs or {}, points, policy))

    cuts = {model.training: cut()}
    first = cuts[model.training]
    with _other_mode(model):
        try:
            other = cut()
            if (other.count, other.edges) == (first.count, first.edges):
                cuts[model.training] = other
        except CutError:
            pass
    stages = []
    for index in range(first.count):
        graphs = {mode: c.module(index, model) for mode, c in cuts.items()}
        begins, ends = index == 0, index == first.count - 1
        stages.append(
            TracedStage(
                graphs, model, first.trace if begins else None, first.trace if ends else None
            )
        )
    return TracedModel(stages, first.edges, find_shared(model, stages), first.trace.module.graph)


@contextmanager
def _other_mode(model: nn.Module) -> Iterator[None]:
    """Switch a model from training to evaluation, or back, for a while."""
    modes = {part: part.training for part in model.modules()}
    model.train(not model.training)
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
