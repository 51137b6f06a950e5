"""One training step on two gloo processes: Penstock, the peer and a loop by hand, in turn in each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.pairs import Ratios, take_turns
from benchmarks.work import RANKS, SCHEDULES, WORKS, Peer, Work, ours
from penstock.testing import WorkerPool

REPEATS = {"gpt": 1, "tiny": 5}
AIMS: dict[tuple[str, str], dict[str, float]] = {
    ("tiny", "1F1B"): {"peer": 0.65, "hand": 1.35},
    ("tiny", "Interleaved1F1B"): {"peer": 0.7},
    ("tiny", "ZB-V"): {"peer": 0.7},
    ("gpt", "1F1B"): {"peer": 1.0},
    ("gpt", "ZB-V"): {"peer": 0.95},
}
"""How much CPU time a step should take at most, of what the peer's takes and of what a loop by hand takes."""


class ByHand:
    """1F1B over two ranks as one would write it for these stages and nothing else: the floor.

    Nothing is checked, watched or agreed on, and the shapes are written down.
    """

    def __init__(self, work: Work, group: Any) -> None:
        self._rank = group.rank()
        self._stage = work.stages[self._rank]
        self._wire = group._get_backend(torch.device("cpu"))
        self._parts = work.batch.chunk(work.microbatches)
        self._targets = work.target.chunk(work.microbatches)
        self._loss, self._count = work.loss, work.microbatches
        self._shape = self._parts[0].shape
        self._sent: list[tuple[Any, Tensor]] = []

    def step(self) -> None:
        """Forward and backward of the batch."""
        run = self._first if self._rank == 0 else self._last
        run()
        for ticket, _ in self._sent:
            ticket.wait()
        self._sent.clear()

    def _first(self) -> None:
        made: dict[int, Tensor] = {}
        for number in range(self._count + 1):
            if number < self._count:
                made[number] = self._stage(self._parts[number])
            if number > 0:
                ticket, gradient = self._receive()
            if number < self._count:
                self._send(made[number].detach())
            if number > 0:
                ticket.wait()
                made.pop(number - 1).backward(gradient)

    def _last(self) -> None:
        coming = self._receive()
        for number in range(self._count):
            ticket, value = coming
            ticket.wait()
            if number + 1 < self._count:
                coming = self._receive()
            value.requires_grad_()
            loss = self._loss(self._stage(value), self._targets[number]) / self._count
            loss.backward()
            assert value.grad is not None
            self._send(value.grad)

    def _send(self, tensor: Tensor) -> None:
        self._sent.append((self._wire.send([tensor], 1 - self._rank, 0), tensor))

    def _receive(self) -> tuple[Any, Tensor]:
        into = torch.empty(self._shape)
        return self._wire.recv([into], 1 - self._rank, 0), into


def measure(group: Any, case: str, schedule: str, rounds: int) -> dict[str, dict[str, Any]]:
    """A worker's task: times of one case, in seconds per step."""
    work = WORKS[case](SCHEDULES[schedule])
    pipe, peer = ours(work, schedule, group), Peer(work, schedule, group)
    steps: dict[str, Callable[[], object]] = {
        "ours": lambda: pipe.step(work.batch, target=work.target),
        "peer": peer.step,
    }
    if "hand" in AIMS[case, schedule]:
        steps["hand"] = ByHand(work, group).step
    ways = {name: work.cleared(step) for name, step in steps.items()}
    for way in ways.values():
        way()
        way()
    found = take_turns(ways, rounds, REPEATS[case])
    pipe.close()
    return {name: {"elapsed": t.elapsed, "cpu": t.cpu} for name, t in found.items()}


def compare(rounds: int) -> dict[str, Any]:
    """All cases, printed, and as JSON data."""
    found: dict[str, Any] = {}
    with WorkerPool(RANKS) as workers:
        for (case, schedule), aims in AIMS.items():
            answers = workers.run(
                "benchmarks.steps:measure",
                RANKS,
                timeout=1200,
                case=case,
                schedule=schedule,
                rounds=rounds,
            )
            for other, aim in aims.items():
                cpu = Ratios(*(_both(answers, name) for name in ("ours", other)))
                clock = Ratios(*(answers[0][name]["elapsed"] for name in ("ours", other)))
                told = {"peer": "the peer", "hand": "a loop by hand"}[other]
                print(f"step, {schedule}, {case}: CPU {cpu.told(told)}; aim {aim}")
                print(f"step, {schedule}, {case}: time {clock.told(told)}")
                found[f"{case}, {schedule}, {other}"] = {
                    "aim": aim,
                    "cpu": cpu.to_json(),
                    "time": clock.to_json(),
                }
    return found


def _both(answers: list[Any], name: str) -> list[float]:
    """The CPU time of all ranks, round by round."""
    return [sum(times) for times in zip(*(a[name]["cpu"] for a in answers), strict=True)]
