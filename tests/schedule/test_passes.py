"""Passes: what each adds, that the proof holds after any of them, and that none changes its argument."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

import pytest

from penstock.errors import ScheduleError, UsageError
from penstock.schedule import (
    Dependencies,
    Edge,
    Op,
    Schedule,
    add_communication,
    build,
    compose,
    looped,
    merge_backward,
    names,
    parse_action,
    prefetch,
    reduce_gradients,
    validate,
)
from penstock.schedule.action import RECV_OPS
from penstock.schedule.passes import Pass

ALL: tuple[Pass, ...] = (
    merge_backward,
    add_communication,
    prefetch,
    reduce_gradients,
)


def schedule(*programs: str, microbatches: int = 1, stages: int | None = None) -> Schedule:
    actions = tuple(tuple(map(parse_action, program.split())) for program in programs)
    per_rank = (stages or len(programs)) // len(programs)
    return Schedule("test", looped(len(programs), per_rank), microbatches, actions)


def rows(made: Schedule) -> list[str]:
    return [" ".join(map(str, program)) for program in made.programs]


def test_add_communication_sends_at_once_and_receives_one_message_ahead() -> None:
    made = add_communication(build("1F1B", ranks=2, microbatches=3))
    assert rows(made) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0F2 0SEND_F2 0RECV_B2 0B1 0B2",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1RECV_F2 1F1 1B1 1SEND_B1 1F2 1B2 1SEND_B2",
    ]


def waiting_buffers(made: Schedule) -> int:
    """The most receives of a channel that are posted and not used yet."""
    most = 0
    for rank in range(made.ranks):
        now: Counter[tuple[Op, int]] = Counter()
        rule = Dependencies(made)
        for action in made.actions(rank):
            found = [action] if action.op in RECV_OPS else rule.receives(action)
            for receive in found:
                channel = receive.op, made.placement.rank_of[receive.peer_stage]
                now[channel] += 1 if receive is action else -1
                most = max(most, now[channel])
    return most


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("name", names())
def test_add_communication_lets_few_buffers_wait(name: str, ahead: int) -> None:
    made = add_communication(build(name, ranks=4, microbatches=8), ahead=ahead)
    assert validate(made).ok
    assert waiting_buffers(made) <= ahead + 1


def test_add_communication_is_at_least_one_message_ahead() -> None:
    with pytest.raises(UsageError, match="ahead=0: must be at least 1"):
        add_communication(build("1F1B", ranks=2, microbatches=2), ahead=0)


def test_a_gradient_message_waits_for_the_last_stage_that_owes_it() -> None:
    edges = (Edge("x", 0, (1, 3)), Edge("y", 1, (2,)), Edge("z", 2, (3,)))
    made = add_communication(build("Interleaved1F1B", ranks=2, microbatches=1).with_edges(edges))
    row = rows(made)[1]
    assert row.index("1B0") < row.index("1SEND_B0")
    assert validate(made).ok


def test_add_communication_refuses_what_lacks_a_value() -> None:
    with pytest.raises(
        ScheduleError, match="rank 1: 1RECV_F0 is needed, but no action makes its value"
    ):
        add_communication(schedule("0F1", "1F0", microbatches=2))


def test_merge_backward_joins_adjacent_halves_only() -> None:
    made = merge_backward(schedule("0F0 0F1 0I0 0W0 0I1 0F2 0W1 0I2 0W2", microbatches=3))
    assert rows(made) == ["0F0 0F1 0B0 0I1 0F2 0W1 0B2"]
    other = merge_backward(schedule("0F0 0F1 0I0 0I1 0W0 0W1", microbatches=2))
    assert rows(other) == ["0F0 0F1 0I0 0I1 0W0 0W1"]


def test_reduce_gradients_follows_the_last_weight_gradient() -> None:
    made = reduce_gradients(schedule("0F0 0F1 0B0 0I1 0W1", microbatches=2))
    assert rows(made) == ["0F0 0F1 0B0 0I1 0W1 0REDUCE_GRAD"]
    assert reduce_gradients(made) is made
    assert rows(reduce_gradients(schedule("0F0"))) == ["0F0"]


def test_prefetch_gathers_ahead_and_frees_what_is_not_needed() -> None:
    made = prefetch(schedule("0F0 1F0 2F0 2B0 1B0 0B0", stages=3), unsharded=2)
    assert rows(made) == [
        "0UNSHARD 1UNSHARD 0F0 0RESHARD 2UNSHARD 1F0 2F0 2B0 2RESHARD 0UNSHARD 1B0 1RESHARD 0B0 0RESHARD"
    ]
    assert validate(made).ok
    assert prefetch(made) is made


def test_prefetch_never_gathers_more_than_its_bound() -> None:
    made = prefetch(
        build("Interleaved1F1B", ranks=2, microbatches=6, stages_per_rank=4), unsharded=3
    )
    for rank in range(2):
        held = most = 0
        for action in made.actions(rank):
            held += (action.op is Op.UNSHARD) - (action.op is Op.RESHARD)
            most = max(most, held)
        assert (held, most) == (0, 3)


def test_prefetch_needs_room_for_an_overlapped_pair() -> None:
    with pytest.raises(ScheduleError, match="unsharded=1: must be at least 2 for DualPipeV"):
        prefetch(build("DualPipeV", ranks=2, microbatches=4), unsharded=1)
    with pytest.raises(ScheduleError, match="unsharded=0: must be at least 1 for GPipe"):
        prefetch(build("GPipe", ranks=2, microbatches=4), unsharded=0)


@pytest.mark.parametrize("name", names())
def test_any_order_of_passes_leaves_a_valid_schedule(name: str) -> None:
    plain = build(name, ranks=3, microbatches=6)
    before = str(plain)
    for order in list(permutations(ALL))[::3]:
        made = compose(*order)(plain)
        report = validate(made)
        assert report.ok, f"{order}: {report}"
        assert made.communicates
        assert not made.trains or Op.REDUCE_GRAD in made.ops
    assert str(plain) == before
