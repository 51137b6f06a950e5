"""The graphs of a model's calls, cut into stages: one for each kind of call, made when it first occurs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.partition.base import Description
from penstock.partition.traced.export import ROOT, Exported, Skeleton, export, undisturbed
from penstock.partition.traced.marks import Layout, Point, Wanted, check_met, lay_out, stages_of
from penstock.partition.traced.wiring import Aliases, Program, Wiring
from penstock.step.loss import collect_losses
from penstock.values import (
    Family,
    Found,
    Unknowns,
    ValueSpec,
    autocast_types,
    flatten,
    forms_of_arguments,
    found_of,
    spec_of_forms,
    surely_reached,
)

Sure = frozenset[tuple[str, int]]
"""The tensors that certainly get a gradient: the value's name, and the index among its tensors."""
Travelling = tuple[ValueSpec, Sure]
"""The spec of what travels and of the output, by name; and the tensors that certainly get gradients."""


class Trace:
    """One call's graph, cut at the marks.

    Args:
        exported: the graph.
        wanted: whether to cut at a mark.
        layout: how the regions between them make up stages.
        arguments_travel: whether the first stage hands on the arguments that later ones use.

    Attributes:
        families: what travels in calls that differ in sizes alone, as far as that is known.
    """

    def __init__(
        self, exported: Exported, wanted: Wanted, layout: Layout, *, arguments_travel: bool = False
    ) -> None:
        self.exported = exported
        self._stage_of = stages_of(exported.graph, wanted, layout)
        aliases = Aliases(exported.graph, exported.root)
        self.wiring = Wiring(
            exported.graph,
            self._stage_of,
            layout.stages,
            aliases,
            arguments_travel=arguments_travel,
        )
        self._programs: dict[int, Program] = {}
        self.families: dict[Any, Family[Travelling]] = {}

    def users(self, name: str) -> dict[int, list[fx.Node]]:
        """The stages that use a parameter or buffer, with the nodes that do."""
        last = len(self.wiring.slices) - 1
        found: dict[int, list[fx.Node]] = {}
        for node in self.exported.graph.nodes:
            if node.op == "get_attr" and node.target == ROOT + name:
                for user in node.users:
                    found.setdefault(self._stage_of.get(user, last), []).append(user)
        return found

    def program(self, stage: int, held: Mapping[str, str], device: torch.device) -> Program:
        """What a stage runs.

        Args:
            stage: its index.
            held: for each name of a parameter or buffer in the model, its name in the stage.
            device: the device of the trace.
        """
        if stage not in self._programs:
            part = self.wiring.slices[stage]
            outputs = self.wiring.outputs if part is self.wiring.slices[-1] else None
            names = {ROOT + name: own for name, own in held.items()}
            self._programs[stage] = Program(part, outputs, self.exported.root, names, device)
        return self._programs[stage]


_KEPT = 32
"""How many graphs are kept for training, and for evaluation; then the oldest is dropped."""
_REMEMBERED = 1024
"""For how many calls it is remembered which graph holds."""

Policy = Callable[[fx.GraphModule], fx.GraphModule]
"""Takes a graph, and returns one with marks where it is to be cut."""


@dataclass(frozen=True)
class Cuts:
    """Where a model's graphs are cut.

    Args:
        points: before and after modules.
        in_code: whether to cut at each ``pipe_split()`` in the code as well.
        policy: puts more ``pipe_split`` calls into a graph.
        arguments_travel: whether the first stage hands on the arguments that later stages use, so that the
            ranks of these need not be given the batch.
    """

    points: tuple[Point, ...] = ()
    in_code: bool = True
    policy: Policy | None = None
    arguments_travel: bool = False

    def wants(self, mark: Point | str) -> bool:
        """Whether to cut at a mark."""
        if isinstance(mark, Point):
            return any(point.covers(mark) for point in self.points)
        return self.in_code


class Held(Protocol):
    """A stage that holds parameters and buffers."""

    @property
    def held_names(self) -> Mapping[str, str]:
        """For each name in the model of a tensor that it holds, the name there."""

    def held_tensor(self, name: str) -> Tensor:
        """A parameter or buffer, by its name there."""


class Traces:
    """Finds the graph for a call.

    A graph holds for all sizes of the batch for which the model's code does the same; for a call for which
    none holds another one is made. Training and evaluation have graphs of their own.

    Args:
        skeleton: the copy of the model that is traced.
        cuts: where to cut.
        call: the spec of the first call's ``(args, kwargs)``.
        training: the mode of the first call.
        exported: the graph of the first call, if it was made already.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        cuts: Cuts,
        call: ValueSpec,
        *,
        training: bool,
        exported: Exported | None = None,
    ) -> None:
        self._skeleton, self._cuts, self._example = skeleton, cuts, call
        exported = exported or self._export(call, training)
        self.layout = lay_out(exported.graph, cuts.wants)
        self.first = self._trace(exported)
        self._made: dict[bool, list[Trace]] = {training: [self.first], not training: []}
        self._found: dict[tuple[bool, str], Trace] = {}

    @property
    def device(self) -> torch.device:
        """The device that the graphs take the model to be on."""
        return self._skeleton.device

    @property
    def changed_modes(self) -> tuple[str, ...]:
        """The paths of the modules that are in another mode than when the model was traced."""
        return self._skeleton.changed_modes()

    @property
    def count(self) -> int:
        """How many graphs were made."""
        return sum(map(len, self._made.values()))

    def example(self, training: bool) -> Trace:
        """The graph of the first call."""
        return self.find(self._example, training)

    def find(self, call: ValueSpec, training: bool) -> Trace:
        """The graph that holds for a call.

        Raises:
            PartitionError: the call cannot be traced, or not be cut as the first one was.
        """
        key = (training, call.digest())
        if key not in self._found:
            fitting = (t for t in self._made[training] if t.exported.fits(call))
            found = next(fitting, None) or self._make(call, training)
            if len(self._found) == _REMEMBERED:
                self._found.clear()
            self._found[key] = found
        return self._found[key]

    def _make(self, call: ValueSpec, training: bool) -> Trace:
        made = self._trace(self._export(call, training))
        kept = self._made[training]
        if len(kept) == _KEPT:
            kept.remove(next(trace for trace in kept if trace is not self.first))
            self._found.clear()
        kept.append(made)
        return made

    def _trace(self, exported: Exported) -> Trace:
        travel = self._cuts.arguments_travel
        return Trace(exported, self._cuts.wants, self.layout, arguments_travel=travel)

    def _export(self, call: ValueSpec, training: bool) -> Exported:
        paths = [point.path for point in self._cuts.points]
        exported = export(self._skeleton, call, paths, training=training)
        regions = [m for m in exported.root.modules() if isinstance(m, fx.GraphModule)]
        check_met(self._cuts.points, exported.graph, regions[1:])
        return exported if self._cuts.policy is None else _with_policy(exported, self._cuts.policy)

    # ---- what travels on each edge in a call

    def describe(self, trace: Trace, call: ValueSpec, held: Sequence[Held]) -> Description:
        """The edges of a call and what travels on them, found without data.

        Args:
            trace: the graph that holds for it.
            call: the spec of its ``(args, kwargs)``.
            held: what each stage holds.
        """
        every = [own.held_tensor(name) for own in held for name in own.held_names.values()]
        traits = tuple((tensor.dtype, tensor.requires_grad) for tensor in every)
        key = (torch.is_grad_enabled(), *autocast_types(), traits, call.kind())
        whole, sure = trace.families.setdefault(key, _new_family()).find(
            forms_of_arguments(call, self.device),
            lambda: self._looked(trace, call, held),
            lambda unknowns: self._follow(trace, call, unknowns, held),
            lambda found: (spec_of_forms(found.leaves, found.rest[0]), found.rest[1]),
        )
        specs = {name: ValueSpec.of(value) for name, value in whole.without_data().items()}
        edges = [
            replace(edge, gradient=bool(specs[edge.value].differentiable))
            for edge in trace.wiring.edges
        ]
        marked = {
            name: spec.marked({index for of, index in sure if of == name})
            for name, spec in specs.items()
            if name != "output"
        }
        return Description(tuple(edges), {**specs, **marked})

    def _looked(self, trace: Trace, call: ValueSpec, held: Sequence[Held]) -> Travelling:
        inputs = [self._skeleton.empty(spec) for spec in call.tensors]
        values, sure = self._values(trace, inputs, held)
        return ValueSpec.of(values), sure

    def _values(
        self, trace: Trace, inputs: Sequence[Tensor], held: Sequence[Held]
    ) -> tuple[dict[str, Any], Sure]:
        """What travels and the output, by name; and the tensors that certainly get a gradient."""
        values: dict[str, Any] = {}
        given: list[Any] = []
        with undisturbed(), self._skeleton.mode:
            for stage, own in enumerate(held):
                program = trace.program(stage, own.held_names, self.device)
                tensors = [self._skeleton.like(own.held_tensor(name)) for name in program.tensors]
                taken = [values[name] for name in program.takes]
                given = program(self.device, taken, inputs, tensors)
                values.update(zip(program.gives, given, strict=False))
            with collect_losses() as added:
                values["output"] = trace.exported.output(given)
        losses = [term.value for term in added]
        sure = surely_reached(_edges(values), flatten(values["output"])[0], losses)
        return values, frozenset(sure)

    def _follow(
        self, trace: Trace, call: ValueSpec, unknowns: Unknowns, held: Sequence[Held]
    ) -> Found:
        with unknowns.within(self._skeleton.mode) as inputs:
            for tensor, spec in zip(inputs, call.tensors, strict=True):
                tensor.requires_grad_(spec.requires_grad)
            values, sure = self._values(trace, inputs, held)
            tensors, structure = flatten(values)
            return found_of(tensors, (structure, sure))


def _new_family() -> Family[Travelling]:
    return Family(lambda one, other: one[0].digest() == other[0].digest() and one[1] == other[1])


def _edges(values: Mapping[str, Any]) -> dict[tuple[str, int], GradientEdge]:
    """The edges of the autograd graph at which the gradients of tensors arrive."""
    tensors = {(n, i): t for n, value in values.items() for i, t in enumerate(flatten(value)[0])}
    return {key: get_gradient_edge(t) for key, t in tensors.items() if t.requires_grad}


def _with_policy(exported: Exported, policy: Policy) -> Exported:
    module = exported.root
    assert isinstance(module, fx.GraphModule)
    module.recompile()
    marked = policy(module)
    return replace(exported, graph=marked.graph, root=marked)
