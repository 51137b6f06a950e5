"""Passes: what each adds. That the proof holds after any of them, in any order, is in test_proof."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

from penstock.errors import ScheduleError, UsageError
from penstock.schedule import (
    Action,
    Dependencies,
    Edge,
    Op,
    Schedule,
    add_communication,
    build,
    looped,
    merge_backward,
    names,
    offload,
    prefetch,
    reduce_gradients,
    validate,
    wait_for_sends,
)
from penstock.schedule.action import COMPUTE_OPS, GRADIENT_OPS, RECV_OPS, SEND_OPS
from penstock.schedule.dependencies import counterpart
from penstock.schedule.passes import Pass
from tests.schedule.programs import rows, schedule


def test_add_communication_sends_at_once_and_receives_one_message_ahead() -> None:
    made = add_communication(build("1F1B", ranks=2, microbatches=3))
    assert rows(made) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0F2 0SEND_F2 0RECV_B2 0B1 0B2",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1RECV_F2 1F1 1B1 1SEND_B1 1F2 1B2 1SEND_B2",
    ]


def test_every_send_is_waited_for_where_an_answer_shows_that_it_was_used() -> None:
    made = wait_for_sends(build("1F1B", ranks=2, microbatches=2))
    assert rows(made) == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0WAIT_SEND_F0 0B1 0WAIT_SEND_F1",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1WAIT_SEND_B0 1WAIT_SEND_B1",
    ]
    assert wait_for_sends(made) == made
    for name in names():
        plain = build(name, ranks=4, microbatches=9)
        lowered = wait_for_sends(plain)
        assert validate(lowered).ok
        assert (
            validate(lowered).survives_blocking_sends
            == validate(add_communication(plain)).survives_blocking_sends
        )
        ops = Counter(action.op for rank in range(4) for action in lowered.actions(rank))
        assert ops[Op.WAIT_SEND_F] == ops[Op.SEND_F]
        assert ops[Op.WAIT_SEND_B] == ops[Op.SEND_B]


def waiting_buffers(made: Schedule) -> int:
    """The most receives of a channel that are posted and not used yet."""
    most, now, rule = 0, Counter[tuple[int, Op, int]](), Dependencies(made)
    for rank in range(made.ranks):
        for action in made.actions(rank):
            receives = [action] if action.op in RECV_OPS else rule.receives(action)
            for receive in receives:
                channel = rank, receive.op, made.placement.rank_of[receive.peer_stage]
                now[channel] += 1 if receive is action else -1
                most = max(most, now[channel])
    return most


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("name", names())
def test_few_buffers_wait_and_messages_are_received_in_the_order_of_their_sends(
    name: str, ahead: int
) -> None:
    """Torch's runtime has one queue for all messages from one rank to another."""
    made = add_communication(build(name, ranks=4, microbatches=9), ahead=ahead)
    assert validate(made).ok
    assert waiting_buffers(made) <= ahead + 1
    rank_of = made.placement.rank_of
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
    received: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank in range(made.ranks):
        for action in made.actions(rank):
            if action.op in SEND_OPS:
                sent[rank, rank_of[action.peer_stage]].append(action)
            elif action.op in RECV_OPS:
                received[rank_of[action.peer_stage], rank].append(counterpart(action))
    assert sent == received


@pytest.mark.parametrize(
    ("name", "use", "says"),
    [
        ("1F1B", lambda s: add_communication(s, ahead=0), "ahead=0: must be at least 1"),
        ("DualPipeV", lambda s: prefetch(s, unsharded=1), "=1: must be at least 2 for DualPipeV"),
    ],
)
def test_bounds_that_are_too_small_are_refused(name: str, use: Pass, says: str) -> None:
    with pytest.raises((ScheduleError, UsageError), match=says):
        use(build(name, ranks=2, microbatches=4))


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
    made = prefetch(schedule("0F0 1F0 2F0 2B0 1B0 0B0", placement=looped(1, 3)), unsharded=2)
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


def alive(made: Schedule, rank: int) -> int:
    """The most microbatches whose activations are on a device, if a copy takes one computing entry."""
    held, leaving, most = 0, 0, 0
    for action in made.actions(rank):
        if action.op in COMPUTE_OPS:
            held += action.op is Op.F
            most = max(most, held)
            held -= leaving + (action.op in GRADIENT_OPS)
            leaving = 0
        leaving += action.op is Op.OFFLOAD
        held += action.op is Op.RELOAD
    return most


def test_offload_moves_what_waits_long_and_no_more_than_keep_stays() -> None:
    made = offload(build("1F1B", ranks=4, microbatches=4), keep=3)
    assert rows(made)[:2] == [
        "0F0 0F1 0OFFLOAD1 0F2 0OFFLOAD2 0F3 0RELOAD1 0B0 0RELOAD2 0B1 0B2 0B3",
        "1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3",
    ]
    assert offload(made) is made
    one = offload(build("1F1B", ranks=4, microbatches=4), keep=[3, 3, 2, 1])
    assert one == made
    with pytest.raises(UsageError, match="keep= has 2 numbers; 1F1B has 4 ranks"):
        offload(build("1F1B", ranks=4, microbatches=4), keep=[3, 3])
    with pytest.raises(ScheduleError, match=r"keep=2: .* rank 0 of 1F1B .* give keep=3 or more"):
        offload(build("1F1B", ranks=4, microbatches=4), keep=2)
    with pytest.raises(UsageError, match="ahead=0"):
        offload(build("1F1B", ranks=4, microbatches=4), ahead=0)


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "ZB-V", "Interleaved1F1B"])
def test_fewer_and_fewer_activations_stay(name: str) -> None:
    plain = build(name, ranks=4, microbatches=8)
    for keep in (6, 5, 4):
        made = offload(plain, keep=keep) if name != "ZB-V" or keep > 5 else offload(plain)
        assert validate(made).ok
        assert validate(add_communication(made)).ok
        assert max(alive(made, rank) for rank in range(4)) <= (7 if name == "ZB-V" else keep)
