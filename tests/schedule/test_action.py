"""Actions, their text form, and patterns of it."""

from __future__ import annotations

import pytest

from penstock.errors import ScheduleError
from penstock.schedule import Action, Op, Overlap, matching, parse_action
from penstock.schedule.action import message

EXAMPLES = {
    "2F0": Action(2, Op.F, 0),
    "10I11": Action(10, Op.I, 11),
    "0SEND_F1": Action(0, Op.SEND_F, 1),
    "0SEND_F1@5": Action(0, Op.SEND_F, 1, 5),
    "4WAIT_SEND_B3": Action(4, Op.WAIT_SEND_B, 3),
    "0UNSHARD": Action(0, Op.UNSHARD),
    "2OFFLOAD0": Action(2, Op.OFFLOAD, 0),
    "2RELOAD11": Action(2, Op.RELOAD, 11),
    "(0F1;3B0)OVERLAP_F_B": Overlap(Action(0, Op.F, 1), Action(3, Op.B, 0)),
    "(0F1;3I0)OVERLAP_F_B": Overlap(Action(0, Op.F, 1), Action(3, Op.I, 0)),
}


@pytest.mark.parametrize("text", EXAMPLES)
def test_text_and_action_are_each_others_inverse(text: str) -> None:
    assert parse_action(text) == EXAMPLES[text]
    assert str(EXAMPLES[text]) == text


NOT_ACTIONS = ",F0,0,0F,0f0,0F0 , 0F0,0F-1,+0F0,0F0@1,0UNSHARD0,00F0,0F00"


@pytest.mark.parametrize("text", NOT_ACTIONS.split(","))
def test_what_is_no_action_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ScheduleError) as refused:
        parse_action(text)
    assert repr(text) in str(refused.value)


@pytest.mark.parametrize(
    ("pair", "says"),
    [
        ("0B0;0F1", "must hold an F and then a B or I"),
        ("0F0;0W0", "must hold an F and then a B or I"),
        ("0F0", "is not an action"),
    ],
)
def test_an_overlap_holds_a_forward_and_a_backward(pair: str, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        parse_action(f"({pair})OVERLAP_F_B")


@pytest.mark.parametrize(
    ("op", "peer"),
    [(Op.SEND_F, 4), (Op.RECV_F, 2), (Op.SEND_B, 2), (Op.RECV_B, 4), (Op.WAIT_SEND_F, 4)],
)
def test_the_neighbour_is_the_peer_unless_another_is_named(op: Op, peer: int) -> None:
    assert Action(3, op, 0).peer_stage == peer
    assert Action(3, op, 0, 7).peer_stage == 7
    assert message(3, op, 0, peer) == Action(3, op, 0)
    assert message(3, op, 0, 7) == Action(3, op, 0, 7)


# ---- patterns

ALL = "0F0 3F0 3F1 13F0 3B0 3I10 3SEND_F0 0SEND_F1@5 0SEND_F1 3UNSHARD"


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("3F0", "3F0"),
        ("*F*", "0F0 3F0 3F1 13F0"),
        ("3F*", "3F0 3F1"),
        ("3*0", "3F0 3B0 3SEND_F0"),
        ("3*", "3F0 3F1 3B0 3I10 3SEND_F0 3UNSHARD"),
        ("*", ALL),
        ("*UNSHARD", "3UNSHARD"),
        ("*SEND_F*", "3SEND_F0 0SEND_F1@5 0SEND_F1"),
        ("0SEND_F1", "0SEND_F1@5 0SEND_F1"),
        ("0SEND_F1@5", "0SEND_F1@5"),
        ("0SEND_F1@1", "0SEND_F1"),
        ("***@4", "3SEND_F0"),
        ("7F0", ""),
    ],
)
def test_what_a_pattern_means(pattern: str, meant: str) -> None:
    matches = matching(pattern)
    actions = ((text, parse_action(text)) for text in ALL.split())
    matched = [text for text, action in actions if isinstance(action, Action) and matches(action)]
    assert matched == meant.split()


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        *((text, "matches no kind of action") for text in ("", "F0", "3f0", "3F0 ", "3?0", "03F0")),
        ("3X0", "ops are F, I, W"),
        ("3F", r"3F\* means all"),
        ("3UNSHARD0", "once for all microbatches"),
        ("3F0@1", "not a message"),
    ],
)
def test_what_is_no_pattern(pattern: str, says: str) -> None:
    with pytest.raises(ScheduleError, match=says):
        matching(pattern)
