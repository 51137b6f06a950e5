"""The ranks of a pipeline: what the units of a model cost on each, and the links between them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations

from penstock.plan.cluster import Cluster
from penstock.plan.costs import Cut, Profile, StageCosts, UnitCosts, Wire
from penstock.schedule import Placement


@dataclass(frozen=True, eq=False)
class PipelineRanks:
    """The ranks of a pipeline, as the costs of its stages depend on them.

    Args:
        units: what the units cost on each rank.
        wire: the latency and bandwidth of messages between ranks.
        links: where they differ from these.
        handling: how long a rank is busy with a message, whatever its size, and with each byte of it.
    """

    units: tuple[UnitCosts, ...]
    wire: tuple[float, float]
    links: tuple[Wire, ...]
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
            latency=self.wire[0],
            bandwidth=self.wire[1],
            handling=self.handling[0],
            copying=self.handling[1],
            on=self.units,
            links=self.links,
        )


def units_on(
    profile: Profile, samples: int, devices: int, cluster: Cluster | None
) -> tuple[UnitCosts, ...]:
    """The costs of a microbatch on each of so many devices, or on those of a cluster."""
    if cluster is None:
        return (profile.at(samples),) * devices
    return profile.on_all(samples, cluster.devices)


def ranks_of(
    profile: Profile, units: Sequence[UnitCosts], ranks: Sequence[int], cluster: Cluster | None
) -> PipelineRanks:
    """The ranks of a pipeline that some of the devices form.

    Args:
        profile: the profile of the model.
        units: what the units cost on each device, as from ``units_on``.
        ranks: the devices that form the pipeline.
        cluster: the devices, if they may differ.
    """
    on, wire = tuple(units[rank] for rank in ranks), profile.wire(len(units))
    if cluster is None:
        return PipelineRanks(on, wire, (), (profile.handling, 0.0))
    pairs = permutations(range(len(ranks)), 2)
    links = tuple((a, b, *cluster.wire(ranks[a], ranks[b])) for a, b in pairs)
    return PipelineRanks(on, wire, links, (cluster.handling, cluster.copying))


def least_work(costs: UnitCosts, *, twice: bool = False) -> list[float]:
    """The least time of a microbatch on each unit; ``twice`` counts a forward that is computed again."""
    return [
        unit.forward * (1 + twice) + min(unit.backward, unit.input + unit.weight)
        for unit in costs.units
    ]
