"""Every schedule, on every transport, gives the gradients of the unsplit model."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import add_loss
from penstock.testing import Case, WorkerPool, compare
from tests.pipeline.cases import sequence_case
from tests.pipeline.test_losses import RAGGED_Y, X, plain_model, token_loss, valid

SCHEDULES = ("GPipe", "1F1B", "ZB-H1")
STAGES = (1, 2, 3, 4)
MICROBATCHES = (1, 2, 5, 8)
IN_PROCESS = list(product(SCHEDULES, STAGES, MICROBATCHES))
ON_GLOO = [case for case in IN_PROCESS if case[1] > 1]


def in_process(schedule: str, stages: int, microbatches: int, dtype: torch.dtype) -> dict[str, str]:
    verdict = compare(
        sequence_case(dtype), schedule=schedule, ranks=stages, microbatches=microbatches
    )
    if dtype is torch.float64:
        verdict.check(1e-12)
    return verdict.digest()


def on_gloo(
    workers: WorkerPool, schedule: str, stages: int, microbatches: int, dtype: str
) -> list[dict[str, Any]]:
    return workers.run(
        "tests.pipeline.cases:run_oracle",
        stages,
        schedule=schedule,
        microbatches=microbatches,
        dtype=dtype,
        stages=stages,
    )


@pytest.mark.parametrize(("schedule", "stages", "microbatches"), IN_PROCESS)
def test_gradients_in_process(schedule: str, stages: int, microbatches: int) -> None:
    in_process(schedule, stages, microbatches, torch.float64)


@pytest.mark.parametrize(("schedule", "stages", "microbatches"), ON_GLOO)
def test_gradients_on_gloo(
    workers: WorkerPool, schedule: str, stages: int, microbatches: int
) -> None:
    answers = on_gloo(workers, schedule, stages, microbatches, "float64")
    seen = {name for answer in answers for name in answer["differences"]}
    assert seen == {"loss", *dict(sequence_case().model.named_parameters())}
    assert max(gap for answer in answers for gap in answer["differences"].values()) < 1e-12


@pytest.mark.parametrize(("stages", "microbatches"), list(product(STAGES, MICROBATCHES)))
def test_float32_bits_do_not_depend_on_the_schedule(stages: int, microbatches: int) -> None:
    found = [in_process(s, stages, microbatches, torch.float32) for s in SCHEDULES]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(("schedule", "stages", "microbatches"), ON_GLOO[::3])
def test_float32_bits_do_not_depend_on_the_transport(
    workers: WorkerPool, schedule: str, stages: int, microbatches: int
) -> None:
    answers = on_gloo(workers, schedule, stages, microbatches, "float32")
    together = {name: text for answer in answers for name, text in answer["digest"].items()}
    assert together == in_process(schedule, stages, microbatches, torch.float32)
    assert len({answer["digest"]["loss"] for answer in answers}) == 1


class Small(nn.Module):
    """Adds a loss that is linear in the samples: one of the whole batch is the mean of those of its parts."""

    def forward(self, hidden: Tensor) -> Tensor:
        add_loss("size", hidden.square().mean(), weight=0.5)
        return hidden


def weighed(weight: Any) -> Case:
    model = plain_model()
    model.insert(3, Small())
    return Case(model, (X[:6],), RAGGED_Y[[0, 1, 0, 1, 0, 1]], token_loss, loss_weight=weight)


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-V"])
def test_weights_and_added_losses(schedule: str) -> None:
    """Three microbatches of equal shape and weight, so that also the added loss is that of the batch."""
    compare(weighed(valid), schedule=schedule, ranks=2, microbatches=3).check(1e-12)


def test_a_wrong_weight_is_found() -> None:
    verdict = compare(weighed([1, 2, 3, 1, 1, 1]), schedule="1F1B", ranks=2, microbatches=6)
    assert verdict.differences()["loss"] > 1e-3
