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


@in_processes(4, 100.0)
def test_a_known_step_has_a_gather_before_and_a_sum_and_an_average_after_it(group: Any) -> None:
    """Later steps of two shapes in turn, with clipping and without."""
    mesh = mesh_of("dp", "pp")
    half, options = half_of(mesh), dict[str, Any](mesh=mesh, replicas="dp", microbatches=2)
    with Pipeline(chain(), loss_fn=mse_loss, **options) as pipe:
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
                assert after - before == 3
                assert clipped - before == 4
                assert come_to(pipe) - clipped == 2
