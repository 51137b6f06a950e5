"""Mixtures of experts with their balance loss, and losses of what layers leave for the output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import Microbatches
from penstock.testing import Case, compare

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
torch.set_num_threads(1)
SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
    "vocab_size": 32, "num_key_value_heads": 2,
}  # fmt: skip
FOUR = {"num_experts": 4, "num_experts_per_tok": 2}
EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen2Moe": {**FOUR, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "Jamba": {
        **FOUR, "use_mamba_kernels": False, "mamba_d_state": 4, "mamba_dt_rank": 4, "pad_token_id": 0,
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    },
}  # fmt: skip
TOKENS = torch.arange(48).view(6, 8) * 7 % 32


def model_of(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **options)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def own_loss(output: Any, _: Any) -> Tensor:
    loss: Tensor = output.loss
    return loss


def check(model: Any, loss_fn: Callable[[Any, Any], Tensor], schedule: str, **kwargs: Any) -> None:
    """One step has the loss and gradients of a plain loop over the same microbatches."""
    parts = TOKENS.split(2)
    calls = [{"input_ids": p, "labels": p, "use_cache": False, **kwargs} for p in parts]
    case = Case(model, (Microbatches(calls, samples=[2, 2, 2]),), parts, loss_fn)
    compare(case, schedule=schedule, ranks=2, microbatches=3).check(1e-5)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("Mixtral", "ZB-V"),
        ("Jamba", "1F1B"),
        pytest.param("Qwen2Moe", "1F1B", marks=pytest.mark.nightly),
        pytest.param("GptOss", "ZB-V", marks=pytest.mark.nightly),
    ],
)
def test_the_balance_loss_is_that_of_each_microbatch(name: str, schedule: str) -> None:
    model = model_of(name, output_router_logits=True, **EXPERTS[name])
    model.router_aux_loss_coef = model.config.router_aux_loss_coef = 0.5
    check(model, own_loss, schedule)


def of_hidden_states(output: Any, _: Any) -> Tensor:
    """The loss beside what a distillation adds: hidden states and attentions of all layers."""
    kept = [*output.hidden_states, *output.attentions]
    loss: Tensor = output.loss + sum((of.square().mean() for of in kept), torch.zeros(()))
    return loss


def test_a_loss_of_what_layers_leave_for_the_output() -> None:
    model = model_of("Llama", attn_implementation="eager")
    check(model, of_hidden_states, "1F1B", output_hidden_states=True, output_attentions=True)
