"""Run the ranks that live in this process until all are done."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple, TypeVar

from penstock.errors import MessageError
from penstock.faults.progress import Activity
from penstock.transport import Ticket

T = TypeVar("T")


class Wait(NamedTuple):
    """What a rank waits for; why, as something that reads ``waits ...``; and from which ranks, if not all."""

    ticket: Ticket
    rank: int
    why: object
    peers: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} {self.why}"


Task = Generator[Wait, None, T]
"""A rank's work: it runs until it must wait, yields for what, and returns its result."""


def drive(tasks: Sequence[Task[T]], activity: Activity | None = None) -> list[T]:
    """Run tasks in turn, each as far as it gets.

    A single task blocks in its waits. Several in one process never block: when none can go on, none ever
    will.

    Args:
        tasks: one for each rank that lives here.
        activity: where the waits of a single task are noted.

    Raises:
        MessageError: all tasks wait for each other; the message says who waits for what.
    """
    try:
        if len(tasks) == 1:
            return [_run_alone(tasks[0], activity or Activity(0))]
        return _run_in_turn(tasks)
    finally:
        # After a failure the others have things to put back, which cannot wait for the garbage collector.
        for task in tasks:
            task.close()


def _run_alone(task: Task[T], activity: Activity) -> T:
    while True:
        try:
            wait = next(task)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return] # a generator's result has no type
        activity.wait(wait.why, wait.peers)
        try:
            wait.ticket.wait()
        except RuntimeError as error:
            # Also what a process group raises for a peer that is gone or too slow.
            raise MessageError(f"{wait}: {error}") from error
        activity.go_on()


def _run_in_turn(tasks: Sequence[Task[T]]) -> list[T]:
    results: dict[int, T] = {}
    waits: dict[int, Wait | None] = dict.fromkeys(range(len(tasks)))
    while waits:
        moved = False
        for index, wait in tuple(waits.items()):
            if wait is not None and not wait.ticket.ready():
                continue
            moved = True
            try:
                waits[index] = next(tasks[index])
            except StopIteration as done:
                results[index] = done.value
                del waits[index]
        if not moved:
            raise MessageError("no rank can go on: " + "; ".join(map(str, waits.values())))
    return [results[index] for index in range(len(tasks))]
