"""Edge tables other than the chain, on any placement: the gradients of plain autograd."""

from __future__ import annotations

from itertools import product

import pytest

from penstock.schedule import Placement
from penstock.testing import WorkerPool
from tests.runtime.graphs import GRAPHS, PLACEMENTS, gap, pipelined, plain, schedule_of

CASES = list(product(sorted(GRAPHS), PLACEMENTS))


@pytest.mark.parametrize("halves", [False, True], ids=["full", "halves"])
@pytest.mark.parametrize(("name", "rank_of"), CASES)
def test_gradients_are_those_of_autograd(name: str, rank_of: tuple[int, ...], halves: bool) -> None:
    graph = GRAPHS[name]
    schedule = schedule_of(graph.edges, Placement(rank_of), 3, halves=halves)
    loss, found, in_flight = pipelined(graph, schedule)
    expected_loss, expected = plain(graph)
    assert loss == pytest.approx(expected_loss, abs=1e-14)
    assert len(found) == len(expected)
    assert max(map(gap, found, expected)) < 1e-12
    assert set(in_flight) == {0}


@pytest.mark.parametrize(("name", "rank_of"), [case for case in CASES if case[1][-1]][::2])
def test_gradients_over_gloo(workers: WorkerPool, name: str, rank_of: tuple[int, ...]) -> None:
    ranks = Placement(rank_of).ranks
    answers = workers.run(
        "tests.runtime.graphs:run_graph", ranks, 30.0, name=name, rank_of=rank_of, halves=True
    )
    assert max(gap for answer in answers for gap in answer.values()) < 1e-12


@pytest.mark.parametrize("name", sorted(GRAPHS))
def test_bits_do_not_depend_on_the_halves(name: str) -> None:
    graph = GRAPHS[name]
    runs = [
        pipelined(graph, schedule_of(graph.edges, Placement((0, 1, 0, 1)), 3, halves=halves))
        for halves in (False, True)
    ]
    assert all(map(bool, map(equal, runs[0][1], runs[1][1])))
    assert runs[0][0] == runs[1][0]


def equal(a: object, b: object) -> bool:
    return bool((a == b).all())  # type: ignore[attr-defined] # tensors
