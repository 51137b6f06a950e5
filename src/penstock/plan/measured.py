"""What a recorded step says of the costs that a plan was made from, and a plan made again from that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median, median_low
from typing import Any

from penstock.errors import UsageError
from penstock.plan.choice import Plan, seconds_as_text, with_messages
from penstock.plan.cluster import Cluster, Link
from penstock.plan.costs import KINDS, Cut, Profile, StageCosts, cut_of, runs_of
from penstock.plan.devices import Device
from penstock.plan.ranks import units_on
from penstock.plan.searching import Plans, plan_for, search
from penstock.schedule import MessageTimes, Placement, Schedule, Timeline, message_times
from penstock.schedule.comparing import SLOWER


@dataclass(frozen=True)
class MeasuredStages:
    """The times of the actions and messages of a recorded step.

    Args:
        seconds: the median times of each stage, by ``forward``, ``input``, ``weight`` and ``backward``.
        messages: what messages took, if the schedule of the step is known.
        placement: which rank held which stage, likewise.
    """

    seconds: tuple[Mapping[str, float], ...]
    messages: MessageTimes | None = None
    placement: Placement | None = None

    def correct(self, profile: Profile, samples: int, cut: Cut) -> Profile:
        """Correct the costs of every size.

        Each unit's times are scaled by the measured ratio of its stage. If the schedule is known, messages
        take what they took.

        Args:
            profile: the costs so far.
            samples: the number of samples in a microbatch of the step.
            cut: the units that the step's stages started with.

        Raises:
            UsageError: the cut has another number of stages than the step.
        """
        return self._corrected(profile, self._ratios(profile, samples, cut), cut, {})

    def correct_both(
        self, profile: Profile, cluster: Cluster, samples: int, cut: Cut
    ) -> tuple[Profile, Cluster]:
        """Correct the costs of the units, and those of the ranks and links.

        What all stages of a rank take longer than those of other ranks is the rank's, and all else the
        units'.

        Args:
            profile: the costs so far.
            cluster: the ranks so far.
            samples: the number of samples in a microbatch of the step.
            cut: the units that the step's stages started with.

        Raises:
            UsageError: the step was read without its schedule, or had other stages or ranks.
        """
        if self.messages is None or self.placement is None or len(cluster) < self.placement.ranks:
            raise UsageError(
                "give costs_from the schedule of the step too, and the cluster that it ran on"
            )
        ratios = self._ratios(profile, samples, cut, cluster)
        pace = self._paces(ratios)
        devices = tuple(
            device.slower(pace.get(rank, 1.0)) for rank, device in enumerate(cluster.devices)
        )
        links = {(link.source, link.target): link for link in cluster.links}
        for (source, target), delay in self.messages.delays.items():
            link = links.get((source, target))
            link = link or Link(source, target, delay, cluster.wire(source, target)[1])
            links[source, target] = replace(link, latency=delay)
        handling = self.messages.handling
        other = replace(
            cluster, devices=devices, links=tuple(links.values()), handling=handling, copying=0.0
        )
        return self._corrected(profile, ratios, cut, pace), other

    @cached_property
    def _places(self) -> Placement:
        """Which rank held which stage; if that is not known, each its own."""
        return self.placement or Placement(tuple(range(len(self.seconds))))

    def _paces(self, ratios: list[dict[str, float]]) -> dict[int, float]:
        """By how much ranks are slower or faster than most, if that is more than chance."""
        each = {
            rank: median(r for s in self._places.stages_on(rank) for r in ratios[s].values())
            for rank in range(self._places.ranks)
        }
        usual = median_low(each.values())
        return {
            rank: ratio / usual
            for rank, ratio in each.items()
            if not 1 / SLOWER < ratio / usual < SLOWER
        }

    def _corrected(
        self,
        profile: Profile,
        ratios: list[dict[str, float]],
        cut: Cut,
        paces: Mapping[int, float],
    ) -> Profile:
        units = len(next(iter(profile.known.values())).units)
        before = profile.factors or ({},) * units
        factors = tuple(
            {
                kind: before[unit].get(kind, 1.0)
                * ratio
                / paces.get(self._places.rank_of[stage], 1.0)
                for kind, ratio in ratios[stage].items()
            }
            for stage, run in enumerate(runs_of(cut, units))
            for unit in run
        )
        if self.messages is None:
            return replace(profile, factors=factors)
        latency = median(self.messages.delays.values()) if self.messages.delays else profile.latency
        handling = self.messages.handling
        return replace(profile, factors=factors, handling=handling, latency=latency)

    def _ratios(
        self, profile: Profile, samples: int, cut: Cut, cluster: Cluster | None = None
    ) -> list[dict[str, float]]:
        """For each stage, the measured over the expected times of actions, by name."""
        if len(cut) != len(self.seconds):
            raise UsageError(
                f"the step had {len(self.seconds)} stages and the cut has {len(cut)}; give the cut that ran"
            )
        units = units_on(profile, samples, self._places.ranks, cluster)
        stages = units[0].stages(cut, self._places, on=units)
        return [
            {kind: self._ratio(stages, stage, kind) for kind in KINDS.values()}
            for stage in range(len(cut))
        ]

    def _ratio(self, stages: StageCosts, stage: int, kind: str) -> float:
        """The measured over the expected time; for a kind that did not run, from all that did."""
        measured = self.seconds[stage]
        kinds = [kind] if kind in measured else list(measured)
        expected = sum(getattr(stages, each)[stage] for each in kinds)
        return sum(measured[each] for each in kinds) / expected if expected else 1.0


@dataclass(frozen=True)
class Replanned:
    """A plan that ran, by the costs that its step showed, and what is planned by them now.

    Args:
        old: the plan that ran.
        plans: the plans now, the fastest first.
        cluster: the ranks, as the step showed them.
    """

    old: Plan
    plans: Plans
    cluster: Cluster

    @property
    def gain(self) -> float:
        """The time of a step of the old plan, divided by that of the new one."""
        return self.old.seconds / self.plans[0].seconds

    def __str__(self) -> str:
        best, usual = self.plans[0], min((d.pace for d in self.cluster.devices), default=0.0)
        slow = [
            f"rank {rank} takes {device.pace / usual:.2f} times as long for the same work"
            for rank, device in enumerate(self.cluster.devices)
            if usual and device.pace > SLOWER * usual
        ]
        cuts = [
            f"{what}: {plan.shape.schedule}, {', '.join(' to '.join(_ends(s)) for s in plan.stages)}: "
            f"{seconds_as_text(plan.seconds)} a step"
            for what, plan in (("old cut", self.old), ("new cut", best))
        ]
        return "\n".join([str(self.plans), *slow, *cuts, f"gain: {self.gain:.2f} x"])


def _ends(paths: Sequence[str]) -> list[str]:
    return [paths[0]] if len(paths) == 1 else [paths[0], paths[-1]]


def plan_again(
    profile: Profile, old: Plan, timeline: Timeline, cluster: Cluster | None = None, **asked: Any
) -> Replanned:
    """Plan again, by what a recorded step of a plan has shown of its units, ranks and links.

    Args:
        profile: the costs of the units.
        old: the plan that ran.
        timeline: the recorded step: ``result.timeline``.
        cluster: the ranks that it ran on; by default ranks that are alike.
        asked: as for ``search``; by default for as many ranks and microbatches as before.

    Raises:
        UsageError: the plan is not for this model, or for more ranks than there are.
    """
    if cluster is None:
        alike = Device(profile.device, {"float32": 1.0}, profile.memory, 1.0, pace=1.0, alone=1.0)
        cluster = Cluster((alike,) * old.ranks, ("here",) * old.ranks)
    samples = old.shape.samples
    units = [unit.path for unit in profile.at(samples).units]
    measured = costs_from(timeline, with_messages(old.schedule))
    corrected, seen = measured.correct_both(profile, cluster, samples, cut_of(units, old.stages))
    batch = asked.pop("batch", old.microbatches * samples * old.replicas)
    default = {"pipeline": old.ranks, "microbatches": old.microbatches}
    plans = search(corrected, cluster=seen, batch=batch, **{**default, **asked})
    again = plan_for(
        corrected, old.schedule, old.stages, batch=old.microbatches * samples, cluster=seen
    )
    return Replanned(replace(again, shape=old.shape), plans, seen)


def costs_from(result: Any, schedule: Schedule | None = None) -> MeasuredStages:
    """Read costs from a recorded step.

    Args:
        result: the result of ``pipe.step(..., record=True)``, or its timeline.
        schedule: the schedule of the step, such as ``pipe.schedule``, to read what messages took too, if
            each rank was a process.

    Raises:
        UsageError: the step was not recorded.
    """
    timeline = result if isinstance(result, Timeline) else result.timeline
    if timeline is None:
        raise UsageError("the step was not recorded; make it with pipe.step(..., record=True)")
    times: dict[int, dict[str, list[float]]] = {}
    for span in timeline.spans:
        if span.action.op in KINDS:
            kinds = times.setdefault(span.action.stage, {})
            kinds.setdefault(KINDS[span.action.op], []).append(span.duration)
    seconds = ({kind: median(each) for kind, each in times[s].items()} for s in sorted(times))
    if schedule is None:
        return MeasuredStages(tuple(seconds))
    return MeasuredStages(tuple(seconds), message_times(schedule, timeline), schedule.placement)
