"""What the transport inside one process does beyond the contract: it never waits in vain."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from penstock.errors import InternalError, MessageError, SpecError
from penstock.transport import FORWARD, Channel, InProcessTransport, Ticket, in_process
from penstock.values import TensorSpec

THERE = Channel(0, 1, FORWARD)
CPU = torch.device("cpu")
SPEC = TensorSpec((2,), "float32", False)


@pytest.fixture
def ends() -> list[InProcessTransport]:
    return in_process(2)


def receive(ends: list[InProcessTransport], spec: TensorSpec = SPEC) -> Ticket:
    return ends[1].post_receive(THERE, [spec], CPU)


def send(ends: list[InProcessTransport], value: float = 1.0) -> torch.Tensor:
    tensor = torch.full((2,), value)
    ends[0].post_send(THERE, [tensor])
    return tensor


def test_every_rank_has_an_end() -> None:
    assert [(end.rank, end.ranks) for end in in_process(3)] == [(0, 3), (1, 3), (2, 3)]


def test_nothing_is_copied(ends: list[InProcessTransport]) -> None:
    tensor = send(ends)
    assert receive(ends).take()[0].data_ptr() == tensor.data_ptr()


def test_a_message_that_nobody_sends_is_an_error(ends: list[InProcessTransport]) -> None:
    ticket = receive(ends)
    assert not ticket.ready()
    with pytest.raises(
        MessageError, match="F channel from rank 0 to rank 1: a message is expected that nobody"
    ):
        ticket.take()


def test_a_send_that_nobody_receives_is_an_error(ends: list[InProcessTransport]) -> None:
    ticket = ends[0].post_send(THERE, [torch.ones(2)])
    with pytest.raises(
        MessageError, match="F channel from rank 0 to rank 1: a message was sent that"
    ):
        ticket.wait()
    receive(ends)
    ticket.wait()


def test_a_message_is_taken_once(ends: list[InProcessTransport]) -> None:
    send(ends)
    ticket = receive(ends)
    ticket.take()
    with pytest.raises(MessageError):
        ticket.take()


def test_a_message_taken_twice_steals_no_other(ends: list[InProcessTransport]) -> None:
    send(ends, 1.0)
    first, second = receive(ends), receive(ends)
    first.take()
    send(ends, 2.0)
    with pytest.raises(MessageError):
        first.take()
    assert second.take()[0].tolist() == [2, 2]


def test_what_was_taken_is_let_go(ends: list[InProcessTransport]) -> None:
    gc.disable()
    send(ends)
    ticket = receive(ends)
    alive = weakref.ref(ticket.take()[0])
    assert alive() is None
    gc.enable()


@pytest.mark.parametrize(
    "spec", [TensorSpec((3,), "float32", False), TensorSpec((2,), "int64", False)], ids=str
)
def test_another_message_than_agreed_is_an_error(
    ends: list[InProcessTransport], spec: TensorSpec
) -> None:
    send(ends)
    with pytest.raises(SpecError, match=r"F channel from rank 0 to rank 1: expected .*, found"):
        receive(ends, spec).wait()


def test_only_the_ends_of_a_channel_use_it(ends: list[InProcessTransport]) -> None:
    with pytest.raises(InternalError, match="rank 1 used the F channel from rank 0 to rank 1"):
        ends[1].post_send(THERE, [])
    with pytest.raises(InternalError, match="whose end it does not hold"):
        ends[0].post_receive(THERE, [], CPU)


def test_a_control_operation_waits_for_all(ends: list[InProcessTransport]) -> None:
    ticket = ends[1].sum(torch.ones(1))
    assert not ticket.ready()
    with pytest.raises(MessageError, match=r"waits for ranks \[0\], which do not take part in it"):
        ticket.take()
    ends[0].sum(torch.ones(1))
    assert ticket.take().tolist() == [2]


def test_values_are_agreed_on_as_json(ends: list[InProcessTransport]) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        ends[0].agree(torch.ones(1))


def test_close_drops_what_was_not_taken(ends: list[InProcessTransport]) -> None:
    send(ends)
    ends[1].close()
    assert not receive(ends).ready()


def test_what_was_sent_survives_the_senders_close(ends: list[InProcessTransport]) -> None:
    send(ends)
    ends[0].close()
    assert receive(ends).ready()
