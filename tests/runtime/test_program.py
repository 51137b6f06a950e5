"""A rank's program: what each action waits for and where its messages go."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import SpecError
from penstock.runtime import RankProgram, channels
from penstock.runtime.exchange import as_arguments, as_values
from penstock.schedule import (
    Edge,
    Placement,
    Schedule,
    add_communication,
    build,
    parse_action,
)
from penstock.schedule.action import MESSAGE_OPS
from penstock.transport import BACKWARD, FORWARD, Channel
from tests.runtime.graphs import schedule_of
from tests.schedule.executor import wait_for_sends

SKIP = (Edge("a", 0, (1, 2, 3)), Edge("b", 1, (2,)), Edge("m", 1, (3,), False), Edge("c", 2, (3,)))


def program(rank: int, *rank_of: int) -> RankProgram:
    return RankProgram(schedule_of(SKIP, Placement(rank_of), 1), rank)


def wires(program: RankProgram) -> dict[str, tuple[Channel, list[str]]]:
    """By message, in its text form, the channel and the values."""
    found = [
        (action, program.wire(action)) for action, _ in program.instructions if is_message(action)
    ]
    return {str(action): (wire.channel, [e.value for e in wire.edges]) for action, wire in found}


def is_message(action: Any) -> bool:
    return action.op in MESSAGE_OPS


def chained() -> Schedule:
    return add_communication(build("1F1B", ranks=3, microbatches=2))


# ---- what waits for what


def test_actions_wait_for_their_receives() -> None:
    found = {
        str(i.action): list(map(str, i.messages)) for i in RankProgram(chained(), 1).instructions
    }
    assert found["1F0"] == ["1RECV_F0"]
    assert found["1B1"] == ["1RECV_B1"]
    assert found["1SEND_F0"] == found["1RECV_F0"] == []


def test_a_wait_for_a_send_waits_for_it() -> None:
    found = RankProgram(wait_for_sends(chained()), 0).instructions[-1]
    assert [str(found.action), *map(str, found.messages)] == ["0WAIT_SEND_F1", "0SEND_F1"]


def test_stages_of_one_rank_wait_for_no_message() -> None:
    assert not any(messages for _, messages in program(0, 0, 0, 0, 0).instructions)


# ---- where messages go


def test_a_value_goes_once_to_each_rank() -> None:
    assert wires(program(0, 0, 1, 1, 2)) == {
        "0SEND_F0": (Channel(0, 1, FORWARD), ["a"]),
        "0SEND_F0@3": (Channel(0, 2, FORWARD), ["a"]),
        "0RECV_B0": (Channel(1, 0, BACKWARD), ["a"]),
        "0RECV_B0@3": (Channel(2, 0, BACKWARD), ["a"]),
    }


def test_values_for_one_rank_travel_together() -> None:
    found = wires(program(0, 0, 0, 1, 1))
    assert found["1SEND_F0"] == (Channel(0, 1, FORWARD), ["b", "m"])


def test_no_gradient_comes_back_where_none_is_owed() -> None:
    found = wires(program(0, 0, 0, 1, 1))
    assert found["1RECV_B0"] == (Channel(1, 0, BACKWARD), ["b"])


def test_both_ends_of_a_wire_carry_the_same() -> None:
    ends = [wires(program(rank, 0, 1, 0, 1)) for rank in range(2)]
    both = [sorted(end.values()) for end in ends]
    assert both[0] == both[1]


def test_uses_are_readers_here_and_messages_from_here() -> None:
    assert program(0, 0, 1, 0, 1).uses_of == {"a": 2, "b": 1, "m": 0, "c": 1}
    assert program(1, 0, 1, 0, 1).uses_of == {"a": 2, "b": 1, "m": 1, "c": 1}


def test_channels_are_the_same_on_every_rank() -> None:
    assert channels(chained()) == [
        Channel(0, 1, FORWARD),
        Channel(1, 0, BACKWARD),
        Channel(1, 2, FORWARD),
        Channel(2, 1, BACKWARD),
    ]


def test_given_and_taken() -> None:
    found = program(0, 0, 1, 0, 1)
    assert [edge.value for edge in found.given(1)] == ["b", "m"]
    assert [edge.value for edge in found.taken(3)] == ["a", "m", "c"]


def test_peers_are_told_apart() -> None:
    found = program(0, 0, 1, 1, 2)
    near, far = parse_action("0SEND_F0"), parse_action("0SEND_F0@3")
    assert found.wire(near) != found.wire(far)  # type: ignore[arg-type] # both are single actions


# ---- values and arguments

A, B = Edge("a", 0, (2,)), Edge("b", 1, (2,))


@pytest.mark.parametrize(
    ("value", "args"), [("x", ("x",)), (("x", "y"), ("x", "y")), (["x"], (["x"],)), ((), ())]
)
def test_one_value_is_passed_by_position(value: Any, args: tuple[Any, ...]) -> None:
    assert as_arguments([A], {"a": value}) == (args, {})


def test_several_values_are_passed_by_name() -> None:
    assert as_arguments([A, B], {"b": ("y",), "a": "x"}) == ((), {"a": "x", "b": ("y",)})


def test_one_value_is_the_whole_output() -> None:
    assert as_values([A], {"anything": 1}) == {"a": {"anything": 1}}


def test_several_values_come_from_a_dict() -> None:
    edges = [Edge("x", 0, (1,)), Edge("y", 0, (1,))]
    assert as_values(edges, {"y": 2, "x": 1, "z": 3}) == {"x": 1, "y": 2}


@pytest.mark.parametrize(("output", "found"), [({"x": 1}, r"\['x'\]"), ((1, 2), "a tuple")])
def test_several_values_need_a_dict_that_has_them(output: Any, found: str) -> None:
    edges = [Edge("x", 4, (5,)), Edge("y", 4, (5,))]
    with pytest.raises(
        SpecError, match=rf"stage 4 must return a dict with \['x', 'y'\], .* {found}"
    ):
        as_values(edges, output)
