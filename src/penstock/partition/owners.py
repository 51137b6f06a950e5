"""The one stage that runs each event of a trace, and what no stage could do there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from penstock.errors import PartitionError
from penstock.partition.functions import is_ours
from penstock.partition.trace import Event, Homes, Trace, Value


class Owners:
    """The stage of each event, by one rule.

    A unit's call is in a stage of the unit. Any other event is in the latest stage among those of its
    arguments; one without such arguments stays where the event before it is. A parameter that no unit holds
    is in the stage that uses it first.

    Args:
        trace: the events.
        homes: the stages of the units and of their parameters.

    Attributes:
        stages: the stage of each event.
        loose: the stages of the parameters that are in no ``homes``, by name.
    """

    def __init__(self, trace: Trace, homes: Homes) -> None:
        self.trace, self.homes = trace, homes
        self.stages: list[int] = []
        self.loose: dict[str, int] = {}
        self._calls = Counter(trace.calls())

    def find(self) -> Owners:
        """Find the stages of all events, one after the other."""
        for event in self.trace.events:
            self.stages.append(self._stage_of(event))
        return self

    def _stage_of(self, event: Event) -> int:
        values = [self.trace.values[number] for _, number in event.inputs]
        makers = [self.stages[value.event] for value in values if value.event is not None]
        weights = [value for value in values if value.event is None]
        stage = self.home(event, max(makers, default=0))
        if stage is None:
            having = [min(stages) for weight in weights if (stages := self.holders(weight))]
            before = self.stages[-1] if self.stages and not is_ours(event.what) else 0
            stage = max([*makers, *having], default=before)
        for weight in weights:
            if weight.parameter and not self.holders(weight):
                self.loose[weight.parameter] = stage
        return stage

    def home(self, event: Event, earliest: int) -> int | None:
        """The stage of a unit's call, of which the unit's stages share all; None for other events.

        Args:
            event: the event.
            earliest: the latest stage among those that make its arguments.
        """
        stages = self.homes.get(event.what)
        if stages is None:
            return None
        share = event.number * len(stages) // self._calls[event.what]
        mine = stages[min(share, len(stages) - 1)]
        return max(mine, next((stage for stage in stages if stage >= earliest), mine))

    def holders(self, value: Value) -> Sequence[int]:
        """The stages that hold a parameter or buffer, or the one that makes a value."""
        if value.event is not None:
            return (self.stages[value.event],)
        assert value.parameter is not None
        known = self.homes.get(value.parameter, self.homes.get(value.unit))
        if known is None and value.parameter in self.loose:
            return (self.loose[value.parameter],)
        return () if known is None else known

    def early(self, stages: int) -> Iterator[tuple[Event, int]]:
        """The events between units that need numbers which not all later stages have, and their stages."""
        others = [index for index, stage in enumerate(self.stages) if stage != stages - 1]
        stop = others[-1] + 1 if others else 0
        for event, stage in zip(self.trace.events[:stop], self.stages, strict=False):
            if event.needs_data and not event.is_unit:
                yield event, stage


def first_uses(trace: Trace, homes: Homes) -> Mapping[str, int]:
    """The first stage that uses each of the parameters that no unit holds."""
    return Owners(trace, homes).find().loose


def decides_early(trace: Trace, homes: Homes, stages: int) -> set[str]:
    """The paths of the modules whose code needs numbers between units that not all later stages have."""
    if not any(event.needs_data and not event.is_unit for event in trace.events):
        return set()
    return {event.module for event, _ in Owners(trace, homes).find().early(stages)}


# ---- what cannot be done in stages


def check_owners(owners: Owners, stages: int) -> None:
    """Check that each event can run in its stage.

    Raises:
        PartitionError: one cannot; the message names the module and the line.
    """
    _check_state(owners, stages)
    stale: dict[int, tuple[Event, int]] = {}
    for event, stage in zip(owners.trace.events, owners.stages, strict=True):
        _check_inputs(owners, event, stage, stale)
        _check_changes(owners, event, stage, stale)
        _check_reads(owners, event, stage)
    _check_generators(owners)
    for event, stage in owners.early(stages):
        raise PartitionError(
            f"{event.where}: the model's code needs numbers of a tensor of stage {stage} "
            f"({event.name}), which the other stages do not have; put that code into a module that is "
            "placed as a whole, by naming the module that contains it in stages="
        )


def _check_state(owners: Owners, stages: int) -> None:
    """Refuse changes of what several stages have, each for itself."""
    for changed in owners.trace.state if stages > 1 else ():
        if not changed.units:
            raise PartitionError(
                f"the model's forward changes {changed.what} outside of its units, in code that every stage "
                "runs; move it into a module that is in one stage, with the code that changes it"
            )
        if len({stage for path in changed.units for stage in owners.homes[path]}) > 1:
            raise PartitionError(
                f"the model's forward changes {changed.what}, which are in several stages, and each has "
                "its own; return what the later one needs and pass it on (a loss: penstock.add_loss), or put "
                "both into one stage"
            )


def _check_inputs(
    owners: Owners, event: Event, stage: int, stale: Mapping[int, tuple[Event, int]]
) -> None:
    """Refuse an argument that a later stage makes, or one that another stage has overwritten."""
    for _, number in event.inputs:
        value = owners.trace.values[number]
        holders = owners.holders(value)
        source = min(holders, default=stage)
        if stage not in holders and source > stage:
            raise PartitionError(
                f"{event.where}: {event.name} in stage {stage} uses {value.name.rstrip('!')} of stage "
                f"{source}, but values go to later stages only; list the modules in the order of their "
                "calls, or name the one that is called again in both lists of stages="
            )
        if number in stale:
            culprit, other = stale[number]
            raise PartitionError(
                f"{culprit.where}: {culprit.name} in stage {other} writes into memory that "
                f"{value.name.rstrip('!')} of another stage shares, and {event.where} reads that; write "
                "into a clone, or put both into one stage"
            )


def _check_changes(
    owners: Owners, event: Event, stage: int, stale: dict[int, tuple[Event, int]]
) -> None:
    """Refuse a change of another stage's weight; note what another stage would not see."""
    values = owners.trace.values
    for change in event.changes:
        if change.old is None:
            continue
        old = values[change.old]
        weight, holders = values[old.root], owners.holders(old)
        having = owners.holders(weight) if weight.parameter and not weight.is_buffer else ()
        if len(having) > 1:
            raise PartitionError(
                f"{event.where}: {event.name} in stage {stage} changes {weight.parameter} in place, which "
                f"stages {', '.join(map(str, having))} share, each with its own copy; put all of its "
                "modules into one stage"
            )
        if old.parameter is not None and stage not in holders:
            raise PartitionError(
                f"{event.where}: {event.name} in stage {stage} changes {old.parameter} of stage "
                f"{min(holders, default=0)}; put both into one module that is placed as a whole"
            )
        if change.argument is None and stage not in holders:
            stale[change.new] = event, stage


def _check_reads(owners: Owners, event: Event, stage: int) -> None:
    """Refuse to read what another stage has left somewhere."""
    for index in event.reads:
        if owners.stages[index] != stage:
            raise PartitionError(
                f"{event.where}: {event.name} in stage {stage} reads a value that "
                f"{owners.trace.events[index].name} in stage {owners.stages[index]} left somewhere, as in an "
                "attribute, a hook's list or an object that both are given; return it and pass it on as an "
                "argument (a loss: penstock.add_loss), or put both into one stage"
            )


def _check_generators(owners: Owners) -> None:
    """Refuse a generator of the model from which several stages draw."""
    drawn: dict[int, tuple[Event, int]] = {}
    for event, stage in zip(owners.trace.events, owners.stages, strict=True):
        for generator in event.generators:
            other, known = drawn.setdefault(id(generator), (event, stage))
            if known != stage:
                raise PartitionError(
                    f"{event.name} in stage {stage} draws from a torch.Generator from which {other.name} in "
                    f"stage {known} draws too, so that the numbers would depend on the schedule; draw from "
                    "torch's own, which is seeded for each call"
                )
