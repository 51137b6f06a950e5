"""One training step on two gloo processes: Penstock, the peer and a loop by hand, in turn in each.

On tiny stages also Penstock without its sockets for small messages, which then travel over gloo too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.pairs import Ratios, take_turns
from benchmarks.work import RANKS, SCHEDULES, WORKS, Peer, Work, ours
from penstock import Pipeline
from penstock._engine.transport.gloo import GlooTransport
from penstock.testing import WorkerPool

REPEATS = {"gpt": 1, "tiny": 5}
AIMS: dict[tuple[str, str], dict[str, float]] = {
    ("tiny", "1F1B"): {"time": 0.6},
    ("tiny", "Interleaved1F1B"): {},
    ("tiny", "ZB-H1"): {},
    ("tiny", "ZB-V"): {"time": 0.45},
    ("gpt", "1F1B"): {"time": 1.0, "cpu": 1.0},
    ("gpt", "Interleaved1F1B"): {"time": 1.0, "cpu": 1.0},
    ("gpt", "ZB-H1"): {"time": 1.0, "cpu": 1.0},
    ("gpt", "ZB-V"): {"time": 0.95, "cpu": 0.95},
}
"""What a step should take at most, of what the peer's takes."""
SOCKETS = 1 / 1.3
"""What a tiny step should take at most, of what it takes without sockets: else they are not worth having."""
OTHERS = {"peer": "torch's package", "hand": "a loop by hand", "gloo": "Penstock without sockets"}


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
        self._shape = work.stages[0](self._parts[0]).shape
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


def without_sockets(work: Work, schedule: str, group: Any) -> Pipeline:
    """Like :func:`ours`, but all messages travel over gloo."""
    with patch.object(GlooTransport, "connect_lines"):
        return ours(work, schedule, group)


def measure(group: Any, case: str, schedule: str, rounds: int) -> dict[str, dict[str, Any]]:
    """A worker's task: times of one case, in seconds per step."""
    work = WORKS[case](SCHEDULES[schedule])
    pipes = {"ours": ours(work, schedule, group)}
    if case == "tiny":
        pipes["gloo"] = without_sockets(work, schedule, group)
    steps: dict[str, Callable[[], object]] = {
        name: partial(pipe.step, work.batch, target=work.target) for name, pipe in pipes.items()
    }
    steps["peer"] = Peer(work, schedule, group).step
    if schedule == "1F1B":
        steps["hand"] = ByHand(work, group).step
    ways = {name: work.cleared(step) for name, step in steps.items()}
    for way in ways.values():
        way()
        way()
    times = take_turns(ways, rounds, REPEATS[case])
    for pipe in pipes.values():
        pipe.close()
    return {name: {"time": t.elapsed, "cpu": t.cpu} for name, t in times.items()}


def compare(rounds: int) -> dict[str, Any]:
    """All cases, printed, and as JSON data."""
    figures: dict[str, Any] = {}
    with WorkerPool(RANKS) as workers:
        for (case, schedule), limits in AIMS.items():
            replies = workers.run(
                "benchmarks.steps:measure",
                RANKS,
                timeout=1200,
                case=case,
                schedule=schedule,
                rounds=rounds,
            )
            for other in [name for name in OTHERS if name in replies[0]]:
                ratios = _ratios(replies, other)
                aims = {"peer": limits, "gloo": {"time": SOCKETS}}.get(other, {})
                _tell(f"step, {schedule}, {case}", ratios, other, aims)
                figures[f"{case}, {schedule}, against {OTHERS[other]}"] = {
                    "aims": aims,
                    **{what: ratio.to_json() for what, ratio in ratios.items()},
                }
    return figures


def _ratios(replies: list[Any], other: str) -> dict[str, Ratios]:
    """Ours to another way: the time on rank 0, and the CPU time of all ranks, round by round."""

    def cpu(name: str) -> list[float]:
        return [sum(times) for times in zip(*(r[name]["cpu"] for r in replies), strict=True)]

    return {
        "time": Ratios(replies[0]["ours"]["time"], replies[0][other]["time"]),
        "cpu": Ratios(cpu("ours"), cpu(other)),
    }


def _tell(title: str, ratios: dict[str, Ratios], other: str, aims: dict[str, float]) -> None:
    for what, ratio in ratios.items():
        aim = f"; aim {aims[what]:.2f}" if what in aims else ""
        print(f"{title}: {what:4} {ratio.told(OTHERS[other])}{aim}")
