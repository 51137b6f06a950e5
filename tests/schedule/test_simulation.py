"""The simulator: times, memory, reasons."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import UsageError
from penstock.schedule import (
    Action,
    Costs,
    Edge,
    Op,
    Overlap,
    Schedule,
    add_communication,
    build,
    costs_of,
    looped,
    offload,
    prefetch,
    replay,
    simulate,
)
from tests.schedule.programs import schedule


def test_each_action_starts_when_its_rank_and_its_needs_allow() -> None:
    ran = simulate(schedule("0F0 0B0", "1F0 1B0"), Costs(forward=2, input=3, weight=1, latency=0.5))
    assert [(s.start, s.end) for s in ran.timeline.of_rank(0)] == [(0, 2), (9, 13)]
    assert [(s.start, s.end) for s in ran.timeline.of_rank(1)] == [(2.5, 4.5), (4.5, 8.5)]
    assert ran.makespan == 13
    assert ran.bubble == pytest.approx(7 / 13)  # each of the two ranks computes for 6


def test_costs_may_differ_by_stage() -> None:
    ran = simulate(schedule("0F0", "1F0"), Costs(forward=[1, 5]))
    assert ran.makespan == 6
    with pytest.raises(UsageError, match="forward has 3 numbers for 2 stages"):
        simulate(schedule("0F0", "1F0"), Costs(forward=[1, 5, 6]))


def test_a_transfer_starts_when_both_ends_have_posted_it() -> None:
    late = schedule("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1F0 1RECV_F1 1F1", microbatches=2)
    ran = simulate(late, Costs(forward=1, latency=3))
    assert ran.span(Action(1, Op.F, 0)).start == 4
    assert ran.span(Action(1, Op.F, 1)).start == 8


def test_a_channel_carries_one_message_after_the_other() -> None:
    both = schedule("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1RECV_F1 1F0 1F1", microbatches=2)
    ran = simulate(both, Costs(forward=1, bandwidth=2, message={"stage0": 10}, latency=1))
    assert ran.span(Action(1, Op.F, 0)).start == 7
    assert ran.span(Action(1, Op.F, 1)).start == 12


@pytest.mark.parametrize("spelled_out", [False, True])
def test_a_value_travels_to_each_rank_as_fast_as_its_link(spelled_out: bool) -> None:
    example = schedule("0F0", "1F0", "2F0").with_edges([Edge("x", 0, (1, 2))])
    costs = Costs(latency=1, bandwidth=2, links={(0, 2): (3, 0.5)}, message={"x": 4})
    ran = simulate(add_communication(example) if spelled_out else example, costs)
    assert [ran.span(Action(stage, Op.F, 0)).start for stage in range(3)] == [0, 4, 12]


@pytest.mark.parametrize("spelled_out", [False, True])
def test_a_message_back_carries_gradients_alone(spelled_out: bool) -> None:
    edges = [Edge("x", 0, (1,)), Edge("mask", 0, (1,), gradient=False)]
    example = schedule("0F0 0B0", "1F0 1B0").with_edges(edges)
    costs = Costs(bandwidth=1, message={"x": 1, "mask": 10})
    ran = simulate(add_communication(example) if spelled_out else example, costs)
    assert [ran.span(Action(*of, 0)).start for of in ((1, Op.F), (0, Op.B))] == [12, 16]


def test_gaps_name_what_is_waited_for() -> None:
    ran = simulate(add_communication(schedule("0F0 0B0", "1F0 1B0")))
    (gap,) = ran.gaps(0)
    assert (gap.start, gap.end, str(gap.action), str(gap.waits_for)) == (1, 4, "0B0", "0RECV_B0")
    # A value may be made in time, and come too late.
    late = schedule("0F0 0F1", "1F0 1F1", microbatches=2)
    gaps = simulate(late, Costs(forward=[2, 1], latency=1.5)).gaps(1)
    assert [(gap.start, gap.end, str(gap.waits_for)) for gap in gaps] == [
        (0, 3.5, "0F0"),
        (4.5, 5.5, "0F1"),
    ]
    # Of two values, the one that comes last.
    two = schedule("0F0", "1F0", "2F0").with_edges([Edge("a", 0, (2,)), Edge("b", 1, (2,))])
    for times, last in (([1, 5, 1], "1F0"), ([5, 1, 1], "0F0")):
        (gap,) = simulate(two, Costs(forward=times)).gaps(2)
        assert str(gap.waits_for) == last


def test_what_recurs_runs_each_time_anew() -> None:
    """A stage is gathered twice: a replay does not take one time for the other."""
    example = prefetch(build("LoopedBFS", ranks=2, microbatches=1, stages_per_rank=3), unsharded=1)
    line = replay(example, {action: 1.0 for rank in range(2) for action in example.actions(rank)})
    gathered = [span.start for span in line.of_rank(0) if str(span.action) == "0UNSHARD"]
    assert len(gathered) == 2
    assert gathered == sorted(set(gathered))


def test_a_timeline_tells_pairs_that_overlapped_from_those_that_ran_in_turn() -> None:
    made = build("DualPipeV", ranks=2, microbatches=6)
    overlap = [1.0, 0.0, 0.5, 0.25]
    costs = Costs(forward=[1, 2, 3, 4], input=2, weight=[1, 3, 1, 2], overlap=overlap)
    line = simulate(made, costs).timeline
    assert {pair.forward.stage for pair in line.overlapped} == {0, 2, 3}
    assert costs_of(4, line).overlap == pytest.approx(overlap)
    assert costs_of(4, line).per_stage("forward", 4) == [1, 2, 3, 4]


def test_memory_over_time() -> None:
    ran = simulate(schedule("0F0 0F1 0I0 0W0 0B1", microbatches=2), Costs(activation=4, stash=3))
    assert ran.memory(0) == [(0, 4), (1, 8), (3, 7), (4, 4), (6, 0)]
    assert ran.peak_memory == (8,)


def test_an_overlapped_pair_hides_a_share_of_its_shorter_half() -> None:
    pair = Overlap(Action(0, Op.F, 1), Action(0, Op.B, 0))
    program = (Action(0, Op.F, 0), pair, Action(0, Op.B, 1))
    overlapped = Schedule("test", looped(1), 2, (program,))
    assert simulate(overlapped).makespan == 6
    assert simulate(overlapped, Costs(overlap=0.5)).makespan == 5.5
    assert simulate(overlapped, Costs(overlap=1)).busy == (5,)
    with pytest.raises(UsageError, match="overlap has 2 numbers for 1 stages"):
        simulate(overlapped, Costs(overlap=[1, 1]))
    # The end of a forward and the start of its backward are one time, however that is rounded.
    odd = Costs(forward=[0.67, 0.62], input=[2.99, 0.85], weight=[2.81, 1.41])
    ran = simulate(build("DualPipeV", ranks=1, microbatches=3), odd)
    assert ran.gaps(0) == []


@pytest.mark.parametrize(
    "bad",
    [
        {"forward": -1},
        {"latency": float("nan")},
        {"bandwidth": 0},
        {"overlap": 2},
        {"overlap": [0, -1]},
    ],
)
def test_impossible_costs_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(bad))):
        Costs(**bad)


def test_measured_durations_are_replayed_on_a_clock_a_rank() -> None:
    example = add_communication(build("1F1B", ranks=2, microbatches=2))
    durations = {action: 2.0 for rank in range(2) for action in example.actions(rank)}
    durations |= {a: 0.5 for a in durations if a.op in (Op.SEND_F, Op.SEND_B)}
    durations |= {a: 0.0 for a in durations if a.op in (Op.RECV_F, Op.RECV_B)}
    line = replay(example, durations)
    assert line.unit == "s"
    assert {span.action.op for span in line.spans} == {Op.F, Op.B}
    assert line.of_rank(1)[0].start == 2.5


def test_a_replay_needs_every_duration() -> None:
    with pytest.raises(UsageError, match="no duration for 1 actions: 0B0"):
        replay(schedule("0F0 0B0"), {Action(0, Op.F, 0): 1.0})


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "ZB-V", "DualPipeV"])
def test_messages_are_counted_alike_spelled_out_or_not(name: str) -> None:
    """A value that two stages of a rank use goes there once."""
    made = build(name, ranks=2, microbatches=4)
    skip = Edge("skip", 0, tuple(range(1, made.stages)))
    for silent in (made, made.with_edges((*made.edges, skip))):
        assert simulate(silent).messages == simulate(add_communication(silent)).messages


def test_copies_to_the_host_run_beside_the_computing_and_backward_waits_for_its_own() -> None:
    made = schedule("0F0 0OFFLOAD0 0F1 0RELOAD0 0B0 0B1", microbatches=2)
    ran = simulate(made, Costs(activation=4, host_bandwidth=2, host_latency=0.5))
    # It leaves from 1 to 3.5, and comes back from 3.5 to 6, while F of microbatch 1 ends at 2.
    assert ran.span(Action(0, Op.F, 1)).end == 2
    assert ran.span(Action(0, Op.B, 0)).start == 6
    assert ran.memory(0) == [(0, 4), (1, 8), (3.5, 4), (3.5, 8), (8, 4), (10, 0)]
    assert (ran.peak_memory, ran.host_memory) == ((8,), (4,))
    assert ran.gaps(0)[0].waits_for == Action(0, Op.RELOAD, 0)
    assert simulate(made).makespan == 6  # a host as fast as memory costs nothing


def test_a_rank_makes_one_copy_at_a_time_in_each_direction() -> None:
    made = schedule("0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0RELOAD0 0RELOAD1 0B2 0B1 0B0", microbatches=3)
    ran = simulate(made, Costs(host_bandwidth=0.25))
    # They leave from 1 to 5 and from 5 to 9, and come back from 5 to 9 and from 9 to 13.
    assert ran.span(Action(0, Op.B, 1)).start == 13
    assert ran.host_memory == (2,)


@pytest.mark.parametrize(("name", "keep"), [("1F1B", 3), ("Interleaved1F1B", 3), ("DualPipeV", 4)])
def test_offloading_takes_memory_and_no_time_with_a_fast_link(name: str, keep: int) -> None:
    plain = add_communication(build(name, ranks=4, microbatches=8))
    moved = simulate(offload(plain, keep=keep), Costs(host_bandwidth=1))
    assert moved.makespan == simulate(plain).makespan
    assert max(moved.peak_memory) == keep < max(simulate(plain).peak_memory)
    assert 0 < max(moved.host_memory) <= 10
    assert moved.messages == simulate(plain).messages
