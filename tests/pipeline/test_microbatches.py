"""Batches that are split already, or in another number in each step, beside the plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock import Microbatches
from penstock.testing import WorkerPool, plain_loop
from penstock.values import MISSING
from tests.pipeline.cases import NEXT, RAGGED, TOKENS, WORDS, language, pipeline, ragged
from tests.pipeline.models import assert_same, gradients


def test_their_outputs_come_one_by_one() -> None:
    case = ragged()
    outputs = pipeline(case, 2).predict(*case.args)
    torch.testing.assert_close(outputs, [case.model(part).detach() for part in RAGGED])


def test_another_number_in_each_step() -> None:
    case = language()
    pipe, expected = pipeline(case, 2), plain_loop(case)[1]
    for count in (4, 1, 7, 3):
        pipe.zero_grad()
        pipe.step(TOKENS, target=NEXT, microbatches=count)
        assert_same(gradients(pipe), expected)


def ragged_steps(group: Any, everywhere: bool) -> dict[str, Any]:
    """A worker's task: who needs no batch gives none; then a step with other lengths and one more."""
    case = ragged()
    pipe, rank = pipeline(case, 2, group=group), group.rank()
    args = case.args if everywhere or rank == 0 else []
    target = case.target if args else Microbatches(case.target)
    result = pipe.step(*args, target=target if everywhere or rank else MISSING)
    outputs = pipe.predict(*args)
    pipe.step(TOKENS, target=NEXT, microbatches=5)
    grads, sizes = gradients(pipe), [list(output.shape) for output in outputs]
    both: Any = [plain_loop(of)[1] for of in (case, language())]
    gaps = [(grads[name] - sum(one[name] for one in both)).abs().max() for name in grads]
    return {"loss": result.loss, "gap": max(map(float, gaps)), "shapes": sizes}


@pytest.mark.parametrize("everywhere", [True, False])
def test_over_processes(workers: WorkerPool, everywhere: bool) -> None:
    for answer in workers.run(f"{__name__}:ragged_steps", 2, 100.0, everywhere=everywhere):
        assert answer["gap"] < 1e-12
        assert answer["loss"] == pytest.approx(plain_loop(ragged())[0])
        assert answer["shapes"] == [[*part.shape, WORDS] for part in RAGGED]
