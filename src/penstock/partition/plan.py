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

from penstock.errors import PartitionError
from penstock.partition.held import hidden, restored
from penstock.partition.seen import may_draw
from penstock.partition.trace import Event, Homes, Trace, Value, is_ours
from penstock.schedule import Edge
from penstock.values import Place, opaque_in, tensors_in


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
class CallPlan:
    """What the stages do in one kind of call.

    Attributes:
        edges: the values that travel.
        steps: the events in order.
        trace: the run that showed the events.
        last: for each stage, the index of its last event.
        arrives: for each stage, the edges of the tensors that it gets, by their roots.
        sends: for each stage, the edges of the tensors that it sends, by their roots.
        borrows: for each stage, the edges of the parameters and buffers that it gets, by their names.
        lends: for each stage, the edges of the parameters and buffers that it sends, by their names.
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
    last: list[int]
    arrives: list[dict[int, str]]
    sends: list[dict[int, str]]
    borrows: list[dict[str, str]]
    lends: list[dict[str, str]]
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
            steps = [] if checked else self.steps[: self.last[stage] + 1]
            kept = {*self.sends[stage], *self.arrives[stage], *self.trace.returned}
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
        arrives, sends, borrows, lends = (
            [*of, {}] for of in (self.arrives, self.sends, self.borrows, self.lends)
        )
        last = [*self.last, len(self.steps)]
        return replace(
            self, last=last, arrives=arrives, sends=sends, borrows=borrows, lends=lends, _quick={}
        )

    def shares(self) -> tuple[tuple[float, ...], tuple[str, float]]:
        """The part of the work that each stage has; the unit that has the most, and its part."""
        stages, units = [0.0] * len(self.last), Counter[str]()
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
    return CallPlan((), [], trace, [0], [{}], [{}], [{}], [{}])


def first_uses(trace: Trace, homes: Homes) -> dict[str, int]:
    """The first stage that uses each of the parameters that no unit holds."""
    return _owners_of(trace, homes, loose=True).loose_homes


def decides_early(trace: Trace, homes: Homes, stages: int) -> set[str]:
    """The paths of the modules whose code needs numbers between units that not all later stages have."""
    if not any(event.needs_data and not event.is_unit for event in trace.events):
        return set()
    owners = _owners_of(trace, homes, loose=True)
    return {event.module for event, _ in owners.early(stages)}


def _owners_of(trace: Trace, homes: Homes, *, loose: bool = False) -> _Owners:
    owners = _Owners(trace, dict(homes), loose=loose)
    for event in trace.events:
        owners.add(event)
    return owners


def assign(trace: Trace, homes: Homes, stages: int) -> CallPlan:
    """Find the owner of each event of a run, and the values that travel.

    Raises:
        PartitionError: the model cannot be cut this way; the message names the module and the line.
    """
    for changed in trace.state if stages > 1 else ():
        if not changed.units:
            raise PartitionError(
                f"the model's forward changes {changed.what} outside of its units, in code that every stage "
                "runs; move it into a module that is in one stage, with the code that changes it"
            )
        if len({stage for path in changed.units for stage in homes[path]}) > 1:
            raise PartitionError(
                f"the model's forward changes {changed.what}, which are in several stages, and each has "
                "its own; return what the later one needs and pass it on (a loss: penstock.add_loss), or put "
                "both into one stage"
            )
    owners = _owners_of(trace, homes)
    _check_generators(trace, owners.stages)
    return _Planner(trace, owners, stages).plan()


def _check_generators(trace: Trace, stages: Sequence[int]) -> None:
    """Refuse a generator of the model from which several stages draw."""
    drawn: dict[int, tuple[Event, int]] = {}
    for event, stage in zip(trace.events, stages, strict=True):
        for generator in event.generators:
            other, known = drawn.setdefault(id(generator), (event, stage))
            if known != stage:
                raise PartitionError(
                    f"{event.name} in stage {stage} draws from a torch.Generator from which {other.name} in "
                    f"stage {known} draws too, so that the numbers would depend on the schedule; draw from "
                    "torch's own, which is seeded for each call"
                )


class _Owners:
    """Finds the stage of each event, one after the other."""

    def __init__(self, trace: Trace, homes: Homes, *, loose: bool = False) -> None:
        self.trace, self.homes, self._loose = trace, homes, loose
        self.stages: list[int] = []
        self.loose_homes: dict[str, int] = {}
        self._calls = Counter(trace.calls())
        self._stale: dict[int, tuple[Event, int]] = {}

    def holders(self, value: Value) -> Sequence[int]:
        """The stages that hold a parameter or buffer, or the one that makes a value."""
        if value.event is not None:
            return (self.stages[value.event],)
        assert value.parameter is not None
        known = self.homes.get(value.parameter, self.homes.get(value.unit))
        if known is None and value.parameter in self.loose_homes:
            return (self.loose_homes[value.parameter],)
        return () if known is None else known

    def add(self, event: Event) -> None:
        values = [self.trace.values[number] for _, number in event.inputs]
        makers = [self.stages[v.event] for v in values if v.event is not None]
        held = [min(h) for v in values if v.event is None and (h := self.holders(v))]
        latest = max([*makers, *held], default=None)
        if event.what in self.homes:
            owner = self._home(event, max(makers, default=0))
        elif latest is not None:
            owner = latest
        else:
            owner = self.stages[-1] if self.stages and not is_ours(event.what) else 0
        for value in values:
            if value.event is None and not self.holders(value) and value.parameter:
                self.loose_homes[value.parameter] = owner
        self.stages.append(owner)
        if not self._loose:
            self._check(event, owner)

    def early(self, stages: int) -> Iterator[tuple[Event, int]]:
        """The events between units that need numbers which not all later stages have, and their stages."""
        last = stages - 1
        for index, event in enumerate(self.trace.events):
            if event.is_unit or not event.needs_data or stages == 1:
                continue
            if set(self.stages[index:]) != {last}:
                yield event, self.stages[index]

    def _home(self, event: Event, earliest: int) -> int:
        stages = self.homes[event.what]
        mine = stages[min(event.number * len(stages) // self._calls[event.what], len(stages) - 1)]
        return max(mine, next((stage for stage in stages if stage >= earliest), mine))

    def _check_shared(self, event: Event, owner: int, weight: Value) -> None:
        """Refuse a change of a weight that several stages hold."""
        holders = self.holders(weight) if weight.parameter and not weight.is_buffer else ()
        if len(holders) > 1:
            raise PartitionError(
                f"{event.where}: {event.name} in stage {owner} changes {weight.parameter} in place, which "
                f"stages {', '.join(map(str, holders))} share, each with its own copy; put all of its "
                "modules into one stage"
            )

    def _check(self, event: Event, owner: int) -> None:
        for _, number in event.inputs:
            value = self.trace.values[number]
            source = min(self.holders(value), default=owner)
            if owner not in self.holders(value) and source > owner:
                raise PartitionError(_backwards(event, owner, value, source))
            if number in self._stale:
                culprit, stage = self._stale[number]
                raise PartitionError(
                    f"{culprit.where}: {culprit.name} in stage {stage} writes into memory that "
                    f"{value.name.rstrip('!')} of another stage shares, and {event.where} reads that; write "
                    "into a clone, or put both into one stage"
                )
        for change in event.changes:
            if change.old is not None:
                holders = self.holders(self.trace.values[change.old])
                old = self.trace.values[change.old]
                self._check_shared(event, owner, self.trace.values[old.root])
                if old.parameter is not None and owner not in holders:
                    raise PartitionError(
                        f"{event.where}: {event.name} in stage {owner} changes {old.parameter} of stage "
                        f"{min(holders, default=0)}; put both into one module that is placed as a whole"
                    )
                if change.argument is None and owner not in holders:
                    self._stale[change.new] = event, owner
        for read in event.reads:
            if self.stages[read] != owner:
                left = self.trace.events[read]
                raise PartitionError(
                    f"{event.where}: {event.name} in stage {owner} reads a value that {left.name} in stage "
                    f"{self.stages[read]} left somewhere, as in an attribute, a hook's list or an object "
                    "that both are given; return it and pass it on as an argument (a loss: penstock."
                    "add_loss), or put both into one stage"
                )


def _backwards(event: Event, owner: int, value: Value, source: int) -> str:
    return (
        f"{event.where}: {event.name} in stage {owner} uses {value.name.rstrip('!')} of stage {source}, but "
        "values go to later stages only; list the modules in the order of their calls, or name the one that "
        "is called again in both lists of stages="
    )


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
    def __init__(self, trace: Trace, owners: _Owners, stages: int) -> None:
        self._trace, self._owners, self._stages = trace, owners, stages
        self._users: dict[int, set[int]] = {}

    def plan(self) -> CallPlan:
        trace, owner_of, stages = self._trace, self._owners.stages, self._stages
        last = [-1] * stages
        for index, owner in enumerate(owner_of):
            last[owner] = index
        # The last stage returns the output. A stage that sets a hook may remove it at any later point.
        hooked = {owner_of[i] for i, event in enumerate(trace.events) if event.sets_hook}
        for stage in (*hooked, stages - 1):
            last[stage] = len(owner_of)
        self._find_users()
        self._check_numbers()
        self._check_versions()
        arrives, sends = ([dict[int, str]() for _ in range(stages)] for _ in range(2))
        borrows, lends = ([dict[str, str]() for _ in range(stages)] for _ in range(2))
        edges = []
        reached = self._reached()
        for number, users in sorted(self._users.items()):
            value = trace.values[number]
            source = min(self._owners.holders(value))
            gradient = value.requires_grad and number in reached
            edges.append(Edge(value.name, source, tuple(sorted(users)), gradient))
            parameter = trace.values[value.root].parameter
            for of_stage in [sends[source], *(arrives[stage] for stage in users)]:
                if parameter is None:
                    of_stage[value.root] = value.name
            for by_name in [lends[source], *(borrows[stage] for stage in users)]:
                if parameter is not None:
                    by_name[parameter] = value.name
        steps = [self._step(event, owner_of[i], borrows) for i, event in enumerate(trace.events)]
        for region in trace.regions:
            _check_region(steps[region.first : region.stop])
        return CallPlan(
            tuple(edges),
            steps,
            trace,
            last,
            arrives,
            sends,
            borrows,
            lends,
            self._lost(),
            [set(owner_of[r.first : r.stop]) for r in trace.regions],
            self._buffers(),
            self._copied(),
            [
                (one.module, one.name, trace.events[one.event].name)
                for one in trace.kept
                if owner_of[one.event] < stages - 1
            ],
        )

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

    def _check_numbers(self) -> None:
        """Refuse a tensor's numbers where they decide what other stages do."""
        for event, owner in self._owners.early(self._stages):
            raise PartitionError(
                f"{event.where}: the model's code needs numbers of a tensor of stage {owner} "
                f"({event.name}), which the other stages do not have; put that code into a module that is "
                "placed as a whole, by naming the module that contains it in stages="
            )

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

    def _step(self, event: Event, owner: int, borrows: Sequence[Mapping[str, str]]) -> Step:
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
            not parameters.isdisjoint(borrows[owner]),
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
