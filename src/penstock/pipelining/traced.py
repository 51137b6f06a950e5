"""Trace a model by ``torch.export``, and cut it into stages where its graph is marked.

A stage is the part of the graph between two marks, as a module that holds the model's own parameters and
buffers under the model's names. It is traced in both modes, training and evaluation, where these differ.
"""

from __future__ import annotations

import inspect
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx, nn
from torch.export import Dim
from torch.utils import _pytree as pytree

from penstock.errors import PartitionError, UsageError
from penstock.partition import find_shared
from penstock.partition.base import check_paths
from penstock.pipelining._utils import CutError, PathError, PipeInfo
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


# ---- the arguments of a trace


class TensorLook(NamedTuple):
    """How a tensor must look; a length of None may be any but 0 and 1, which torch traces apart."""

    dtype: torch.dtype
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        lengths = ", ".join("2 or more" if n is None else str(n) for n in self.shape)
        return f"{str(self.dtype).removeprefix('torch.')}[{lengths}]"

    def fits(self, other: Any) -> bool:
        """Tell whether a tensor of another look may take this one's place."""
        if not isinstance(other, TensorLook) or len(self.shape) != len(other.shape):
            return False
        pairs = zip(self.shape, other.shape, strict=True)
        lengths = all(b == a if a is not None else b is None or b > 1 for a, b in pairs)
        return lengths and self.dtype == other.dtype


def _look_of(leaf: Any) -> Any:
    """Return how a tensor looks; another value as it is."""
    if not isinstance(leaf, Tensor):
        return leaf
    return TensorLook(leaf.dtype, tuple(n if isinstance(n, int) else None for n in leaf.shape))


def _alike(leaf: Any, traced: Any) -> bool:
    if isinstance(traced, TensorLook):
        return traced.fits(leaf)
    return type(leaf) is type(traced) and bool(leaf == traced)


def _bound(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Arguments in one form, however they are passed.

    Raises:
        UsageError: the signature does not take them.
    """
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(f"the model's forward{signature} does not take these: {error}") from None


@dataclass
class Arguments:
    """What a graph takes: the model's arguments, flat, as its trace looked at them.

    Args:
        signature: that of the model's forward.
        names: the parameters of the signature that were passed; the others keep their defaults.
        in_spec: the structure of the arguments.
        looks: how each must look.
        guards: raises AssertionError for sizes that the graph does not hold for; None if there are none.
    """

    signature: inspect.Signature
    names: Collection[str]
    in_spec: Any
    looks: Sequence[Any]
    guards: Callable[..., None] | None

    def flat(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Flatten the model's arguments.

        Raises:
            UsageError: the graph does not hold for them.
        """
        bound, unlike = _bound(self.signature, args, kwargs), []
        bound.apply_defaults()
        for name in [name for name in bound.arguments if name not in self.names]:
            value, usual = bound.arguments.pop(name), self.signature.parameters[name].default
            # Those of *args and **kwargs have no default.
            if not (_alike(value, usual) if usual is not inspect.Parameter.empty else not value):
                unlike.append(f"{name}, which the trace left to its default")
        order = self.in_spec.children()[1].context
        named = {name: bound.kwargs[name] for name in order if name in bound.kwargs}
        leaves, spec = pytree.tree_flatten((bound.args, named | bound.kwargs))
        if spec != self.in_spec:
            unlike.append("their number or structure")
        for place, (leaf, traced) in enumerate(zip(leaves, self.looks, strict=False)):
            if not _alike(look := _look_of(leaf), traced):
                unlike.append(f"number {place}: {look} instead of {traced}")
        try:
            if self.guards is not None and not unlike:
                self.guards(*leaves)
        except AssertionError as error:
            unlike.append(f"it needs {str(error).removeprefix('Guard failed: ')}")
        if unlike:
            raise UsageError(
                f"the model was traced with other arguments ({'; '.join(unlike)}), and its graph does not "
                "hold for these; call pipeline() with arguments of one microbatch as in training"
            )
        return leaves


# ---- the trace

_GUARDS = "_guards_fn"
"""The module in which torch.export puts its checks of the arguments."""


@dataclass
class ModelTrace:
    """A model's graph in one mode."""

    module: fx.GraphModule
    arguments: Arguments
    out_spec: Any


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    points: Mapping[str, SplitPoint],
    policy: Policy | None,
) -> ModelTrace:
    """Trace a model in its current mode, for any number of samples where it can be."""
    signature = inspect.signature(model.forward)
    bound = _bound(signature, args, kwargs)
    args, kwargs = bound.args, bound.kwargs
    lengths = pytree.tree_map(_any_length, dict(bound.arguments))

    def traced(dynamic_shapes: Any) -> tuple[Any, Any, Arguments]:
        program = torch.export.export(
            model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False
        )
        module: Any = program.module()
        looks = [_look_of(node.meta["val"]) for node in module.graph.find_nodes(op="placeholder")]
        guards, in_spec = getattr(module, _GUARDS, None), program.call_spec.in_spec
        arguments = Arguments(signature, [*bound.arguments], in_spec, looks, guards)
        # Torch 2.14 writes guards on the sizes of **kwargs that cannot run.
        arguments.flat(args, kwargs)
        return module, program.call_spec.out_spec, arguments

    with _marked(model, points), _lost() as lost:
        try:
            try:
                module, out_spec, arguments = traced(lengths)
            except Exception:  # what torch cannot trace without knowing the sizes
                module, out_spec, arguments = traced(None)
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
    return ModelTrace(policy(module) if policy else module, arguments, out_spec)


def _any_length(value: Any) -> dict[int, Any] | None:
    return {0: Dim.AUTO} if isinstance(value, Tensor) and value.dim() else None


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
            if node.target == _GUARDS:
                continue
            if _is_mark(node):
                stage += 1
                busy[stage] = False
                continue
            # An item of a tuple belongs to the tuple's stage, so that tuples do not travel.
            source = node.args[0] if node.target is operator.getitem else None
            self.owner[node] = self.owner[source] if isinstance(source, fx.Node) else stage
            if node.op in ("placeholder", "get_attr"):
                self.owner[node] = 0
            elif node.op != "output" and not _is_size(node):
                busy[stage] = True
        self._place_assignments()
        self.count = stage + 1
        empty = [index for index, works in busy.items() if not works]
        if empty and self.count > 1:
            raise CutError(
                f"these cuts leave stage {empty[0]} of {self.count} without anything to compute, since they "
                "leave the whole model in one stage or meet; move or drop one"
            )
        self.values = self._find_values()
        self._written: set[Any] = set()
        self._check_writes()

    def _check_regions(self) -> None:
        for path, part in self.trace.module.named_modules():
            graphs = isinstance(part, fx.GraphModule) and path
            if graphs and any(map(_is_mark, part.graph.nodes)):
                raise CutError(
                    f"a cut lies within a region ({path}), such as torch.no_grad() or autocast, which cannot "
                    "end in one stage and begin in another; cut outside of it"
                )

    def _place_assignments(self) -> None:
        """Let a buffer be set where its value is made: export writes ``self.n += 1`` back at the end."""
        for node, stage in self.owner.items():
            if node.target is not torch.ops.aten.copy_.default or node.users:
                continue
            buffer, value = node.args[:2]
            if isinstance(buffer, fx.Node) and isinstance(value, fx.Node):
                users = {self.owner[user] for user in buffer.users if user is not node}
                if buffer.op == "get_attr" and users == {self.owner[value]} != {stage}:
                    self.owner[node] = self.owner[value]

    def _find_values(self) -> dict[fx.Node, tuple[int, ...]]:
        """Map each value that travels to the stages that use it."""
        targets: dict[fx.Node, set[int]] = {node: set() for node in self.owner}
        sizes = []
        for node, stage in self.owner.items():
            for source in [] if _is_size(node) else node.all_input_nodes:
                if _is_size(source):
                    sizes.append((source, stage))
                elif source.op != "get_attr" and self.owner[source] != stage:
                    targets[source].add(stage)
        for size, stage in sizes:
            for missing in self._missing(size, stage, [n for n in targets if stage in targets[n]]):
                targets[missing].add(stage)
        return {node: tuple(sorted(stages)) for node, stages in targets.items() if stages}

    def _missing(self, size: fx.Node, stage: int, arrive: Sequence[fx.Node]) -> Iterator[fx.Node]:
        """The sizes that a stage must be sent to know a size: it sees those of tensors that arrive."""
        if _place_of(size, arrive) is not None:
            return
        for source in size.all_input_nodes:
            if _is_size(source):
                yield from self._missing(source, stage, arrive)
            elif self.owner[source] != stage:
                yield size

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
                    self._written.add(base.target)
                    self._check_buffer(node, stage, base)
                elif self.owner[base] != stage:
                    self._check_value(node, stage, base)

    def _check_buffer(self, node: fx.Node, stage: int, base: fx.Node) -> None:
        same = [n for n in self.owner if n.op == "get_attr" and n.target == base.target]
        others = {self.owner[user] for one in same for user in one.users} - {stage}
        if others:
            raise CutError(
                f"{_node_name(node)} in stage {stage} changes {base.target} in place, which stage "
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
                f"{_node_name(node)} in stage {stage} changes a value of stage {self.owner[base]} in place, "
                "and other values that travel share its memory; cut elsewhere, or write not in place"
            )

    # ---- stages

    def graph(self, stage: int) -> fx.Graph:
        """Build a stage's graph, which maps flat arguments or values to values or the flat output."""
        graph = fx.Graph()
        taken = {node: node.name for node in self.owner if node.op == "placeholder" and stage == 0}
        taken |= {node: self.names[node] for node, stages in self.values.items() if stage in stages}
        copies = {node: graph.placeholder(name) for node, name in taken.items()}

        def copied(node: fx.Node) -> fx.Node:
            if node not in copies:
                place = _place_of(node, taken)
                if place is None:
                    copies[node] = graph.node_copy(node, copied)
                else:
                    tensor, dim = place
                    copies[node] = graph.call_function(_SIZE, (copies[tensor], dim))
            return copies[node]

        for node, owner in self.owner.items():
            if owner == stage and node.op not in _HELD and not _is_size(node):
                copied(node)
        graph.output(self._output(stage, copied))
        return graph

    def _output(self, stage: int, copied: Callable[[fx.Node], fx.Node]) -> Any:
        """Choose a stage's result: the flat output, its only value, or all values in a tuple or by name."""
        if stage == self.count - 1:
            output = next(node for node in self.owner if node.op == "output")
            return fx.map_arg(output.args[0], copied)
        gives = {node: copied(node) for node in self.values if self.owner[node] == stage}
        for node, value in gives.items():
            base = _base(node)
            if base.op == "get_attr" and base.target in self._written:
                # The next microbatch changes the buffer, whose value now is what travels.
                gives[node] = value.graph.call_function(torch.ops.aten.clone.default, (value,))
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


_HELD = ("placeholder", "get_attr", "output")
_SIZE = torch.ops.aten.sym_size.int


def _is_size(node: fx.Node) -> bool:
    """Tell whether a node is a number that depends on the sizes of the arguments: each stage computes it."""
    return isinstance(node.meta.get("val"), SymInt | SymBool | SymFloat)


def _place_of(size: fx.Node, tensors: Iterable[fx.Node]) -> tuple[fx.Node, int] | None:
    """Find a tensor and its dimension of this size."""
    if not _is_size(size):
        return None
    shapes = [(node, getattr(node.meta.get("val"), "shape", ())) for node in tensors]
    places = ((node, dim) for node, shape in shapes for dim in range(len(shape)))
    return next(
        (p for p in places if str(p[0].meta["val"].shape[p[1]]) == str(size.meta["val"])), None
    )


def _has_gradient(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return value.is_floating_point() or value.is_complex()
    return not _is_size(node)


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


def _node_name(node: fx.Node) -> str:
    """Name a node for messages, with the line of the author's code."""
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    where = [line.strip() for line in lines if line.strip().startswith("File ")]
    return f"{node.name} ({where[-1]})" if where else node.name


# ---- a stage


class TracedStage(nn.Module):
    """A stage of a traced model, with the model's own parameters and buffers under their names.

    Args:
        cuts: the cut in training (True) and evaluation (False), or in the one traced mode.
        index: the index of the stage.
        model: the model.
    """

    def __init__(self, cuts: Mapping[bool, Cut], index: int, model: nn.Module) -> None:
        super().__init__()
        parts = {mode: cut.module(index, model) for mode, cut in cuts.items()}
        self._forwards = {mode: type(part).forward for mode, part in parts.items()}
        traces = {mode: cut.trace for mode, cut in cuts.items()}
        self._arguments = {mode: traced.arguments for mode, traced in traces.items() if index == 0}
        some, part = next(iter(cuts.values())), next(iter(parts.values()))
        self._out_spec = some.trace.out_spec if index == some.count - 1 else None
        self._taken = [node.name for node in part.graph.nodes if node.op == "placeholder"]
        self._code = part.code
        for part in parts.values():
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
        arguments = self._arguments.get(self.training)
        taken = self._values(args, kwargs) if arguments is None else arguments.flat(args, kwargs)
        output = self._forwards[self.training](self, *taken)
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


def cut_traced(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    points: Mapping[str, SplitPoint],
    policy: Policy | None,
) -> tuple[list[TracedStage], PipeInfo]:
    """Trace a model in both modes, and cut it where it is marked; its stages, and what they share."""

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
    stages = [TracedStage(cuts, index, model) for index in range(first.count)]
    shared = find_shared(model, stages)
    info = PipeInfo(first.trace.module.graph, first.count, shared=shared, edges=first.edges)
    return stages, info


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
