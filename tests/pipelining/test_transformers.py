"""transformers' models, unedited, traced and cut: outputs and gradients of the unsplit model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.pipelining import ScheduleInterleaved1F1B, SplitPoint, pipeline

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "vocab_size": 50,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=16,
        n_layer=3,
        n_head=2,
        vocab_size=50,
        n_positions=16,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL))  # type: ignore[no-any-return]


def llama() -> nn.Module:
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=1)
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "GPT-2": (gpt2, {"use_cache": False}, "transformer.h"),
    "BERT": (bert, {}, "bert.encoder.layer"),
    "Llama": (llama, {"use_cache": False}, "model.layers"),
}
IDS = torch.arange(28).view(4, 7) % 50
MASK = torch.ones_like(IDS)
MASK[:, -1] = torch.tensor([1, 0, 1, 0])


def token_loss(output: Any, target: Tensor) -> Tensor:
    loss: Tensor = nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())
    return loss


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_cut_unedited(name: str) -> None:
    make, options, layers = MODELS[name]
    torch.manual_seed(0)
    model = make().double().eval()
    passed = {"attention_mask": MASK, **options}
    example = {"input_ids": IDS[:2], **options, "attention_mask": MASK[:2]}
    spec = {f"{layers}.{index}": SplitPoint.BEGINNING for index in (1, 2)}
    pipe = pipeline(model, (), example, split_spec=spec)
    stages = [pipe.build_stage(index, "cpu") for index in range(3)]
    schedule = ScheduleInterleaved1F1B(stages, 2, loss_fn=token_loss)
    expected = model(input_ids=IDS, **passed)
    loss = token_loss(expected, IDS)
    wanted = torch.autograd.grad(loss, list(model.parameters()))
    losses: list[Tensor] = []
    output = schedule.step(input_ids=IDS, target=IDS, losses=losses, **passed)
    torch.testing.assert_close(output.logits, expected.logits, rtol=0, atol=1e-12)
    assert float(torch.stack(losses).mean()) == pytest.approx(float(loss.detach()), abs=1e-12)
    gradients = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(gradients, list(wanted), rtol=0, atol=1e-12)
