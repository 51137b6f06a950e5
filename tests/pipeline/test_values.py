"""Any value between stages: the gradients of the unsplit model, in every schedule, on both transports."""

from __future__ import annotations

from itertools import product

import pytest

from penstock.testing import WorkerPool, compare
from tests.pipeline.kinds import KINDS, case_of

SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "ZB-V", "DualPipeV"]


@pytest.mark.parametrize(("kind", "schedule"), list(product(sorted(KINDS), SCHEDULES)))
def test_gradients_are_those_of_the_unsplit_model(kind: str, schedule: str) -> None:
    compare(case_of(kind), schedule=schedule, ranks=2, microbatches=4, steps=2).check(1e-12)


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-V"])
def test_on_gloo_too_with_the_same_bits(workers: WorkerPool, schedule: str) -> None:
    kinds = sorted(KINDS)
    answers = workers.run(
        "tests.pipeline.kinds:run_kinds", 2, 120.0, schedule=schedule, kinds=kinds
    )
    for kind in kinds:
        here = compare(case_of(kind), schedule=schedule, ranks=2, microbatches=4, steps=2).digest()
        assert max(answer[kind][0] for answer in answers) < 1e-12
        assert {k: v for answer in answers for k, v in answer[kind][1].items()} == here, kind
