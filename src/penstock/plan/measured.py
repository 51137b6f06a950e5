"""What a recorded step says of the costs that a plan was made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from penstock.errors import UsageError
from penstock.plan.cluster import Cluster
from penstock.plan.costs import KINDS, Profile, cut_of, runs_of
from penstock.plan.ranks import ranks_of
from penstock.schedule import Placement, Schedule, Timeline, costs_of
from penstock.schedule.comparing import SLOWER, relative


def correct(
    profile: Profile,
    timeline: Timeline | None,
    schedule: Schedule,
    stages: Sequence[Sequence[str]],
    *,
    samples: int,
    cluster: Cluster | None = None,
) -> tuple[Profile, Cluster | None]:
    """Correct the costs of a model by what the actions of a recorded step took.

    Each unit's times, for every size of microbatch, are scaled by the measured ratio of its stage. With a
    cluster, what all stages of a rank take longer than those of other ranks is the rank's.

    Args:
        profile: the costs so far.
        timeline: the recorded step: ``result.timeline`` of ``pipe.step(..., record=True)``.
        schedule: the schedule of the step: ``pipe.schedule``.
        stages: for each stage the paths of its modules.
        samples: the number of samples in a microbatch of the step.
        cluster: the ranks that it ran on, with what is known of them.

    Returns:
        The costs, and the ranks if they were given, as the step has shown them.

    Raises:
        UsageError: the step was not recorded, or had other stages or more ranks than these.
    """
    if timeline is None:
        raise UsageError("the step was not recorded; make it with pipe.step(..., record=True)")
    placement = schedule.placement
    if len(stages) != placement.stages or (cluster is not None and len(cluster) < placement.ranks):
        raise UsageError(
            f"the step had {placement.stages} stages on {placement.ranks} ranks; give the stages= that ran, "
            "and the cluster that they ran on"
        )
    ranks = ranks_of(profile, samples, placement.ranks, placement.ranks, cluster)
    count = len(ranks.units[0].units)
    cut = cut_of([unit.path for unit in ranks.units[0].units], stages)
    expected = ranks.units[0].stages(cut, placement, on=ranks.units).costs
    took = costs_of(len(stages), timeline)
    ratios = [
        _ratios(*(
            {kind: costs.per_stage(kind, len(stages))[stage] for kind in KINDS.values()}
            for costs in (took, expected)
        ))
        for stage in range(len(stages))
    ]  # fmt: skip
    paces = {} if cluster is None else _paces(ratios, placement)
    before = profile.factors or ({},) * count
    factors = tuple(
        {
            kind: before[unit].get(kind, 1.0) * ratio / paces.get(placement.rank_of[stage], 1.0)
            for kind, ratio in ratios[stage].items()
        }
        for stage, run in enumerate(runs_of(cut, count))
        for unit in run
    )
    if cluster is not None:
        slower = enumerate(cluster.devices)
        devices = tuple(device.slower(paces.get(rank, 1.0)) for rank, device in slower)
        cluster = replace(cluster, devices=devices)
    return replace(profile, factors=factors), cluster


def _ratios(took: Mapping[str, float], expected: Mapping[str, float]) -> dict[str, float]:
    """The measured over the expected times of a stage's actions; of all, for one that did not run."""
    ran = [kind for kind, seconds in took.items() if seconds]

    def ratio(kinds: Sequence[str]) -> float:
        should = sum(expected[kind] for kind in kinds)
        return sum(took[kind] for kind in kinds) / should if should else 1.0

    return {kind: ratio([kind] if kind in ran else ran) for kind in took}


def _paces(ratios: Sequence[Mapping[str, float]], placement: Placement) -> dict[int, float]:
    """By how much ranks are slower or faster than most, if that is more than chance."""
    of_stages = {stage: median(each.values()) for stage, each in enumerate(ratios)}
    each = relative(of_stages, placement)
    paces = {rank: median(stages.values()) for rank, stages in enumerate(each)}
    return {rank: pace for rank, pace in paces.items() if not 1 / SLOWER < pace < SLOWER}
