"""Plan one kind of call: the owners of its events, and the values that travel between the stages."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from penstock._engine.values import Place, opaque_in, tensors_in
from penstock.errors import PartitionError
from penstock.partition.functions import is_ours, may_draw
from penstock.partition.mutables import restored
from penstock.partition.owners import Owners, check_owners
from penstock.partition.private import hidden
from penstock.partition.trace import Event, Homes, Trace, Value
from penstock.schedule import Edge


class Step(NamedTuple):
    """An event as the stages see it.

    Attributes:
        what: the function, or the unit's path.
        owner: the stage that runs it.
        event: what was recorded.
        inputs: the roots of its arguments that are values, by place; ``None`` for parameters and buffers.
        claims: the arguments, by place, that become values, with the values' numbers: tensors that each stage
            makes itself from the model's arguments, and that the event writes into.
        borrows: whether it uses a parameter or buffer of another stage.
        copies: the places of arguments in memory of a module that may change it before the backward.
        tells: whether the model's code uses tensors that a unit leaves in its arguments, such as in a list.
    """

    what: Any
    owner: int
    event: Event
    inputs: dict[Place, int | None]
    claims: dict[Place, int]
    borrows: bool
    copies: tuple[Place, ...]
    tells: bool


class Quick(NamedTuple):
    """A PyTorch function whose result is one tensor, which neither travels nor is changed later.

    Attributes:
        what: the function.
        is_own: whether the stage runs it.
        placeholder: the result in stages that do not run it.
    """

    what: Any
    is_own: bool
    placeholder: Tensor


@dataclass(eq=False)
class StagePlan:
    """What one stage does in one kind of call.

    Attributes:
        last: the index of its last event.
        arrives: the edges of the tensors that it gets, by their roots.
        sends: the edges of the tensors that it sends, by their roots.
        borrows: the edges of the parameters and buffers that it gets, by their names.
        lends: the edges of the parameters and buffers that it sends, by their names.
    """

    last: int = -1
    arrives: dict[int, str] = field(default_factory=dict)
    sends: dict[int, str] = field(default_factory=dict)
    borrows: dict[str, str] = field(default_factory=dict)
    lends: dict[str, str] = field(default_factory=dict)


@dataclass(eq=False)
class CallPlan:
    """What the stages do in one kind of call.

    Attributes:
        edges: the values that travel.
        steps: the events in order.
        trace: the run that showed the events.
        stages: what each stage does.
        lost: the names in the output of objects that no stage has in full, such as caches.
        regions: for each of the author's checkpoints, the stages of its events.
        buffers: the names of the units' buffers that are used between units.
        copied: the roots of values whose memory belongs to modules, and the names of parameters and buffers
            that travel and may change before they have arrived.
        attributes: the modules, names and units of the attributes set in stages before the last.
    """

    edges: tuple[Edge, ...]
    steps: list[Step]
    trace: Trace
    stages: list[StagePlan]
    lost: set[Any] = field(default_factory=set)
    regions: list[set[int]] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    copied: set[int | str] = field(default_factory=set)
    attributes: list[tuple[nn.Module, str, str]] = field(default_factory=list)
    _quick: dict[int, list[Quick | None]] = field(default_factory=dict, repr=False)

    @functools.cached_property
    def writes(self) -> bool:
        """Whether an event writes into tensors that it is given."""
        return any(step.event.changes_arguments for step in self.steps)

    def quick(self, stage: int) -> list[Quick | None]:
        """For each event up to a stage's last one, its quick form there, or None."""
        if stage not in self._quick:
            # A stage that must check again which values an event has does nothing quickly.
            checked = self.trace.decides or any(step.claims for step in self.steps)
            part = self.stages[stage]
            steps = [] if checked else self.steps[: part.last + 1]
            kept = {*part.sends, *part.arrives, *self.trace.returned}
            self._quick[stage] = [self._quick_step(step, stage, kept) for step in steps]
        return self._quick[stage]

    def _quick_step(self, step: Step, stage: int, kept: set[int | None]) -> Quick | None:
        event = step.event
        number = event.slots[0] if isinstance(event.result, Tensor) else None
        if (
            not isinstance(number, int)
            or number in kept
            or not event.inputs
            or event.is_unit
            or event.sets_hook
            or event.needs_data
            or event.changes
            or step.borrows
            or step.copies
            or is_ours(step.what)
            or may_draw(step.what)
        ):
            return None
        return Quick(step.what, step.owner == stage, self.trace.values[number].tensor)

    @functools.cached_property
    def beyond(self) -> CallPlan:
        """The plan with a stage after the last one, in which there is nothing to do."""
        return replace(self, stages=[*self.stages, StagePlan(len(self.steps))], _quick={})

    def shares(self) -> tuple[tuple[float, ...], tuple[str, float]]:
        """The part of the work that each stage has; the unit that has the most, and its part."""
        stages, units = [0.0] * len(self.stages), Counter[str]()
        for step in self.steps:
            stages[step.owner] += step.event.work
            units[step.what if step.event.is_unit else ""] += step.event.work  # type: ignore[assignment]
        total = sum(stages) or 1.0
        path, work = max(
            units.items(), key=lambda pair: (bool(pair[0]), pair[1]), default=("", 0.0)
        )
        return tuple(of / total for of in stages), (path, work / total)

    def apart(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the last stage, such as a loss, that may not read other stages' attributes.

        Raises:
            PartitionError: it reads one.
        """
        if not self.attributes:
            return function(*args)
        with hidden(self.attributes):
            return function(*args)

    def with_output(self, function: Callable[[Any], Any], counts: Any = None) -> Any:
        """Call a function with the model's output without data; restore what ``counts`` holds."""
        if not self.steps:
            return None  # the model was not run without data
        with self.trace.mode, restored(counts):
            return function(self.trace.output)


def empty_plan() -> CallPlan:
    """A plan in which nothing travels."""
    trace = Trace(FakeTensorMode(), torch.device("cpu"), [])
    return CallPlan((), [], trace, [StagePlan(0)])


def assign(trace: Trace, homes: Homes, stages: int) -> CallPlan:
    """Find the owner of each event of a run, and the values that travel.

    Raises:
        PartitionError: the model cannot be cut this way; the message names the module and the line.
    """
    owners = Owners(trace, homes).find()
    check_owners(owners, stages)
    return _Planner(trace, owners, stages).plan()


def _check_region(steps: Sequence[Step]) -> None:
    """Refuse a checkpoint that is recomputed as a whole, and uses a parameter of another stage."""
    borrows = next((step.event for step in steps if step.borrows), None)
    if borrows is not None and len({step.owner for step in steps}) == 1:
        raise PartitionError(
            f"{borrows.where}: a checkpoint's function in stage {steps[0].owner} uses a parameter of another "
            "stage, and could not be run again with it; use it outside of the checkpoint, or put both into a "
            "module that is placed as a whole"
        )


class _Planner:
    def __init__(self, trace: Trace, owners: Owners, stages: int) -> None:
        self._trace, self._owners, self._stages = trace, owners, stages
        self._users: dict[int, set[int]] = {}

    def plan(self) -> CallPlan:
        trace, owner_of = self._trace, self._owners.stages
        self._find_users()
        self._check_versions()
        parts = self._stage_plans()
        edges = tuple(self._edges(parts))
        events = zip(trace.events, owner_of, strict=True)
        steps = [self._step(event, owner, parts[owner].borrows) for event, owner in events]
        for region in trace.regions:
            _check_region(steps[region.first : region.stop])
        return CallPlan(
            edges,
            steps,
            trace,
            parts,
            self._lost(),
            [set(owner_of[r.first : r.stop]) for r in trace.regions],
            self._buffers(),
            self._copied(),
            [
                (one.module, one.name, trace.events[one.event].name)
                for one in trace.kept
                if owner_of[one.event] < self._stages - 1
            ],
        )

    def _stage_plans(self) -> list[StagePlan]:
        """What each stage does, with its last event."""
        parts = [StagePlan() for _ in range(self._stages)]
        hooked = {self._stages - 1}
        for index, owner in enumerate(self._owners.stages):
            parts[owner].last = index
            if self._trace.events[index].sets_hook:
                hooked.add(owner)
        # The last stage returns the output. A stage that sets a hook may remove it at any later point.
        for stage in hooked:
            parts[stage].last = len(self._trace.events)
        return parts

    def _edges(self, parts: Sequence[StagePlan]) -> Iterator[Edge]:
        """The values that travel; notes for each stage what it gets and sends."""
        values, reached = self._trace.values, self._reached()
        for number, users in sorted(self._users.items()):
            value = values[number]
            source = min(self._owners.holders(value))
            parameter = values[value.root].parameter
            if parameter is None:
                for by_root in [parts[source].sends, *(parts[stage].arrives for stage in users)]:
                    by_root[value.root] = value.name
            else:
                for by_name in [parts[source].lends, *(parts[stage].borrows for stage in users)]:
                    by_name[parameter] = value.name
            gradient = value.requires_grad and number in reached
            yield Edge(value.name, source, tuple(sorted(users)), gradient)

    def _find_users(self) -> None:
        for index, event in enumerate(self._trace.events):
            for _, number in event.inputs:
                self._use(number, self._owners.stages[index])
        for slot in (*self._trace.slots, *self._trace.inner):
            if slot is not None:
                self._use(slot, self._stages - 1)

    def _use(self, number: int, stage: int) -> None:
        holders = self._owners.holders(self._trace.values[number])
        if holders and stage not in holders:
            self._users.setdefault(number, set()).add(stage)

    def _check_versions(self) -> None:
        """Refuse in-place writes between uses of a tensor: each stage gets it once, in its final state."""
        values, owner_of = self._trace.values, self._owners.stages
        known: dict[tuple[int, int], int] = {}
        for number, users in sorted(self._users.items()):
            value = values[number]
            first = values[value.root]
            others = {known.setdefault((value.root, stage), number) for stage in users}
            if others != {number} or value.tensor.shape != first.tensor.shape:
                self._refuse_change(number, value)
        for index, event in enumerate(self._trace.events):
            for change in event.changes:
                old = None if change.old is None else values[change.old]
                if (
                    old
                    and change.old in self._users
                    and owner_of[index] in self._owners.holders(old)
                ):
                    self._refuse_change(change.new, old)

    def _refuse_change(self, number: int, value: Value) -> None:
        index = self._trace.values[number].event
        assert index is not None
        event, stage = self._trace.events[index], self._owners.stages[index]
        users = sorted({*self._users.get(number, ()), *self._users.get(value.root, ())}) or [stage]
        raise PartitionError(
            f"{event.where}: {event.name} in stage {stage} changes {value.name.rstrip('!')} in place, "
            f"which stage {users[0]} uses as it was before, or in another shape; use the operation that is "
            "not in place, or write into a clone"
        )

    def _step(self, event: Event, owner: int, borrowed: Mapping[str, str]) -> Step:
        values = self._trace.values
        roots = {place: values[number].root for place, number in event.inputs}
        parameters = {values[root].parameter for root in roots.values()}
        inputs = {p: None if values[root].event is None else root for p, root in roots.items()}
        new = {change.argument: change.new for change in event.changes if change.old is None}
        claims = {place: number for place, number in new.items() if place is not None}
        lasting = (
            [] if event.changes else [p for p, n in event.inputs if self._may_change(values[n])]
        )
        return Step(
            event.what,
            owner,
            event,
            inputs,
            claims,
            not parameters.isdisjoint(borrowed),
            tuple(lasting),
            bool(event.left) and not self._used.isdisjoint(self._left_by(event)),
        )

    def _left_by(self, event: Event) -> set[int]:
        slots = event.slots[len(tensors_in(event.result)) :]
        return {self._trace.values[slot].root for slot in slots if isinstance(slot, int)}

    @functools.cached_property
    def _used(self) -> set[int | None]:
        """The values that events or the output use."""
        values = self._trace.values
        inputs = {values[n].root for event in self._trace.events for _, n in event.inputs}
        return {*inputs, *self._trace.returned}

    def _may_change(self, value: Value) -> bool:
        """Whether a tensor lies in memory of a module that the next microbatch may write into."""
        root = self._trace.values[value.root]
        return not value.requires_grad and (root.belongs or root.parameter in self._moving)

    @functools.cached_property
    def _moving(self) -> set[str | None]:
        """The buffers that events change."""
        values = self._trace.values
        roots = [values[value.root] for value in values if value.event is not None]
        return {root.parameter for root in roots if root.is_buffer}

    def _reached(self) -> set[int]:
        """The values that lead to the output or an added loss: a gradient may come back to them."""
        trace = self._trace
        reached = {number for number in (*trace.slots, *trace.inner) if number is not None}
        for event in reversed(trace.events):
            results = [slot for slot in event.slots if isinstance(slot, int)]
            results += [change.new for change in event.changes]
            # A unit may add a loss, even if its results are not used.
            counts = event.is_unit or is_ours(event.what)
            counts = counts or any(
                number in reached and trace.values[number].requires_grad for number in results
            )
            if counts:
                reached.update(number for _, number in event.inputs)
        return reached

    def _lost(self) -> set[Any]:
        """The names in the output of objects that units of other stages got."""
        elsewhere = {
            id(thing)
            for event, stage in zip(self._trace.events, self._owners.stages, strict=True)
            if event.is_unit and stage != self._stages - 1
            for thing in opaque_in(event.call).values()
        }
        things = opaque_in(self._trace.output)
        return {place[0] for place, thing in things.items() if place and id(thing) in elsewhere}

    def _buffers(self) -> list[str]:
        values = self._trace.values
        events = [event for event in self._trace.events if not event.is_unit]
        roots = {values[number].root for event in events for _, number in event.inputs}
        return [values[n].parameter or "" for n in sorted(roots) if values[n].is_buffer]

    def _copied(self) -> set[int | str]:
        """What belongs to modules; a parameter only if an event changes it."""
        values = self._trace.values
        copied: set[int | str] = {v.root for v in values if v.belongs}
        roots = [v for v in values if v.is_buffer]
        roots += [values[v.root] for v in values if v.event is not None]
        return copied | {v.parameter for v in roots if v.parameter is not None}
