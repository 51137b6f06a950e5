"""Every way a schedule can be wrong is reported, with where it is and what to change."""

from __future__ import annotations

import pytest

from penstock.errors import ScheduleError
from penstock.schedule import (
    Placement,
    Report,
    Schedule,
    looped,
    parse_action,
    validate,
)


def schedule(*programs: str, microbatches: int = 1, placement: Placement | None = None) -> Schedule:
    """A schedule from lines of actions, a rank each."""
    actions = tuple(tuple(map(parse_action, program.split())) for program in programs)
    return Schedule("test", placement or looped(len(programs)), microbatches, actions)


def said(report: Report) -> str:
    return str(report)


TWO = ("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0")


def test_a_right_schedule_has_no_problem() -> None:
    report = validate(schedule(*TWO))
    assert report.ok
    assert report.survives_blocking_sends
    report.raise_if_bad()
    assert said(report) == "test: valid; also with blocking sends"


@pytest.mark.parametrize(
    ("programs", "expected"),
    [
        (("0F0 0B0", "1F0"), "rank 1, 1B0: missing; add 1B0 to the program of rank 1"),
        (("0F0 0F0 0B0",), "rank 0, position 1, 0F0: stands already at position 0 of rank 0"),
        (
            ("0F0 0B0 0I0 0W0",),
            "rank 0, position 2, 0I0: the microbatch has a full backward as well",
        ),
        (
            ("0B0 0F0",),
            "rank 0, position 0, 0B0: needs 0F0, which stands later, at position 1; move",
        ),
        (("0F0 0W0 0I0",), "0W0: needs 0I0, which stands later"),
        (
            ("0F0 1F0 0B0", "1B0"),
            "rank 0, position 1, 1F0: stage 1 is on rank 1; move it to rank 1",
        ),
        (("0F0 0SEND_F0 0RECV_B0 0B0", TWO[1][:9] + "1F0 1B0"), "0RECV_B0: no rank has the SEND_B"),
        (
            (TWO[0], "1F0 1B0 1SEND_B0"),
            "0SEND_F0: no rank has the RECV_F at its other end; add 1RECV_F0",
        ),
        ((TWO[0], "1F0 1B0 1SEND_B0"), "1F0: needs 1RECV_F0, which is in no program"),
        ((TWO[0], "1F0 1RECV_F0 1B0 1SEND_B0"), "1F0: needs 1RECV_F0, which stands later"),
        (("0SEND_F0 0F0 0RECV_B0 0B0", TWO[1]), "0SEND_F0: needs 0F0, which stands later"),
        (("0F0 0B0 0REDUCE_GRAD 0WAIT_SEND_F0", "1F0 1B0"), "0WAIT_SEND_F0: needs 0SEND_F0"),
        (("0F0 0REDUCE_GRAD 0B0",), "0REDUCE_GRAD: needs 0B0, which stands later"),
        (
            ("0F0 0UNSHARD 0B0",),
            "0F0: runs while the stage is not unsharded; put 0UNSHARD before it",
        ),
        (
            ("0UNSHARD 0F0 0RESHARD 0B0",),
            "position 3, 0B0: runs while the stage is not unsharded",
        ),
        (("0UNSHARD 0UNSHARD 0F0 0B0",), "position 1, 0UNSHARD: the stage is unsharded already"),
        (("0RESHARD 0F0 0B0",), "position 0, 0RESHARD: needs 0UNSHARD, which is in no program"),
    ],
)
def test_each_problem_says_where_what_and_what_to_do(
    programs: tuple[str, ...], expected: str
) -> None:
    report = validate(schedule(*programs))
    assert not report.ok
    assert expected in said(report)


def test_all_problems_are_reported_at_once() -> None:
    report = validate(schedule("0B0 0F0 0F0", "1F0 1W0"))
    assert len(report.problems) >= 3
    with pytest.raises(ScheduleError, match="problem") as caught:
        report.raise_if_bad()
    assert all(str(problem) in str(caught.value) for problem in report.problems)


def test_a_deadlock_prints_who_waits_for_whom() -> None:
    report = validate(
        schedule(
            "0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1",
            "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
            microbatches=2,
        )
    )
    assert [p.what for p in report.problems] == [
        "deadlock: rank 0 at 0B0 waits for 1SEND_B0 of rank 1"
        " -> rank 1 at 1F1 waits for 0SEND_F1 of rank 0"
    ]


def test_channel_orders_that_differ_are_named_at_both_ends() -> None:
    report = validate(
        schedule("0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F1 1RECV_F0 1F0 1F1", microbatches=2)
    )
    (problem,) = report.problems
    assert "0SEND_F1: is sent after 0SEND_F0, but rank 1 posts 1RECV_F1 (position 0)" in str(
        problem
    )


def test_sends_that_cross_survive_only_if_they_do_not_block() -> None:
    crossed = schedule(
        "0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
        microbatches=2,
    )
    assert validate(crossed).survives_blocking_sends
    blocks = schedule(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
        microbatches=2,
    )
    report = validate(blocks)
    assert report.ok
    assert not report.survives_blocking_sends
    assert said(report) == "test: valid; not with blocking sends"


def test_a_message_that_no_edge_carries_is_refused() -> None:
    report = validate(schedule("0F0 0SEND_F0@2", "1F0", "2RECV_F0@0 2F0"))
    assert "0SEND_F0@2: no edge carries such a message" in said(report)


def test_an_overlapped_pair_starts_when_both_halves_may() -> None:
    report = validate(schedule("(0F0;0B0)OVERLAP_F_B"))
    assert "0B0: needs 0F0, which stands later, at position 0" in said(report)
    assert validate(schedule("0F0 (0F1;0B0)OVERLAP_F_B 0B1", microbatches=2)).ok
