"""Run the ranks that live in this process until all are done."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple, TypeVar

from penstock.errors import MessageError
from penstock.faults.progress import Activity
from penstock.transport import Ticket

T = TypeVar("T")


class Wait(NamedTuple):
    """Why a rank cannot go on: the ticket, the reason (its text begins ``waits ...``), and from which ranks.

    ``peers`` of None stands for all ranks.
    """

    ticket: Ticket
    rank: int
    why: object
    peers: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} {self.why}"


Task = Generator[Wait, None, T]
"""A rank's work: it runs until it must wait, yields for what, and returns its result."""


def drive(tasks: Sequence[Task[T]], activity: Activity | None = None) -> list[T]:
    """Run tasks until all are done.

    A single task blocks in its waits. Several tasks take turns, each running until it must wait, and never
    block: if none of them can go on, none ever will.

    Args:
        tasks: one for each rank of this process.
        activity: records the waits of a single task.

    Raises:
        MessageError: all tasks wait for each other; the message says which rank waits for what.
    """
    try:
        if len(tasks) == 1:
            return [_run_alone(tasks[0], activity or Activity(0))]
        return _run_in_turn(tasks)
    finally:
        # After a failure the other tasks have contexts to leave, which must not wait for the garbage
        # collector.
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
            # A process group raises this too, when a peer is gone or too slow.
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
