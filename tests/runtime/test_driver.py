"""Tasks in turn: who goes on, who waits, and what is said when nobody can."""

from __future__ import annotations

import pytest

from penstock.errors import MessageError
from penstock.runtime import Task, Wait, drive
from tests.runtime.fakes import Bell, rings, waits_for


def test_one_task_blocks_in_its_waits() -> None:
    bell = Bell("there")
    bell.ring()
    assert drive([waits_for(bell)]) == ["there"]
    assert bell.waited == 2


def test_several_tasks_never_block() -> None:
    bell = Bell("there")
    assert drive([waits_for(bell), rings(bell, "rung")]) == ["there", "rung"]
    assert bell.waited == 1


def test_results_come_in_the_order_of_the_tasks() -> None:
    bells = [Bell(index) for index in range(3)]
    chain = [waits_for(bells[0]), relay(bells[1], bells[0]), relay(bells[2], bells[1])]
    assert drive([*chain, rings(bells[2])]) == [0, 1, 2, None]


def relay(heard: Bell, rung: Bell) -> Task[object]:
    value = yield from waits_for(heard)
    rung.ring()
    return value


def test_no_tasks_give_nothing() -> None:
    assert drive([]) == []


def test_a_circle_is_told() -> None:
    tasks = [waits_for(Bell(), rank) for rank in range(2)]
    with pytest.raises(
        MessageError,
        match="no rank can go on: rank 0 waits for its bell; rank 1 waits for its bell",
    ):
        drive(tasks)


def test_who_is_done_waits_for_nobody() -> None:
    with pytest.raises(MessageError, match=r"can go on: rank 1 waits for its bell$"):
        drive([rings(Bell()), waits_for(Bell(), 1)])


ERRORS = {
    "its own": MessageError("nobody rings"),
    "a process group's": RuntimeError("Connection closed by peer"),
}


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_a_wait_that_fails_says_who_waited_for_what(name: str) -> None:
    with pytest.raises(MessageError, match=f"rank 3 waits for its bell: {ERRORS[name]}") as caught:
        drive([waits_for(Bell(error=ERRORS[name]), 3)])
    assert caught.value.__cause__ is ERRORS[name]


def fails() -> Task[None]:
    raise KeyError("mine")
    yield


@pytest.mark.parametrize("others", [0, 1])
def test_what_a_task_raises_is_raised(others: int) -> None:
    with pytest.raises(KeyError, match="mine"):
        drive([fails(), *(waits_for(Bell()) for _ in range(others))])


def test_a_wait_reads_as_a_sentence() -> None:
    assert str(Wait(Bell(), 2, "waits in 1F0 for 1RECV_F0")) == "rank 2 waits in 1F0 for 1RECV_F0"
