"""The models of diffusers, made small by rules; :data:`SPECIAL` has what no rule can know."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from campaigns.zoo.operators import have_torchvision
from penstock.testing import Case
from tests.catalogue.making import MICROBATCHES, SAMPLES, case_of, mapped

have_torchvision()

import diffusers

WIDTH, HEADS, HEAD = 64, 4, 16
RULES: dict[str, Any] = {
    r"num_layers|num_hidden_layers|depth|num_blocks|num_visual_blocks|num_double_layers": 4,
    r"num_single_layers|num_text_blocks|num_refiner_layers|n_refiner_layers|num_single_blocks": 2,
    r"num_attention_heads|num_heads|n_heads|num_cross_attention_heads|motion_num_attention_heads": HEADS,
    r"num_key_value_heads|num_kv_heads|n_kv_heads": 2,
    r"attention_head_dim|head_dim|cross_attention_head_dim": HEAD,
    r"in_channels|out_channels|latent_channels|z_channels|z_dim|in_visual_dim|out_visual_dim": 4,
    r"(joint_attention|cross_attention|text_embed|text|caption|caption_projection|pooled_projection|cond_token)_dim": WIDTH,
    r"caption_channels|hidden_size|dim|model_dim|cap_feat_dim|inner_dim|encoder_hidden_size|embed_dim|text_dim": WIDTH,
    r"projection_class_embeddings_input_dim|encoder_hid_dim|pooled_projection_dim|in_text_dim|in_text_dim2": WIDTH,
    r"image_dim|text_states_dim|text_states_dim_2|pooled_dim|context_dim|condition_dim|time_dim": WIDTH,
    r"ffn_dim|intermediate_size|ff_dim": 48,
    r"layers_per_block|num_res_blocks": 1,
    r"norm_num_groups|num_groups": 4,
    r"sample_size|sample_height|sample_width|input_size": 8,
    r"sample_frames": 5,
    r"base_dim|base_channels|encoder_dim|decoder_dim|base_block_out_channels": 8,
    r"freq_dim|frequency_embedding_size|time_embed_dim|addition_time_embed_dim": 16,
    r"pos_embed_max_size|max_position_embeddings|text_len|max_text_seq_length": 16,
    r"num_embeds_ada_norm|num_vectors": 20,
    r"vocab_size|num_classes": 50,
    r"transformer_layers_per_block": 1,
    r"latent_dim": 8,
    r"patch_size": 2,
    r"rope_dim|rotary_dim": 16,
    r"conditioning_dim": WIDTH,
}
NEEDED = ("in_channels", "sample_size", "attention_head_dim", "num_attention_heads", "patch_size")
"""What some models have no usual value for, and need."""
AXES = {1: (16,), 2: (8, 8), 3: (4, 4, 8), 4: (4, 4, 4, 4)}
"""How a head is divided among the axes of a rotary table."""


def options_of(kind: type, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a constructor, with small sizes."""
    wanted: dict[str, Any] = {}
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        value = parameter.default
        small = _small(name, value)
        if small is not None:
            wanted[name] = small
    return {**wanted, **changes}


def _small(name: str, value: Any) -> Any:
    if isinstance(value, bool | str | float):
        return 0.0 if isinstance(value, float) and "drop" in name else None
    if isinstance(value, tuple | list):
        if re.search("axes_dim|rope_ax|axes_dims_rope|axes_dims", name):
            return AXES.get(len(value))
        if "block_out_channels" in name or name in ("channels", "widths"):
            return type(value)(8 * min(2, place + 1) for place in range(len(value)))
        if re.search("layers_per_block|num_layers|depths", name):
            return type(value)(1 for _ in value)
        return None
    for pattern, small in RULES.items():
        if not re.fullmatch(pattern, name):
            continue
        if isinstance(value, int):
            return min(small, value) if value > 0 else small
        if value is inspect.Parameter.empty or (value is None and name in NEEDED):
            return small
    return None


# ---- what a forward is given


def _setting(model: nn.Module, *names: str, default: Any = None) -> Any:
    config: Any = model.config
    return next((config[name] for name in names if config.get(name) is not None), default)


def _noisy(model: nn.Module, dims: int) -> Tensor:
    channels = _setting(model, "in_channels", "in_visual_dim", "in_dim", default=4)
    shapes: dict[int, tuple[int, ...]] = {
        2: (channels,), 3: (16, channels), 4: (channels, 8, 8), 5: (channels, 5, 8, 8), 6: (4, channels, 8, 8),
        7: (channels, 16),
    }  # fmt: skip
    if (dims in (4, 5) and "Autoencoder" in type(model).__name__) or "VAE" in type(model).__name__:
        shapes |= {4: (channels, 32, 32), 5: (channels, 5, 32, 32)}
    return torch.randn(SAMPLES, *shapes[dims])


def _texts(model: nn.Module, wide: int) -> Tensor:
    return torch.randn(SAMPLES, 6, wide)


def calls(model: nn.Module, changes: Mapping[str, Any]) -> Iterator[Callable[[], dict[str, Any]]]:
    """What may be the arguments of a model, one guess after the other."""
    names = inspect.signature(model.forward).parameters
    needed = [n for n, p in names.items() if p.default is inspect.Parameter.empty]
    text = [_setting(model, name) for name in TEXTS]
    widths = list(dict.fromkeys([w for w in text if isinstance(w, int)] + [WIDTH]))
    video = re.search(
        "3D|Video|Wan|Temporal|Motion|KVAEVideo|Magvit|Mochi|Allegro|Hunyuan", type(model).__name__
    )
    dims = (5, 6, 3, 4) if video else (4, 3, 5, 7)
    for dim, wide, whole in product(dims, widths, (True, False)):
        yield partial(_call, model, names, needed, dim, wide, whole, changes)


TEXTS = (
    "joint_attention_dim", "cross_attention_dim", "text_embed_dim", "text_dim", "caption_channels", "cap_feat_dim",
    "encoder_hidden_size", "in_text_dim", "text_states_dim", "context_in_dim", "encoder_hid_dim",
)  # fmt: skip


def _call(
    model: nn.Module,
    names: Any,
    needed: list[str],
    dim: int,
    wide: int,
    whole: bool,
    changes: Mapping[str, Any],
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    axes = len(_setting(model, "axes_dims_rope", "axes_dim", "axes_dims", default=(0, 0, 0)))
    main = (
        "hidden_states"
        if "hidden_states" in names
        else "sample"
        if "sample" in names
        else next(iter(names))
    )
    found[main] = _noisy(model, dim)
    makers: dict[str, Callable[[], Any]] = {
        "timestep": lambda: torch.randint(1, 20, (SAMPLES,)) if whole else torch.rand(SAMPLES),
        "t": lambda: torch.rand(SAMPLES),
        "encoder_hidden_states": lambda: _texts(model, wide),
        "r_timestep": lambda: torch.rand(SAMPLES),
        "timestep_r": lambda: torch.rand(SAMPLES),
        "attention_mask": lambda: None,
        "encoder_hidden_states_t5": lambda: _texts(model, wide),
        "encoder_hidden_states_mask": lambda: torch.ones(SAMPLES, 6, dtype=torch.long),
        "encoder_attention_mask": lambda: torch.ones(SAMPLES, 6, dtype=torch.long),
        "pooled_projections": lambda: torch.randn(
            SAMPLES, _setting(model, "pooled_projection_dim", default=WIDTH)
        ),
        "controlnet_cond": lambda: torch.randn(
            SAMPLES, _setting(model, "conditioning_channels", default=3), 64, 64
        ),
        "conditioning_scale": lambda: 1.0,
        "img_ids": lambda: torch.zeros(16, axes),
        "txt_ids": lambda: torch.zeros(6, axes),
        "guidance": lambda: torch.ones(SAMPLES),
        "class_labels": lambda: torch.randint(0, 9, (SAMPLES,)),
        "padding_mask": lambda: torch.zeros(1, 1, 8, 8),
        "position_ids": lambda: torch.zeros(SAMPLES, 22, 3),
        "original_size": lambda: torch.full((SAMPLES, 2), 64.0),
        "target_size": lambda: torch.full((SAMPLES, 2), 64.0),
        "crop_coords": lambda: torch.zeros(SAMPLES, 2),
        "img_shapes": lambda: [(1, 4, 4)] * SAMPLES,
        "fps": lambda: torch.full((SAMPLES,), 8),
        "num_frames": lambda: 1,
        "height": lambda: 4,
        "width": lambda: 4,
    }
    given = {*needed, *({"timestep", "encoder_hidden_states"} & set(names))}
    if _setting(model, "guidance_embeds", "guidance_embed"):
        given |= {"guidance"} & set(names)
    if "LTX" in type(model).__name__:
        given |= {"num_frames", "height", "width"} & set(names)
    given |= {
        "img_ids",
        "txt_ids",
        "pooled_projections",
        "img_shapes",
        "encoder_hidden_states_mask",
    } & set(names)
    if "cross_attention_dim" in model.config and model.config["cross_attention_dim"] is not None:
        given |= {"encoder_hidden_states"} & set(names)
    if _setting(model, "num_embeds_ada_norm"):
        given |= {"timestep", "class_labels"} & set(names)
    for name in given:
        if name in makers and name not in found:
            found[name] = makers[name]()
    for name, value in changes.items():
        if value is None:
            found.pop(name, None)
        else:
            found[name] = value() if callable(value) else value
    if "return_dict" in names:
        found["return_dict"] = False
    return found


def make(name: str) -> Case:
    """A model with its calls."""
    special = SPECIAL.get(name, {})
    kind = getattr(diffusers, name)
    torch.manual_seed(0)
    model = kind(**options_of(kind, special.get("config", {})))
    weights = sum(p.numel() for p in model.parameters())
    if weights > 60e6:
        largest = max(model.named_parameters(), key=lambda p: p[1].numel())
        raise ValueError(
            f"{weights / 1e6:.0f} million parameters; {largest[0]} has {list(largest[1].shape)}"
        )
    model.train()
    errors = []
    for give in calls(model, special.get("call", {})):
        try:
            with torch.no_grad():
                model(**mapped(give(), torch.clone))
            return case_of(model, [((), give()) for _ in range(MICROBATCHES)])
        except Exception as error:
            errors.append(error)
    texts = dict.fromkeys(str(error)[:120] for error in errors)
    raise ValueError(" // ".join(texts)) from errors[0]


def names() -> Iterator[str]:
    """The classes of models that can be run."""
    for name in sorted(dir(diffusers)):
        with contextlib.suppress(Exception):
            kind = getattr(diffusers, name)
            if (
                (
                    isinstance(kind, type)
                    and issubclass(kind, diffusers.ModelMixin)
                    and "pipeline" not in kind.__module__
                )
                and kind is not diffusers.ModelMixin
                and not name.startswith("Multi")
            ):
                yield name


_GREY = {"controlnet_cond": lambda: torch.randn(SAMPLES, 3, 64, 64)}
_SD = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "block_out_channels": (8, 16), "layers_per_block": 1,
    "norm_num_groups": 4, "attention_head_dim": 4, "cross_attention_dim": 32, "sample_size": 8,
}  # fmt: skip
_NO_UP = {
    name: value for name, value in _SD.items() if name not in ("up_block_types", "sample_size")
}
_VAE = {
    "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"),
    "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"), "block_out_channels": (8, 16),
    "layers_per_block": 1, "latent_channels": 4, "norm_num_groups": 4, "in_channels": 3, "out_channels": 3,
}  # fmt: skip
_IMAGE = {"sample": lambda: torch.randn(SAMPLES, 3, 16, 16), "sample_posterior": True}
_VIDEO = {"sample": lambda: torch.randn(SAMPLES, 3, 5, 16, 16), "sample_posterior": True}
SPECIAL: dict[str, dict[str, Any]] = {
    "UNet2DConditionModel": {"config": _SD},
    "ControlNetModel": {"config": {**_NO_UP, "conditioning_embedding_out_channels": (8, 16)},
                        "call": {"controlnet_cond": lambda: torch.randn(SAMPLES, 3, 16, 16)}},
    "UNet2DModel": {"config": {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1,
                               "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "attention_head_dim": 4,
                               "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "sample_size": 8}},
    "UNet3DConditionModel": {"config": {**_SD, "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
                                        "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D")}},
    "UNetMotionModel": {"config": {**{k: v for k, v in _SD.items() if k != "attention_head_dim"},
                                   "num_attention_heads": 2, "motion_num_attention_heads": 2,
                                   "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
                                   "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion")},
                        "call": {"encoder_hidden_states": lambda: torch.randn(SAMPLES, 6, 32)}},
    "AutoencoderKL": {"config": _VAE, "call": _IMAGE},
    "AsymmetricAutoencoderKL": {"config": {
        "down_block_types": ("DownEncoderBlock2D", "DownEncoderBlock2D"), "down_block_out_channels": (8, 16),
        "layers_per_down_block": 1, "up_block_types": ("UpDecoderBlock2D", "UpDecoderBlock2D"),
        "up_block_out_channels": (8, 16), "layers_per_up_block": 1, "norm_num_groups": 4, "in_channels": 3,
        "out_channels": 3}, "call": _IMAGE},
    "VQModel": {"config": {**_VAE, "num_vq_embeddings": 16, "vq_embed_dim": 4}, "call": {"sample": _IMAGE["sample"]}},
    "AutoencoderTiny": {"config": {"encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8),
                                   "num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1), "in_channels": 3,
                                   "out_channels": 3}, "call": {"sample": _IMAGE["sample"]}},
    "AutoencoderKLWan": {"config": {"base_dim": 4, "dim_mult": [1, 2, 2], "num_res_blocks": 1, "z_dim": 4,
                                    "temperal_downsample": [False, True], "in_channels": 3, "out_channels": 3,
                                    "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}, "call": _VIDEO},
    "AutoencoderKLQwenImage": {"config": {"base_dim": 4, "dim_mult": [1, 2, 2], "num_res_blocks": 1, "z_dim": 4,
                                          "temperal_downsample": [False, True]},
                               "call": {**_VIDEO, "sample": lambda: torch.randn(SAMPLES, 3, 1, 16, 16)}},
    "AutoencoderKLTemporalDecoder": {"config": {"block_out_channels": (8, 16), "layers_per_block": 1,
                                                "down_block_types": ("DownEncoderBlock2D",) * 2, "in_channels": 3,
                                                "out_channels": 3},
                                     "call": {**_IMAGE, "num_frames": 1}},
    "AutoencoderKLCogVideoX": {"config": {**_VAE, "down_block_types": ("CogVideoXDownBlock3D",) * 2,
                                          "up_block_types": ("CogVideoXUpBlock3D",) * 2,
                                          "temporal_compression_ratio": 2},
                               "call": _VIDEO},
    "AutoencoderOobleck": {"config": {"encoder_hidden_size": 8, "downsampling_ratios": [2, 2], "channel_multiples": [1, 2],
                                      "decoder_channels": 8, "decoder_input_channels": 4, "audio_channels": 2},
                           "call": {"sample": lambda: torch.randn(SAMPLES, 2, 32)}},
    "FluxTransformer2DModel": {"call": {"hidden_states": lambda: torch.randn(SAMPLES, 16, 4),
                                        "encoder_hidden_states": lambda: torch.randn(SAMPLES, 6, 64)}},
    "T2IAdapter": {"config": {"channels": [8, 16], "num_res_blocks": 1, "downscale_factor": 2, "in_channels": 3},
                   "call": {"x": lambda: torch.randn(SAMPLES, 3, 16, 16)}},
    "StableCascadeUNet": {
        "config": {"in_channels": 4, "out_channels": 4, "conditioning_dim": 16, "block_out_channels": (16, 16),
                   "num_attention_heads": (0, 2), "down_num_layers_per_block": (1, 1),
                   "up_num_layers_per_block": (1, 1), "down_blocks_repeat_mappers": (1, 1),
                   "up_blocks_repeat_mappers": (2, 2), "clip_text_pooled_in_channels": 16, "clip_seq": 2,
                   "block_types_per_layer": (("SDCascadeResBlock", "SDCascadeTimestepBlock"),
                                             ("SDCascadeResBlock", "SDCascadeTimestepBlock", "SDCascadeAttnBlock")),
                   "switch_level": (False,), "timestep_ratio_embedding_dim": 16},
        "call": {"sample": lambda: torch.randn(SAMPLES, 4, 8, 8), "timestep_ratio": lambda: torch.rand(SAMPLES),
                 "clip_text_pooled": lambda: torch.randn(SAMPLES, 1, 16)}},
    "DiTTransformer2DModel": {"call": {"timestep": lambda: torch.randint(0, 9, (SAMPLES,))}},
    "UVit2DModel": {"config": {"hidden_size": 32, "cond_embed_dim": 16, "micro_cond_encode_dim": 4,
                               "micro_cond_embed_dim": 20, "encoder_hidden_size": 32, "vocab_size": 50,
                               "codebook_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
                               "in_channels": 32, "block_out_channels": 32, "intermediate_size": 48,
                               "block_num_heads": 4, "num_res_blocks": 1, "sample_size": 8},
                    "call": {"input_ids": lambda: torch.randint(0, 48, (SAMPLES, 8, 8)),
                             "encoder_hidden_states": lambda: torch.randn(SAMPLES, 6, 32),
                             "pooled_text_emb": lambda: torch.randn(SAMPLES, 16),
                             "micro_conds": lambda: torch.rand(SAMPLES, 5)}},
    "AutoencoderKLKVAE": {"config": {"channels": 32, "num_enc_blocks": 1, "num_dec_blocks": 1, "z_channels": 4,
                                     "ch_mult": (1, 1)}, "call": _IMAGE},
    "AutoencoderVidTok": {"config": {"ch": 32, "ch_mult": [1, 1, 1], "num_res_blocks": 1, "in_channels": 3, "out_channels": 3,
                                     "spatial_ds": [1], "spatial_us": [1], "tempo_ds": [1], "tempo_us": [1]},
                          "call": {**_VIDEO, "sample": lambda: torch.randn(SAMPLES, 3, 5, 16, 16)}},
    "AutoencoderKLHunyuanImage": {"config": {"in_channels": 3, "out_channels": 3, "latent_channels": 4,
                                             "block_out_channels": (32, 32), "layers_per_block": 1,
                                             "spatial_compression_ratio": 2, "sample_size": 16}, "call": _IMAGE},
    "AutoencoderKLHunyuanVideo15": {"config": {"in_channels": 3, "out_channels": 3, "latent_channels": 4,
                                               "block_out_channels": (32, 32, 32), "spatial_compression_ratio": 4,
                                               "temporal_compression_ratio": 2}, "call": _VIDEO},
    "Kandinsky3UNet": {"config": {"block_out_channels": (32, 64), "layers_per_block": 1, "groups": 4,
                                  "attention_head_dim": 8, "cross_attention_dim": 32, "encoder_hid_dim": 32,
                                  "time_embedding_dim": 32, "in_channels": 4},
                       "call": {"encoder_hidden_states": lambda: torch.randn(SAMPLES, 6, 32),
                                "encoder_attention_mask": lambda: torch.ones(SAMPLES, 6)}},
    "LatteTransformer3DModel": {"config": {"in_channels": 4, "out_channels": 8, "num_layers": 3, "patch_size": 2,
                                           "sample_size": 8, "caption_channels": 64, "cross_attention_dim": 64,
                                           "norm_type": "ada_norm_single", "num_embeds_ada_norm": 20, "video_length": 2,
                                           "norm_elementwise_affine": False},
                                "call": {"hidden_states": lambda: torch.randn(SAMPLES, 4, 2, 8, 8), "class_labels": None}},
    "PriorTransformer": {"config": {"num_layers": 4, "embedding_dim": 16, "num_embeddings": 6},
                         "call": {"hidden_states": lambda: torch.randn(SAMPLES, 16),
                                  "proj_embedding": lambda: torch.randn(SAMPLES, 16),
                                  "encoder_hidden_states": lambda: torch.randn(SAMPLES, 6, 16)}},
    "ChromaTransformer2DModel": {"config": {"approximator_num_channels": 8, "approximator_hidden_dim": 16,
                                            "approximator_layers": 1},
                                 "call": {"encoder_hidden_states": lambda: torch.randn(SAMPLES, 6, 64)}},
    "HiDreamImageTransformer2DModel": {
        "config": {"patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2, "num_single_layers": 2,
                   "caption_channels": [32, 16], "text_emb_dim": 16, "llama_layers": [0, 1], "max_resolution": (16, 16),
                   "axes_dims_rope": (8, 4, 4), "num_routed_experts": 2},
        "call": {"timesteps": lambda: torch.ones(SAMPLES), "encoder_hidden_states_t5": lambda: torch.randn(SAMPLES, 6, 32),
                 "encoder_hidden_states_llama3": lambda: torch.randn(2, SAMPLES, 6, 16),
                 "pooled_embeds": lambda: torch.randn(SAMPLES, 16), "hidden_states": lambda: torch.randn(SAMPLES, 4, 8, 8)}},
    "GlmImageTransformer2DModel": {"config": {"prior_vq_quantizer_codebook_size": 20, "condition_dim": 16},
                                   "call": {"prior_token_id": lambda: torch.randint(0, 20, (SAMPLES, 16)),
                                            "prior_token_drop": lambda: torch.zeros(SAMPLES, 16, dtype=torch.bool)}},
    "EasyAnimateTransformer3DModel": {"config": {"in_channels": 4, "out_channels": 4, "patch_size": 2, "mmdit_layers": 2,
                                                 "num_layers": 4}},
    "CosmosTransformer3DModel": {"config": {"attention_head_dim": 16, "max_size": (4, 8, 8), "text_embed_dim": 32,
                                            "adaln_lora_dim": 4, "num_layers": 4},
                                 "call": {"hidden_states": lambda: torch.randn(SAMPLES, 4, 1, 8, 8), "fps": 30,
                                          "encoder_hidden_states": lambda: torch.randn(SAMPLES, 6, 32)}},
    "SparseControlNetModel": {"config": {**{k: v for k, v in _NO_UP.items() if k != "attention_head_dim"},
                                         "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
                                         "conditioning_channels": 3, "conditioning_embedding_out_channels": (8, 16),
                                         "num_attention_heads": 2, "motion_num_attention_heads": 2},
                              "call": {"sample": lambda: torch.randn(SAMPLES, 4, 3, 8, 8),
                                       "controlnet_cond": lambda: torch.randn(SAMPLES, 3, 3, 16, 16),
                                       "conditioning_mask": lambda: torch.ones(SAMPLES, 1, 3, 16, 16),
                                       "encoder_hidden_states": lambda: torch.randn(SAMPLES, 6, 32)}},
    "StableAudioDiTModel": {"config": {"sample_size": 16, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 64,
                                       "cross_attention_input_dim": 64, "global_states_input_dim": 32, "time_proj_dim": 16,
                                       "num_key_value_attention_heads": 2},
                            "call": {"hidden_states": lambda: torch.randn(SAMPLES, 4, 16),
                                     "global_hidden_states": lambda: torch.randn(SAMPLES, 1, 32),
                                     "encoder_hidden_states": lambda: torch.randn(SAMPLES, 6, 64)}},
    "I2VGenXLUNet": {"config": {**_SD, "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
                                "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D")},
                     "call": {"sample": lambda: torch.randn(SAMPLES, 4, 3, 8, 8),
                              "image_latents": lambda: torch.randn(SAMPLES, 4, 3, 8, 8),
                              "image_embeddings": lambda: torch.randn(SAMPLES, 32), "fps": lambda: torch.tensor([8] * SAMPLES),
                              "encoder_hidden_states": lambda: torch.randn(SAMPLES, 6, 32)}},
    "AutoencoderRAE": {"config": {"encoder_hidden_size": 32, "encoder_num_hidden_layers": 3, "decoder_hidden_size": 32,
                                  "decoder_num_hidden_layers": 3, "decoder_num_attention_heads": 4,
                                  "decoder_intermediate_size": 48, "patch_size": 4, "encoder_patch_size": 14,
                                  "encoder_input_size": 28, "image_size": 8},
                       "call": {"sample": lambda: torch.randn(SAMPLES, 3, 28, 28)}},
    "QwenImageTransformer2DModel": {"config": {"patch_size": 2, "in_channels": 16, "out_channels": 4},
                                    "call": {"hidden_states": lambda: torch.randn(SAMPLES, 16, 16), "guidance": None,
                                             "img_shapes": lambda: [[(1, 4, 4)]] * SAMPLES,
                                             "encoder_hidden_states": lambda: torch.randn(SAMPLES, 6, 64)}},
    "T5FilmDecoder": {"config": {"input_dims": 8, "targets_length": 8, "d_model": 32, "num_layers": 4, "num_heads": 4,
                                 "d_kv": 8, "d_ff": 48},
                      "call": {"encodings_and_masks": lambda: [(torch.randn(SAMPLES, 5, 32), torch.ones(SAMPLES, 5))],
                               "decoder_input_tokens": lambda: torch.randn(SAMPLES, 8, 8),
                               "decoder_noise_time": lambda: torch.rand(SAMPLES)}},
    "MMAudioVAE": {"config": {"mel_bins": 8, "latent_channels": 4, "hidden_channels": 8, "channel_multipliers": (1, 2),
                              "layers_per_block": 1},
                   "call": {"sample": lambda: torch.randn(SAMPLES, 8, 16), "sample_posterior": True}},
    "AceStepTransformer1DModel": {"config": {"num_hidden_layers": 4, "audio_acoustic_hidden_dim": 4, "in_channels": 12,
                                             "sliding_window": 4, "num_attention_heads": 4, "head_dim": 16},
                                  "call": {"hidden_states": lambda: torch.randn(SAMPLES, 16, 4),
                                           "context_latents": lambda: torch.randn(SAMPLES, 16, 8),
                                           "encoder_hidden_states": lambda: torch.randn(SAMPLES, 6, 64)}},
    "MotionAdapter": {"config": {"block_out_channels": (8, 16), "motion_norm_num_groups": 4, "motion_num_attention_heads": 2}},
    "SD3ControlNetModel": {"call": {"controlnet_cond": lambda: torch.randn(SAMPLES, 4, 8, 8)}},
    "SanaControlNetModel": {"call": {"controlnet_cond": lambda: torch.randn(SAMPLES, 4, 8, 8)}},
    "FluxControlNetModel": {"call": {"controlnet_cond": lambda: torch.randn(SAMPLES, 16, 4),
                                     "hidden_states": lambda: torch.randn(SAMPLES, 16, 4),
                                     "encoder_hidden_states": lambda: torch.randn(SAMPLES, 6, 64)}},
    "HunyuanVideo15Transformer3DModel": {"config": {"text_embed_2_dim": 16, "image_embed_dim": 16},
                                         "call": {"encoder_hidden_states_2": lambda: torch.randn(SAMPLES, 4, 16),
                                                  "encoder_attention_mask_2": lambda: torch.ones(SAMPLES, 4),
                                                  "image_embeds": lambda: torch.randn(SAMPLES, 3, 16)}},
    "AnyFlowTransformer3DModel": {"call": {"hidden_states": lambda: torch.randn(SAMPLES, 5, 4, 8, 8),
                                           "timestep": lambda: torch.rand(SAMPLES, 5), "r_timestep": lambda: torch.rand(SAMPLES, 5)}},
    "UNetControlNetXSModel": {"config": {**_NO_UP, "sample_size": 8, "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
                                         "norm_num_groups": (4, 4), "num_attention_heads": (2, 2)}},
    "LuminaNextDiT2DModel": {"config": {"num_kv_heads": 2, "multiple_of": 8, "cross_attention_dim": 64},
                             "call": {"encoder_mask": lambda: torch.ones(SAMPLES, 6, dtype=torch.bool),
                                      "image_rotary_emb": lambda: torch.ones(16, 8, dtype=torch.complex64)}},
    "OmniGenTransformer2DModel": {
        "config": {"pad_token_id": 0, "num_layers": 4, "time_step_dim": 16},
        "call": {"hidden_states": lambda: torch.randn(SAMPLES, 4, 8, 8), "input_ids": lambda: torch.randint(1, 50, (SAMPLES, 6)),
                 "input_img_latents": list, "input_image_sizes": dict, "timestep": lambda: torch.rand(SAMPLES),
                 "attention_mask": lambda: torch.ones(SAMPLES, 23, 23), "position_ids": lambda: torch.arange(23).expand(SAMPLES, -1)}},
    "PRXTransformer2DModel": {"config": {"axes_dim": [8, 8], "context_in_dim": 64}},
}  # fmt: skip
"""What is special, by class: ``config`` sizes and ``call`` arguments; ``None`` leaves one out."""
MODELS: dict[str, Callable[[], Case]] = {name: partial(make, name) for name in names()}
