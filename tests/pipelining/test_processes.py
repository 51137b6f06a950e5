"""What people write for several processes does the same with torch's package and with ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.testing import WorkerPool

HALVES = ["by hand", "InterleavedZeroBubble", "Interleaved1F1B"]
FORWARDS = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"]
CASES: list[tuple[str, dict[str, Any]]] = [
    *(("weights:under_whole_backwards", {"schedule": name}) for name in ("GPipe", "1F1B")),
    *(("weights:under_halves", {"schedule": name}) for name in HALVES),
    *(("weights:under_a_loop", {"kind": kind}) for kind in ("fills", "turns")),
    ("shown:after_a_step", {}),
    *(("shown:without_outputs", {"schedule": name}) for name in ("GPipe", "1F1B")),
    *(("shown:evaluated", {"schedule": name}) for name in FORWARDS),
    ("shown:round_and_round", {}),
    *(("shown:recounted", {"schedule": name}) for name in ("GPipe", "1F1B")),
    *(("orders:by_hand", {"which": name}) for name in ("subclass", "v", "unbalanced")),
    *(("orders:by_hand", {"which": name}) for name in ("messages", "attribute")),
    *(("callbacks:called_back", {"threads": threads}) for threads in (False, True)),
    *(
        ("callbacks:halves_called_back", {"schedule": name, "splits": splits})
        for name in ("InterleavedZeroBubble", "Interleaved1F1B")
        for splits in (False, True)
    ),
    *(("loops:own_loop", {"kind": kind}) for kind in ("fills", "turns", "v")),
    *(("loops:traced_loop", {"kind": kind}) for kind in ("fills", "turns")),
    *(("loops:in_microbatches", {"schedule": name}) for name in FORWARDS[:3]),
]


def run(
    workers: WorkerPool, package: str, task: str, processes: int = 2, **options: Any
) -> list[Any]:
    module = f"tests.pipelining.peers.{task}"
    answers: list[Any] = workers.run(module, processes, 60.0, package=package, **options)
    return answers


@pytest.mark.parametrize(
    ("task", "options"), CASES, ids=[" ".join([t, *map(str, o.values())]) for t, o in CASES]
)
def test_either_import_does_the_same(
    workers: WorkerPool, task: str, options: dict[str, Any]
) -> None:
    theirs = run(workers, "torch", task, **options)
    assert run(workers, "penstock", task, **options) == theirs


@pytest.mark.parametrize("package", ["torch", "penstock"])
@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "InterleavedZeroBubble"])
def test_orders_go_through_files(
    workers: WorkerPool, tmp_path: Path, package: str, schedule: str
) -> None:
    path = str(tmp_path)
    assert run(workers, package, "orders:through_files", schedule=schedule, path=path) == [2, 2]


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["fills", "turns"])
def test_loops_over_replicas(workers: WorkerPool, kind: str, how: str) -> None:
    # torch's DDP does not reduce what the weights' half of a backward makes.
    packages = ["penstock"] if (kind, how) == ("turns", "ddp") else ["torch", "penstock"]
    for package in packages:
        gaps = run(workers, package, "loops:replicated_loop", 4, kind=kind, how=how)
        assert max(gaps) < 1e-6


@pytest.mark.parametrize("package", ["torch", "penstock"])
@pytest.mark.parametrize("how", ["given whole", "computes alone"])
def test_orders_of_sharded_stages(workers: WorkerPool, package: str, how: str) -> None:
    run(workers, package, "loops:sharded_order", 4, how=how)


def test_every_rank_hears_what_one_cannot_split(workers: WorkerPool) -> None:
    first, second = run(workers, "penstock", "shown:refused")
    assert first[:2] == second[:2] == [first[0]] * 2
    assert first[0].partition(": ")[2].startswith("rank 0: ")
    assert second[2] == "TypeError: losses must be a list, not a tuple"
    assert first[2] == f"StageError: rank 1: before the first microbatch: {second[2]}"
