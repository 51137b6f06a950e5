"""Bytes of receive buffers on two gloo processes, by the number of microbatches: Penstock and the peer."""

from __future__ import annotations

from typing import Any

from benchmarks.work import RANKS, SCHEDULES, Peer, ours, tiny
from penstock.testing import WorkerPool, record_messages

MICROBATCHES = (8, 64, 512)


def measure(group: Any, schedule: str, microbatches: int) -> dict[str, int]:
    """A worker's task: the most bytes this rank holds for messages in a step."""
    work = tiny(SCHEDULES[schedule], microbatches)
    peer = Peer(work, schedule, group)
    with ours(work, schedule, group) as pipe:
        counter = record_messages(pipe)
        for _ in range(2):
            pipe.step(work.batch, target=work.target)
    peer.step()
    return {
        "received": counter.received.most,
        "peer received": peer.receive_bytes,
    }


def compare(rounds: int) -> dict[str, Any]:
    """All schedules, printed, and as JSON data.

    Args:
        rounds: unused; bytes are the same each time.
    """
    del rounds
    figures: dict[str, Any] = {}
    with WorkerPool(RANKS) as workers:
        for schedule in SCHEDULES:
            for count in MICROBATCHES:
                replies = workers.run(
                    "benchmarks.buffers:measure",
                    RANKS,
                    timeout=120,
                    schedule=schedule,
                    microbatches=count,
                )
                figures[f"{schedule}, {count}"] = replies
                each = "; ".join(
                    f"rank {rank}: {at['received']}, peer {at['peer received']}"
                    for rank, at in enumerate(replies)
                )
                print(f"receive buffers in bytes, {schedule}, {count:3} microbatches: {each}")
    return figures
