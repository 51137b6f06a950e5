"""Tiny random models of transformers, as their authors wrote them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


class Author(NamedTuple):
    """A model, arguments for it, paths to cut before, and how close it comes."""

    make: Callable[[], nn.Module]
    kwargs: Callable[[], dict[str, Any]]
    points: list[str]
    tolerance: float = 1e-9


LLAMA = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BERT = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
GPT2 = {
    "vocab_size": 64,
    "n_embd": 16,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
T5 = {
    "vocab_size": 64,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 32,
    "num_layers": 3,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
BART = {
    "vocab_size": 64,
    "d_model": 16,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "dropout": 0.0,
    "max_position_embeddings": 64,
}
VIT = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": 3,
    "hidden_dropout_prob": 0.0,
}


def tokens() -> dict[str, Any]:
    mask = torch.ones(4, 7, dtype=torch.long)
    mask[0, 5:] = 0
    return {"input_ids": torch.randint(3, 60, (4, 7)), "attention_mask": mask}


def labelled() -> dict[str, Any]:
    return {**tokens(), "labels": torch.tensor([0, 2, 1, 0])}


def translated() -> dict[str, Any]:
    return {**tokens(), "labels": torch.randint(3, 60, (4, 5))}


def pixels() -> dict[str, Any]:
    return {"pixel_values": torch.randn(4, 3, 8, 8)}


def causal(name: str, **more: Any) -> Callable[[], nn.Module]:
    return built(f"{name}ForCausalLM", f"{name}Config", {**LLAMA, **more})


def built(model: str, config: str, values: dict[str, Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        found: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**values))
        return found

    return make


_LAYERS = ["model.layers.1", "model.layers.2", "model.norm"]

AUTHORS: dict[str, Author] = {
    "gpt2": Author(
        built("GPT2LMHeadModel", "GPT2Config", GPT2), tokens, ["transformer.h.1", "lm_head"]
    ),
    "llama": Author(causal("Llama"), tokens, _LAYERS),
    "llama tied": Author(causal("Llama", tie_word_embeddings=True), tokens, _LAYERS),
    "qwen2": Author(causal("Qwen2"), tokens, _LAYERS),
    "mistral": Author(causal("Mistral"), tokens, _LAYERS),
    "gemma2": Author(causal("Gemma2", head_dim=4), tokens, _LAYERS),
    # Its experts have no double precision.
    "mixtral": Author(causal("Mixtral", num_local_experts=4), tokens, _LAYERS, 1e-5),
    "phi3": Author(causal("Phi3"), tokens, _LAYERS),
    "gpt neox": Author(
        causal("GPTNeoX", hidden_dropout=0.0), tokens, ["gpt_neox.layers.1", "lm_head"]
    ),
    "bert": Author(
        built("BertForMaskedLM", "BertConfig", BERT), tokens, ["bert.encoder.layer.3", "cls"]
    ),
    "roberta": Author(
        built("RobertaForSequenceClassification", "RobertaConfig", {**BERT, "num_labels": 3}),
        labelled,
        ["roberta.encoder.layer.0", "roberta.encoder.layer.2"],
    ),
    "t5": Author(
        built("T5ForConditionalGeneration", "T5Config", T5),
        translated,
        ["encoder.block.1", "decoder.block.0", "decoder.block.2"],
    ),
    "bart": Author(
        built("BartForConditionalGeneration", "BartConfig", BART),
        translated,
        ["model.encoder.layers.1", "model.decoder.layers.0", "model.decoder.layers.2"],
    ),
    "vit": Author(
        built("ViTForImageClassification", "ViTConfig", VIT), pixels, ["vit.layers.1", "classifier"]
    ),
}


class Made(NamedTuple):
    model: nn.Module
    kwargs: dict[str, Any]
    tolerance: float


def made(name: str, *, training: bool = True) -> Made:
    """A model and a batch, in double precision where it can be."""
    author = AUTHORS[name]
    dtype = torch.float64 if author.tolerance < 1e-8 else torch.float32
    model = author.make().to(dtype).train(training)
    torch.manual_seed(1)
    kwargs = {
        key: value.to(dtype) if value.is_floating_point() else value
        for key, value in author.kwargs().items()
    }
    return Made(model, kwargs, author.tolerance)
