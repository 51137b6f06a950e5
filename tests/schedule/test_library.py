"""Every schedule: valid for all numbers or refused, with the makespans, bubbles and memory of its paper."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from penstock.cli.schedule import app
from penstock.errors import ScheduleError
from penstock.schedule import (
    Costs,
    Op,
    Schedule,
    Simulation,
    add_communication,
    build,
    looped,
    names,
    register,
    search,
    simulate,
    unregister,
    validate,
)
from penstock.schedule.action import microbatch_of
from penstock.schedule.library import RECIPES, find
from penstock.schedule.library.schedules import gpipe

RANKS = (1, 2, 3, 4, 5, 6, 7, 8)


def run(
    name: str, ranks: int, microbatches: int, v: int | None = None, **costs: float
) -> Simulation:
    built = build(name, ranks=ranks, microbatches=microbatches, stages_per_rank=v)
    return simulate(built, Costs(**costs))  # type: ignore[arg-type]  # the times are all numbers


# What a schedule takes where F = I = W = 1, by ranks p, microbatches m and stages per rank v.
MAKESPANS: dict[str, Callable[[int, int, int], int]] = {
    "GPipe": lambda p, m, _: 3 * m + 3 * (p - 1),
    "1F1B": lambda p, m, _: 3 * m + 3 * (p - 1),
    "Eager-1F1B": lambda p, m, _: 3 * m + 3 * (p - 1),
    "ZB-H1": lambda p, m, _: 3 * m + p - 1,
    "ZB-H2": lambda p, m, _: 3 * m + p - 1,
    "Interleaved1F1B": lambda p, m, v: 3 * m * v + 3 * (p - 1),
    "LoopedBFS": lambda p, m, v: 3 * m * v + 3 * (p - 1),
    "InterleavedZeroBubble": lambda p, m, v: 3 * m * v + p - 1,
    "ZB-V": lambda p, m, _: 6 * m + p - 1,
    "DualPipeV": lambda p, m, _: 6 * m + 2 * (p - 1),
    "forward-only": lambda p, m, v: m * v + p - 1,
}


@pytest.mark.parametrize("name", MAKESPANS)
@pytest.mark.parametrize("p", RANKS)
def test_makespans_are_exact(name: str, p: int) -> None:
    recipe = RECIPES[name]
    for v in (
        (1, 2, 3) if recipe.any_stages and name != "forward-only" else (recipe.stages_per_rank,)
    ):
        for m in (2 * p, 3 * p):
            assert run(name, p, m, v).makespan == MAKESPANS[name](p, m, v)


@pytest.mark.parametrize("p", range(3, 14))
def test_makespans_and_memory_of_v_half_and_v_min_are_exact(p: int) -> None:
    for m in (2 * p, 2 * p + 3, 4 * p):
        half, least = run("V-Half", p, m), run("V-Min", p, m)
        assert half.makespan == 6 * m + 3 * p - (7 if p % 2 == 0 else 4)
        assert least.makespan == 6 * m + 4 * p - (5 if p % 3 else 7)
        assert max(half.peak_memory) == 2 * ((p + 2) // 2)
        assert max(least.peak_memory) == 2 * ((p + 4) // 3)


@pytest.mark.parametrize("p", [2, 4, 7])
@pytest.mark.parametrize("times", [(5, 4, 3), (4, 5, 2), (3, 3, 3), (7, 4, 1)])
def test_bubbles_for_any_times(p: int, times: tuple[int, int, int]) -> None:
    f, i, w = times
    m = 4 * p
    work = m * (f + i + w)
    costs = {"forward": f, "input": i, "weight": w}
    assert run("1F1B", p, m, **costs).makespan - work == (p - 1) * (f + i + w)
    assert run("ZB-H1", p, m, **costs).makespan - work == (p - 1) * (f + i - w)
    assert run("ZB-H2", p, m, **costs).longest_stage - work == (p - 1) * max(0, f + i - 2 * w)
    for v in (2, 3):
        interleaved = run("Interleaved1F1B", p, m, v, **costs)
        assert interleaved.makespan - work * v == (p - 1) * (f + i + w)


@pytest.mark.parametrize("p", RANKS)
def test_peak_memory_is_exact_and_zero_bubbles_are_zero(p: int) -> None:
    m = 3 * p
    ranks = range(p)
    assert run("1F1B", p, m).peak_memory == tuple(min(m, p - r) for r in ranks)
    assert run("1F1B", p, 2).peak_memory == tuple(min(2, p - r) for r in ranks)
    assert max(run("ZB-H1", p, m).peak_memory) == p
    for name, most in (("ZB-H2", 2 * p - 1), ("ZB-V", 2 * p)):
        ran = run(name, p, m)
        assert max(ran.peak_memory) == most
        assert ran.longest_stage_bubble == 0, "no bubble within a rank"
        assert ran.longest_stage == max(ran.busy)
    assert run("GPipe", p, m).peak_memory == (m,) * p
    for v in (1, 2, 3):
        held = tuple(2 * (p - r - 1) + (v - 1) * p + 1 for r in ranks)
        assert run("Interleaved1F1B", p, m, v).peak_memory == held
        assert run("LoopedBFS", p, m, v).peak_memory == (m * v,) * p


@pytest.mark.parametrize("lowered", [False, True])
def test_eager_1f1b_hides_latency(lowered: bool) -> None:
    def takes(name: str, latency: float) -> float:
        built = build(name, ranks=4, microbatches=16)
        costs = Costs(forward=2, backward=4, latency=latency)
        return simulate(add_communication(built) if lowered else built, costs).makespan

    assert [takes("Eager-1F1B", x) for x in (0, 0.5, 1, 2)] == [114, 117, 120, 126]
    assert [takes("1F1B", x) for x in (0, 0.5, 1, 2)] == [114, 128, 142, 170]


def built_or_refused(name: str, p: int, v: int, m: int) -> Schedule | None:
    refused = m < 2 * p if name == "DualPipeV" else False
    if refused or (v != RECIPES[name].stages_per_rank and not RECIPES[name].any_stages):
        with pytest.raises(ScheduleError, match=f"(={v}|not {m})"):
            build(name, ranks=p, microbatches=m, stages_per_rank=v)
        return None
    return build(name, ranks=p, microbatches=m, stages_per_rank=v)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("p", RANKS)
def test_valid_for_all_numbers_or_refused(name: str, p: int) -> None:
    """Every m up to 17 is validated; as the messages triple the time, every third of them is simulated."""
    for v in (1, 2, 3):
        for m in range(1, 18):
            built = built_or_refused(name, p, v, m)
            if built is None:
                continue
            validate(built).raise_if_bad()
            if (m + p + v) % 3 == 0:
                lowered = add_communication(built)
                validate(lowered).raise_if_bad()
                assert simulate(lowered).makespan >= m * len(built.placement.stages_on(0))


@pytest.mark.parametrize("name", names())
def test_weight_gradients_come_in_microbatch_order(name: str) -> None:
    """The runtime adds gradients in this order, so all schedules give the same bits."""
    for p, m in ((1, 3), (2, 7), (4, 9), (5, 10)):
        built = build(name, ranks=p, microbatches=m)
        for rank in range(p):
            ends = [a for a in built.actions(rank) if a.op in (Op.W, Op.B)]
            for stage in built.placement.stages_on(rank):
                order = [microbatch_of(a) or 0 for a in ends if a.stage == stage]
                assert all(first < second for first, second in pairwise(order))


def test_names_are_found_in_any_case_and_by_torchs_names() -> None:
    for name in ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"):
        assert find(name.upper())[0] == find(name.lower())[0] == name
    assert (find("ZBVZeroBubble")[0], find("dualpipev")[0]) == ("ZB-V", "DualPipeV")


@pytest.fixture
def own_registry() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    before = names()
    yield
    for name in set(names()) - set(before):
        unregister(name)


def three_in_laps(ranks: int, microbatches: int) -> Schedule:
    """Three stages on each rank, in laps."""
    if ranks == 1:
        raise ScheduleError("ranks=1: nothing to overlap")
    laps = build("LoopedBFS", ranks=ranks, microbatches=microbatches, stages_per_rank=3)
    return replace(laps, name="three in laps")


@pytest.mark.usefixtures("own_registry")
def test_a_schedule_is_added_by_a_function_and_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing else: how many stages it has is read off what it builds."""
    register("three in laps", three_in_laps)
    made = build("Three in Laps", ranks=2, microbatches=4)
    assert (made.stages, made.placement) == (6, looped(2, 3))
    assert build("three in laps", ranks=2, microbatches=4, stages_per_rank=3) == made
    with pytest.raises(ScheduleError, match=r"three in laps has 3 stages on each rank, not .*=2"):
        build("three in laps", ranks=2, microbatches=4, stages_per_rank=2)
    validate(add_communication(made)).raise_if_bad()
    assert simulate(made).makespan == MAKESPANS["LoopedBFS"](2, 4, 3)
    assert search(Costs(forward=[1] * 6), ranks=2, microbatches=4, effort=0).stages == 6
    app(["compare", "-p", "2", "-m", "4"], prog_name="schedule", standalone_mode=False)
    assert "three in laps" in capsys.readouterr().out


@pytest.mark.usefixtures("own_registry")
def test_a_schedule_of_ones_own_is_what_was_asked_for_under_a_name_of_its_own() -> None:
    for name, says in (
        ("zbv", "is taken"),
        ("mine.csv", "like the name of a file"),
        ("", "choose"),
    ):
        with pytest.raises(ScheduleError, match=f"cannot be registered as {name!r}: .*{says}"):
            register(name, gpipe)
    register("mine", lambda ranks, microbatches: build("GPipe", ranks=2, microbatches=2))
    register("yours", lambda ranks, microbatches: "GPipe")  # type: ignore[arg-type,return-value]
    with pytest.raises(ScheduleError, match="mine gave a schedule of ranks=2, microbatches=2"):
        build("mine", ranks=2, microbatches=4)
    with pytest.raises(ScheduleError, match=r"yours gave a str, which is not a penstock\.schedule"):
        build("yours", ranks=2, microbatches=4)
    register("open", lambda ranks, microbatches, **more: gpipe(ranks, microbatches))
    assert build("open", ranks=2, microbatches=4) == build("GPipe", ranks=2, microbatches=4)


@pytest.mark.parametrize(
    ("name", "numbers", "reason"),
    [
        ("1F2B", (2, 2, None), r"'1F2B'; did you mean '1F1B'\? Known: GPipe, 1F1B"),
        ("GPipe", (0, 1, None), "ranks=0: must be at least 1"),
        ("ZB-V", (2, 4, 3), "has 2 stages on each rank, not stages_per_rank=3; Inter.* take any"),
        ("DualPipeV", (4, 7, None), "ranks=4 needs microbatches=8 or more, not 7"),
    ],
)
def test_refusals_say_why(name: str, numbers: tuple[int, int, int | None], reason: str) -> None:
    p, m, v = numbers
    with pytest.raises(ScheduleError, match=reason):
        build(name, ranks=p, microbatches=m, stages_per_rank=v)
