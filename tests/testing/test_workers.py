"""The pool of workers: results by rank, errors by name, and usable after each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.errors import PenstockError, UsageError
from penstock.testing import WorkerError, WorkerPool

TASKS = "tests.testing.tasks"
ENDLESS = 1000.0
"""Seconds that a task may take, more than its test: the first error must end the wait for the others."""


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """One of its own: what these tests do to it is not for others."""
    with WorkerPool(2) as workers:
        yield workers


# ---- results


@pytest.mark.parametrize(
    ("task", "ranks", "arguments", "answers"),
    [
        pytest.param("add", 2, {"first": 2, "second": 3}, [[5, 0, 2], [5, 1, 2]], id="by rank"),
        pytest.param("add", 1, {"first": 2}, [[3, 0, 1]], id="of fewer"),
        pytest.param("together", 2, {}, [2.0, 2.0], id="of their group"),
        pytest.param("threads", 2, {}, [1, 1], id="with one thread each"),
        pytest.param("speak", 2, {}, ["answer", "answer"], id="and not what a task prints"),
    ],
)
def test_results(
    pool: WorkerPool, task: str, ranks: int, arguments: dict[str, Any], answers: list[Any]
) -> None:
    assert pool.run(f"{TASKS}:{task}", ranks, **arguments) == answers


def test_closed_workers_are_started_anew(pool: WorkerPool) -> None:
    for _ in range(2):
        pool.close()
    assert pool.run(f"{TASKS}:add", 1, first=1) == [[2, 0, 1]]


# ---- errors

FAILING: dict[str, tuple[Callable[[WorkerPool], Any], str]] = {
    "a task that raises": (
        lambda pool: pool.run(f"{TASKS}:fail", 2, ENDLESS, rank=1),
        r"worker 1:\nTraceback[\s\S]*KeyError: 'lost'",
    ),
    "a task that is not there": (
        lambda pool: pool.run(f"{TASKS}:missing", 1),
        "no attribute 'missing'",
    ),
    "a result that is not JSON": (
        lambda pool: pool.run(f"{TASKS}:answer_oddly", 1),
        "set is not JSON serializable",
    ),
    "a worker that dies": (
        lambda pool: pool.run(f"{TASKS}:die", 2, ENDLESS, rank=1),
        r"worker 1 died:\n[\s\S]*first words[\s\S]{,9000}last words",
    ),
    "a worker that dies between tasks": (lambda pool: die_between(pool), "worker 0 died"),
    "a task beyond its time": (
        lambda pool: pool.run(f"{TASKS}:sleep", 2, 0.2, seconds=60),
        r"workers \[0, 1\] did not end in time\nworker 0 is here:\n[\s\S]* in sleep\n[\s\S]*worker 1",
    ),
}


def die_between(pool: WorkerPool) -> None:
    pool.run(f"{TASKS}:die_soon", 1)
    while True:
        pool.run(f"{TASKS}:add", 1, first=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FAILING))
def test_errors_are_told_and_the_pool_goes_on(pool: WorkerPool, name: str) -> None:
    call, says = FAILING[name]
    with pytest.raises(WorkerError, match=says) as caught:
        call(pool)
    assert isinstance(caught.value, PenstockError | RuntimeError)
    assert pool.run(f"{TASKS}:add", 1, first=1) == [[2, 0, 1]]


@pytest.mark.parametrize("ranks", [0, 3])
def test_more_workers_than_there_are_is_refused(pool: WorkerPool, ranks: int) -> None:
    with pytest.raises(UsageError, match=rf"ranks={ranks}: the pool has 2 workers"):
        pool.run(f"{TASKS}:add", ranks, first=1)
    assert pool.run(f"{TASKS}:add", 1, first=1) == [[2, 0, 1]]


def test_arguments_are_json_and_are_looked_at_first() -> None:
    with WorkerPool(1) as unused, pytest.raises(TypeError, match="not JSON serializable"):
        unused.run(f"{TASKS}:add", 1, first={1})
