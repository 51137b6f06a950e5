"""Five steps of AdamW with clipped gradients, of many kinds of model: all weights are the plain loop's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor, nn

from penstock import Microbatches, Pipeline, PipelineStage
from penstock.testing import WorkerPool
from tests.pipeline.whole import LIMIT, MODELS, STEPS, Whole, optimizer_of, plain

SCHEDULES = {"1F1B": 4, "Interleaved1F1B": 2, "ZB-V": 2, "DualPipeV": 2, "GPipe": 4}
"""Their names, and on how many ranks they have four stages."""


def trained(pipe: Pipeline, whole: Whole) -> list[list[float]]:
    """Loss and norm of each step."""
    optimizer, seen = optimizer_of(pipe.parameters()), []
    for step in range(STEPS):
        parts, targets = whole.batches(step)
        result = pipe.step(Microbatches(parts), target=targets)
        norm = pipe.clip_grad_norm_(LIMIT)
        optimizer.step()
        pipe.zero_grad()
        seen.append([result.loss, float(norm)])
    return seen


def cut(whole: Whole, model: nn.Module, schedule: str, group: Any = None) -> Pipeline:
    """A pipeline of an unedited model."""
    return Pipeline(
        model,
        schedule=schedule,
        ranks=SCHEDULES[schedule],
        stages=4,
        loss_fn=whole.loss_fn,
        loss_weight=whole.weight,
        group=group,
    )


def gaps(found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True))


def gap(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("name", sorted(MODELS))
def test_in_one_process(name: str, schedule: str) -> None:
    whole = MODELS[name]
    model = whole.model()
    seen = trained(cut(whole, model, schedule), whole)
    expected, weights = plain(whole)
    assert gaps(seen, expected) < 1e-10
    assert gap([*model.state_dict().values()], weights) < 1e-10


BY_HAND = sorted(name for name, whole in MODELS.items() if whole.edges)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize("name", BY_HAND)
def test_with_edges_by_hand(name: str, schedule: str) -> None:
    whole = MODELS[name]
    model = whole.model()
    seen = trained(by_hand(whole, model, schedule), whole)
    expected, weights = plain(whole)
    assert gaps(seen, expected) < 1e-10
    assert gap([*model.state_dict().values()], weights) < 1e-10


def by_hand(whole: Whole, model: nn.Module, schedule: str) -> Pipeline:
    stages = [PipelineStage(module, i, 4) for i, module in enumerate(model.children())]
    return Pipeline.from_stages(
        stages,
        schedule=schedule,
        loss_fn=whole.loss_fn,
        loss_weight=whole.weight,
        edges=whole.edges,
    )


def in_processes(group: Any, name: str, schedule: str) -> list[float]:
    """A worker's task: how far losses, norms and the weights that live here are from the plain loop's."""
    whole = MODELS[name]
    with cut(whole, whole.model(), schedule, group) as pipe:
        seen = trained(pipe, whole)
        found = pipe.state_dict()
    expected, weights = plain(whole)
    named = dict(zip(whole.model().state_dict(), weights, strict=True))
    return [gaps(seen, expected), gap([*found.values()], [named[name] for name in found])]


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("U-Net", "ZB-V"),
        ("encoder-decoder", "1F1B"),
        ("ragged", "ZB-V"),
        ("experts", "Interleaved1F1B"),
        ("vision", "DualPipeV"),
        ("dicts", "GPipe"),
    ],
)
def test_over_processes(workers: WorkerPool, name: str, schedule: str) -> None:
    task = f"{__name__}:in_processes"
    answers = workers.run(task, SCHEDULES[schedule], 60.0, name=name, schedule=schedule)
    assert max(found for answer in answers for found in answer) < 1e-10
