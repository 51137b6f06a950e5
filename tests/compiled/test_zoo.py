"""The graphs of backward's tests, and models of transformers: compiled, the gradients are those without."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from penstock import Pipeline
from tests.backward.graphs import GRAPHS
from tests.backward.oracle import Staged, check
from tests.partition.driver import square_mean
from tests.partition.families import make

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

# PENSTOCK_COMPILE=plain takes all that there are, and PENSTOCK_COMPILE=inductor compiles them with it.
ALL = "PENSTOCK_COMPILE" in os.environ
BACKEND = os.environ.get("PENSTOCK_COMPILE", "plain")
TOLERANCE = 1e-12 if BACKEND == "plain" else 1e-5
# Each does to a compiled stage what no other does; the rest is for the night.
BY_DAY = {
    "a function in Python",
    "a gradient in forward",
    "outputs that are not always used",
    "selective checkpoint",
}
REFUSED = {"a gradient in forward", "lstm", "gru", "experts"}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch.compiler.reset()


def cases(names: Sequence[str], by_day: Collection[str]) -> list[Any]:
    """All of them, of which by day only some run."""
    marks = [[] if ALL or name in by_day else [pytest.mark.nightly] for name in names]
    return [pytest.param(n, marks=of) for n, of in zip(names, marks, strict=True)]


@pytest.mark.parametrize("name", cases(sorted(GRAPHS), BY_DAY))
def test_graphs(name: str) -> None:
    torch.manual_seed(0)
    stage = GRAPHS[name]()
    compiled = Staged(stage, compile={"backend": BACKEND})
    check(lambda: stage, compiled, tolerance=TOLERANCE)
    assert compiled.stage.compiles == (name not in REFUSED)


ARCHITECTURES = [
    "bart", "bert", "gemma2", "gpt neox", "gpt2", "llama", "mistral", "mixtral", "phi3", "qwen2",
    "roberta", "t5", "vit",
]  # fmt: skip


@pytest.mark.parametrize("name", cases(ARCHITECTURES, ()))
def test_transformers(name: str) -> None:
    model, kwargs, tolerance = make(name)
    if BACKEND != "plain":
        # Inductor draws other numbers for dropout than eager does.
        model = model.float().eval()
        kwargs = {key: v.float() if v.is_floating_point() else v for key, v in kwargs.items()}
    step: Callable[[nn.Module, Any], list[Any]] = lambda m, how: _step(m, kwargs, how)  # noqa: E731
    actual, expected = step(copy.deepcopy(model), {"backend": BACKEND}), step(model, None)
    close = max(TOLERANCE, tolerance if tolerance > 1e-8 else 0.0)
    torch.testing.assert_close(actual, expected, rtol=close, atol=close)


def _step(model: nn.Module, kwargs: dict[str, Any], compiled: Any) -> list[Any]:
    pipe = Pipeline(
        model,
        schedule="ZB-H1",
        ranks=2,
        stages=2,
        microbatches=2,
        loss_fn=lambda output, target: square_mean(output),
        compile=compiled,
    )
    samples = len(next(iter(kwargs.values())))
    result = pipe.step(**kwargs, target=torch.zeros(samples))
    return [result.loss, *(parameter.grad for parameter in model.parameters())]
