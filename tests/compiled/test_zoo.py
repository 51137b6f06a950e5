"""The zoo of backward's tests, and models of transformers: compiled, the gradients are those without."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipeline
from penstock.compiled import CompiledModule, RefusedError, graphs_kept
from tests.backward.oracle import SplitEngine, Stage, check
from tests.backward.zoo import ZOO
from tests.partition.driver import square_mean
from tests.partition.families import make

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

# PENSTOCK_COMPILE=plain takes all that there are, and PENSTOCK_COMPILE=inductor compiles them with it.
ALL = "PENSTOCK_COMPILE" in os.environ
BACKEND = os.environ.get("PENSTOCK_COMPILE", "plain")
TOLERANCE = 1e-12 if BACKEND == "plain" else 1e-5
# Each does to a compiled stage what no other does; the rest is for the night.
OF_ZOO = {
    "custom_function",
    "gradient_in_forward",
    "output_not_always_used",
    "selective_checkpoint",
}
REFUSED = {"gradient_in_forward", "lstm", "gru", "experts"}


@pytest.fixture(autouse=True)
def as_precise_as_can_be(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("tests.backward.oracle.TOLERANCE", TOLERANCE)
    yield
    torch.compiler.reset()


class CompiledEngine(SplitEngine):
    """`SplitBackward` with a compiled stage, or without where that is refused."""

    def __init__(self) -> None:
        self.refused = False
        self.called: Any = None

    def forward(self, stage: Stage, inputs: Sequence[Any]) -> Any:
        # As a transport delivers them.
        given = [value.clone() if isinstance(value, Tensor) else value for value in inputs]
        if self.called is None:
            self.called = CompiledModule(stage.model, {"backend": BACKEND}, "the stage")
        try:
            # Equal graphs are in the zoo, which torch keeps on disk.
            with graphs_kept():
                return self.called(*given)
        except RefusedError:
            self.refused, self.called = True, stage.model
            return self.forward(stage, inputs)


def cases(names: Sequence[str], by_day: Collection[str]) -> list[Any]:
    """All of them, of which but some are for the night."""
    marks = [[] if ALL or name in by_day else [pytest.mark.nightly] for name in names]
    return [pytest.param(n, marks=of) for n, of in zip(names, marks, strict=True)]


@pytest.mark.parametrize("name", cases(sorted(ZOO), OF_ZOO))
def test_zoo(name: str) -> None:
    engine = CompiledEngine()
    check({"compiled": engine}, ZOO[name], seed=0)
    assert engine.refused == (name in REFUSED)


ARCHITECTURES = [
    "bart", "bert", "gemma2", "gpt neox", "gpt2", "llama", "mistral", "mixtral", "phi3", "qwen2",
    "roberta", "t5", "vit",
]  # fmt: skip


@pytest.mark.parametrize("name", cases(ARCHITECTURES, {"llama"}))
def test_transformers(name: str) -> None:
    model, kwargs, tolerance = make(name)
    if BACKEND != "plain":
        # Inductor draws other numbers for dropout than eager does.
        model = model.float().eval()
        kwargs = {key: v.float() if v.is_floating_point() else v for key, v in kwargs.items()}
    step: Callable[[nn.Module, Any], list[Any]] = lambda m, how: _step(m, kwargs, how)  # noqa: E731
    found, expected = step(copy.deepcopy(model), {"backend": BACKEND}), step(model, None)
    close = max(TOLERANCE, tolerance if tolerance > 1e-8 else 0.0)
    torch.testing.assert_close(found, expected, rtol=close, atol=close)


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
