"""transformers' models, unedited, traced and cut: outputs and gradients of the unsplit model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.pipelining import ScheduleInterleaved1F1B, pipeline
from tests.partition.families import make
from tests.pipelining.models import before

LAYERS = {"gpt2": "transformer.h", "bert": "bert.encoder.layer", "llama": "model.layers"}


def square(output: Any, target: Tensor) -> Tensor:
    loss: Tensor = (output[0] - target[:, None, None]).square().mean()
    return loss


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_a_model_is_cut_unedited(name: str) -> None:
    model, kwargs, _ = make(name, training=False)
    model.config.use_cache = False  # type: ignore[union-attr]
    samples = len(kwargs["input_ids"])
    half = {key: value[: samples // 2] for key, value in kwargs.items()}
    pipe = pipeline(model, (), half, split_spec=before(*(f"{LAYERS[name]}.{i}" for i in (1, 2))))
    stages = [pipe.build_stage(index, "cpu") for index in range(3)]
    target = torch.arange(samples, dtype=torch.float64)
    expected = model(**kwargs)
    wanted = torch.autograd.grad(
        square(expected, target), list(model.parameters()), allow_unused=True
    )
    output = ScheduleInterleaved1F1B(stages, 2, loss_fn=square).step(target=target, **kwargs)
    torch.testing.assert_close(output[0], expected[0], rtol=0, atol=1e-12)
    gradients = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(gradients, list(wanted), rtol=0, atol=1e-12)
