"""Plans for ranks that differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.errors import InputFileError, UsageError
from penstock.plan import Cluster, Device, Link, Plan, Profile, plan_for, predict, search
from penstock.schedule import build, simulate
from tests.plan.models import SLOW, Tower, profile


def device(pace: float = 1.0, memory: float = 0.0) -> Device:
    """A device on which work takes so many times as long as on that of the profile."""
    return Device("paper", {"float32": 1.0}, memory, 1.0, pace=pace, alone=1.0)


def cluster(*paces: float, links: tuple[Link, ...] = (), memory: Any = None) -> Cluster:
    held = memory or [0.0] * len(paces)
    devices = tuple(device(pace, most) for pace, most in zip(paces, held, strict=True))
    return Cluster(devices, ("one",) * len(paces), links or (Link(0, 1, 0.01, 1e6),))


def chain(units: int = 12, held: float = 10.0) -> Profile:
    return replace(profile([1.0] * units, held), measured=True)


ONE: dict[str, Any] = {"batch": 4, "microbatches": 4, "seconds": 0, "schedules": "1F1B"}


def sizes(plan: Plan) -> list[int]:
    return [len(paths) for paths in plan.stages]


def test_a_slow_rank_gets_less_and_the_simulator_agrees() -> None:
    costs, ranks = chain(), cluster(1.0, 2.0)
    best = search(costs, cluster=ranks, pipeline=2, **ONE)
    assert sizes(best[0]) == [8, 4]
    halves = costs.at(1).cut(2)
    schedule = build("1F1B", ranks=2, microbatches=4)
    even = plan_for(costs, schedule, halves, batch=4, cluster=ranks)
    assert sizes(even) == [6, 6]
    assert even.seconds > 1.25 * best[0].seconds
    with pytest.raises(UsageError, match="has 2 ranks, and the cluster only 1 devices"):
        plan_for(costs, schedule, halves, batch=4, cluster=ranks.only([0]))
    # The same by hand: the second stage's actions take twice as long.
    stages = costs.at(1).stages((0, 8), best[0].schedule.placement).costs
    by_hand = replace(
        stages, forward=[8.0, 8.0], input=[8.0, 8.0], weight=[8.0, 8.0], backward=[16.0, 16.0],
        latency=0.01, bandwidth=1e6,
    )  # fmt: skip
    assert best[0].seconds == pytest.approx(simulate(best[0].schedule, by_hand).makespan)
    assert best[0].simulation.makespan == pytest.approx(best[0].seconds)
    again = Plan.from_json(best[0].to_json())
    assert again == best[0]
    assert again.simulation.makespan == pytest.approx(best[0].seconds)


def test_a_slow_rank_of_the_same_name_gets_less() -> None:
    costs = predict(Tower(blocks=12, head=16), torch.empty(4, 16), device=SLOW)
    ranks = [SLOW, SLOW.slower(2.0)]
    plan = search(costs, cluster=ranks, pipeline=2, memory=0, **ONE)[0]
    assert sizes(plan) == [8, 5]


def test_a_device_without_a_known_limit_lifts_that_of_no_other() -> None:
    """Neighbours form a pipeline; each of its ranks holds what fits whichever replica it is of."""
    memory = [0.0, 300.0, 0.0, 300.0]
    asked = {**ONE, "batch": 8, "keep": 20, "schedules": ["1F1B", "GPipe"]}
    plans = search(chain(8, held=100.0), cluster=cluster(*[1.0] * 4, memory=memory), **asked)
    two = [plan.memory for plan in plans if plan.ranks == 2]
    assert two
    assert all(second <= 300.0 for _, second in two)
    assert all(held <= 300.0 for plan in plans if plan.ranks == 1 for held in plan.memory)


def test_the_slowest_replica_of_a_rank_decides_its_stage() -> None:
    ranks = cluster(1.0, 1.0, 1.0, 2.0)
    plan = search(chain(), cluster=ranks, pipeline=2, **{**ONE, "batch": 8})[0]
    assert sizes(plan) == [8, 4]


def test_replicas_wait_for_the_slowest() -> None:
    ranks, asked = cluster(1.0, 1.0, 3.0, 3.0), {**ONE, "pipeline": 1}
    whole = search(chain(8), cluster=ranks, **{**asked, "batch": 16})[0]
    one = search(chain(8), cluster=Cluster((device(3.0),), ("one",)), **asked)[0]
    assert whole.seconds == pytest.approx(one.seconds + whole.reduce)
    # Whether a slow device is worth its place is seen without it.
    fast = search(chain(8), cluster=ranks.only([0, 1]), **{**asked, "batch": 16, "microbatches": 8})
    assert fast[0].seconds < whole.seconds


def test_a_plan_holds_the_links_between_ranks_that_exchange_values() -> None:
    slow = Link(1, 2, 0.5, 1e6)
    plan = search(chain(), cluster=cluster(1.0, 1.0, 1.0, links=(slow,)), pipeline=3, **ONE)[0]
    links = {(a, b): latency for a, b, latency, _ in plan.stage_costs.links}
    assert links.keys() == {(0, 1), (1, 0), (1, 2), (2, 1)}
    assert links[1, 2] == links[2, 1] == 0.5


def test_clusters_in_words() -> None:
    read = Cluster.parse("2xh100-80GB, a100-40GB")
    assert [device.name for device in read.devices] == ["h100-80GB", "h100-80GB", "a100-40GB"]
    assert [device.memory for device in read.devices] == [80e9, 80e9, 40e9]
    assert read.wire(0, 1) == (10e-6, 450e9)
    assert str(read) == "2 x h100-80GB, 1 x a100-40GB"
    slow = replace(read, links=(Link(1, 2, 5e-3, 1e9),))
    assert slow.wire(2, 1) == (5e-3, 1e9)
    assert Cluster.from_json(slow.to_json()) == slow
    with pytest.raises(InputFileError, match="not a cluster"):
        Cluster.from_json("{}")


@pytest.mark.parametrize(
    ("ranks", "gist"),
    [
        ("4xh1000", "did you mean 'h100'"),
        ("four h100", "ranks='four h100': must be a number of devices"),
        ("99999999999xh100", "at most 1048576 devices"),
        ("", "at least one device"),
    ],
)
def test_a_wrong_word_is_told(ranks: str, gist: str) -> None:
    with pytest.raises(UsageError, match=gist):
        Cluster.parse(ranks)


def test_costs_of_another_device_are_not_guessed() -> None:
    other = Cluster((replace(device(), name="other", pace=0.0),) * 2)
    with pytest.raises(UsageError, match="nothing says how fast other is beside it"):
        search(chain(), cluster=other, **ONE)
    with pytest.raises(UsageError, match="the cluster has 2 devices"):
        search(chain(), cluster=other, ranks=3, **ONE)
    with pytest.raises(UsageError, match="ranks=, or the devices as cluster="):
        search(chain(), **ONE)
