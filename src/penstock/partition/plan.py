"""Who does what in one kind of call: the owners of its events, and what travels between the stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from penstock.errors import PartitionError
from penstock.partition.kept import hidden
from penstock.partition.nested import Place, opaque_in
from penstock.partition.seen import may_draw
from penstock.partition.state import restored
from penstock.partition.trace import Event, Trace, Value, is_ours
from penstock.schedule import Edge

Homes = Mapping[str, Sequence[int]]
"""The stages of each unit by path, and of each parameter and saved buffer by name.

Of a unit that is in several stages, the first calls are in the first of these, and so on.
"""


@dataclass(eq=False)
class Step:
    """An event as the stages see it.

    Attributes:
        what: the function, or the unit's path.
        owner: the stage that runs it.
        event: what was recorded.
        swaps: the arguments, by place, in whose place the owner puts what has arrived: the edge of each.
        sends: the arguments that it changed, by place, that travel afterwards: the edge of each.
        follows: the arguments, by place, that are other values from now on.
        aliases: values that it changed without being given them: by the value before, the value after and its
            edge, if it travels.
    """

    what: Any
    owner: int
    event: Event
    swaps: dict[Place, str] = field(default_factory=dict)
    sends: dict[Place, str] = field(default_factory=dict)
    follows: dict[Place, int] = field(default_factory=dict)
    aliases: dict[int, tuple[int, str | None]] = field(default_factory=dict)


class Quick(NamedTuple):
    """A function of PyTorch whose one tensor neither travels nor is changed later.

    Attributes:
        what: the function.
        is_own: whether the stage runs it.
        number: of the value that it gives.
        placeholder: what stages have that do not run it.
    """

    what: Any
    is_own: bool
    number: int
    placeholder: Tensor


@dataclass(eq=False)
class CallPlan:
    """What the stages do in one kind of call.

    Attributes:
        edges: the values that travel.
        steps: the events in order.
        trace: the run that showed them.
        last: for each stage, the index of its last event.
        arrives: for each stage, the edges of values that are results, by value.
        sends: for each stage, the edges of results that it sends, by value.
        parameters: for each stage, the edges of parameters and buffers that it sends, by their names.
        copies: the values that are changed after they are to be sent.
        kept: the values whose tensors a stage needs later.
        output_swaps: the tensors of the output, by position, that arrive: the edge of each.
        lost: the names in the output of objects that no stage has all of, such as caches.
        regions: for each of the author's checkpoints, the stages of its events.
        buffers: the names of the units' buffers that are used between units.
        changed_arguments: the positions of the model's arguments that are changed.
        attributes: those, with their modules and units, that units of earlier stages than the last set.
    """

    edges: tuple[Edge, ...]
    steps: list[Step]
    trace: Trace
    last: list[int]
    arrives: list[dict[int, str]]
    sends: list[dict[int, str]]
    parameters: list[dict[str, str]]
    copies: set[int]
    kept: set[int]
    output_swaps: dict[int, str]
    lost: set[Any]
    regions: list[set[int]]
    buffers: list[str]
    changed_arguments: set[int]
    attributes: list[tuple[nn.Module, str, str]] = field(default_factory=list)
    _quick: dict[int, list[Quick | None]] = field(default_factory=dict, repr=False)

    def quick(self, stage: int) -> list[Quick | None]:
        """For each event up to a stage's last one how it is done quickly there, or None."""
        if self.trace.decides or any(step.event.changes for step in self.steps):
            # Which values an event has is then checked again in the stage.
            return []
        if stage not in self._quick:
            steps = self.steps[: self.last[stage] + 1]
            kept = {*self.kept, *self.sends[stage], *self.arrives[stage], *self.trace.slots}
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
            or step.swaps
            or is_ours(step.what)
            or may_draw(step.what)
        ):
            return None
        return Quick(step.what, step.owner == stage, number, self.trace.values[number].tensor)

    def apart(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the last stage, such as a loss, which may not see what other stages' units keep.

        Raises:
            PartitionError: it does.
        """
        if not self.attributes:
            return function(*args)
        with hidden(self.attributes):
            return function(*args)

    def with_output(self, function: Callable[[Any], Any], counts: Any = None) -> Any:
        """Call a function with the model's output without data; what ``counts`` holds is put back."""
        if not self.steps:
            return None  # of a model that was not run without data
        with self.trace.mode, restored(counts):
            return function(self.trace.output)


def empty_plan() -> CallPlan:
    """Nothing travels."""
    trace = Trace(FakeTensorMode(), torch.device("cpu"), [])
    return CallPlan((), [], trace, [0], [{}], [{}], [{}], set(), set(), {}, set(), [], [], set())


def first_uses(trace: Trace, homes: Homes) -> dict[str, int]:
    """The first stage that uses each of the parameters that no unit holds."""
    known = dict(homes)
    owners = _Owners(trace, known, loose=True)
    for event in trace.events:
        owners.add(event)
    return owners.loose_homes


def assign(trace: Trace, homes: Homes, stages: int) -> CallPlan:
    """Find the owner of each event of a run, and what travels.

    Raises:
        PartitionError: the model cannot be cut so; the message names the module and the line.
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
                "its own; return what the later one needs and pass it on, or put both into one stage"
            )
    owners = _Owners(trace, homes)
    for event in trace.events:
        owners.add(event)
    _check_generators(trace, owners.stages)
    return _Planner(trace, owners, stages).plan()


def _check_generators(trace: Trace, stages: Sequence[int]) -> None:
    """Refuse a generator of the model's own from which several stages draw."""
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
        known = self.homes.get(value.parameter)
        if known is None and value.parameter in self.loose_homes:
            return (self.loose_homes[value.parameter],)
        return () if known is None else known

    def add(self, event: Event) -> None:
        values = [self.trace.values[number] for _, number in event.inputs]
        made = [self.stages[v.event] for v in values if v.event is not None]
        held = [min(h) for v in values if v.event is None and (h := self.holders(v))]
        latest = max([*made, *held], default=None)
        if event.what in self.homes:
            owner = self._home(event, max(made, default=0))
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

    def _home(self, event: Event, earliest: int) -> int:
        stages = self.homes[event.what]
        mine = stages[min(event.number * len(stages) // self._calls[event.what], len(stages) - 1)]
        return max(mine, next((stage for stage in stages if stage >= earliest), mine))

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
        "values go to later stages only; place the modules in the order of their calls, for which "
        "example=(args, kwargs) helps, or let the later one's module be called again there by naming it in "
        "both lists of stages="
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
        # The last stage gives the output; and where a hook is set, it may be removed at any later place.
        hooked = {owner_of[i] for i, event in enumerate(trace.events) if event.sets_hook}
        for stage in (*hooked, stages - 1):
            last[stage] = len(owner_of)
        self._find_users()
        self._check_numbers()
        names = self._names()
        steps = [self._step(event, owner_of[i], names) for i, event in enumerate(trace.events)]
        arrives: list[dict[int, str]] = [{} for _ in range(stages)]
        sends: list[dict[int, str]] = [{} for _ in range(stages)]
        parameters: list[dict[str, str]] = [{} for _ in range(stages)]
        edges = []
        reached = self._reached()
        for number, users in sorted(self._users.items()):
            value, name = trace.values[number], names[number]
            source = min(self._owners.holders(value))
            gradient = value.requires_grad and number in reached
            edges.append(Edge(name, source, tuple(sorted(users)), gradient))
            if value.is_result:
                sends[source][number] = name
                for stage in users:
                    arrives[stage][number] = name
            elif value.event is None:
                assert value.parameter is not None
                parameters[source][value.parameter] = name
        output_swaps = {
            place: names[number]
            for place, number in enumerate(trace.slots)
            if number is not None and stages - 1 in self._users.get(number, ())
        }
        changes = [(c, i) for i, e in enumerate(trace.events) for c in e.changes]
        copies = {
            c.old
            for c, i in changes
            if c.old in self._users and owner_of[i] in self._owners.holders(trace.values[c.old])
        }
        return CallPlan(
            tuple(edges),
            steps,
            trace,
            last,
            arrives,
            sends,
            parameters,
            {number for number in copies if number is not None},
            {c.old for c, _ in changes if c.argument is None and c.old is not None},
            output_swaps,
            self._lost(),
            [set(owner_of[r.first : r.stop]) for r in trace.regions],
            self._buffers(),
            trace.changed_arguments,
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
        for slot in self._trace.slots:
            if slot is not None:
                self._use(slot, self._stages - 1)

    def _use(self, number: int, stage: int) -> None:
        holders = self._owners.holders(self._trace.values[number])
        if holders and stage not in holders:
            self._users.setdefault(number, set()).add(stage)

    def _check_numbers(self) -> None:
        """Refuse numbers of tensors that decide what other stages do."""
        owner_of = self._owners.stages
        for index, event in enumerate(self._trace.events):
            if event.is_unit or not event.needs_data or self._stages == 1:
                continue
            if owner_of[index] == self._stages - 1 and set(owner_of[index:]) == {self._stages - 1}:
                continue
            raise PartitionError(
                f"{event.where}: the model's code needs numbers of a tensor of stage {owner_of[index]} "
                f"({event.name}), which the other stages do not have; put that code into a module that is "
                "placed as a whole, by naming the module that contains it in stages="
            )

    def _names(self) -> dict[int, str]:
        """What the values that travel are called; each once."""
        return {number: self._trace.values[number].name for number in self._users}

    def _step(self, event: Event, owner: int, names: Mapping[int, str]) -> Step:
        step = Step(event.what, owner, event)
        values = self._trace.values
        for place, number in event.inputs:
            if owner in self._users.get(number, ()) and not values[number].is_result:
                step.swaps[place] = names[number]
        for change in event.changes:
            name = names.get(change.new)
            if change.argument is not None:
                step.follows[change.argument] = change.new
                if name is not None:
                    step.sends[change.argument] = name
            elif change.old is not None:
                step.aliases[change.old] = (change.new, name)
        return step

    def _reached(self) -> set[int]:
        """The values that the output or an added loss is made of: from those a gradient may come back."""
        trace = self._trace
        reached = {number for number in trace.slots if number is not None}
        for event in reversed(trace.events):
            results = [slot for slot in event.slots if isinstance(slot, int)]
            results += [change.new for change in event.changes]
            # A unit may add a loss, whatever becomes of its results.
            counts = event.is_unit or is_ours(event.what)
            counts = counts or any(
                number in reached and trace.values[number].requires_grad for number in results
            )
            if counts:
                reached.update(number for _, number in event.inputs)
        return reached

    def _lost(self) -> set[Any]:
        """The names in the output of objects that units of other stages were given."""
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
        used = {number for event in events for _, number in event.inputs}
        return [
            values[number].parameter or "" for number in sorted(used) if values[number].is_buffer
        ]
