"""What each stage of a graph takes from other stages and gives to them, and the code that it runs."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from penstock.errors import PartitionError, UsageError
from penstock.partition.faces import given_to, written_by
from penstock.partition.traced.export import function_of
from penstock.partition.traced.marks import attribute, is_check, is_size, regions_of
from penstock.schedule import Edge

# ---- which nodes of a graph may share memory, and which change what they are given


_SAME_WITHOUT_SAYING = {"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"}
"""Operators that may return their first argument itself, although their schema does not say so."""

_STATISTICS = {"batch_norm": (3, 4, 5), "instance_norm": (3, 4, 5), "cudnn_batch_norm": (3, 4, 5)}
"""Operators that change two buffers if a flag is set, although their schema does not say so."""


class Aliases:
    """Groups the nodes of a graph that may share memory.

    Args:
        graph: the graph of a call.
        root: holds the graphs of regions, such as those under ``torch.no_grad()``.
    """

    def __init__(self, graph: fx.Graph, root: nn.Module) -> None:
        self._root = root
        self._parent: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            for other in self._shared_by(node):
                self._parent[self._top(node)] = self._top(other)
        self._sets: dict[fx.Node, list[fx.Node]] = {}
        for node in graph.nodes:
            self._sets.setdefault(self._top(node), []).append(node)

    def of(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that may share memory with a node, including itself, in the graph's order."""
        return self._sets[self._top(node)]

    def written(self, node: fx.Node) -> list[fx.Node]:
        """The nodes whose values a node changes in place."""
        if node.op != "call_function":
            return []
        if isinstance(node.target, torch._ops.OpOverload):
            written = written_by(node.target._schema, node.args, node.kwargs)
            return [*_nodes_in(list(written)), *_statistics(node)]
        return list(self._written_inside(node))

    def _written_inside(self, node: fx.Node) -> Iterator[fx.Node]:
        for region in regions_of(node, self._root):
            inner = Aliases(region.graph, region)
            changed = [w for n in region.graph.nodes for w in inner.written(n)]
            yield from _given_for(node, inner, region, changed)

    def _shown_outside(self, node: fx.Node) -> Iterator[fx.Node]:
        """What a region is given and returns, itself or as a view."""
        for region in regions_of(node, self._root):
            inner = Aliases(region.graph, region)
            output = next(n for n in region.graph.nodes if n.op == "output")
            yield from _given_for(node, inner, region, output.all_input_nodes)

    def _shared_by(self, node: fx.Node) -> Iterable[fx.Node]:
        if node.op == "get_attr":
            return ()
        if next(regions_of(node, self._root), None) is not None:
            return self._shown_outside(node)
        if node.target is operator.getitem or not isinstance(node.target, torch._ops.OpOverload):
            return [n for n in node.all_input_nodes if n.op != "get_attr" or _is_tensor(n)]
        return _shared_by_schema(node)

    def _top(self, node: fx.Node) -> fx.Node:
        while node in self._parent and self._parent[node] is not node:
            node = self._parent[node]
        return node


def _given_for(
    node: fx.Node, inner: Aliases, region: fx.GraphModule, found: Iterable[fx.Node]
) -> Iterator[fx.Node]:
    """The arguments of a region that share memory with some of the nodes inside."""
    shared = {n for one in found for n in inner.of(one)}
    inputs = [n for n in region.graph.nodes if n.op == "placeholder"]
    given = list(node.args)[-len(inputs) :] if inputs else []
    for own, outer in zip(inputs, given, strict=True):
        if own in shared and isinstance(outer, fx.Node):
            yield outer


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _shared_by_schema(node: fx.Node) -> Iterator[fx.Node]:
    schema = node.target._schema  # type: ignore[union-attr]
    if schema.name.removeprefix("aten::") in _SAME_WITHOUT_SAYING:
        yield from _nodes_in(node.args[0])
    if not any(given.alias_info for given in schema.returns):
        return
    for argument, value in given_to(schema, node.args, node.kwargs):
        if argument.alias_info is not None:
            yield from _nodes_in(value)


def _statistics(node: fx.Node) -> Iterator[fx.Node]:
    name = node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
    if name in _STATISTICS:
        mean, variance, flag = _STATISTICS[name]
        if node.args[flag]:
            yield from _nodes_in([node.args[mean], node.args[variance]])


def _nodes_in(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _nodes_in(item)


# ---- the slices of a graph


_ARGUMENT = "argument."


def argument_in(value: str) -> int | None:
    """The index of the model's argument that a value is, if the first stage hands that on."""
    return int(value.removeprefix(_ARGUMENT)) if value.startswith(_ARGUMENT) else None


@dataclass
class Slice:
    """The part of a graph that a stage runs.

    Attributes:
        nodes: what it computes, in order.
        takes: the names of the values of earlier stages that it uses, by the nodes that made them.
        inputs: the indices of the model's arguments that it uses itself, by their nodes.
        copied: those of both that it changes in place, which other stages must not see.
        gives: the names of the values for later stages, by their nodes.
    """

    nodes: list[fx.Node] = field(default_factory=list)
    takes: dict[fx.Node, str] = field(default_factory=dict)
    inputs: dict[fx.Node, int] = field(default_factory=dict)
    copied: set[fx.Node] = field(default_factory=set)
    gives: dict[fx.Node, str] = field(default_factory=dict)


class Wiring:
    """The slices of a graph and the edges between them.

    It goes through the stages in order and keeps track of the home of each value: the stage that made it, or
    the last one that has changed it in place.

    Args:
        graph: the graph.
        stage_of: the stage of each of its nodes.
        stages: how many there are.
        aliases: which of its values share memory.
        arguments_travel: whether the first stage hands on the arguments that later ones use.

    Attributes:
        slices: one per stage.
        edges: with ``gradient`` true for all; whether a gradient comes back depends on the specs of a call.
        outputs: the leaves of the model's output, as the graph's output node holds them.

    Raises:
        PartitionError: one stage changes in place what another one needs unchanged, and the two share memory.
    """

    def __init__(
        self,
        graph: fx.Graph,
        stage_of: Mapping[fx.Node, int],
        stages: int,
        aliases: Aliases,
        *,
        arguments_travel: bool = False,
    ) -> None:
        self._arguments_travel = arguments_travel
        self._stage_of, self._aliases = stage_of, aliases
        self.slices = tuple(Slice() for _ in range(stages))
        for node, stage in stage_of.items():
            self.slices[stage].nodes.append(node)
        self._output = next(node for node in graph.nodes if node.op == "output")
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self._inputs = {node: position for position, node in enumerate(inputs)}
        self._home: dict[fx.Node, int] = {}
        self._targets: dict[tuple[int, str], list[int]] = {}
        self._check_held()
        for stage in range(stages):
            self._enter(stage)
            self._change(stage)
        self.edges = tuple(
            Edge(name, home, tuple(targets))
            for (home, name), targets in sorted(self._targets.items())
        )
        outputs = self._output.args[0]
        self.outputs: tuple[object, ...] = (
            tuple(outputs) if isinstance(outputs, list | tuple) else (outputs,)
        )

    def _used(self, stage: int) -> Iterator[fx.Node]:
        """What a stage uses that it did not make, as often as it uses it."""
        last = [self._output] if stage == len(self.slices) - 1 else []
        for node in (*self.slices[stage].nodes, *last):
            for used in node.all_input_nodes:
                if used.op == "get_attr" or is_size(used):
                    continue
                if used.op == "placeholder" or self._stage_of[used] != stage:
                    yield used

    def _enter(self, stage: int) -> None:
        entering = dict.fromkeys(self._used(stage))
        for node in entering:
            home = self._home.get(node, self._stage_of.get(node, -1))
            travels = home < 0 < stage and self._arguments_travel
            if home < 0:
                home = 0 if travels else stage
                self.slices[home].inputs.setdefault(node, self._inputs[node])
                if not travels:
                    continue
            given = self.slices[home].gives
            # By number, so that the graphs of training and evaluation give the same names.
            called = f"{_ARGUMENT}{self._inputs[node]}" if travels else f"stage{home}.{len(given)}"
            name = given.setdefault(node, called)
            self.slices[stage].takes[node] = name
            self._targets.setdefault((home, name), []).append(stage)

    # ---- changes in place

    def _change(self, stage: int) -> None:
        part = self.slices[stage]
        for node in part.nodes:
            for changed in self._aliases.written(node):
                same = self._before(self._aliases.of(changed), stage)
                entered = [n for n in same if n in part.takes or n in part.inputs]
                self._check_apart(node, stage, same, entered)
                part.copied.update(entered)
                self._home.update(dict.fromkeys(entered, stage))

    def _before(self, nodes: Iterable[fx.Node], stage: int) -> list[fx.Node]:
        return [n for n in nodes if n in self._inputs or self._stage_of.get(n, stage) < stage]

    def _check_apart(
        self, node: fx.Node, stage: int, same: Sequence[fx.Node], entered: Sequence[fx.Node]
    ) -> None:
        """Check that a change reaches every value that shares the memory: a copy of one does not show it."""
        later = [n for n in same if n not in entered and self._used_after(n, stage)]
        if (entered and later) or len(entered) > 1:
            raise PartitionError(
                f"{node.target} in stage {stage} changes {entered[0]} in place, which shares its memory "
                f"with {', '.join(str(n) for n in (*entered[1:], *later))} of an earlier stage; "
                "cut elsewhere, or make the change out of place"
            )

    def _used_after(self, node: fx.Node, stage: int) -> bool:
        last = len(self.slices) - 1
        return any(self._stage_of.get(user, last) > stage for user in node.users)

    def _check_held(self) -> None:
        """Refuse a buffer or parameter that one stage changes and another one uses."""
        for node, stage in self._stage_of.items():
            for changed in self._aliases.written(node):
                for held in self._aliases.of(changed):
                    self._check_users(held, stage)

    def _check_users(self, held: fx.Node, stage: int) -> None:
        if held.op != "get_attr":
            return
        others = {self._stage_of[n] for n in held.users if n in self._stage_of} - {stage}
        if others:
            raise PartitionError(
                f"{held.target} is changed by stage {stage} and used by stage {min(others)} too; "
                "put the modules that use it into one stage"
            )


# ---- the part of a graph that a stage runs, as a function


class Program:
    """Runs a slice.

    Args:
        part: the slice.
        outputs: the leaves of the model's output if the stage is the last, else ``None``.
        root: holds what ``get_attr`` nodes name.
        held: for each ``get_attr`` target that is a parameter or buffer of the stage, its name there.
        traced_on: the device that the graph was traced on.
    """

    def __init__(
        self,
        part: Slice,
        outputs: Sequence[Any] | None,
        root: nn.Module,
        held: Mapping[str, str],
        traced_on: torch.device,
    ) -> None:
        self.takes = tuple(part.takes.values())
        self.inputs = tuple(part.inputs.values())
        self.gives = tuple(part.gives.values())
        self._traced_on = traced_on
        writer = _Writer(part, outputs, root, held)
        self.tensors = writer.tensors
        self._constants = writer.constants
        self.sized = writer.sized
        self._module = fx.GraphModule(writer.regions, writer.graph)
        self._placed: dict[torch.device, tuple[fx.GraphModule, list[Tensor]]] = {}

    @property
    def graph_module(self) -> fx.GraphModule:
        """The code, as a function of the stage's values, arguments, parameters and constants."""
        return self._module

    def __call__(
        self,
        device: torch.device,
        values: Sequence[Any],
        inputs: Sequence[Tensor],
        own: Sequence[Tensor],
    ) -> list[Any]:
        """Run it.

        Args:
            device: where to run.
            values: the values of ``takes``, in order.
            inputs: all tensors among the model's arguments.
            own: the stage's parameters and buffers, in the order of ``tensors``.
        """
        if device not in self._placed:
            module = _moved(self._module, self._traced_on, device)
            self._placed[device] = module, [c.to(device) for c in self._constants]
        module, constants = self._placed[device]
        used = [_given(inputs[position], position, device) for position in self.inputs]
        sized = [inputs[position] for position in self.sized]
        return list(module(*values, *used, *sized, *own, *constants))


def _given(tensor: Tensor, position: int, device: torch.device) -> Tensor:
    if tensor.is_meta and device.type != "meta":
        raise UsageError(
            f"this stage uses tensor {position} of the model's arguments, which this process was not given; "
            "pass the batch on this rank too"
        )
    return tensor


class _Writer:
    """Writes a slice as a graph of its own that takes all it needs as inputs."""

    def __init__(
        self, part: Slice, outputs: Sequence[Any] | None, root: nn.Module, held: Mapping[str, str]
    ) -> None:
        self.graph = fx.Graph()
        self.regions = nn.Module()
        self.constants: list[Tensor] = []
        self._root, self._held = root, held
        self._env: dict[fx.Node, fx.Node] = {}
        wanted = [*part.nodes, *_nodes(outputs)]
        for kind, nodes in (("value", part.takes), ("input", part.inputs)):
            for index, node in enumerate(nodes):
                self._env[node] = self.graph.placeholder(f"{kind}_{index}_{node.name}")
        self.sized = self._add_sizes(wanted)
        self.tensors = self._add_held(wanted)
        for node in part.copied:
            self._env[node] = self.graph.call_function(torch.clone, (self._env[node],))
        for node in part.nodes:
            self._add(node)
        given = list(part.gives) if outputs is None else list(outputs)
        self.graph.output(fx.map_arg(tuple(given), self._env.__getitem__))

    def _add(self, node: fx.Node) -> None:
        if is_check(node):
            return
        made = self.graph.node_copy(node, self._env.__getitem__)
        made.target = function_of(node.target)
        self._env[node] = made

    def _add_sizes(self, wanted: Sequence[fx.Node]) -> tuple[int, ...]:
        """Copy the nodes that compute sizes from those of arguments, which any stage can do for itself."""
        sizes: dict[fx.Node, None] = {}
        for node in wanted:
            for used in node.all_input_nodes if node.op == "call_function" else [node]:
                _collect_sizes(used, sizes)
        inputs = dict.fromkeys(
            n for size in sizes for n in size.all_input_nodes if n.op == "placeholder"
        )
        shapes = {node: self.graph.placeholder(f"sized_{node.name}") for node in inputs}
        for size in sizes:
            self._env[size] = self.graph.node_copy(size, {**self._env, **shapes}.__getitem__)
        return tuple(map(_position, inputs))

    def _add_held(self, wanted: Sequence[fx.Node]) -> tuple[str, ...]:
        used = dict.fromkeys(n for node in wanted for n in _with_inputs(node) if n.op == "get_attr")
        tensors = [node for node in used if str(node.target) in self._held]
        others = [node for node in used if str(node.target) not in self._held]
        for node in tensors:
            self._env[node] = self.graph.placeholder(f"own_{node.name}")
        for node in others:
            self._add_other(node)
        return tuple(self._held[str(node.target)] for node in tensors)

    def _add_other(self, node: fx.Node) -> None:
        """A constant, or the graph of a region, such as one under ``torch.no_grad()``."""
        found = attribute(self._root, str(node.target))
        if isinstance(found, Tensor):
            self._env[node] = self.graph.placeholder(f"constant_{node.name}")
            self.constants.append(found)
            return
        name = node.name
        self.regions.add_module(name, found)
        self._env[node] = self.graph.get_attr(name)


def _position(placeholder: fx.Node) -> int:
    inputs = [node for node in placeholder.graph.nodes if node.op == "placeholder"]
    return inputs.index(placeholder)


def _with_inputs(node: fx.Node) -> list[fx.Node]:
    return [node, *node.all_input_nodes]


def _nodes(outputs: Sequence[Any] | None) -> list[fx.Node]:
    return [value for value in outputs or () if isinstance(value, fx.Node)]


def _collect_sizes(node: fx.Node, found: dict[fx.Node, None]) -> None:
    """Note a size after the sizes that it is computed from."""
    if is_size(node) and node not in found:
        for used in node.all_input_nodes:
            _collect_sizes(used, found)
        found[node] = None


# ---- devices


def _moved(module: fx.GraphModule, old: torch.device, new: torch.device) -> fx.GraphModule:
    """The code, where the device that it was traced on is replaced by another."""
    if old == new:
        return module
    moved = copy.deepcopy(module)
    for part in moved.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                node.args = _replace(node.args, old, new)
                node.kwargs = _replace(node.kwargs, old, new)
                _move_autocast(node, old, new)
            part.recompile()
    return moved


def _replace(value: Any, old: torch.device, new: torch.device) -> Any:
    if isinstance(value, torch.device):
        return new if value.type == old.type else value
    if isinstance(value, list | tuple):
        return type(value)(_replace(item, old, new) for item in value)
    if isinstance(value, dict):
        return {key: _replace(item, old, new) for key, item in value.items()}
    return value


def _move_autocast(node: fx.Node, old: torch.device, new: torch.device) -> None:
    """Replace the type of device in a call that enters autocast, where it is the first argument."""
    if "autocast" in str(node.target) and node.args and node.args[0] == old.type:
        node.args = (new.type, *node.args[1:])
