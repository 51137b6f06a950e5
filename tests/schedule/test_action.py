"""Actions and their text form."""

from __future__ import annotations

import pytest

from penstock.errors import ScheduleError
from penstock.schedule import Action, Op, Overlap, parse_action
from penstock.schedule.action import message, misfit

EXAMPLES = {
    "2F0": Action(2, Op.F, 0),
    "3W2": Action(3, Op.W, 2),
    "10I11": Action(10, Op.I, 11),
    "0B0": Action(0, Op.B, 0),
    "0SEND_F1": Action(0, Op.SEND_F, 1),
    "1RECV_B0": Action(1, Op.RECV_B, 0),
    "0SEND_F1@5": Action(0, Op.SEND_F, 1, 5),
    "4WAIT_SEND_B3": Action(4, Op.WAIT_SEND_B, 3),
    "0UNSHARD": Action(0, Op.UNSHARD),
    "7RESHARD": Action(7, Op.RESHARD),
    "1REDUCE_GRAD": Action(1, Op.REDUCE_GRAD),
    "(0F1;3B0)OVERLAP_F_B": Overlap(Action(0, Op.F, 1), Action(3, Op.B, 0)),
    "(0F1;3I0)OVERLAP_F_B": Overlap(Action(0, Op.F, 1), Action(3, Op.I, 0)),
}


@pytest.mark.parametrize("text", EXAMPLES)
def test_text_and_action_are_each_others_inverse(text: str) -> None:
    assert parse_action(text) == EXAMPLES[text]
    assert str(EXAMPLES[text]) == text


@pytest.mark.parametrize("op", Op)
def test_every_op_has_a_text_form(op: Op) -> None:
    action = Action(1, op) if misfit(Action(1, op, 0)) else Action(1, op, 0)
    assert parse_action(str(action)) == action


@pytest.mark.parametrize(
    "text",
    [
        "",
        *[
            "F0",
            "0",
            "0F",
            "0f0",
            "0F0 ",
            " 0F0",
            "0F-1",
            "+0F0",
            "0F0@1",
            "0UNSHARD0",
            "00F0",
            "0F00",
        ],
    ],
)
def test_what_is_no_action_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ScheduleError) as refused:
        parse_action(text)
    assert repr(text) in str(refused.value)


@pytest.mark.parametrize(
    "text", ["(0B0;0F1)OVERLAP_F_B", "(0F0;0W0)OVERLAP_F_B", "(0F0;0F1)OVERLAP_F_B"]
)
def test_an_overlap_holds_a_forward_and_a_backward(text: str) -> None:
    with pytest.raises(ScheduleError, match="must hold an F and then a B or I"):
        parse_action(text)


@pytest.mark.parametrize(
    "text", ["(0F0)OVERLAP_F_B", "(0F0;0B1;0B2)OVERLAP_F_B", "(0F0;x)OVERLAP_F_B"]
)
def test_malformed_overlaps_are_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action"):
        parse_action(text)


@pytest.mark.parametrize(
    ("op", "peer"),
    [(Op.SEND_F, 4), (Op.RECV_F, 2), (Op.SEND_B, 2), (Op.RECV_B, 4), (Op.WAIT_SEND_F, 4)],
)
def test_the_neighbour_is_the_peer_unless_another_is_named(op: Op, peer: int) -> None:
    assert Action(3, op, 0).peer_stage == peer
    assert Action(3, op, 0, 7).peer_stage == 7
    assert message(3, op, 0, peer) == Action(3, op, 0)
    assert message(3, op, 0, 7) == Action(3, op, 0, 7)
