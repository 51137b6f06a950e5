"""The rule: what must be complete before each kind of action."""

from __future__ import annotations

import pytest

from penstock.schedule import (
    Action,
    Dependencies,
    Op,
    Schedule,
    add_communication,
    build,
    parse_action,
    prefetch,
    reduce_gradients,
)
from penstock.schedule.dependencies import counterpart
from tests.schedule.programs import SKIPPING, schedule


def before(of: Schedule, text: str) -> list[str]:
    action = parse_action(text)
    assert isinstance(action, Action)
    return [str(needed) for needed in Dependencies(of).before(action)]


PLAIN = build("ZB-H1", ranks=3, microbatches=2)
LOWERED = add_communication(PLAIN)


@pytest.mark.parametrize(
    ("action", "plain", "lowered"),
    [
        ("0F0", [], []),
        ("1F1", ["0F1"], ["1RECV_F1"]),
        ("2I0", ["2F0"], ["2F0"]),
        ("1I0", ["1F0", "2I0"], ["1F0", "1RECV_B0"]),
        ("1W0", ["1I0"], ["1I0"]),
        ("0SEND_F0", ["0F0"], ["0F0"]),
        ("1SEND_B1", ["1I1"], ["1I1"]),
        ("1RECV_F0", ["0SEND_F0"], ["0SEND_F0"]),
        ("0RECV_B1", ["1SEND_B1"], ["1SEND_B1"]),
        ("0WAIT_SEND_F1", ["0SEND_F1"], ["0SEND_F1"]),
        ("1REDUCE_GRAD", ["1W0", "1W1"], ["1W0", "1W1"]),
        ("1UNSHARD", [], []),
        ("1RESHARD", ["1UNSHARD"], ["1UNSHARD"]),
    ],
)
def test_the_rule_for_a_chain(action: str, plain: list[str], lowered: list[str]) -> None:
    assert before(PLAIN, action) == plain
    assert before(LOWERED, action) == lowered


def test_a_microbatch_may_differ_from_others_in_its_backward() -> None:
    mixed = schedule("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1I1 1W1", microbatches=2)
    assert before(mixed, "0B0") == ["0F0", "1B0"]
    assert before(mixed, "0B1") == ["0F1", "1I1"]
    assert before(mixed, "1REDUCE_GRAD") == ["1B0", "1W1"]


def test_sharded_stages_compute_where_they_are_gathered() -> None:
    sharded = prefetch(PLAIN)
    assert before(sharded, "1F0") == ["0F0", "1UNSHARD"]
    assert Dependencies(sharded).shards(1)
    assert not Dependencies(PLAIN).shards(1)


def test_general_edges() -> None:
    plain = build("Interleaved1F1B", ranks=2, microbatches=1).with_edges(SKIPPING)
    lowered = add_communication(plain)
    assert before(plain, "3F0") == ["0F0", "2F0"]
    assert before(lowered, "3F0") == ["1RECV_F0", "3RECV_F0"]
    assert before(lowered, "2F0") == ["0F0", "2RECV_F0"]
    assert before(plain, "0B0") == ["0F0", "1B0", "3B0"]
    assert before(lowered, "0B0") == ["0F0", "0RECV_B0"]
    assert before(lowered, "1SEND_B0") == ["1B0", "3B0"]


def test_messages_that_an_action_makes_possible_or_needs() -> None:
    rule = Dependencies(build("Interleaved1F1B", ranks=2, microbatches=1).with_edges(SKIPPING))
    assert [str(a) for a in rule.sends(Action(0, Op.F, 0))] == ["0SEND_F0"]
    assert [str(a) for a in rule.sends(Action(3, Op.B, 0))] == ["1SEND_B0", "3SEND_B0"]
    assert [str(a) for a in rule.receives(Action(3, Op.F, 0))] == ["1RECV_F0", "3RECV_F0"]
    assert [str(a) for a in rule.receives(Action(0, Op.B, 0))] == ["0RECV_B0"]
    assert rule.sends(Action(0, Op.W, 0)) == rule.receives(Action(0, Op.W, 0)) == []


def test_the_ends_of_a_message_name_each_other() -> None:
    for pair in ("0SEND_F1 1RECV_F1", "2SEND_B0@0 0RECV_B0@2", "3SEND_B1 2RECV_B1"):
        first, second = map(parse_action, pair.split())
        assert isinstance(first, Action)
        assert isinstance(second, Action)
        assert (counterpart(first), counterpart(second)) == (second, first)


def test_the_rule_answers_for_every_action_of_every_pass() -> None:
    made = reduce_gradients(prefetch(LOWERED))
    rule = Dependencies(made)
    present = {action for rank in range(3) for action in made.actions(rank)}
    assert all(set(rule.before(action)) <= present for action in present)
