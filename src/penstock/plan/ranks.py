"""The ranks of a pipeline: what the units of a model cost on each, and the links between them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property

from penstock.plan.cluster import Cluster
from penstock.plan.costs import Cut, Profile, StageCosts, UnitCosts
from penstock.schedule import Placement


@dataclass(frozen=True, eq=False)
class PipelineRanks:
    """The ranks of a pipeline, as the costs of its stages depend on them.

    Args:
        units: what the units cost on each rank.
        usual: the latency and bandwidth of messages between ranks.
        wire: those from one rank to another, where they differ.
        handling: how long a rank is busy with a message, whatever its size, and with each byte of it.
    """

    units: tuple[UnitCosts, ...]
    usual: tuple[float, float]
    wire: Callable[[int, int], tuple[float, float]] | None
    handling: tuple[float, float]

    @cached_property
    def paces(self) -> tuple[float, ...]:
        """How many times as long each rank takes for the same work."""
        distinct = {id(units): units for units in self.units}
        works = {key: sum(least_work(units)) or 1.0 for key, units in distinct.items()}
        return tuple(works[id(units)] / min(works.values()) for units in self.units)

    def stages(
        self, cut: Cut, placement: Placement, again: Collection[int] = (), states: float = 2.0
    ) -> StageCosts:
        """The costs of the stages of a cut; names as in ``UnitCosts.stages``."""
        return self.units[0].stages(
            cut,
            placement,
            recompute=again,
            states=states,
            latency=self.usual[0],
            bandwidth=self.usual[1],
            handling=self.handling[0],
            copying=self.handling[1],
            on=self.units,
            wire=self.wire,
        )


def ranks_of(
    profile: Profile, samples: int, ranks: int, devices: int, cluster: Cluster | None
) -> PipelineRanks:
    """The ranks of a pipeline, of which each is as slow as the slowest device that does its work.

    Args:
        profile: the profile of the model.
        samples: the number of samples in a microbatch.
        ranks: how many of the devices form a pipeline, one after the other; the next ones are its replica.
        devices: the number of devices.
        cluster: the devices, if they may differ.
    """
    if cluster is None:
        units = (profile.at(samples),) * ranks
        return PipelineRanks(units, profile.wire(devices), None, (profile.handling, 0.0))
    each, starts = profile.on_all(samples, cluster.devices), range(0, devices, ranks)
    slowest = (
        max((each[start + rank] for start in starts), key=lambda units: sum(least_work(units)))
        for rank in range(ranks)
    )

    def wire(source: int, target: int) -> tuple[float, float]:
        wires = [cluster.wire(start + source, start + target) for start in starts]
        return max(late for late, _ in wires), min(rate for _, rate in wires)

    handling = cluster.handling, cluster.copying
    return PipelineRanks(tuple(slowest), profile.wire(devices), wire, handling)


def least_work(costs: UnitCosts, *, twice: bool = False) -> list[float]:
    """The least time of a microbatch on each unit; ``twice`` counts a forward that is computed again."""
    return [
        unit.forward * (1 + twice) + min(unit.backward, unit.input + unit.weight)
        for unit in costs.units
    ]
