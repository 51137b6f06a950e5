"""The rule: what must be complete before each kind of action."""

from __future__ import annotations

import pytest

from penstock.schedule import (
    Action,
    Dependencies,
    Schedule,
    add_communication,
    build,
    merged,
    names,
    parse_action,
    prefetch,
    reduce_gradients,
)
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


def test_general_edges() -> None:
    plain = build("Interleaved1F1B", ranks=2, microbatches=1).with_edges(SKIPPING)
    lowered = add_communication(plain)
    assert before(plain, "3F0") == ["0F0", "2F0"]
    assert before(lowered, "3F0") == ["1RECV_F0", "3RECV_F0"]
    assert before(lowered, "2F0") == ["0F0", "2RECV_F0"]
    assert before(plain, "0B0") == ["0F0", "1B0", "3B0"]
    assert before(lowered, "0B0") == ["0F0", "0RECV_B0"]
    assert before(lowered, "1SEND_B0") == ["1B0", "3B0"]


@pytest.mark.parametrize("name", names())
def test_all_ranks_actions_have_an_order_in_which_each_comes_after_what_it_needs(name: str) -> None:
    made = reduce_gradients(prefetch(build(name, ranks=4, microbatches=9)))
    order, rule, done = merged(made), Dependencies(made), set[Action]()
    for action in order:
        assert done.issuperset(rule.before(action)), action
        done.add(action)
    for rank in range(made.ranks):
        stages = made.placement.stages_on(rank)
        assert [a for a in order if a.stage in stages] == list(made.actions(rank))
    for pair in made.pairs:
        assert order.index(pair.backward) == order.index(pair.forward) + 1
    assert merged(add_communication(made)) == order
