"""How often processes talk in a step: once before it, once after it, for clipping, and for averages."""

from __future__ import annotations

from typing import Any

import pytest
from torch.nn.functional import mse_loss

from penstock import Pipeline
from penstock.testing import WorkerPool
from tests.parallel.bodies import X, Y, chain, half_of, mesh_of


def come_to(pipe: Pipeline) -> int:
    """How many collectives this process has come to, as the watch over the job tells them."""
    return sum(int(entry.split("=")[1]) for entry in pipe.job.activity.place().arrived.split())


def talk(group: Any, replicas: bool) -> dict[str, list[int]]:
    """A worker's task: the collectives of later steps of two shapes in turn, with clipping and without."""
    half, options = slice(0, 8), dict[str, Any](mesh=group)
    if replicas:
        mesh = mesh_of("dp", "pp")
        half, options = half_of(mesh), {"mesh": mesh, "replicas": "dp"}
    counts: dict[str, list[int]] = {"steps": [], "clipped": [], "evaluated": []}
    with Pipeline(chain(), loss_fn=mse_loss, microbatches=2, **options) as pipe:
        for step in range(6):
            x, y = X[half], Y[half]
            x, y = (x[:4], y[:4]) if step % 2 else (x, y)
            before = come_to(pipe)
            result = pipe.step(x, target=y)
            after = come_to(pipe)
            assert result.finite
            pipe.clip_grad_norm_(1.0)
            clipped = come_to(pipe)
            pipe.evaluate(x, target=y)
            if step > 1:
                counts["steps"].append(after - before)
                counts["clipped"].append(clipped - before)
                counts["evaluated"].append(come_to(pipe) - clipped)
    return counts


@pytest.mark.parametrize("replicas", [False, True])
def test_a_known_step_has_a_gather_before_and_a_sum_after_it(
    workers: WorkerPool, replicas: bool
) -> None:
    for counts in workers.run(f"{__name__}:talk", 4 if replicas else 2, 100.0, replicas=replicas):
        assert counts["steps"] == [2 + replicas] * 4, "with replicas, and their average"
        assert counts["clipped"] == [3 + replicas] * 4
        assert counts["evaluated"] == [2] * 4


def first_steps(group: Any) -> list[int]:
    """A worker's task: the collectives of a first step with replicas, and of a first one of other shapes."""
    mesh, counts = mesh_of("dp", "pp"), []
    half = half_of(mesh)
    with Pipeline(
        chain(), loss_fn=mse_loss, microbatches=2, mesh=mesh, replicas="dp", stages=2
    ) as pipe:
        for size in (8, 4):
            pipe.cut(X[half])
            before = come_to(pipe)
            pipe.step(X[half][:size], target=Y[half][:size])
            counts.append(come_to(pipe) - before)
    return counts


def test_a_new_call_costs_a_few_meetings(workers: WorkerPool) -> None:
    for first, other in workers.run(f"{__name__}:first_steps", 4, 100.0):
        assert first <= 10
        assert other <= 9
