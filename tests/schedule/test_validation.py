"""Every way a schedule can be wrong is reported, with where it is and what to change."""

from __future__ import annotations

import pytest

from penstock.errors import ScheduleError
from penstock.schedule import merged, simulate, validate
from tests.schedule.programs import schedule

SENDS, RECEIVES = "0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"


def test_a_right_schedule_has_no_problem() -> None:
    report = validate(schedule(SENDS, RECEIVES))
    assert report.ok
    report.raise_if_bad()
    assert str(report) == "test: valid; also with blocking sends"


LATER = "comes later"
Case = tuple[tuple[str, ...], str]
"""Programs, and what is said of them."""
WRONG: list[Case] = [
    (("0F0 0B0", "1F0"), "rank 1, 1B0: missing; add 1B0 to the program of rank 1"),
    (("0B0",), "rank 0, 0F0: missing; add 0F0 to the program of rank 0"),
    (("0F0 0F0 0B0",), "rank 0, position 1, 0F0: is already at position 0 of rank 0"),
    (("0F0 0B0 0I0 0W0",), "rank 0, position 2, 0I0: the microbatch has a full backward as well"),
    (("0F0 0UNSHARD 0B0",), "0F0: runs while the stage is not unsharded; put 0UNSHARD before it"),
    (("0UNSHARD 0F0 0RESHARD 0B0",), "position 3, 0B0: runs while the stage is not unsharded"),
    (("0UNSHARD 0UNSHARD 0F0 0B0",), "position 1, 0UNSHARD: the stage is unsharded already"),
    (("0UNSHARD 0F0 0B0 0RESHARD 0RESHARD",), "position 4, 0RESHARD: runs while the stage is not"),
    (("0F0 0OFFLOAD0 0B0",), "rank 0, 0RELOAD0: missing; add 0RELOAD0 to the program of rank 0"),
    (("0F0 0OFFLOAD0 0RELOAD0 0RELOAD0 0B0",), "position 3, 0RELOAD0: is already at position 2"),
    (("0F0 0SEND_F0@2", "1F0", "2RECV_F0@0 2F0"), "0SEND_F0@2: no edge carries such a message"),
]
STOPS: list[Case] = [
    (("0B0 0F0",), f"position 0, 0B0: needs 0F0, which {LATER}, at position 1; move 0F0 before it"),
    (("(0F0;0B0)OVERLAP_F_B",), f"0B0: needs 0F0, which {LATER}, at position 0"),
    (("0F0 0W0 0I0",), f"0W0: needs 0I0, which {LATER}"),
    (("0F0 1F0 0B0", "1B0"), "rank 0, position 1, 1F0: stage 1 is on rank 1; move it to rank 1"),
    (("0F0 0REDUCE_GRAD 0B0",), f"0REDUCE_GRAD: needs 0B0, which {LATER}"),
    (("0OFFLOAD0 0F0 0RELOAD0 0B0",), f"0OFFLOAD0: needs 0F0, which {LATER}"),
    (("0F0 0RELOAD0 0B0",), "0RELOAD0: needs 0OFFLOAD0, which is in no program; add it to rank 0"),
    (("0F0 0RELOAD0 0OFFLOAD0 0B0",), f"0RELOAD0: needs 0OFFLOAD0, which {LATER}"),
    (("0F0 0OFFLOAD0 0B0 0RELOAD0",), f"0B0: needs 0RELOAD0, which {LATER}"),
    (("0F0 0OFFLOAD0 0I0 0RELOAD0 0W0",), f"0I0: needs 0RELOAD0, which {LATER}"),
    (("0F0 1OFFLOAD0 1RELOAD0 0B0", "1F0 1B0"), "1OFFLOAD0: stage 1 is on rank 1; move it"),
    (("0RESHARD 0F0 0B0",), "position 0, 0RESHARD: needs 0UNSHARD, which is in no program"),
]
MESSAGES: list[Case] = [
    (("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0"), "0RECV_B0: no rank has the SEND_B"),
    (
        (SENDS, "1F0 1B0 1SEND_B0"),
        "0SEND_F0: no rank has the RECV_F at its other end; add 1RECV_F0",
    ),
    ((SENDS, "1F0 1B0 1SEND_B0"), "1F0: needs 1RECV_F0, which is in no program"),
    ((SENDS, "1F0 1RECV_F0 1B0 1SEND_B0"), f"1F0: needs 1RECV_F0, which {LATER}"),
    (("0SEND_F0 0F0 0RECV_B0 0B0", RECEIVES), f"0SEND_F0: needs 0F0, which {LATER}"),
    (("0F0 0B0 0REDUCE_GRAD 0WAIT_SEND_F0", "1F0 1B0"), "0WAIT_SEND_F0: needs 0SEND_F0"),
]


@pytest.mark.parametrize(("programs", "expected"), WRONG + STOPS + MESSAGES)
def test_each_problem_says_where_what_and_what_to_do(
    programs: tuple[str, ...], expected: str
) -> None:
    report = validate(schedule(*programs))
    assert not report.ok
    assert expected in str(report)


@pytest.mark.parametrize("programs", [programs for programs, _ in STOPS])
def test_what_does_not_complete_can_neither_be_simulated_nor_merged(
    programs: tuple[str, ...],
) -> None:
    for use in (simulate, merged):
        with pytest.raises(ScheduleError, match="test does not complete: rank 0, position"):
            use(schedule(*programs))


def test_a_reduction_names_the_gradient_that_is_missing() -> None:
    lacking = schedule("0F0 0F1 0B0 0REDUCE_GRAD", microbatches=2)
    with pytest.raises(ScheduleError, match="position 3, 0REDUCE_GRAD: needs 0B1, which is in no"):
        simulate(lacking)


def test_all_problems_are_reported_at_once() -> None:
    report = validate(schedule("0B0 0F0 0F0", "1F0 1W0"))
    assert len(report.problems) >= 3
    with pytest.raises(ScheduleError, match="problem") as caught:
        report.raise_if_bad()
    assert all(str(problem) in str(caught.value) for problem in report.problems)


@pytest.mark.parametrize(
    ("programs", "circle"),
    [
        (
            ("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
            "rank 0 at 0B0 waits for 1B0 of rank 1 -> rank 1 at 1F1 waits for 0F1 of rank 0",
        ),
        (
            (
                "0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1",
                "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
            ),
            "rank 0 at 0B0 waits for 1SEND_B0 of rank 1 -> rank 1 at 1F1 waits for 0SEND_F1 of rank 0",
        ),
    ],
)
def test_a_deadlock_prints_who_waits_for_whom(programs: tuple[str, ...], circle: str) -> None:
    stuck = schedule(*programs, microbatches=2)
    assert [p.what for p in validate(stuck).problems] == [f"deadlock: {circle}"]
    with pytest.raises(ScheduleError, match=f"deadlock: {circle}"):
        simulate(stuck)


def test_a_rank_that_waits_for_a_deadlock_is_no_part_of_it() -> None:
    stuck = schedule("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F1 2B1 2F0 2B0", microbatches=2)
    (problem,) = validate(stuck).problems
    assert problem.what == (
        "deadlock: rank 1 at 1B0 waits for 2B0 of rank 2 -> rank 2 at 2F1 waits for 1F1 of rank 1"
    )


def test_channel_orders_that_differ_are_named_at_both_ends() -> None:
    crossed = schedule("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F1 1RECV_F0 1F0 1F1", microbatches=2)
    (problem,) = validate(crossed).problems
    named = "0SEND_F1: is sent after 0SEND_F0, but rank 1 posts 1RECV_F1 (position 0)"
    assert named in str(problem)


def test_sends_that_cross_survive_only_if_they_do_not_block() -> None:
    sends = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
    in_turn = "0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1"
    other = "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"
    assert validate(schedule(in_turn, other, microbatches=2)).survives_blocking_sends
    report = validate(schedule(sends, other, microbatches=2))
    assert report.ok
    assert str(report) == "test: valid; not with blocking sends"
    blocking = validate(schedule(sends, other, microbatches=2), blocking_sends=True)
    assert "rank 0 at 0RECV_B0 waits for 1RECV_F1 of rank 1" in str(blocking)


def test_an_overlapped_pair_starts_when_both_halves_may() -> None:
    assert validate(schedule("0F0 (0F1;0B0)OVERLAP_F_B 0B1", microbatches=2)).ok
