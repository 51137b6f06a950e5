"""What every transport must do: each case is one rank's part, as a task, and what it must give by rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.runtime import Task, Wait, drive
from penstock.transport import BACKWARD, FORWARD, SHARED, Channel, Ticket, Transport, connect
from penstock.values import TensorSpec

LARGE = 64 * 1024
"""Numbers of a message that goes nowhere before somebody wants it."""
CPU = torch.device("cpu")
THERE = Channel(0, 1, FORWARD)
BACK = Channel(1, 0, BACKWARD)
AHEAD = Channel(1, 0, FORWARD)
ASIDE = Channel(0, 1, BACKWARD)
OVER = Channel(0, 1, SHARED)
CHANNELS = sorted([THERE, BACK, AHEAD, ASIDE, OVER])

Part = Callable[[Transport], Task[Any]]


@dataclass(frozen=True)
class Case:
    """A part for each rank to run, and what each must give."""

    part: Part
    gives: Sequence[Any]

    @property
    def ranks(self) -> int:
        return len(self.gives)


CASES: dict[str, Case] = {}


def case(*gives: Any) -> Callable[[Part], Part]:
    def register(part: Part) -> Part:
        CASES[part.__name__] = Case(part, gives)
        return part

    return register


def run_part(group: Any, name: str) -> Any:
    """A worker's task: one rank's part over the process group."""
    end = connect(CPU, group)
    end.open(CHANNELS)
    found = drive([CASES[name].part(end)])[0]
    end.finish()
    end.close()
    return found


def take(end: Transport, ticket: Ticket) -> Task[Any]:
    yield Wait(ticket, end.rank, "waits in the contract")
    return ticket.take()


def receive(end: Transport, channel: Channel, *like: Tensor) -> Ticket:
    return end.post_receive(channel, [TensorSpec.of(tensor) for tensor in like], CPU)


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def exchange(end: Transport, *tensors: Tensor) -> Task[list[Tensor]]:
    """Rank 0 sends, rank 1 gives what arrives."""
    if end.rank == 0:
        end.post_send(THERE, tensors)
        return []
    ticket = receive(end, THERE, *(torch.empty(t.shape, dtype=t.dtype) for t in tensors))
    arrived: list[Tensor] = yield from take(end, ticket)
    return arrived


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())


# ---- messages


@case(None, [0.0, 1.0, 2.0])
def first_in_first_out(end: Transport) -> Task[Any]:
    if end.rank == 0:
        for value in range(3):
            end.post_send(THERE, [numbers(value)])
        return None
    tickets = [receive(end, THERE, numbers(0)) for _ in range(3)]
    # Waited for in another order than posted.
    values = {}
    for index in (2, 0, 1):
        values[index] = yield from take(end, tickets[index])
    return [values[index][0].item() for index in range(3)]


@case([20.0], [10.0])
def receives_stand_in_no_sends_way(end: Transport) -> Task[Any]:
    """Both post a receive first: with one queue for both directions that would hang."""
    mine, theirs = (THERE, AHEAD) if end.rank == 0 else (AHEAD, THERE)
    ticket = receive(end, theirs, numbers(0))
    end.post_send(mine, [numbers(10.0 * (end.rank + 1))])
    (arrived,) = yield from take(end, ticket)
    return arrived.tolist()


@case(None, [[3.0], [2.0], [1.0]])
def kinds_do_not_block_each_other(end: Transport) -> Task[Any]:
    """What is sent last is taken first."""
    if end.rank == 0:
        end.post_send(THERE, [numbers(1)])
        end.post_send(ASIDE, [numbers(2)])
        end.post_send(OVER, [numbers(3)])
        return None
    activation = receive(end, THERE, numbers(0))
    gradient = receive(end, ASIDE, numbers(0))
    weight = receive(end, OVER, numbers(0))
    found = []
    for ticket in (weight, gradient, activation):
        found.append((yield from take(end, ticket)))
    return [arrived[0].tolist() for arrived in found]


@case(None, [[1.0, 2.0], [[3], [4]], [True, False]])
def a_message_of_several_tensors(end: Transport) -> Task[Any]:
    tensors = numbers(1, 2), torch.tensor([[3], [4]]), torch.tensor([True, False])
    arrived = yield from exchange(end, *tensors)
    return [tensor.tolist() for tensor in arrived] or None


@case(None, [[0, 3], [2], []])
def tensors_of_size_zero(end: Transport) -> Task[Any]:
    arrived = yield from exchange(end, torch.zeros(0, 3), torch.ones(2), torch.zeros(0))
    shapes = [list(tensor.shape) for tensor in arrived]
    return [*shapes[:2], arrived[2].tolist()] if arrived else None


@case(None, 0)
def a_message_of_nothing(end: Transport) -> Task[Any]:
    arrived = yield from exchange(end)
    return len(arrived) if end.rank else None


LAID_OUT = {
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "strided": torch.arange(8)[::2],
    "expanded": torch.tensor([5]).expand(3),
    "negated in name": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "conjugated in name": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "channels last": torch.arange(8).reshape(1, 2, 2, 2).to(memory_format=torch.channels_last),
}


@case(True, True)
def however_it_lies_in_memory(end: Transport) -> Task[Any]:
    tensors = list(LAID_OUT.values())
    arrived = yield from exchange(end, *tensors)
    return all(map(same_bits, arrived, tensors))


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
]


@case(True, True)
def every_type(end: Transport) -> Task[Any]:
    tensors = [torch.tensor([[0, 1, 1]]).to(dtype) for dtype in DTYPES]
    arrived = yield from exchange(end, *tensors)
    return all(map(same_bits, arrived, tensors))


@case(True, [False, True])
def what_arrives_needs_no_gradient(end: Transport) -> Task[Any]:
    tensor = numbers(1).requires_grad_() * 2
    arrived = yield from exchange(end, tensor)
    return [arrived[0].requires_grad, arrived[0].is_leaf] if end.rank else tensor.requires_grad


@case(None, [False, True])
def a_message_is_ready_when_it_is_there(end: Transport) -> Task[Any]:
    if end.rank == 0:
        yield from take(end, end.agree("the receive is posted"))
        end.post_send(THERE, [numbers(1)])
        return None
    ticket = receive(end, THERE, numbers(0))
    before = ticket.ready()
    yield from take(end, end.agree(None))
    yield Wait(ticket, end.rank, "waits for it")
    # Gloo can tell only after a wait.
    ticket.wait()
    return [before, ticket.ready()]


@case([False, True], None)
def a_send_is_ready_when_it_is_received(end: Transport) -> Task[Any]:
    if end.rank == 1:
        yield from take(end, end.agree("the send is posted"))
        yield from take(end, receive(end, THERE, torch.empty(LARGE)))
        return None
    ticket = end.post_send(THERE, [torch.zeros(LARGE)])
    before = ticket.ready()
    yield from take(end, end.agree(None))
    assert (yield from take(end, ticket)) is None
    return [before, ticket.ready()]


@case([True], [True])
def more_is_sent_than_there_is_room_for(end: Transport) -> Task[Any]:
    """Each first sends all it has, of all sizes, before it reads anything."""
    mine, theirs = (THERE, AHEAD) if end.rank == 0 else (AHEAD, THERE)
    sizes = [1 + (index * 4099) % 20_000 for index in range(100)]
    kinds = (torch.float32, torch.bfloat16, torch.bool, torch.complex64)
    types = [kinds[index % len(kinds)] for index in range(len(sizes))]

    def message(index: int, rank: int) -> Tensor:
        values = torch.arange(sizes[index]) * (index + 1) + rank
        return (values % 251).to(types[index])

    sent = [end.post_send(mine, [message(i, end.rank)]) for i in range(len(sizes))]
    found = []
    for index in range(len(sizes)):
        expected = message(index, 1 - end.rank)
        (arrived,) = yield from take(end, receive(end, theirs, torch.empty_like(expected)))
        found.append(same_bits(arrived, expected))
    end.finish()
    for ticket in sent:
        yield from take(end, ticket)
    return [all(found)]


@case([7.0], [99.0])
def what_is_expected_holds_up_no_sender(end: Transport) -> Task[Any]:
    """The receiver waits for something else, which the sender sends once all that is expected has left."""
    if end.rank == 1:
        tickets = [receive(end, THERE, torch.empty(10_000)) for _ in range(100)]
        (last,) = yield from take(end, receive(end, ASIDE, numbers(0)))
        assert last.tolist() == [7.0]
        for ticket in tickets:
            (last,) = yield from take(end, ticket)
        return [last[-1].item()]
    for ticket in [end.post_send(THERE, [torch.full((10_000,), float(i))]) for i in range(100)]:
        yield from take(end, ticket)
    end.post_send(ASIDE, [numbers(7)])
    return [7.0]


@case([0.0], None)
def sends_are_waited_for_in_any_order(end: Transport) -> Task[Any]:
    if end.rank == 1:
        tickets = [receive(end, THERE, numbers(0)) for _ in range(3)]
        for ticket in reversed(tickets):
            yield from take(end, ticket)
        return None
    sent = [end.post_send(THERE, [numbers(value)]) for value in range(3)]
    for index in (1, 0, 2):
        yield from take(end, sent[index])
    sent[0].wait()
    return [0.0]


@case(None, True)
def small_and_large_tensors_in_one_message(end: Transport) -> Task[Any]:
    tensors = [torch.full((size,), size, dtype=torch.int32) for size in (3, 20_000, 0, 5, 10_000)]
    tensors[3] = tensors[3].to(torch.float64)
    arrived = yield from exchange(end, *tensors)
    return all(map(same_bits, arrived, tensors)) if end.rank else None


@case(None, 0)
def tensors_of_one_message_are_apart(end: Transport) -> Task[Any]:
    """A change in place of one is none of the others', in memory or in what autograd counts."""
    arrived = yield from exchange(end, numbers(1, 2), numbers(3, 4))
    if not arrived:
        return None
    first, second = arrived
    before = first._version
    second.add_(1)
    assert first.tolist() == [1, 2]
    return first._version - before


@case([6.0], [5.0])
def messages_go_both_ways_at_once(end: Transport) -> Task[Any]:
    mine, theirs = (THERE, BACK) if end.rank == 0 else (BACK, THERE)
    end.post_send(mine, [numbers(5 + end.rank)])
    (arrived,) = yield from take(end, receive(end, theirs, numbers(0)))
    return arrived.tolist()


# ---- control

WORDS = [None, "längere Wörter", {"shape": [1, 2], "ok": True}]


@case(WORDS, WORDS, WORDS)
def agree_gives_all_values_in_rank_order(end: Transport) -> Task[Any]:
    found = yield from take(end, end.agree(WORDS[end.rank]))
    return found


@case([0, 1], [0, 1])
def agree_keeps_rounds_apart(end: Transport) -> Task[Any]:
    tickets = [end.agree([round_, end.rank]) for round_ in range(2)]
    rounds = []
    for ticket in tickets:
        rounds.append((yield from take(end, ticket)))
    assert all([rank for _, rank in found] == [0, 1] for found in rounds)
    return [found[end.rank][0] for found in rounds]


@case(*[[6.0, 15.0]] * 3)
def sum_adds_over_ranks(end: Transport) -> Task[Any]:
    mine = numbers(end.rank + 1, end.rank + 4)
    found = yield from take(end, end.sum(mine))
    assert mine.tolist() == [end.rank + 1, end.rank + 4]
    return found.tolist()


@case(*[[1.0, 0.0]] * 3)
def sum_adds_in_rank_order(end: Transport) -> Task[Any]:
    """1e16 + 1 - 1e16 is 0 and 1e16 - 1e16 + 1 is 1: the order shows in the bits."""
    terms = [(1e16, 1e16), (-1e16, 1.0), (1.0, -1e16)]
    mine = torch.tensor(terms[end.rank], dtype=torch.float64)
    found = yield from take(end, end.sum(mine))
    return found.tolist()


@case(*[[[0.0, 5.0], [1.0, 6.0], [2.0, 7.0]]] * 3)
def gather_gives_every_ranks_tensor(end: Transport) -> Task[Any]:
    mine = numbers(end.rank, end.rank + 5)
    found = yield from take(end, end.gather(mine))
    mine.zero_()
    return [row.tolist() for row in found]


@case(*[2**60 * 3 + 3] * 3)
def sum_of_integers_is_exact(end: Transport) -> Task[Any]:
    found = yield from take(end, end.sum(torch.tensor([2**60 + end.rank])))
    return int(found)


@case(*[[1.0, 1.0]] * 3)
def broadcast_gives_the_sources_tensor(end: Transport) -> Task[Any]:
    mine = numbers(end.rank, end.rank)
    found = yield from take(end, end.broadcast(mine, 1))
    assert mine.tolist() == [end.rank, end.rank]
    return found.tolist()


@case(True, True)
def broadcast_of_every_type(end: Transport) -> Task[Any]:
    good = []
    for dtype in DTYPES:
        whole = torch.tensor([[0, 1, 1]]).to(dtype)
        mine = whole if end.rank == 0 else torch.zeros_like(whole)
        found = yield from take(end, end.broadcast(mine, 0))
        good.append(same_bits(found, whole))
    return all(good)


@case(True, True)
def broadcast_however_it_lies_in_memory(end: Transport) -> Task[Any]:
    good = []
    for whole in [*LAID_OUT.values(), torch.zeros(0, 2), torch.tensor(4.0)]:
        mine = whole if end.rank == 0 else torch.zeros(whole.shape, dtype=whole.dtype)
        found = yield from take(end, end.broadcast(mine, 0))
        good.append(same_bits(found, whole))
    return all(good)


@case([None, [1.0]], [None, [1.0]])
def control_and_messages_are_apart(end: Transport) -> Task[Any]:
    """A control operation between a send and its receive."""
    if end.rank == 0:
        end.post_send(THERE, [numbers(1)])
    words = yield from take(end, end.agree(None))
    arrived = [] if end.rank == 0 else (yield from take(end, receive(end, THERE, numbers(0))))
    shared = yield from take(end, end.agree([tensor.tolist() for tensor in arrived]))
    return [words[0], shared[1][0]]


# ---- the end


@case(*[["at rank", 0], ["at rank", 1]])
def finish_and_close_may_be_repeated(end: Transport) -> Task[Any]:
    yield from exchange(end, numbers(1))
    for _ in range(2):
        end.finish()
    for _ in range(2):
        end.close()
    return ["at rank", end.rank]
