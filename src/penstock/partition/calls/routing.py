"""Which stage runs which event, and which values travel, worked out from a tape and the homes of its units.

A unit runs in the stage that holds it; the rest runs where the least has to travel for it. A value travels
from the stage that makes it to all later ones that use it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.errors import PartitionError
from penstock.partition.base import Description
from penstock.partition.calls.tape import NO_VALUE, Event, Origin, Region, Tape, Value
from penstock.partition.faces import HOOKS
from penstock.schedule import Edge
from penstock.values import ValueSpec


@dataclass(frozen=True)
class Part:
    """What one stage does in a call.

    Args:
        runs: for each event, whether it runs here.
        regions: for each checkpointed region, whether all of it is here.
        takes: the names of the values that arrive, by number.
        gives: the names of the values that other stages use, by number.
        changes: those among both whose memory this stage is the next to write into.
        views: the events of earlier stages that make views of such memory.
        end: the event after which there is nothing left to do; ``None`` in the last stage.
    """

    runs: tuple[bool, ...]
    regions: tuple[bool, ...]
    takes: Mapping[int, str]
    gives: Mapping[int, str]
    changes: frozenset[int]
    views: frozenset[int]
    end: int | None


@dataclass(frozen=True)
class Route:
    """The tape of a call, cut into stages.

    Args:
        tape: the events.
        parts: what each stage does.
        description: what travels.
    """

    tape: Tape
    parts: tuple[Part, ...]
    description: Description


Homes = Mapping[str, tuple[int, ...]]
"""The stages of each unit by path, ascending, and the stage of each parameter by name.

Of a unit that is in several stages, the first calls are in the first of these, and so on.
"""


def routed(tape: Tape, homes: Homes, stages: int, output: ValueSpec | None) -> Route:
    """Cut a tape into stages.

    Args:
        tape: the record of a call.
        homes: where the units and parameters are.
        stages: how many there are.
        output: the spec of the model's output, where it can be described.

    Raises:
        PartitionError: a value would have to travel to an earlier stage.
    """
    earliest = _owners(tape, homes, stages)
    parameters = {
        n: homes[value.parameter][0]
        for n, value in enumerate(tape.values)
        if value.parameter is not None
    }
    placing = Placing(tape, earliest, parameters, stages)
    owners = placing.improve()
    _check_hidden(tape, homes)
    _check_hooked(tape, owners, placing)
    travel = Travel(tape, owners, {n: placing.stage_of(n) for n in range(len(tape.values))}, stages)
    used = sorted(travel.users.items())
    edges = tuple(
        Edge(
            tape.values[n].name,
            travel.makers[n],
            tuple(sorted(to)),
            tape.values[n].form.requires_grad,
        )
        for n, to in used
    )
    specs = {tape.values[n].name: _spec(tape, n) for n, _ in used}
    if output is not None:
        specs["output"] = output
    parts = tuple(travel.part(stage) for stage in range(stages))
    return Route(tape, parts, Description(edges, specs))


def _spec(tape: Tape, number: int) -> ValueSpec:
    spec = ValueSpec.of(tape.values[number].form.empty("meta"))
    return spec.marked({0} if number in tape.sure else ())


# ---- who runs what


def first_uses(tape: Tape, homes: Homes, stages: int) -> dict[str, int]:
    """The first stage that uses each of the parameters that are used between the units.

    Args:
        tape: the record of a call.
        homes: where the units are.
        stages: how many there are.
    """
    found: dict[str, int] = {}
    for event, owner in zip(tape.events, _owners(tape, homes, stages), strict=True):
        for number in (*event.inputs, *(() if event.on is None else (event.on,))):
            name = tape.values[number].parameter
            if name is not None:
                found[name] = min(owner, found.get(name, owner))
    return found


def _owners(tape: Tape, homes: Homes, stages: int) -> list[int]:
    """The stage of each event."""
    owners: list[int | None] = []
    called = _Turns(tape, homes)

    def made_in(number: int) -> int | None:
        value = tape.values[number]
        if value.parameter is not None:
            return homes[value.parameter][0] if value.parameter in homes else None
        assert value.maker is not None
        return owners[value.maker]

    for event in tape.events:
        known = [(s, n) for n in event.inputs if (s := made_in(n)) is not None]
        latest = max(known, default=None)
        if event.is_call:
            home = called.home(event.what, 0 if latest is None else latest[0])
            if latest is not None and latest[0] > home:
                raise PartitionError(_backwards(tape, event, home, *latest))
            owners.append(home)
        else:
            # An effect goes where its value is made (see `Placing`), a loss of arguments alone to stage 0.
            owners.append(0 if event.effect else None if latest is None else latest[0])
    return _with_free(tape, owners, stages)


class _Turns:
    """Tells which call of a unit is in which of its stages."""

    def __init__(self, tape: Tape, homes: Homes) -> None:
        self._homes = homes
        self._calls = Counter(event.what for event in tape.events if event.is_call)
        self._been: Counter[str] = Counter()

    def home(self, unit: str, earliest: int) -> int:
        """The stage of the next call of a unit: not before ``earliest``, if the unit has such a stage."""
        stages, turn = self._homes[unit], self._been[unit]
        self._been[unit] += 1
        mine = stages[turn * len(stages) // self._calls[unit]]
        return max(mine, next((stage for stage in stages if stage >= earliest), mine))


def _with_free(tape: Tape, owners: list[int | None], stages: int) -> list[int]:
    """Place what uses no value, such as the drawing of random numbers, in the first stage that uses it.

    Raises:
        PartitionError: several stages would have to draw from one generator.
    """
    first = [stages - 1 if owner is None else owner for owner in owners]
    before: list[int] = []
    while first != before:
        before = list(first)
        _before_uses(tape, owners, first)
        _draw_in_one_stage(tape, owners, first)
    return first


def _before_uses(tape: Tape, owners: list[int | None], first: list[int]) -> None:
    for index in reversed(range(len(owners))):
        for number in tape.events[index].inputs:
            maker = tape.values[number].maker
            if maker is not None and owners[maker] is None:
                first[maker] = min(first[maker], first[index])


def _draw_in_one_stage(tape: Tape, owners: list[int | None], first: list[int]) -> None:
    """Place all draws from one generator of the model's own in one stage, so that they keep their order."""
    users: dict[int, list[int]] = {}
    for index, event in enumerate(tape.events):
        for generator in event.generators:
            users.setdefault(generator, []).append(index)
    for events in users.values():
        stage = min(first[index] for index in events)
        for index in events:
            if owners[index] is None:
                first[index] = stage
            elif first[index] != stage:
                raise PartitionError(_drawn_apart(tape, stage, index, first[index]))


# ---- what happens between the units runs where the fewest bytes travel for it
# At first that is the earliest stage that has all it uses: so the sum of a residual connection travels rather
# than its summands. An event whose results are larger than what it uses, such as an upsampling, a
# concatenation or a cast, moves on to the stage that uses them if fewer bytes travel then.


class Placing:
    """The stage of each event, at first the earliest possible one.

    Args:
        tape: the events.
        owners: the earliest stage of each.
        makers: the stage of each parameter among the values, by number.
        stages: how many there are.
    """

    def __init__(
        self, tape: Tape, owners: Sequence[int], makers: Mapping[int, int], stages: int
    ) -> None:
        self._tape = tape
        self._parameters = makers
        self.owners = list(owners)
        self._users: dict[int, list[int]] = {}
        for index, event in enumerate(tape.events):
            for number in event.inputs:
                self._users.setdefault(number, []).append(index)
        self.stages = stages
        changed = {tape.values[c.new].memory for event in tape.events for c in event.changes}
        self._fixed = {n for n, value in enumerate(tape.values) if value.memory in changed}

    def improve(self) -> list[int]:
        """Move events to later stages, from the last event to the first."""
        for index in reversed(range(len(self.owners))):
            target = self._target(index)
            if target is not None and self._gain(index, target) > 0:
                self.owners[index] = target
        for index, event in enumerate(self._tape.events):
            if event.on is not None:
                self.owners[index] = self.stage_of(event.on)
        return self.owners

    def stage_of(self, number: int) -> int:
        """The stage that makes a value."""
        maker = self._tape.values[number].maker
        return self._parameters[number] if maker is None else self.owners[maker]

    def _target(self, index: int) -> int | None:
        """The first stage that uses what an event makes, if it is a later one and the event may move."""
        event = self._tape.events[index]
        if not self._may_move(event):
            return None
        stages = [s for n in self._made(index) for s in self._used_in(n)]
        first = min(stages, default=self.owners[index])
        return first if first > self.owners[index] else None

    def _may_move(self, event: Event) -> bool:
        if event.is_call or event.changes or event.random or event.answers or event.effect:
            return False
        if event.generators:
            return False
        return self._fixed.isdisjoint(event.inputs) and all(
            slot.same_as is None and slot.value not in self._fixed for slot in event.slots
        )

    def _made(self, index: int) -> list[int]:
        return [slot.value for slot in self._tape.events[index].slots]

    def _used_in(self, number: int, but: int | None = None) -> set[int]:
        """The stages that use a value, apart from event ``but``."""
        found = {self.owners[i] for i in self._users.get(number, ()) if i != but}
        return found | ({self.stages - 1} if number in self._tape.outputs else set())

    def _gain(self, index: int, target: int) -> int:
        """How many fewer bytes travel if an event moves."""
        owner = self.owners[index]
        gain = sum(self._bytes(n) for n in self._made(index) if target in self._used_in(n))
        for number in self._tape.events[index].inputs:
            home, others = self.stage_of(number), self._used_in(number, but=index)
            gain += self._bytes(number) * (home != owner and owner not in others)
            gain -= self._bytes(number) * (home != target and target not in others)
        return gain

    def _bytes(self, number: int) -> int:
        form = self._tape.values[number].form
        return math.prod(form.shape) * form.dtype.itemsize


# ---- what travels


class Travel:
    """Which values travel where.

    Where a stage writes into memory that an earlier stage has made, and that several values share, it needs
    all of that memory: the views are made again there, so that each shows what is written through another.

    Args:
        tape: the events.
        owners: the stage of each.
        makers: the stage that makes each value.
        stages: how many there are.

    Attributes:
        makers: as given.
        users: for each value that travels, the stages that use it.

    Raises:
        PartitionError: a stage cannot make a view that it needs.
    """

    def __init__(
        self, tape: Tape, owners: Sequence[int], makers: Mapping[int, int], stages: int
    ) -> None:
        self.makers = makers
        self._tape, self._owners, self._stages = tape, owners, stages
        self._written = {
            (value.memory, owner)
            for event, owner in zip(tape.events, owners, strict=True)
            for value in self._changed(event)
            if makers[value.memory] != owner
        }
        self.users: dict[int, set[int]] = {}
        uses = [(n, owners[i]) for i, event in enumerate(tape.events) for n in event.inputs]
        for number, stage in [*uses, *((n, stages - 1) for n in tape.outputs)]:
            taken = self._taken(number, stage)
            if makers[taken] != stage:
                self.users.setdefault(taken, set()).add(stage)

    def _changed(self, event: Event) -> list[Value]:
        """The values that an event changes together with others that share their memory."""
        values = [self._tape.values[change.new] for change in event.changes]
        memories = Counter(value.memory for value in values)
        return [value for value in values if memories[value.memory] > 1]

    def _taken(self, number: int, stage: int) -> int:
        """The value that travels to a stage so that it can use this one."""
        value = self._tape.values[number]
        if value.whole is None:
            return number
        if value.origin is Origin.FOUND:
            return value.whole
        if (value.memory, stage) not in self._written:
            return number
        if value.origin is Origin.UNIT and self.makers[number] != stage:
            raise PartitionError(
                f"stage {stage} changes {value.name} in place, which shares its memory with "
                f"{self._tape.values[value.whole].name} of an earlier stage; put both into one stage"
            )
        return value.whole

    def part(self, stage: int) -> Part:
        """What a stage does."""
        tape = self._tape
        gives = {n: tape.values[n].name for n in sorted(self.users) if self.makers[n] == stage}
        takes = {n: tape.values[n].name for n, to in sorted(self.users.items()) if stage in to}
        runs = tuple(owner == stage for owner in self._owners)
        given_at = [maker for n in gives if (maker := tape.values[n].maker) is not None]
        last = max([*given_at, *(i for i, mine in enumerate(runs) if mine)], default=-1)
        if any(runs[i] and event.what in HOOKS for i, event in enumerate(tape.events)):
            # The author's code may remove the hook later on.
            last = len(tape.events)
        return Part(
            runs,
            tuple(self._is_whole(region, stage) for region in tape.regions),
            takes,
            gives,
            frozenset(n for n in (*takes, *gives) if self._changes_next(n, stage)),
            frozenset(
                i for i, e in enumerate(tape.events) if not runs[i] and self._views(e, stage)
            ),
            None if stage == self._stages - 1 else last,
        )

    def _is_whole(self, region: Region | None, stage: int) -> bool:
        if region is None:
            return False
        inside = range(region.start, region.stop)
        return (
            {stage}.issuperset(self._owners[region.start : region.stop])
            and self._used_outside(inside).issubset(region.results)
            and not any(
                self._tape.values[self._tape.values[change.new].memory].maker not in inside
                for event in self._tape.events[region.start : region.stop]
                for change in event.changes
            )
        )

    def _used_outside(self, inside: range) -> set[int]:
        """The values that are made inside a region and used outside."""
        events = self._tape.events
        used = {n for i, event in enumerate(events) if i not in inside for n in event.inputs}
        used.update(
            self._tape.outputs, *([e.on] for e in events[inside.stop :] if e.on is not None)
        )
        return {n for n in used if self._tape.values[n].maker in inside}

    def _changes_next(self, number: int, stage: int) -> bool:
        value = self._tape.values[number]
        start = -1 if value.maker is None else value.maker
        for index in range(start + 1, len(self._owners)):
            changes = self._tape.events[index].changes
            if any(self._tape.values[change.new].memory == value.memory for change in changes):
                return self._owners[index] == stage
        return False

    def _views(self, event: Event, stage: int) -> bool:
        made = [self._tape.values[slot.value] for slot in event.slots if slot.value != NO_VALUE]
        return any(
            value.origin is Origin.VIEW and (value.memory, stage) in self._written for value in made
        )


# ---- what is refused, and why


def _backwards(tape: Tape, event: Event, home: int, stage: int, number: int) -> str:
    calls = sum(other.what == event.what for other in tape.events if other.is_call)
    value = tape.values[number].name
    if calls > 1:
        return (
            f"{event.what} is called {calls} times, here after {value}, which stage {stage} makes, but it is "
            f"in stage {home}: a loop that calls a module again and again cannot be cut while that module is "
            "in one stage. Give example=(args, kwargs) and a number of stages, which cuts between the calls; "
            "or name the module in several stages, which then share its weights; or put all that the loop "
            "calls into one stage"
        )
    return (
        f"{event.what} is in stage {home}, but it uses {value}, which stage {stage} makes: values travel to "
        "later stages only. Name the modules of each stage in the order in which the model calls them, or "
        "give example=(args, kwargs), from which that order is found"
    )


def _drawn_apart(tape: Tape, stage: int, index: int, other: int) -> str:
    return (
        f"{tape.events[index].label} in stage {other} draws from a torch.Generator that stage {stage} draws "
        "from too: what it returns would depend on the cut. Give each its own, put both into one stage, or "
        "draw without generator=, from torch's own, which is seeded for each step, microbatch and module"
    )


def _check_hidden(tape: Tape, homes: Homes) -> None:
    for first, second in tape.hidden:
        if len({*homes[first], *homes[second]}) > 1:
            raise PartitionError(
                f"{second} in stage {homes[second][0]} uses a tensor that {first} in stage "
                f"{homes[first][0]} has left in an object that both are given, such as a cache; put "
                "both into one stage, or turn off the option that shares it"
            )


def _check_hooked(tape: Tape, owners: Sequence[int], placing: Placing) -> None:
    """Refuse a hook that would get, or change, only part of its tensor's gradient."""
    for event, stage in zip(tape.events, owners, strict=True):
        for number in event.hooked:
            used = {s for e, s in zip(tape.events, owners, strict=True) if number in e.inputs}
            used |= {placing.stage_of(number) for e in tape.events if e.on == number}
            used |= {placing.stages - 1} if number in tape.outputs else set()
            if placing.stage_of(number) != stage and (others := sorted(used - {stage})):
                raise PartitionError(
                    f"{event.what} in stage {stage} sets a hook on the gradient of "
                    f"{tape.values[number].name}, which it is given and which stage {others[0]} uses too: "
                    "neither has the whole gradient. Set the hook where that tensor is made, or put all that "
                    "uses it into one stage"
                )
