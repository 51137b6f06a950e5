"""Small random models of many families of transformers, each with one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

TEXT = {
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
ENCODER = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
PAIR = {
    "vocab_size": 64,
    "d_model": 16,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 64,
}
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "image_size": 8,
    "patch_size": 4,
}
EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def tokens() -> dict[str, Any]:
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, 5:] = 0
    return {"input_ids": torch.randint(3, 60, (2, 7)), "attention_mask": mask}


def whole_tokens() -> dict[str, Any]:
    return {"input_ids": torch.randint(3, 60, (2, 8))}


def translated() -> dict[str, Any]:
    return {**tokens(), "labels": torch.randint(3, 60, (2, 5))}


def pixels(size: int = 8) -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, size, size)}


def larger_pixels() -> dict[str, Any]:
    return pixels(32)


def heard() -> dict[str, Any]:
    return {"input_features": torch.randn(2, 8, 32), "labels": torch.randint(3, 60, (2, 5))}


def sound() -> dict[str, Any]:
    return {"input_values": torch.randn(2, 400)}


def text_and_pixels() -> dict[str, Any]:
    return {**tokens(), **pixels()}


Batch = Callable[[], dict[str, Any]]

FAMILIES: dict[str, tuple[str, str, dict[str, Any], Batch]] = {
    # decoders
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 64, "n_embd": 16, "n_layer": 4, "n_head": 4, "n_positions": 64},
        tokens,
    ),
    "gptj": (
        "GPTJForCausalLM",
        "GPTJConfig",
        {
            "vocab_size": 64,
            "n_embd": 16,
            "n_layer": 4,
            "n_head": 4,
            "n_positions": 64,
            "rotary_dim": 4,
        },
        tokens,
    ),
    "gpt neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "vocab_size": 64,
            "hidden_size": 16,
            "num_layers": 4,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 2]],
            "max_position_embeddings": 64,
        },
        tokens,
    ),
    "gpt neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT, tokens),
    "llama": ("LlamaForCausalLM", "LlamaConfig", TEXT, tokens),
    "llama tied": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**TEXT, "tie_word_embeddings": True},
        tokens,
    ),
    "mistral": ("MistralForCausalLM", "MistralConfig", TEXT, tokens),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**TEXT, **EXPERTS, "output_router_logits": False},
        tokens,
    ),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", TEXT, tokens),
    "qwen2 moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {**TEXT, **EXPERTS, "shared_expert_intermediate_size": 16},
        tokens,
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**TEXT, "head_dim": 4}, tokens),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**TEXT, "head_dim": 4}, tokens),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**TEXT, "head_dim": 4}, tokens),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**TEXT, "head_dim": 4}, tokens),
    "phi": ("PhiForCausalLM", "PhiConfig", TEXT, tokens),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", TEXT, tokens),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", TEXT, tokens),
    "granite": ("GraniteForCausalLM", "GraniteConfig", TEXT, tokens),
    "cohere": ("CohereForCausalLM", "CohereConfig", TEXT, tokens),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", TEXT, tokens),
    "falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        {
            "vocab_size": 64,
            "hidden_size": 16,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "alibi": False,
        },
        tokens,
    ),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": 64, "hidden_size": 16, "n_layer": 4, "n_head": 4},
        tokens,
    ),
    "mpt": (
        "MptForCausalLM",
        "MptConfig",
        {"vocab_size": 64, "d_model": 16, "n_layers": 4, "n_heads": 4, "max_seq_len": 64},
        tokens,
    ),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {
            "vocab_size": 64,
            "hidden_size": 16,
            "num_hidden_layers": 4,
            "ffn_dim": 32,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 16,
        },
        tokens,
    ),
    "starcoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", TEXT, tokens),
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 4, "state_size": 4},
        whole_tokens,
    ),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", TEXT, tokens),
    # encoders
    "bert": ("BertForMaskedLM", "BertConfig", ENCODER, tokens),
    "roberta": (
        "RobertaForSequenceClassification",
        "RobertaConfig",
        {**ENCODER, "num_labels": 3},
        tokens,
    ),
    "distilbert": (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {
            "vocab_size": 64,
            "dim": 16,
            "hidden_dim": 32,
            "n_layers": 4,
            "n_heads": 4,
            "max_position_embeddings": 64,
        },
        tokens,
    ),
    "electra": (
        "ElectraForPreTraining",
        "ElectraConfig",
        {**ENCODER, "embedding_size": 16},
        tokens,
    ),
    "deberta": ("DebertaV2ForMaskedLM", "DebertaV2Config", ENCODER, tokens),
    "albert": (
        "AlbertForMaskedLM",
        "AlbertConfig",
        {**ENCODER, "embedding_size": 8, "num_hidden_groups": 1},
        tokens,
    ),
    "mpnet": ("MPNetForMaskedLM", "MPNetConfig", ENCODER, tokens),
    "modernbert": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {**TEXT, "cls_token_id": 1, "sep_token_id": 2},
        tokens,
    ),
    # both
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 64,
            "d_model": 16,
            "d_kv": 4,
            "d_ff": 32,
            "num_layers": 3,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        translated,
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", PAIR, translated),
    "pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", PAIR, translated),
    "m2m": (
        "M2M100ForConditionalGeneration",
        "M2M100Config",
        {**PAIR, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
        translated,
    ),
    # images and sound
    "vit": ("ViTForImageClassification", "ViTConfig", VISION, pixels),
    "deit": ("DeiTForImageClassification", "DeiTConfig", VISION, pixels),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", VISION, pixels),
    "convnext": (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [4, 8, 8, 8], "depths": [1, 1, 1, 1]},
        larger_pixels,
    ),
    "resnet": (
        "ResNetForImageClassification",
        "ResNetConfig",
        {
            "embedding_size": 4,
            "hidden_sizes": [4, 8, 8, 8],
            "depths": [1, 1, 1, 1],
            "layer_type": "basic",
        },
        larger_pixels,
    ),
    "swin": (
        "SwinForImageClassification",
        "SwinConfig",
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 4,
        },
        larger_pixels,
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **PAIR,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 32,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        heard,
    ),
    "wav2vec2": (
        "Wav2Vec2ForSequenceClassification",
        "Wav2Vec2Config",
        {
            "hidden_size": 16,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "intermediate_size": 32,
            "conv_dim": (8, 8),
            "conv_stride": (5, 2),
            "conv_kernel": (10, 3),
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
            "layerdrop": 0.0,
            "apply_spec_augment": False,
            "classifier_proj_size": 8,
        },
        sound,
    ),
    "clip": (
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {**ENCODER, "hidden_size": 16},
            "vision_config": VISION,
            "projection_dim": 8,
        },
        text_and_pixels,
    ),
    "siglip": (
        "SiglipModel",
        "SiglipConfig",
        {"text_config": {**ENCODER, "projection_size": 16}, "vision_config": VISION},
        text_and_pixels,
    ),
    "upernet": (
        "SegformerForImageClassification",
        "SegformerConfig",
        {
            "hidden_sizes": [4, 8],
            "depths": [1, 1],
            "num_encoder_blocks": 2,
            "num_attention_heads": [1, 2],
            "sr_ratios": [2, 1],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 8,
        },
        larger_pixels,
    ),
}
SINGLE = {"mixtral", "qwen2 moe"}
"""Those whose operations have no double precision."""


def make(name: str, *, training: bool = True) -> tuple[nn.Module, dict[str, Any], float]:
    """A model, a batch, and how close the gradients must come."""
    model_class, config_class, values, batch = FAMILIES[name]
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, model_class)(
        getattr(transformers, config_class)(**values)
    )
    dtype = torch.float32 if name in SINGLE else torch.float64
    kwargs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch().items()}
    return model.to(dtype).train(training), kwargs, 1e-5 if name in SINGLE else 1e-10
