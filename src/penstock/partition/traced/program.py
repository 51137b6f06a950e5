"""The part of a graph that a stage runs, as something to call."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from penstock.errors import UsageError
from penstock.partition.traced.aliasing import attribute
from penstock.partition.traced.layout import is_check, is_size
from penstock.partition.traced.skeleton import function_of
from penstock.partition.traced.wiring import Slice


class Program:
    """Runs a slice.

    Args:
        part: the slice.
        outputs: the leaves of the model's output where the stage is the last, else ``None``.
        root: holds what ``get_attr`` nodes name.
        held: for each ``get_attr`` target that is a parameter or buffer of the stage, its name there.
        traced_on: the device that the graph speaks of.
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
        """The code, taking the stage's values, arguments, parameters and constants."""
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
            device: where.
            values: for ``takes``, in order.
            inputs: all tensors among the model's arguments.
            own: for ``tensors``, the stage's parameters and buffers.
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
    """Writes a slice as a graph of its own, whose inputs are all that it needs."""

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
        """Numbers that follow from the sizes of arguments, which any stage can work out itself."""
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
    """Note a size and what it is made of, first things first."""
    if is_size(node) and node not in found:
        for used in node.all_input_nodes:
            _collect_sizes(used, found)
        found[node] = None


# ---- devices


def _moved(module: fx.GraphModule, old: torch.device, new: torch.device) -> fx.GraphModule:
    """The code for another device than the one it was traced on."""
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
    """A region under autocast names the kind of device first."""
    if "autocast" in str(node.target) and node.args and node.args[0] == old.type:
        node.args = (new.type, *node.args[1:])
