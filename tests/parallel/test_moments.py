"""How often processes talk in a step: once before it, once after it, for clipping, and for averages."""

from __future__ import annotations

from typing import Any

from torch.nn.functional import mse_loss

from penstock import Pipeline
from tests.parallel.bodies import X, Y, chain, half_of, mesh_of
from tests.processes import in_processes


def come_to(pipe: Pipeline) -> int:
    """How many collectives this process has come to, as the watch over the job tells them."""
    return sum(int(entry.split("=")[1]) for entry in pipe.job.activity.place().arrived.split())


def check_steps(group: Any, *, replicas: bool) -> None:
    """Later steps of two shapes in turn, with clipping and without."""
    half, options = slice(0, 8), dict[str, Any](mesh=group)
    if replicas:
        mesh = mesh_of("dp", "pp")
        half, options = half_of(mesh), {"mesh": mesh, "replicas": "dp"}
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
                # With replicas, and their average.
                assert after - before == 2 + replicas
                assert clipped - before == 3 + replicas
                assert come_to(pipe) - clipped == 2


@in_processes(2, 100.0)
def test_a_known_step_has_a_gather_before_and_a_sum_after_it(group: Any) -> None:
    check_steps(group, replicas=False)


@in_processes(4, 100.0)
def test_with_replicas_there_is_their_average_too(group: Any) -> None:
    check_steps(group, replicas=True)


@in_processes(4, 100.0)
def test_a_new_call_costs_a_few_meetings(group: Any) -> None:
    """A first step with replicas, and a first one of other shapes."""
    mesh = mesh_of("dp", "pp")
    half = half_of(mesh)
    with Pipeline(
        chain(), loss_fn=mse_loss, microbatches=2, mesh=mesh, replicas="dp", stages=2
    ) as pipe:
        for size, most in ((8, 10), (4, 9)):
            pipe.cut(X[half])
            before = come_to(pipe)
            pipe.step(X[half][:size], target=Y[half][:size])
            assert come_to(pipe) - before <= most
