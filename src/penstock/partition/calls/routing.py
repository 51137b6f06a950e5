"""Who runs which event, and which values travel: from a tape and the homes of its units.

A unit runs at home; where the rest runs says ``placing``. A value travels from the stage that makes it to all
later ones that use it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.errors import PartitionError
from penstock.partition.base import Description
from penstock.partition.calls.placing import Placing
from penstock.partition.calls.tape import NO_VALUE, Event, Tape
from penstock.schedule import Edge
from penstock.specs import ValueSpec


@dataclass(frozen=True)
class Part:
    """What one stage does in a call.

    Args:
        runs: for each event, whether it runs here.
        takes: the values that arrive, by number, each with its name.
        gives: the values that others use, by number, each with its name.
        copies: those of them that are changed in place after they are made.
        end: the event after which there is nothing left to do; ``None`` in the last stage.
    """

    runs: tuple[bool, ...]
    takes: Mapping[int, str]
    gives: Mapping[int, str]
    copies: frozenset[int]
    end: int | None


@dataclass(frozen=True)
class Route:
    """A call's tape, cut.

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

Of a unit that is in several stages the first calls are in the first of them, and so on.
"""


def routed(tape: Tape, homes: Homes, stages: int, output: ValueSpec | None) -> Route:
    """Cut a tape.

    Args:
        tape: of a call.
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
    makers = {number: placing.stage_of(number) for number in range(len(tape.values))}
    _check_hidden(tape, homes)
    users = _users(tape, owners, makers, stages)
    _check_changes(tape, owners, makers)
    edges = tuple(
        Edge(tape.values[n].name, makers[n], tuple(sorted(to)), tape.values[n].form.requires_grad)
        for n, to in sorted(users.items())
    )
    specs = {tape.values[n].name: ValueSpec.of(tape.values[n].form.without_data()) for n in users}
    if output is not None:
        specs["output"] = output
    parts = tuple(_part(tape, owners, makers, users, stage, stages) for stage in range(stages))
    return Route(tape, parts, Description(edges, specs))


# ---- who runs what


def _owners(tape: Tape, homes: Homes, stages: int) -> list[int]:
    """The stage of each event."""
    owners: list[int | None] = []
    made = _MadeIn(tape, homes)
    called = _Turns(tape, homes)
    for event in tape.events:
        known = [(s, n) for n in event.inputs if (s := made.stage(n, owners)) is not None]
        latest = max(known, default=None)
        if event.is_call:
            home = called.home(event.what, 0 if latest is None else latest[0])
            if latest is not None and latest[0] > home:
                raise PartitionError(_backwards(tape, event, home, *latest))
            owners.append(home)
        else:
            owners.append(None if latest is None else latest[0])
    return _with_free(tape, owners, stages)


class _Turns:
    """Which call of a unit is in which of its stages."""

    def __init__(self, tape: Tape, homes: Homes) -> None:
        self._homes = homes
        self._calls = Counter(event.what for event in tape.events if event.is_call)
        self._been: Counter[str] = Counter()

    def home(self, unit: str, earliest: int) -> int:
        """The stage of the next call of a unit; one that can know what it uses, if there is any."""
        stages, turn = self._homes[unit], self._been[unit]
        self._been[unit] += 1
        mine = stages[turn * len(stages) // self._calls[unit]]
        return max(mine, next((stage for stage in stages if stage >= earliest), mine))


@dataclass(frozen=True)
class _MadeIn:
    tape: Tape
    homes: Homes

    def stage(self, number: int, owners: list[int | None]) -> int | None:
        value = self.tape.values[number]
        if value.parameter is not None:
            return self.homes[value.parameter][0]
        assert value.maker is not None
        return owners[value.maker]


def _with_free(tape: Tape, owners: list[int | None], stages: int) -> list[int]:
    """Place what uses no value, such as random numbers, in the first stage that uses it.

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
    """Let all that is drawn from a generator of the model's own be drawn in one stage, in its order."""
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


def _users(
    tape: Tape, owners: list[int], makers: Mapping[int, int], stages: int
) -> dict[int, set[int]]:
    """For each value that travels, the stages that use it."""
    users: dict[int, set[int]] = {}
    uses = [(n, owners[i]) for i, event in enumerate(tape.events) for n in event.inputs]
    for number, stage in [*uses, *((n, stages - 1) for n in tape.outputs)]:
        if makers[number] != stage:
            users.setdefault(number, set()).add(stage)
    return users


def _part(
    tape: Tape,
    owners: list[int],
    makers: Mapping[int, int],
    users: Mapping[int, set[int]],
    stage: int,
    stages: int,
) -> Part:
    gives = {n: tape.values[n].name for n in sorted(users) if makers[n] == stage}
    runs = tuple(owner == stage for owner in owners)
    given_at = [maker for n in gives if (maker := tape.values[n].maker) is not None]
    last = max([*given_at, *(i for i, mine in enumerate(runs) if mine)], default=-1)
    changed = {change.old for event in tape.events for change in event.changes}
    return Part(
        runs,
        {n: tape.values[n].name for n, to in sorted(users.items()) if stage in to},
        gives,
        frozenset(n for n in gives if n in changed),
        None if stage == stages - 1 else last,
    )


# ---- what cannot be


def _backwards(tape: Tape, event: Event, home: int, stage: int, number: int) -> str:
    calls = sum(other.what == event.what for other in tape.events if other.is_call)
    value = tape.values[number].name
    if calls > 1:
        return (
            f"{event.what} is called {calls} times, here after {value}, which stage {stage} makes, but it is "
            f"in stage {home}: a cut inside a loop that calls one module again and again cannot be "
            "honoured with that module in one stage; name it in several stages, which then share its "
            "weights, or put all that the loop calls into one"
        )
    return (
        f"{event.what} is in stage {home}, but it uses {value}, which stage {stage} makes: values travel to "
        "later stages only. Name the modules of each stage in the order in which the model calls them, or "
        "give example=(args, kwargs), with which that order is found"
    )


def _drawn_apart(tape: Tape, stage: int, index: int, other: int) -> str:
    return (
        f"{tape.events[index].label} in stage {other} draws from a torch.Generator that stage {stage} draws "
        "from too: what it gives would depend on the cut. Give each its own, put both into one stage, or "
        "draw without generator=, from torch's own, which is seeded for each step, microbatch and module"
    )


def _check_hidden(tape: Tape, homes: Homes) -> None:
    for first, second in tape.hidden:
        if len({*homes[first], *homes[second]}) > 1:
            raise PartitionError(
                f"{second} in stage {homes[second][0]} uses a tensor that {first} in stage "
                f"{homes[first][0]} has left in an object that both are given, such as a cache; put "
                "both into one stage, or turn the option off that shares it"
            )


def _check_changes(tape: Tape, owners: list[int], makers: Mapping[int, int]) -> None:
    """What is changed through another tensor of the same memory must be where that memory is."""
    for index, event in enumerate(tape.events):
        for old in _indirect(event):
            if makers[old] != owners[index]:
                raise PartitionError(
                    f"{event.label} in stage {owners[index]} changes memory in place that "
                    f"{tape.values[old].name} of stage {makers[old]} shares; put both into one stage"
                )


def _indirect(event: Event) -> Iterator[int]:
    for change in event.changes:
        if change.argument is None and change.old not in (None, NO_VALUE):
            assert change.old is not None
            yield change.old
