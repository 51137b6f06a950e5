"""A traced cut with a process a rank: each keeps its stages, and only ranks that use the batch need it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock import Pipeline
from penstock.partition.traced import Cuts, Point, cut_traced
from penstock.testing import WorkerPool
from tests.partition.traced.models import EXAMPLES, Example


def cut(example: Example, group: Any = None) -> Pipeline:
    model = example.model()
    points = tuple(Point(path, where) for path, where in example.cuts.items())
    args, kwargs = example.microbatch()
    return Pipeline(
        model,
        schedule="Interleaved1F1B",
        ranks=2,
        stages=cut_traced(model, args, kwargs, Cuts(points)).partition,
        microbatches=4,
        loss_fn=example.loss,
        group=group,
    )


def train(group: Any, name: str) -> tuple[list[float], float]:
    example = EXAMPLES[name]
    pipe = cut(example, group)
    given = example.args if torch.distributed.get_rank() == 0 else ()
    losses = [pipe.step(*given, target=example.target, **example.kwargs).loss for _ in range(2)]
    return losses, pipe.clip_grad_norm_(1.0)


def alone(name: str) -> tuple[list[float], float]:
    example = EXAMPLES[name]
    pipe = cut(example)
    step = [pipe.step(*example.args, target=example.target, **example.kwargs) for _ in range(2)]
    return [one.loss for one in step], pipe.clip_grad_norm_(1.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unet", "words"])
def test_processes_train_as_one_does(name: str, workers: WorkerPool) -> None:
    losses, norm = alone(name)
    for found, other in workers.run(f"{__name__}:train", 2, 90.0, name=name):
        assert found == pytest.approx(losses, abs=1e-12)
        assert other == pytest.approx(norm, abs=1e-12)
