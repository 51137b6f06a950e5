"""Any value between stages: the gradients of the unsplit model, in every schedule, on both transports."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipeline
from penstock.errors import PenstockError, SpecError
from penstock.testing import WorkerPool, compare
from tests.pipeline.kinds import KINDS, X, case_of

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


# ---- refusals


class Gives(nn.Module):
    def __init__(self, make: str) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4, dtype=torch.float64)
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return MAKE[self.make](self.lin(x))


@dataclass
class Holder:
    x: Any


def local() -> Any:
    @dataclass
    class Local:
        x: Any

    return Local(None)


MAKE: dict[str, Callable[[Tensor], Any]] = {
    "set": lambda h: {"h": [h, {1}]},
    "sparse": lambda h: (h, h.detach().to_sparse()),
    "object": lambda h: Holder([h, object()]),
    "local": lambda h: (h, local()),
    "rows": lambda h: {"h": h[: 1 + int(h.device.type == "cpu")]},
    "dtype": lambda h: (h, h.detach().to(torch.float32 if h.device.type == "cpu" else h.dtype)),
    "number": lambda h: Holder((h, 3.5 if h.device.type == "cpu" else 2.5)),
}
SAYS: dict[str, str] = {
    "set": r"rank 0, stage 0, .*a value of type set at \['h'\]\[1\] cannot "
    "travel between ranks; a set has no order",
    "sparse": r"rank 0, stage 0, .*value 'stage0', \[1\]: a tensor of layout sparse_coo cannot travel",
    "object": r"rank 0, stage 0, .*a value of type object at \.x\[1\] cannot travel between ranks",
    "local": r"rank 0, stage 0, .*other ranks cannot find the class .*Local; define it at the top level",
    "rows": r"value 'stage0' of stage 0, microbatch 0, .* \['h'\]: expected float64\[1, 4\], .*\[2, 4\]",
    "dtype": r"value 'stage0' of stage 0, microbatch 0, .* \[1\]: expected float64\[2, 4\], found float32",
    "number": r"value 'stage0' of stage 0, microbatch 0, .* \.x\[1\]: expected 2\.5, found 3\.5",
}


def refusal(make: str, group: Any = None) -> str:
    """What a pipeline says to a first stage that gives something of a kind."""
    model = nn.Sequential(Gives(make), nn.Identity())
    pipe = Pipeline(model, schedule="1F1B", ranks=2, microbatches=4, group=group)
    try:
        pipe.predict(X)
    except PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("make", sorted(MAKE))
def test_what_cannot_travel_or_differs_is_refused_by_name(make: str) -> None:
    assert re.search(SAYS[make], refusal(make))


def refuse(group: Any, makes: list[str]) -> list[str]:
    """A worker's task: what this rank hears."""
    return [refusal(make, group) for make in makes]


def test_every_rank_hears_what_set_up_refuses(workers: WorkerPool) -> None:
    makes = ["set", "sparse", "object", "local"]
    answers = workers.run("tests.pipeline.test_values:refuse", 2, makes=makes)
    for heard in answers:
        assert all(re.search(SAYS[make], text) for make, text in zip(makes, heard, strict=True))


def test_outputs_that_differ_are_refused() -> None:
    model = nn.Sequential(nn.Identity(), Gives("number"))
    pipe = Pipeline(model, schedule="1F1B", ranks=2, microbatches=4)
    with pytest.raises(SpecError, match=r"output is not what was agreed: \.x\[1\]: expected 2\.5"):
        pipe.predict(X)


def test_a_sparse_output_is_refused_only_where_it_is_asked_for() -> None:
    model = nn.Sequential(nn.Identity(), Gives("sparse"))
    options: dict[str, Any] = {"schedule": "1F1B", "ranks": 2, "microbatches": 4}
    pipe = Pipeline(model, loss_fn=lambda output, target: output[0].mean(), **options)
    pipe.step(X, target=X)
    with pytest.raises(SpecError, match=r"the model's output, \[1\]: .*sparse_coo cannot travel"):
        pipe.predict(X)
