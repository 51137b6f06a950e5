"""Numbers for actions: the columns say what the programs say, and the needs what the rule says."""

from __future__ import annotations

import pytest

from penstock.schedule import (
    Action,
    Dependencies,
    Op,
    Schedule,
    add_communication,
    build,
    names,
    prefetch,
    reduce_gradients,
)
from penstock.schedule.packed import NOWHERE, OPS, Packed, Wiring


def schedules(name: str) -> list[Schedule]:
    plain = build(name, ranks=3, microbatches=6)
    return [plain, reduce_gradients(prefetch(add_communication(plain)))]


@pytest.mark.parametrize("name", names())
def test_columns_and_actions_say_the_same(name: str) -> None:
    for made in schedules(name):
        packed = Packed(made)
        flat = [(rank, a) for rank in range(made.ranks) for a in made.actions(rank)]
        assert len(packed) == len(flat)
        for number, (rank, action) in enumerate(flat):
            assert packed.action(number) == action
            assert packed.rank[number] == rank
            assert (packed.stage[number], OPS[packed.op[number]]) == (action.stage, action.op)


@pytest.mark.parametrize("name", ["1F1B", "DualPipeV"])
def test_positions_count_overlapped_pairs_once(name: str) -> None:
    made = build(name, ranks=2, microbatches=6)
    packed = Packed(made)
    number = 0
    for program in made.programs:
        for position, entry in enumerate(program):
            for _ in entry if not isinstance(entry, Action) else (entry,):
                assert packed.position(number) == position
                number += 1


def needs(wiring: Wiring) -> dict[Action, set[Action]]:
    """What the columns say that each action needs."""
    name = wiring.packed.action
    found: dict[Action, set[Action]] = {}
    for block in wiring.blocks:
        for after, before in zip(block.after.tolist(), block.before.tolist(), strict=True):
            found.setdefault(name(after), set()).add(name(before))
    return found


@pytest.mark.parametrize("name", names())
def test_needs_of_columns_are_the_needs_of_actions(name: str) -> None:
    """One rule, two ways to ask it."""
    for made in schedules(name):
        found, rule = needs(Wiring(made)), Dependencies(made)
        for action in (a for rank in range(made.ranks) for a in made.actions(rank)):
            # A stage may be freed several times; the columns look at the first.
            assert action.op is Op.RESHARD or found.get(action, set()) == set(rule.before(action))


def test_actions_are_found_by_what_they_are() -> None:
    made = add_communication(build("1F1B", ranks=2, microbatches=2))
    packed = Packed(made)
    for rank in range(2):
        for action in made.actions(rank):
            assert packed.action(packed.number(action)) == action
    assert packed.number(Action(0, Op.I, 0)) == NOWHERE
    assert packed.number(Action(0, Op.SEND_F, 0, 7)) == NOWHERE


def test_both_ends_of_a_message_are_partners() -> None:
    wiring = Wiring(add_communication(build("1F1B", ranks=3, microbatches=4)))
    packed = wiring.packed
    for number, partner in enumerate(wiring.partner.tolist()):
        assert (partner == NOWHERE) == (not packed.messages[number])
        if partner != NOWHERE:
            assert wiring.partner[partner] == number
            assert packed.rank[partner] != packed.rank[number]
