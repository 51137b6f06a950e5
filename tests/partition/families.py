"""Small random models of many families of transformers, each with one batch."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = {
    "vocab_size": 64,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim"), 16),
    **dict.fromkeys(("intermediate_size", "hidden_dim", "ffn_dim", "d_ff"), 32),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "state_size", "rotary_dim"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **dict.fromkeys(("num_local_experts", "num_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), 0),
    **dict.fromkeys(("bos_token_id", "cls_token_id"), 1),
    **dict.fromkeys(("eos_token_id", "sep_token_id"), 2),
    **dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop"), 0.0),
}
"""What every configuration gets that has it."""
VISION = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4,
          "intermediate_size": 32, "image_size": 8, "patch_size": 4}  # fmt: skip
STEPS = {"hidden_sizes": [4, 8, 8, 8], "depths": [1, 1, 1, 1]}


def tokens(count: int = 7) -> Tensor:
    return torch.randint(3, 60, (2, count))


def images(size: int) -> Tensor:
    return torch.randn(2, 3, size, size)


def batch(kind: str) -> dict[str, Any]:
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, 5:] = 0
    text = {"input_ids": tokens(), "attention_mask": mask}
    return {
        "text": text,
        "whole text": {"input_ids": tokens(8)},
        "translation": {**text, "labels": tokens(5)},
        "image": {"pixel_values": images(8)},
        "large image": {"pixel_values": images(32)},
        "text and image": {**text, "pixel_values": images(8)},
        "speech": {"input_features": torch.randn(2, 8, 32), "labels": tokens(5)},
        "sound": {"input_values": torch.randn(2, 400)},
    }[kind]


class Family(NamedTuple):
    """The class of a model, what it takes, and its sizes beside the usual ones."""

    model: str
    takes: str
    sizes: dict[str, Any]


def text(model: str, **sizes: Any) -> Family:
    return Family(model, "text", sizes)


def image(model: str, **sizes: Any) -> Family:
    return Family(model, "image", VISION | sizes)


def steps(model: str, **sizes: Any) -> Family:
    return Family(model, "large image", sizes)


FAMILIES = {
    # decoders
    "gpt2": text("GPT2LMHeadModel"),
    "gptj": text("GPTJForCausalLM"),
    "gpt neo": text("GPTNeoForCausalLM", attention_types=[[["global", "local"], 2]]),
    "gpt neox": text("GPTNeoXForCausalLM"),
    "llama": text("LlamaForCausalLM"),
    "llama tied": text("LlamaForCausalLM", tie_word_embeddings=True),
    "mistral": text("MistralForCausalLM"),
    "mixtral": text("MixtralForCausalLM", output_router_logits=False),
    "qwen2": text("Qwen2ForCausalLM"),
    "qwen2 moe": text("Qwen2MoeForCausalLM"),
    "qwen3": text("Qwen3ForCausalLM"),
    "gemma": text("GemmaForCausalLM"),
    "gemma2": text("Gemma2ForCausalLM"),
    "gemma3": text("Gemma3ForCausalLM"),
    "phi": text("PhiForCausalLM"),
    "phi3": text("Phi3ForCausalLM"),
    "olmo2": text("Olmo2ForCausalLM"),
    "granite": text("GraniteForCausalLM"),
    "cohere": text("CohereForCausalLM"),
    "stablelm": text("StableLmForCausalLM"),
    "falcon": text("FalconForCausalLM", alibi=False),
    "bloom": text("BloomForCausalLM"),
    "mpt": text("MptForCausalLM"),
    "opt": text("OPTForCausalLM"),
    "starcoder2": text("Starcoder2ForCausalLM"),
    "mamba": Family("MambaForCausalLM", "whole text", {}),
    "smollm3": text("SmolLM3ForCausalLM"),
    # encoders
    "bert": text("BertForMaskedLM"),
    "roberta": text("RobertaForSequenceClassification", num_labels=3),
    "distilbert": text("DistilBertForMaskedLM"),
    "electra": text("ElectraForPreTraining", embedding_size=16),
    "deberta": text("DebertaV2ForMaskedLM"),
    "albert": text("AlbertForMaskedLM", embedding_size=8, num_hidden_groups=1),
    "mpnet": text("MPNetForMaskedLM"),
    "modernbert": text("ModernBertForMaskedLM"),
    # both
    "t5": Family(
        "T5ForConditionalGeneration", "translation", {"num_layers": 3, "decoder_start_token_id": 0}
    ),
    "bart": Family("BartForConditionalGeneration", "translation", {}),
    "pegasus": Family("PegasusForConditionalGeneration", "translation", {}),
    "m2m": Family("M2M100ForConditionalGeneration", "translation", {}),
    # images and sound
    "vit": image("ViTForImageClassification"),
    "deit": image("DeiTForImageClassification"),
    "dinov2": image("Dinov2ForImageClassification"),
    "convnext": steps("ConvNextForImageClassification", **STEPS),
    "resnet": steps(
        "ResNetForImageClassification", embedding_size=4, layer_type="basic", **STEPS
    ),
    "swin": steps(
        "SwinForImageClassification", image_size=32, patch_size=4, embed_dim=8, depths=[1, 1],
        num_heads=[2, 2], window_size=4,
    ),
    "segformer": steps(
        "SegformerForImageClassification", hidden_sizes=[4, 8], depths=[1, 1], num_encoder_blocks=2,
        num_attention_heads=[1, 2], sr_ratios=[2, 1], patch_sizes=[3, 3], strides=[2, 2],
        mlp_ratios=[2, 2], decoder_hidden_size=8,
    ),
    "whisper": Family(
        "WhisperForConditionalGeneration", "speech",
        {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32,
         "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None},
    ),
    "wav2vec2": Family(
        "Wav2Vec2ForSequenceClassification", "sound",
        {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "layerdrop": 0.0,
         "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
         "apply_spec_augment": False, "classifier_proj_size": 8},
    ),
    "clip": Family(
        "CLIPModel", "text and image",
        {"text_config": SIZES, "vision_config": VISION, "projection_dim": 8},
    ),
    "siglip": Family(
        "SiglipModel", "text and image",
        {"text_config": {**SIZES, "projection_size": 16}, "vision_config": VISION},
    ),
}  # fmt: skip
SINGLE = {"mixtral", "qwen2 moe"}
"""Those whose operations have no double precision."""


def make(name: str, *, training: bool = True) -> tuple[nn.Module, dict[str, Any], float]:
    """A model, a batch, and how close the gradients must come."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    kind = getattr(transformers, family.model)
    known = inspect.signature(kind.config_class.__init__).parameters
    usual = {size: value for size, value in SIZES.items() if size in known}
    model: nn.Module = kind(kind.config_class(**usual | family.sizes))
    dtype = torch.float32 if name in SINGLE else torch.float64
    arguments = batch(family.takes).items()
    kwargs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in arguments}
    return model.to(dtype).train(training), kwargs, 1e-5 if name in SINGLE else 1e-10
