"""Pairs of DualPipeV whose halves run in turns at exchanges, with pairs of F and then B as the baseline.

One process exchanges rows with itself over a wire of a given time, and computes meanwhile, or waits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.pairs import Ratios, take_turns
from penstock import Pipeline, overlap_collectives
from penstock.schedule import build
from penstock.testing import WorkerPool

WIDTH, ROWS, LAYERS = 512, 64, 8
WIRES = (0.002, 0.005)
"""How long an exchange takes, in seconds; a layer computes for about as long forward as the first."""


class Exchange(torch.autograd.Function):
    """Rows that go to themselves, over a wire that takes a while."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, seconds: float) -> Tensor:
        """Start the exchange, and wait until it has arrived."""
        ctx.seconds = seconds
        arrives, result = perf_counter() + seconds, torch.empty_like(rows)
        dist.all_to_all_single(result, rows.contiguous())
        sleep(max(0.0, arrives - perf_counter()))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Send the gradients back over the same wire."""
        return Exchange.apply(gradients[0], ctx.seconds), None  # type: ignore[no-untyped-call]


class Expert(nn.Module):
    """A layer between two exchanges."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, rows: Tensor) -> Any:
        """Send rows to experts and back."""
        there: Any = Exchange.apply(rows, self.seconds)  # type: ignore[no-untyped-call]
        back: Any = Exchange.apply(self.layers(there), self.seconds)  # type: ignore[no-untyped-call]
        return rows + back


def step(pipe: Pipeline, batch: Tensor) -> None:
    """A step whose gradients are dropped."""
    pipe.step(batch, target=batch)
    pipe.zero_grad()


def measure(group: Any, seconds: float, rounds: int) -> dict[str, list[float]]:
    """The worker's task: seconds of a step with and without turns."""
    batch = torch.randn(8 * ROWS, WIDTH)
    ways: dict[str, Callable[[], object]] = {}
    for name in ("in turns", "one by one"):
        pipe = Pipeline(
            nn.Sequential(*[Expert(seconds) for _ in range(LAYERS)]),
            schedule=build("DualPipeV", ranks=1, microbatches=8),
            loss_fn=nn.functional.mse_loss,
            mesh=group,
        )
        if name == "in turns":
            pipe.on_overlap(overlap_collectives)
        ways[name] = partial(step, pipe, batch)
    for way in (*ways.values(), *ways.values()):
        way()
    return {
        name: list(taken.elapsed) for name, taken in take_turns(ways, rounds, repeats=1).items()
    }


def compare(rounds: int) -> dict[str, Any]:
    """All wires, printed, and as JSON data."""
    figures: dict[str, Any] = {}
    with WorkerPool(1) as workers:
        for seconds in WIRES:
            times = workers.run(
                "benchmarks.overlap:measure", 1, timeout=1200, seconds=seconds, rounds=rounds
            )[0]
            ratios = Ratios(times["in turns"], times["one by one"])
            title = f"overlap_collectives, exchanges of {1e3 * seconds:g} ms"
            print(f"{title}: {ratios.told('F and then B')}")
            figures[title] = ratios.to_json()
    return figures
