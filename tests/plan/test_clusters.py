"""Plans for ranks that differ: their cuts and orders, and why a device is left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import InputFileError, UsageError
from penstock.plan import Cluster, Device, Link, Plan, Profile, plan_for, predict, search
from penstock.schedule import Costs, build, on_ranks, simulate, validate
from tests.plan.models import SLOW, Tower, profile, stepped

mse = nn.functional.mse_loss


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
    even = search(costs, cluster=ranks, pipeline=2, even=True, **ONE)[0]
    assert sizes(even) == [6, 6]
    assert even.seconds > 1.25 * best[0].seconds
    # The same by hand: the second stage's actions take twice as long.
    stages = costs.at(1).stages((0, 8), best[0].schedule.placement).costs
    by_hand = replace(
        stages, forward=[8.0, 8.0], input=[8.0, 8.0], weight=[8.0, 8.0], backward=[16.0, 16.0],
        latency=0.01, bandwidth=1e6,
    )  # fmt: skip
    assert best[0].seconds == pytest.approx(simulate(best[0].schedule, by_hand).makespan)
    assert best[0].simulation.makespan == pytest.approx(best[0].seconds)
    priced = plan_for(
        costs, build("1F1B", ranks=2, microbatches=4), even.stages, batch=4, cluster=ranks
    )
    assert priced.seconds == pytest.approx(even.seconds)
    assert "even stages" in str(best)
    again = Plan.from_json(best[0].to_json())
    assert again == best[0]
    assert again.simulation.makespan == pytest.approx(best[0].seconds)


def test_a_slow_rank_of_the_same_name_gets_less() -> None:
    costs = predict(Tower(blocks=12, head=16), torch.empty(4, 16), device=SLOW)
    ranks = [SLOW, SLOW.slower(2.0)]
    plan = search(costs, cluster=ranks, pipeline=2, memory=0, **ONE)[0]
    assert dict(zip(plan.schedule.placement.rank_of, sizes(plan), strict=True)) == {0: 9, 1: 4}


def test_a_rank_that_only_holds_others_up_is_left_out() -> None:
    plans = search(chain(), cluster=cluster(1.0, 1.0, 50.0), **ONE)
    assert plans[0].devices == (0, 1)
    assert "ranks left out: 2 (paper); with all of them" in str(plans)


def test_the_first_stages_go_where_there_is_memory() -> None:
    """1F1B holds most in the first stage, so that the larger of two devices has it, wherever it stands."""
    costs = chain(4, held=100.0)
    ranks = cluster(1.0, 1.0, memory=[600.0, 1200.0])
    plans = search(costs, cluster=ranks, pipeline=2, recompute="none", **ONE)
    best = plans[0]
    assert best.schedule.placement.rank_of == (1, 0)
    assert validate(best.schedule).ok
    assert all(most <= limit for most, limit in zip(best.memory, (600.0, 1200.0), strict=True))
    assert "the stages go through ranks 1, 0; in their own order" in str(plans)


def test_a_device_without_a_known_limit_lifts_that_of_no_other() -> None:
    memory = [0.0, 300.0, 0.0, 300.0]
    asked = {**ONE, "batch": 8, "keep": 20, "schedules": ["1F1B", "GPipe"]}
    plans = search(chain(8, held=100.0), cluster=cluster(*[1.0] * 4, memory=memory), **asked)
    held = [
        (rank, most)
        for p in plans
        for start in range(0, len(p.devices), p.ranks)
        for rank, most in zip(p.devices[start : start + p.ranks], p.memory, strict=True)
    ]
    assert {rank for rank, _ in held} == {0, 1, 2, 3}
    assert all(most <= (memory[rank] or most) for rank, most in held)


def test_neighbours_do_not_talk_over_a_slow_link() -> None:
    """Ranks 0 and 2 are near each other, and so are 1 and 3: the pipeline crosses between them once."""
    slow = tuple(Link(a, b, 5.0, 1e6) for a, b in ((0, 1), (1, 2), (2, 3), (0, 3)))
    near = Link(0, 2, 0.01, 1e6), Link(1, 3, 0.01, 1e6)
    best = search(chain(8), cluster=cluster(*[1.0] * 4, links=slow + near), pipeline=4, **ONE)[0]
    order = best.schedule.placement.rank_of
    assert {*order[:2]} in ({0, 2}, {1, 3})


def test_devices_that_are_alike_form_pipelines_in_their_order() -> None:
    ranks = cluster(1.0, 1.0, 1.0, 1.0)
    plan = search(chain(), cluster=ranks, pipeline=2, **{**ONE, "batch": 8})[0]
    assert plan.devices == (0, 1, 2, 3)
    assert plan.schedule.placement.rank_of == (0, 1)


def test_the_slowest_rank_of_all_pipelines_decides_its_stage() -> None:
    ranks = cluster(1.0, 1.0, 1.0, 2.0)
    plan = search(chain(), cluster=ranks, pipeline=2, **{**ONE, "batch": 8})[0]
    assert sizes(plan)[plan.schedule.placement.rank_of.index(1)] == 4
    assert plan.devices[3] == 3


def test_replicas_wait_for_the_slowest_and_a_slow_device_is_left_out() -> None:
    asked = {**ONE, "batch": 16, "pipeline": 1}
    plans = search(chain(8), cluster=cluster(1.0, 1.0, 3.0, 3.0), **asked, keep=50)
    all_used = next(plan for plan in plans if len(plan.devices) == 4)
    slow = Cluster((device(3.0),), ("one",))
    one = search(chain(8), cluster=slow, **{**asked, "batch": 4})[0]
    assert all_used.seconds == pytest.approx(one.seconds + all_used.reduce)
    assert plans[0].devices == (0, 1)
    assert plans[0].seconds < all_used.seconds


def test_a_model_trains_by_a_plan_in_another_order() -> None:
    model, x, y = Tower(), torch.empty(8, 16), torch.empty(8, 64)
    fast = Device("fast", {"float32": 4e9}, 1e9, 1e12, compute_efficiency=1.0, launch=1e-9)
    slow = replace(fast, name="slow", flops={"float32": 1e9}, memory=1e6)
    costs = predict(model, x, target=y, loss_fn=mse, device=fast)
    plan = search(costs, cluster=[slow, fast], batch=8, microbatches=4, pipeline=2, seconds=0)[0]
    assert plan.schedule.placement.rank_of == (1, 0)
    stepped(model, schedule=plan)


def test_work_moves_to_other_ranks() -> None:
    plain = build("1F1B", ranks=3, microbatches=4)
    moved = on_ranks(plain, [2, 0, 1])
    assert moved.placement.rank_of == (2, 0, 1)
    assert moved.programs[2] == plain.programs[0]
    assert validate(moved).ok
    costs = Costs(forward=[1, 2, 3])
    assert simulate(moved, costs).makespan == simulate(plain, costs).makespan
    links = {(1, 2): (10.0, 1.0)}
    assert simulate(plain, Costs(links=links)).makespan > simulate(plain).makespan
    assert simulate(moved, Costs(links=links)).makespan == simulate(moved).makespan
    with pytest.raises(UsageError, match=r"ranks=\[0, 0, 1\]: must be 3 ranks from 0, each once"):
        on_ranks(plain, [0, 0, 1])


def test_clusters_in_words() -> None:
    read = Cluster.parse("2xh100-80GB, a100-40GB", "1-2=8Gb/s@5ms")
    assert [device.name for device in read.devices] == ["h100-80GB", "h100-80GB", "a100-40GB"]
    assert [device.memory for device in read.devices] == [80e9, 80e9, 40e9]
    assert read.wire(2, 1) == (5e-3, 1e9)
    assert read.wire(0, 1) == (10e-6, 450e9)
    assert str(read) == "2 x h100-80GB, 1 x a100-40GB"
    many = Cluster.parse("16xh100", "0..7-8..15=1GB/s")
    assert len(many.links) == 64
    assert many.wire(0, 15) == (20e-6, 1e9)
    assert Cluster.from_json(many.to_json()) == many
    with pytest.raises(InputFileError, match="not a cluster"):
        Cluster.from_json("{}")


@pytest.mark.parametrize(
    ("ranks", "links", "gist"),
    [
        ("4xh1000", "", "did you mean 'h100'"),
        ("four h100", "", "ranks='four h100': must be a number of devices"),
        ("99999999999xh100", "", "at most 1048576 devices"),
        ("2xh100", "0-1=fast", "links='0-1=fast': must be two ranks"),
        ("2xh100", "0-2=1GB/s", "links='0-2=1GB/s': must be of ranks from 0 to 1"),
        ("4xh100", "0-1=1.2.3GB/s", "must be two ranks"),
        ("4xh100", "2..1-3=1GB/s", "from 0 to 3, in ascending order"),
        ("4xh100", "0..9999999999-1=1GB/s", "from 0 to 3"),
        ("", "", "at least one device"),
    ],
)
def test_a_wrong_word_is_told(ranks: str, links: str, gist: str) -> None:
    with pytest.raises(UsageError, match=gist):
        Cluster.parse(ranks, links)


def test_costs_of_another_device_are_not_guessed() -> None:
    other = Cluster((replace(device(), name="other", pace=0.0),) * 2)
    with pytest.raises(UsageError, match="nothing says how fast other is beside it"):
        search(chain(), cluster=other, **ONE)
    with pytest.raises(UsageError, match="the cluster has 2 devices"):
        search(chain(), cluster=other, ranks=3, **ONE)
    with pytest.raises(UsageError, match="ranks=, or the devices as cluster="):
        search(chain(), **ONE)
