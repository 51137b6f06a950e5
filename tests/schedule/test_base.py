"""A schedule is a value, and one of the wrong shape cannot be constructed."""

from __future__ import annotations

import dataclasses

import pytest

from penstock.errors import ScheduleError
from penstock.schedule import Action, Edge, Op, Overlap, Schedule, build, looped, parse_action
from penstock.schedule.base import flat


def schedule(*programs: str, microbatches: int = 1) -> Schedule:
    actions = tuple(tuple(map(parse_action, program.split())) for program in programs)
    return Schedule("test", looped(len(programs)), microbatches, actions)


def test_schedules_compare_by_what_they_do_not_by_name() -> None:
    made = build("1F1B", ranks=2, microbatches=3)
    assert made == build("1f1b", ranks=2, microbatches=3)
    assert made == dataclasses.replace(made, name="mine")
    assert made != build("GPipe", ranks=2, microbatches=3)
    assert len({made, dataclasses.replace(made, name="mine")}) == 1


def test_a_schedule_is_frozen_and_says_what_it_is() -> None:
    made = schedule("0F0 0B0", "1F0 1B0")
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.microbatches = 2  # type: ignore[misc]  # that is the point
    assert str(made) == "test: 2 ranks, 2 stages, 1 microbatches\nrank 0: 0F0 0B0\nrank 1: 1F0 1B0"


def test_the_chain_is_the_common_case_of_edges() -> None:
    assert [edge.targets for edge in schedule("0F0", "1F0").edges] == [(1,)]


def test_what_occurs_says_what_a_schedule_is_for() -> None:
    forward = schedule("0F0 0UNSHARD")
    assert not forward.trains
    assert not forward.communicates
    assert schedule("0F0 0B0").trains
    assert schedule("0F0 0SEND_F0", "1RECV_F0 1F0").communicates


def test_an_overlapped_pair_counts_as_its_halves() -> None:
    pair = Overlap(Action(0, Op.F, 1), Action(0, Op.B, 0))
    made = Schedule("test", looped(1), 2, ((Action(0, Op.F, 0), pair, Action(0, Op.B, 1)),))
    assert [str(action) for action in made.actions(0)] == ["0F0", "0F1", "0B0", "0B1"]
    assert list(flat((pair,))) == list(pair)
    assert made.ops == {Op.F, Op.B}


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("1F0", "rank 0, position 0, 1F0: there is no stage 1; stages go from 0 to 0"),
        (
            "0F0 0F1",
            "rank 0, position 1, 0F1: there is no microbatch 1; microbatches go from 0 to 0",
        ),
        ("0SEND_F0", "its peer, stage 1, does not exist"),
        ("0RECV_F0", "its peer, stage -1, does not exist"),
    ],
)
def test_actions_out_of_range_are_refused(program: str, reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        schedule(program)


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (Action(0, Op.F), "F needs a microbatch"),
        (Action(0, Op.UNSHARD, 0), "UNSHARD names no microbatch"),
        (Action(0, Op.F, 0, 0), "F is not a message and names no peer"),
        (Action(-1, Op.F, 0), "there is no stage -1"),
        (Action(0, Op.F, -1), "there is no microbatch -1"),
    ],
)
def test_actions_have_the_parts_their_op_needs(action: Action, reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        Schedule("test", looped(1), 1, ((action,),))


def test_counts_must_fit() -> None:
    with pytest.raises(ScheduleError, match="1 programs for 2 ranks"):
        Schedule("test", looped(2), 1, ((),))
    with pytest.raises(ScheduleError, match="microbatches=0"):
        Schedule("test", looped(1), 0, ((),))


def test_edges_must_fit() -> None:
    made = schedule("0F0", "1F0")
    with pytest.raises(ScheduleError, match=r"edges \['x'\] go to stages beyond the last, 1"):
        made.with_edges([Edge("x", 0, (1, 2))])
    with pytest.raises(ScheduleError, match=r"edges named twice: \['x'\]"):
        made.with_edges([Edge("x", 0, (1,)), Edge("x", 0, (1,))])


def test_a_rank_may_have_nothing_to_do_yet() -> None:
    assert schedule("", "").ops == frozenset()
