"""What a search for plans tries, and the arguments that narrow it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product

from penstock.errors import ScheduleError, UsageError
from penstock.plan.choice import LARGEST, OFFLOAD, POLICIES, Order, PlanShape, check_size, scheduled
from penstock.plan.cluster import Cluster
from penstock.plan.costs import StageCosts
from penstock.schedule import Schedule, names
from penstock.schedule.library import find

MOST_MICROBATCHES = 6
"""The most numbers of microbatches that are tried by default."""
LAPS = (2, 3, 4)
"""The numbers of stages per rank that are tried by default, if a schedule takes any number."""


@dataclass(frozen=True)
class Wanted:
    """The run to plan, and what the user has fixed; names as in ``search``.

    Args:
        devices: the number of devices.
        memory: the bytes that each rank may hold; None if each device of the cluster may hold what it has.
        ranks: the numbers of ranks in a pipeline to try; None for all.
        cluster: the devices, if they may differ.
        host: the bytes per second between a device and its host.
    """

    devices: int
    batch: int
    memory: float | None
    schedules: tuple[str, ...]
    ranks: tuple[int, ...] | None
    stages_per_rank: tuple[int, ...] | None
    microbatches: tuple[int, ...] | None
    recompute: tuple[str, ...]
    states: float
    keep: int
    cluster: Cluster | None = field(default=None, repr=False)
    host: float = math.inf

    @property
    def limits(self) -> tuple[float, ...]:
        """The bytes that each device may hold; 0 for no limit."""
        if self.memory is None and self.cluster is not None:
            return tuple(device.memory for device in self.cluster.devices)
        return (self.memory or 0.0,) * self.devices

    def check(self) -> None:
        """Refuse what has too many microbatches to be planned, whatever is chosen.

        Raises:
            UsageError: all candidates have too many.
        """
        shapes = list(self._all(math.inf))
        if shapes and not any(map(_is_small, shapes)):
            check_size("", shapes[0])

    def shapes(self, units: float = math.inf) -> Iterator[PlanShape]:
        """All candidates for a model of so many units."""
        yield from filter(_is_small, self._all(units))

    def _all(self, units: float) -> Iterator[PlanShape]:
        for ranks in self.ranks or dividing(self.devices):
            replicas = self.devices // ranks
            if self.batch % replicas:
                continue
            part = self.batch // replicas
            # One rank waits for nothing, so any schedule is as fast; the first one, 1F1B, holds least.
            for name in self.schedules if ranks > 1 else self.schedules[:1]:
                laps = [each for each in self._laps(name) if ranks * each <= units]
                counts = self._counts(ranks, part) if laps else ()
                for each, count, policy in product(laps, counts, self.recompute):
                    yield PlanShape(name, ranks, replicas, each, count, part // count, policy)  # type: ignore[arg-type]

    def _laps(self, name: str) -> tuple[int, ...]:
        """The numbers of stages per rank to try with a schedule."""
        recipe = find(name)[1]
        if recipe.any_stages:
            return self.stages_per_rank or LAPS
        laps = recipe.stages_per_rank
        return (laps,) if laps in (self.stages_per_rank or (laps,)) else ()

    def _counts(self, ranks: int, part: int) -> tuple[int, ...]:
        """The numbers of microbatches to try for a pipeline's share of the batch."""
        if self.microbatches is not None:
            return tuple(count for count in self.microbatches if part % count == 0)
        counts = dividing(part)
        # Each is at least twice the one before, since neighbours differ little.
        tried: list[int] = []
        for count in [count for count in counts if count >= ranks] or counts[-1:]:
            if not tried or count >= 2 * tried[-1]:
                tried.append(count)
        return tuple(tried[:MOST_MICROBATCHES])


def _is_small(shape: PlanShape) -> bool:
    return shape.forwards <= LARGEST >= shape.replicas


@lru_cache(maxsize=64)
def _ordered(shape: PlanShape) -> Order | None:
    try:
        return Order(scheduled(shape))
    except ScheduleError:
        return None


def order_of(shape: PlanShape) -> Order | None:
    """The order of a shape's schedule, without edges; None if there is none for these numbers."""
    # The key leaves out what the schedule does not depend on.
    return _ordered(replace(shape, replicas=1, samples=1, recompute="none"))


@dataclass(frozen=True)
class Candidate:
    """A shape with a cut.

    Args:
        again: the units that are recomputed.
        stage_costs: what its stages cost.
        memory: the most that each rank of a pipeline holds, in bytes.
        lacks: how many bytes each of these ranks lacks; empty if it fits.
        reduce: the seconds in which replicas sum their gradients.
        bound: seconds that no order of the actions beats.
        searched: its schedule, if it is not one of the library.
        seconds: the simulated time of a step.
    """

    shape: PlanShape
    cut: tuple[int, ...]
    again: frozenset[int]
    stage_costs: StageCosts
    memory: tuple[float, ...]
    lacks: tuple[float, ...]
    reduce: float
    bound: float
    searched: Schedule | None = None
    seconds: float = math.inf

    @property
    def rank(self) -> tuple[float, float]:
        """By what candidates are sorted, the fastest first."""
        return self.seconds, max(self.memory)

    @property
    def plain_schedule(self) -> Schedule:
        """Its schedule, without edges."""
        if self.searched is not None:
            return self.searched
        order = order_of(self.shape)
        assert order is not None, "a candidate is made of a schedule"
        return order.schedule


# ---- the arguments of a search


def whole(name: str, number: int, most: int = LARGEST) -> int:
    """Check a whole number."""
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= most:
        raise UsageError(f"{name}={number!r}: must be a whole number from 1 to {most}")
    return number


def whole_numbers(name: str, numbers: int | Iterable[int] | None) -> tuple[int, ...] | None:
    """Check whole numbers, of which there may be one, several or none."""
    if numbers is None:
        return None
    several = (numbers,) if isinstance(numbers, int) else tuple(numbers)
    return tuple(whole(name, number) for number in several)


def divisors(
    name: str, numbers: int | Iterable[int] | None, devices: int
) -> tuple[int, ...] | None:
    """Check numbers that are to divide the number of devices."""
    several = whole_numbers(name, numbers)
    if wrong := [number for number in several or () if devices % number]:
        raise UsageError(
            f"{name}={wrong[0]}: {devices} ranks cannot be divided into pipelines of {wrong[0]} ranks"
        )
    return several


def dividing(number: int) -> list[int]:
    """All divisors, in ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def schedules_of(wanted: str | Iterable[str] | None) -> tuple[str, ...]:
    """The names of schedules that train; by default, all of the library."""
    several = names() if wanted is None else [wanted] if isinstance(wanted, str) else list(wanted)
    proper = [find(name)[0] for name in several]
    idle = [name for name in proper if not find(name)[1].trains]
    if idle and wanted is not None:
        raise UsageError(f"schedules={idle[0]!r} has no backward; choose one that trains")
    if cut := [name for name in proper if find(name)[1].slices]:
        raise UsageError(
            f"schedules={cut[0]!r} cuts sequences into slices, for stages placed by hand that hand on a "
            "state; choose another for a model that is cut"
        )
    # 1F1B first: it holds least if several are equally fast.
    return tuple(
        sorted(set(proper) - set(idle), key=lambda name: (name != "1F1B", proper.index(name)))
    )


def policies(wanted: str | Iterable[str] | None, host: float) -> tuple[str, ...]:
    """Check what to recompute, or to move to a host with this bandwidth, if there is one."""
    several = () if wanted is None else (wanted,) if isinstance(wanted, str) else tuple(wanted)
    for policy in several:
        if policy not in (*POLICIES, OFFLOAD):
            known = ", ".join((*POLICIES, OFFLOAD))
            raise UsageError(f"recompute={policy!r}: must be one of {known}")
        if policy == OFFLOAD and not host:
            raise UsageError(
                "recompute='offload' moves activations to the host; give its bytes per second as "
                "host_bandwidth="
            )
    return several
