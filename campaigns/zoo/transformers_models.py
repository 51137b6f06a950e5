"""One small model of each family of transformers, made by rules.

A rule makes sizes small by their names, and gives arguments by theirs; :data:`SPECIAL` has what no rule can know.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from campaigns.zoo.operators import have_torchvision
from penstock.testing import Case
from tests.catalogue.making import MICROBATCHES, SAMPLES, Call, case_of, mapped

have_torchvision()  # before transformers looks for it

import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

VOCAB, WIDTH, HEADS, LAYERS, LENGTH, SIDE, PATCH = 96, 32, 4, 4, 8, 16, 4
HEADS_IN_ORDER = (
    "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM",
    "SPEECH_SEQ_2_SEQ", "CTC", "RNNT", "TDT", "SEMANTIC_SEGMENTATION", "UNIVERSAL_SEGMENTATION",
    "INSTANCE_SEGMENTATION", "OBJECT_DETECTION", "ZERO_SHOT_OBJECT_DETECTION", "DEPTH_ESTIMATION",
    "IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "AUDIO_CLASSIFICATION", "TIME_SERIES_PREDICTION",
    "PRETRAINING", "SEQUENCE_CLASSIFICATION", "MASKED_IMAGE_MODELING", "KEYPOINT_DETECTION",
    "KEYPOINT_MATCHING", "MASK_GENERATION", "TEXT_TO_SPECTROGRAM", "TEXT_TO_WAVEFORM", "IMAGE_MATTING",
    "IMAGE_TO_IMAGE", "POSE_ESTIMATION", "RETRIEVAL", "TEXT_RECOGNITION", "TABLE_RECOGNITION",
)  # fmt: skip
"""The tasks of ``transformers``; a family's model is that of the first one that it has."""
RULES: dict[str, int] = {
    r"(hidden_size|n_embd|d_model|dim|embed_dim|embedding_size|word_embed_proj_dim|embed_hidden_size)": WIDTH,
    r"(out_hidden_size|output_hidden_size|\w+_hidden_size|projection_dim|output_dim|hidden_dim)": WIDTH,
    r"(projection_size|input_dim|query_dim|out_dim|vision_output_dim|embedding_dim|lstm_dim)": WIDTH,
    r"(\w*intermediate_size|\w*ffn_dim|d_ff|mlp_dim|ffn_hidden_size|d_inner|linear_units)": 48,
    r"(num_hidden_layers|n_layer|n_layers|num_layers|layers|depth|encoder_layers|decoder_layers)": LAYERS,
    r"(num_(en|de)coder_layers|(en|de)coder_num_hidden_layers|num_blocks)": LAYERS,
    r"(max_window_layers|num_conv_layers)": 2,
    r"(num_attention_heads|n_head|n_heads|num_heads|(en|de)coder_attention_heads|attention_heads)": HEADS,
    r"((en|de)coder_num_attention_heads|\w+_num_attention_heads|num_head)": HEADS,
    r"(num_key_value_heads|\w+_num_key_value_heads|num_kv_heads|n_head_kv)": 2,
    r"(head_dim|d_kv|swa_head_dim|attention_head_dim|dim_head|head_size)": 8,
    r"(vocab_size|\w+_vocab_size|vocab_size_per_layer_input)": VOCAB,
    r"(max_position_embeddings|n_positions|max_seq_len|max_sequence_length|max_target_positions)": 64,
    r"(max_source_positions)": 64,
    r"(num_local_experts|num_experts|n_routed_experts|moe_num_experts|num_experts_per_layer)": 4,
    r"(num_experts_per_tok|moe_topk|moe_k|num_selected_experts|num_experts_per_token)": 2,
    r"(n_group|topk_group|num_expert_group)": 1,
    r"(n_shared_experts|num_shared_experts|moe_num_shared_experts)": 1,
    r"(image_size|pretrain_image_size|crop_size|train_image_size)": SIDE,
    r"(patch_size)": PATCH,
    r"(temporal_patch_size|tubelet_size|num_frames|patch_temporal)": 2,
    r"(q_lora_rank|kv_lora_rank|o_lora_rank|index_head_dim)": 16,
    r"(qk_nope_head_dim|qk_rope_head_dim|v_head_dim)": 8,
    r"(qk_head_dim)": 16,
    r"(sliding_window|sliding_window_size|attention_chunk_size|local_attention)": 8,
    r"(window_size)": 4,
    r"(index_topk|index_n_heads)": 4,
    r"(mamba_n_heads|mamba_num_heads)": 8,
    r"(n_mamba_heads|linear_num_\w+_heads|linear_num_heads)": HEADS,
    r"(mamba_d_head|mamba_head_dim|linear_\w+_head_dim|linear_head_dim)": 8,
    r"(mamba_d_state|state_size|ssm_state_size|mamba_dt_rank|time_step_rank)": 8,
    r"(mamba_chunk_size|chunk_size)": 4,
    r"(type_vocab_size)": 2,
    r"(num_queries|num_query_tokens|num_image_tokens|num_proposals)": 6,
    r"(num_mel_bins|n_mels|mel_dim|n_mel_bins|num_mels)": 16,
    r"(num_register_tokens)": 2,
    r"(num_codebooks|num_quantizers)": 2,
    r"(codebook_size|num_embeddings|num_embeds)": 64,
    r"(mask_time_length|mask_feature_length|mask_time_min_masks)": 2,
    r"(mm_tokens_per_image)": 4,
    r"(emb_dim)": WIDTH,
    r"(context_size)": 16,
    r"(prediction_length)": 4,
    r"(codebook_dim|latent_dim|latent_channels|codevector_dim|proj_codevector_dim)": 16,
    r"(base_channels|num_filters|stem_channels|embed_channels)": 8,
    r"(num_conv_pos_embeddings)": 4,
    r"(num_conv_pos_embedding_groups)": 2,
    r"(conv_depthwise_kernel_size|conv_kernel_size|depthwise_conv_kernel_size)": 3,
    r"(num_labels|num_classes)": 3,
    r"(first_k_dense_replace|num_dense_layers|n_dense_layers)": 1,
    r"(num_kv_shared_layers)": 2,
    r"(hidden_size_per_layer_input)": 8,
    r"(fpn_hidden_size|mask_feature_size|feature_size|fusion_hidden_size|\w+_feature_size)": 32,
    r"(classifier_proj_size)": 8,
    r"(num_denoising|train_num_points)": 8,
    r"(rotary_dim)": 4,
    r"(max_2d_position_embeddings|max_rel_pos|max_rel_2d_pos)": 64,
    r"(coordinate_size|shape_size)": 5,
    r"(num_position_embeddings)": 16,
    r"(vocab_offset)": 0,
    r"(query_pre_attn_scalar)": 8,
    r"(upsample_initial_channel)": 16,
    r"(output_channels)": 32,
}
COUNTS = (
    r"(num_hidden_layers|n_layers?|num_layers|layers|depth|(en|de)coder_layers|num_(en|de)coder_layers)"
    r"|\w*vocab_size|max_position_embeddings|n_positions|num_queries|num_denoising|num_local_experts"
    r"|(en|de)coder_num_hidden_layers|train_num_points|codebook_size|num_experts|n_routed_experts"
)
"""The sizes that are no widths."""
"""Sizes by name; a whole number that is 0 or below by default stays, since it turns something off."""
MARKS = {"pad": 0, "bos": 1, "eos": 2, "decoder_start": 1, "cls": 1, "sep": 2, "mask": 3, "unk": 3}
IMAGE, VIDEO, AUDIO = 90, 91, 92
"""The tokens that stand for what is no text; texts have smaller ones."""
TEXT = (10, 80)


def shrunk(config: Any, changes: Mapping[str, Any], *, widths: bool = True) -> Any:
    """A configuration of the same class with small sizes.

    Args:
        config: the usual one.
        changes: what the rules do not know, by name; for inner configurations ``inner.name``.
        widths: whether to make widths small too, rather than numbers of layers, words and the like alone.
    """
    wanted: dict[str, Any] = {}
    known = inspect.signature(type(config).__init__).parameters
    usual = config.to_dict()
    layers = next(
        (usual[n] for n in ("num_hidden_layers", "n_layer", "num_layers") if usual.get(n)), 0
    )
    if isinstance(config, transformers.TimmBackboneConfig):
        return type(config)(**{**config.to_dict(), "backbone": "resnet18"})
    for name, value in vars(config).items():
        inner = {n.partition(".")[2]: v for n, v in changes.items() if n.startswith(f"{name}.")}
        if isinstance(value, transformers.PreTrainedConfig):
            wanted[name] = shrunk(value, inner, widths=widths).to_dict()
        elif isinstance(value, dict) and "mrope_section" in value and widths:
            wanted[name] = {**value, "mrope_section": [2, 1, 1]}
        elif name in known and (known[name].default is not None or value is None):
            small = _small(name, value, layers, widths)
            if small is not value:
                wanted[name] = small
        elif name in known and isinstance(value, int) and _token(name) is not None:
            wanted[name] = _token(name)
    if usual.get("kv_lora_rank") and widths:
        wanted["num_key_value_heads"] = HEADS
    if any(isinstance(usual.get(name), list | tuple) for name in ("depths", "hidden_sizes")):
        wanted |= {
            name: min(usual[name], 64) for name in ("image_size",) if type(usual.get(name)) is int
        }
        wanted.pop("patch_size", None)
    wanted |= {name: value for name, value in changes.items() if "." not in name}
    wanted = {name: value for name, value in wanted.items() if value is not _KEEP}
    return type(config)(**wanted)


_KEEP: Any = object()


NEEDED = {
    "head_dim": 8, "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 48,
    "num_experts_per_tok": 2, "n_routed_experts": 4, "num_key_value_heads": HEADS, "n_group": 1,
    "topk_group": 1, "prediction_length": 4, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS,
}  # fmt: skip
"""What some configurations have no usual value for, and models need."""
RANDOM = re.compile(r"\w*layer_?drop\w*|mask_time_prob|mask_feature_prob|apply_spec_augment")
"""Settings that make a model drop layers, or draw by numpy."""


def _small(name: str, value: Any, layers: int, widths: bool) -> Any:
    if value is None:
        return NEEDED.get(name) if widths else None
    if RANDOM.fullmatch(name):
        return type(value)(0)
    if isinstance(value, float | bool | str):
        return value
    if isinstance(value, int):
        counts = widths or re.fullmatch(COUNTS, name)
        return _number(name, value) if _token(name) is not None or (value > 0 and counts) else value
    if isinstance(value, list | tuple) and value:
        return _list(name, value, layers, widths)
    return value


def _number(name: str, value: int) -> int:
    token = _token(name)
    if token is not None:
        return token
    for pattern, small in RULES.items():
        if re.fullmatch(pattern, name):
            return min(value, small) if value > 0 else value
    return value


def _token(name: str) -> int | None:
    if not re.search(r"_(token|id|index|token_id)$", name):
        return None
    for word, token in MARKS.items():
        if re.fullmatch(rf"\w*{word}_(token_)?(id|index)", name):
            return token
    if not re.search("token", name):
        return None
    for word, token in (("image", IMAGE), ("video", VIDEO), ("audio", AUDIO)):
        if re.fullmatch(rf"{word}_token_(id|index)", name):
            return token
    return 85 if re.search(r"_token_(id|index)$", name) else None


def _list(name: str, value: Any, layers: int, widths: bool) -> Any:
    if layers > LAYERS and len(value) == layers:
        return type(value)(_varied(value))
    if re.fullmatch("(backbone_)?out_(indices|features)", name) and 1 < len(value) <= LAYERS:
        places = range(LAYERS - len(value) + 1, LAYERS + 1)
        return type(value)(place if type(value[0]) is int else f"stage{place}" for place in places)
    numbers = all(type(one) is int for one in value)
    if not numbers:
        return value
    if re.search("depths|num_block|stage_blocks|^layers$", name):
        return type(value)(1 for _ in value)
    if not widths:
        return value
    if re.fullmatch("num_(attention_)?heads", name):
        return type(value)(2**place for place in range(len(value)))
    if re.search("(hidden_sizes|dims|embed_dim|conv_dim)$", name) and max(value) > 32:
        least = min(value)
        return type(value)(max(1, one // least * 16) for one in value)
    return value


def _varied(value: Any) -> list[Any]:
    """As many entries as there are layers, with every kind."""
    kinds = [value.index(one) for one in dict.fromkeys(map(str, ()))]
    first = list(value[:LAYERS])
    if not all(isinstance(one, str | int | bool) for one in value):
        return first
    kinds = [one for one in dict.fromkeys(value) if one not in first]
    return [*first[: LAYERS - len(kinds)], *kinds][:LAYERS]


# ---- what a forward is given


def call_for(model: Any, changes: Mapping[str, Any]) -> Call:
    """The arguments of one microbatch."""
    config = model.config
    names = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    found: dict[str, Any] = {}
    for name in names:
        maker = INPUTS.get(name)
        if maker is not None and (name not in OPTIONAL or name == main):
            found[name] = maker(config)
    if "input_ids" not in found:
        found.pop("attention_mask", None)
    if "image_grid_thw" in names and "pixel_values" in found:
        _grids(config, found)
    if "pixel_values" in found and "input_ids" in found:
        _put_images(config, found)
    if "mm_token_type_ids" in names and "input_ids" in found:
        token = of(config, "image_token_id", "image_token_index", default=-1)
        found["mm_token_type_ids"] = (found["input_ids"] == token).long()
    if "input_ids" in found and "labels" in names and _learns_labels(model):
        ids = found.get("decoder_input_ids", found["input_ids"])
        found["labels"] = _labels(model, ids)
    elif "labels" in names and type(model).__name__.endswith("ForImageClassification"):
        found["labels"] = torch.randint(0, config.num_labels, (SAMPLES,))
    for name, value in changes.items():
        if value is None:
            found.pop(name, None)
        else:
            found[name] = value(config, found) if callable(value) else value
    return (), found


def _grids(config: Any, found: dict[str, Any]) -> None:
    """Images as rows of patches, with the numbers of patches in time, height and width."""
    patch = of(config, "patch_size", default=PATCH)
    frames = of(config, "temporal_patch_size", default=1)
    wide = of(config, "in_channels", "num_channels", "in_chans", default=3) * frames * patch**2
    found["pixel_values"] = torch.randn(SAMPLES * 16, wide)
    found["image_grid_thw"] = torch.tensor([[1, 4, 4]] * SAMPLES)


def _learns_labels(model: Any) -> bool:
    return bool(re.search("For(CausalLM|MaskedLM|ConditionalGeneration|SequenceClassification)$|LMHeadModel$",
                          type(model).__name__))  # fmt: skip


def _labels(model: Any, ids: Tensor) -> Tensor:
    if type(model).__name__.endswith("ForSequenceClassification"):
        return torch.randint(0, model.config.num_labels, (SAMPLES,))
    labels = ids.clone()
    labels[:, :2] = -100
    return labels


def of(config: Any, *names: str, default: Any = None) -> Any:
    """The first of some settings that a configuration has, also in its inner ones."""
    inner = [
        value for value in vars(config).values() if isinstance(value, transformers.PreTrainedConfig)
    ]
    inner.sort(key=lambda one: "vision" not in one.model_type)
    for name in names:
        for one in (*inner, config):
            value = getattr(one, name, None)
            if value is not None:
                return value
    return default


def text(config: Any, length: int = LENGTH) -> Tensor:
    most = min(of(config, "vocab_size", default=VOCAB), TEXT[1])
    return torch.randint(min(TEXT[0], most - 1), most, (SAMPLES, length))


def mask(_: Any) -> Tensor:
    """Which positions are text; the number of those that are not differs between microbatches."""
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (SAMPLES,))
    return (torch.arange(LENGTH)[None] < lengths[:, None]).long()


def side(config: Any) -> int:
    size = of(config, "image_size", default=64)
    return int(
        size[0]
        if isinstance(size, list | tuple)
        else size["height"]
        if isinstance(size, dict)
        else size
    )


def images(config: Any) -> Tensor:
    size = side(config)
    return torch.randn(
        SAMPLES, of(config, "num_channels", "in_channels", "in_chans", default=3), size, size
    )


def videos(config: Any) -> Tensor:
    frames = of(config, "num_frames", "frames_per_clip", default=2)
    return images(config)[:, None].repeat(1, frames, 1, 1, 1) * torch.randn(
        SAMPLES, frames, 1, 1, 1
    )


def features(config: Any) -> Tensor:
    bins = of(
        config, "num_mel_bins", "feature_size", "n_mels", "input_feat_per_channel", default=16
    )
    frames = 2 * of(config, "max_source_positions", default=16)
    return (
        torch.randn(SAMPLES, bins, frames)
        if "whisper" in config.model_type
        else torch.randn(SAMPLES, 64, bins)
    )


INPUTS: dict[str, Callable[[Any], Any]] = {
    "input_ids": text,
    "attention_mask": mask,
    "decoder_input_ids": partial(text, length=LENGTH - 2),
    "pixel_values": images,
    "pixel_values_videos": videos,
    "input_features": features,
    "input_values": lambda config: torch.randn(SAMPLES, 1200),
    "input_features_mask": lambda config: torch.ones(
        SAMPLES, features(config).shape[-1], dtype=torch.long
    ),
    "bbox": lambda config: torch.randint(0, 30, (SAMPLES, LENGTH, 4)).sort(-1).values,
    "audio_values": lambda config: torch.randn(SAMPLES, 1, 640),
}
OPTIONAL = {"pixel_values_videos", "bbox"}


def _put_images(config: Any, found: dict[str, Any]) -> None:
    token = of(config, "image_token_id", "image_token_index", "media_token_id")
    if token is not None:
        count = (
            16 // of(config, "spatial_merge_size", default=4) ** 2
            if "image_grid_thw" in found
            else 1
        )
        found |= with_tokens(((), found), token, count)[1]


def with_tokens(call: Call, token: int, wanted: int) -> Call:
    """A call with so many tokens of a kind in every text."""
    args, kwargs = call
    ids = kwargs["input_ids"]
    ids = ids[:, (ids != token).all(0)]
    more = torch.full((len(ids), wanted), token)
    new = {"input_ids": torch.cat([ids[:, :1], more, ids[:, 1:]], 1)}
    for name, fill in (
        ("attention_mask", 1),
        ("labels", -100),
        ("token_type_ids", 0),
        ("mm_token_type_ids", 1),
    ):
        if kwargs.get(name) is not None and kwargs[name].dim() == 2:
            value = kwargs[name]
            value = value[:, value.shape[1] - ids.shape[1] :]
            rest = torch.full((len(ids), wanted), fill)
            new[name] = torch.cat([value[:, :1], rest, value[:, 1:]], 1)
    return args, {**kwargs, **new}


# ---- the models


def families() -> Iterator[tuple[str, str, str]]:
    """Each family with the type of a configuration and the class of its model."""
    tasks = [getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES") for task in HEADS_IN_ORDER]
    tasks.append(modeling_auto.MODEL_MAPPING_NAMES)
    chosen: dict[str, tuple[int, str, str]] = {}
    for kind in CONFIG_MAPPING_NAMES:
        family = transformers.models.auto.configuration_auto.model_type_to_module_name(kind)
        for rank, task in enumerate(tasks):
            if kind in task:
                names = task[kind]
                name = names if isinstance(names, str) else names[0]
                better = (rank, kind != family)
                known = chosen.get(family)
                if known is None or better < known[0]:  # type: ignore[operator]
                    chosen[family] = (better, kind, name)  # type: ignore[assignment]
                break
    for family, (_, kind, name) in sorted(chosen.items()):
        yield family, kind, name


def make(family: str, kind: str, name: str) -> Case:
    """A model with its calls."""
    special = SPECIAL.get(family, {})
    model_class = getattr(transformers, special.get("model", name))
    usual = CONFIG_MAPPING[kind]
    if not issubclass(model_class.config_class, usual):
        usual = model_class.config_class
    errors: list[Exception] = []
    for widths in (True, False):
        try:
            config = shrunk(usual(), special.get("config", {}), widths=widths)
            return _made(model_class, config, special.get("call", {}))
        except Exception as error:
            errors.append(error)
    raise errors[0]


def _made(model_class: Any, config: Any, changes: Mapping[str, Any]) -> Case:
    torch.manual_seed(0)
    with torch.device("meta"), contextlib.suppress(NotImplementedError, RuntimeError):
        weights = sum(p.numel() for p in model_class(copy.deepcopy(config)).parameters())
        if weights > LARGEST_MODEL:
            raise ValueError(f"{weights / 1e6:.0f} million parameters")
    model = model_class(config).train()
    calls = [call_for(model, changes) for _ in range(MICROBATCHES)]
    return case_of(model, [_repaired(model, call) for call in calls])


LARGEST_MODEL = 60e6
"""In parameters."""


def _repaired(model: Any, call: Call) -> Call:
    """A call in the form that the model asks for by its errors."""
    for _ in range(5):
        try:
            with torch.no_grad():
                model(**mapped(call[1], torch.clone))
            return call
        except Exception as error:
            for pattern, repair in REPAIRS.items():
                if found := re.search(pattern, str(error)):
                    call = repair(model.config, call, found)
                    break
            else:
                raise
    return call


def _more_tokens(config: Any, call: Call, found: re.Match[str]) -> Call:
    kinds = {"mage": ("image_token_id", "image_token_index"), "ideo": ("video_token_id", "video_token_index"),
             "udio": ("audio_token_id", "audio_token_index")}  # fmt: skip
    names = next((names for kind, names in kinds.items() if kind in found[0]), kinds["mage"])
    wanted = int(found["features"])
    if wanted == int(found["tokens"]):
        # It counted numbers, not vectors.
        wanted //= WIDTH
    have, shown = call[1]["input_ids"].shape, int(found["tokens"])
    token = of(config, *names)
    count = int((call[1]["input_ids"] == token).sum())
    # Some models count numbers instead of tokens.
    each = max(1, shown // max(count, 1))
    return with_tokens(call, token, max(1, wanted // each // have[0]))


def _with_more(dim: int) -> Callable[..., Call]:
    def repair(_: Any, call: Call, __: re.Match[str]) -> Call:
        args, kwargs = call
        name = next(n for n in ("pixel_values", "input_features", "input_values") if n in kwargs)
        return args, {**kwargs, name: kwargs[name].unsqueeze(dim)}

    return repair


def _frames(config: Any, call: Call, _: re.Match[str]) -> Call:
    args, kwargs = call
    if "idef" in config.model_type or "smol" in config.model_type or "vbert" in config.model_type:
        return args, {**kwargs, "pixel_values": kwargs["pixel_values"].unsqueeze(1)}
    return args, {**kwargs, "pixel_values": videos(config)}


def _transposed(_: Any, call: Call, __: re.Match[str]) -> Call:
    args, kwargs = call
    return args, {**kwargs, "input_features": kwargs["input_features"].mT}


REPAIRS: dict[str, Callable[[Any, Call, re.Match[str]], Call]] = {
    r"(?s).*tokens: (?P<tokens>\d+), features:? ?(?:torch.Size\(\[)?(?P<features>\d+)": _more_tokens,
    r"not enough values to unpack \(expected 5, got 4": _frames,
    r"to have \d+ channels, but got 64 channels": _transposed,
    r"expected input\[1, 2, \d+\] to have 1 channels": _with_more(1),
}
"""What to change in a call after an error."""


def _normal(*sizes: int) -> Callable[[Any, Any], Tensor]:
    return lambda config, found: torch.randn(SAMPLES, *sizes)


def _whole_numbers(most: int, *sizes: int) -> Callable[[Any, Any], Tensor]:
    return lambda config, found: torch.randint(0, most, (SAMPLES, *sizes))


def _ones(*sizes: int) -> Callable[[Any, Any], Tensor]:
    return lambda config, found: torch.ones(SAMPLES, *sizes)


_SERIES = {
    "config": {
        "prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2, 3], "num_time_features": 1,
        "encoder_layers": 3, "decoder_layers": 3, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
    },
    "call": {
        "past_values": _normal(11), "past_time_features": _normal(11, 1), "past_observed_mask": _ones(11),
        "future_values": _normal(4), "future_time_features": _normal(4, 1),
    },
}  # fmt: skip
_NECK = {
    "neck_hidden_sizes": [16, 16, 32, 32], "backbone_out_indices": [0, 1, 2, 3], "fusion_hidden_size": 16,
    "backbone_featmap_shape": [1, 16, 4, 4], "image_size": 32,
    "backbone_config": {"model_type": "dinov2", "hidden_size": 32, "num_hidden_layers": 4,
                        "num_attention_heads": 4, "image_size": 28, "patch_size": 7, "mlp_ratio": 2,
                        "out_features": ["stage1", "stage2", "stage3", "stage4"], "reshape_hidden_states": False,
                        "apply_layernorm": True},
    "patch_size": 7, "reassemble_hidden_size": 32,
}  # fmt: skip
_NECKS = {"config": _NECK, "call": {"pixel_values": _normal(3, 28, 28), "labels": None}}
_RESNET = {
    "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
    "layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"],
}  # fmt: skip
_DETR = {
    "config": {"backbone_config": _RESNET, "use_timm_backbone": False, "use_pretrained_backbone": False,
               "backbone": None, "num_feature_levels": 3, "d_model": 32, "num_queries": 6},
    "call": {"pixel_values": _normal(3, 64, 64)},
}  # fmt: skip
_ONE_STAGE = {
    **_DETR,
    "config": {**_DETR["config"], "backbone_config": {**_RESNET, "out_features": ["stage4"]}},
}
_TILES = {
    "pixel_values": _normal(2, 3, SIDE, SIDE),
    "image_sizes": lambda c, f: torch.full((SAMPLES, 2), SIDE),
}
_SIZES = {"image_sizes": lambda config, found: torch.full((SAMPLES, 2), side(config))}
_PATCHED = {
    "pixel_values": lambda config, found: torch.randn(SAMPLES, 16, 3 * PATCH**2),
    "pixel_attention_mask": lambda config, found: torch.ones(SAMPLES, 16, dtype=torch.long),
    "spatial_shapes": lambda config, found: torch.full((SAMPLES, 2), 4),
}
_ROTARY = {
    "text_config.rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [2, 1, 1],
    }
}
_BOXES = {"bbox": lambda config, found: INPUTS["bbox"](config)}
SPECIAL: dict[str, dict[str, Any]] = {
    "blip_2": {"config": {"image_token_index": IMAGE}},
    "layoutlmv3": {"config": {"coordinate_size": 6, "shape_size": 4, "input_size": 16},
                   "call": {**_BOXES, "pixel_values": _normal(3, 16, 16)}},
    "bros": {"call": {"bbox": _normal(LENGTH, 8)}},
    "udop": {"call": {"bbox": lambda config, found: torch.rand(SAMPLES, LENGTH, 4)}},
    "lxmert": {
        "config": {"l_layers": 3, "x_layers": 2, "r_layers": 2, "visual_feat_dim": 16, "num_qa_labels": 10,
                   "num_object_labels": 10, "num_attr_labels": 10},
        "call": {"visual_feats": _normal(5, 16), "visual_pos": _normal(5, 4), "labels": None},
    },
    "decision_transformer": {
        "config": {"state_dim": 5, "act_dim": 3, "max_ep_len": 32, "n_layer": 4, "n_head": 4, "hidden_size": 32},
        "call": {
            "input_ids": None, "states": _normal(6, 5), "actions": _normal(6, 3), "rewards": _normal(6, 1),
            "returns_to_go": _normal(6, 1), "timesteps": _whole_numbers(30, 6), "attention_mask": _ones(6),
        },
    },
    "time_series_transformer": _SERIES,
    "informer": _SERIES,
    "autoformer": {**_SERIES, "config": {**_SERIES["config"], "label_length": 4, "moving_average": 3}},
    "patchtst": {"config": {"context_length": 16, "patch_length": 4, "patch_stride": 4},
                 "call": {"past_values": _normal(16, 1)}},
    "patchtsmixer": {"config": {"context_length": 16, "patch_length": 4, "patch_stride": 4, "d_model": 8},
                     "call": {"past_values": _normal(16, 1)}},
    "dpt": {"config": {**_NECK, "backbone_config": None}, "call": {"labels": None}},
    "depth_anything": _NECKS, "zoedepth": _NECKS, "prompt_depth_anything": _NECKS,
    "beit": {"config": {"image_size": 32, "patch_size": 8, "out_indices": [1, 2, 3, 4], "auxiliary_channels": 16,
                        "num_labels": 3}, "call": {"pixel_values": _normal(3, 32, 32)}},
    "upernet": {"config": {"backbone_config": {**_RESNET, "out_features": ["stage1", "stage2", "stage3", "stage4"]},
                           "auxiliary_channels": 16, "auxiliary_in_channels": 16, "num_labels": 3}},
    "conditional_detr": _ONE_STAGE, "dab_detr": _ONE_STAGE, "table_transformer": _ONE_STAGE,
    "detr": {**_ONE_STAGE, "model": "DetrForObjectDetection"},
    "deformable_detr": _DETR,
    "yolos": {"config": {"image_size": [16, 16], "num_detection_tokens": 5}},
    "pvt": {"config": {"image_size": 64}, "call": {"pixel_values": _normal(3, 64, 64)}},
    "llava_next": {"call": _TILES}, "llava_next_video": {"call": _TILES}, "llava_onevision": {"call": _TILES},
    "mistral3": {"call": _SIZES}, "lighton_ocr": {"call": _SIZES}, "mistral_large4": {"call": _SIZES},
    "siglip2": {"call": _PATCHED}, "lfm2_vl": {"call": _PATCHED},
    "instructblip": {"config": {"image_token_index": IMAGE}, "call": {"qformer_input_ids": lambda c, f: text(c)}},
    "clap": {
        "config": {"audio_config.patch_embeds_hidden_size": 16, "audio_config.hidden_size": 128, "audio_config.spec_size": 64,
                   "audio_config.depths": [1, 1, 1, 1], "audio_config.num_attention_heads": [1, 2, 4, 8],
                   "audio_config.num_mel_bins": 16, "audio_config.patch_size": 4},
        "call": {"input_features": _normal(1, 64, 16), "is_longer": lambda c, f: torch.zeros(SAMPLES, 1, dtype=torch.bool)},
    },
    "audio_spectrogram_transformer": {"config": {"max_length": 32}, "call": {"input_values": _normal(32, 16)}},
    "wav2vec2_bert": {"config": {"feature_projection_input_dim": 16}},
    "gemma3n": {"model": "Gemma3nForCausalLM", "config": {"num_hidden_layers": 6, "num_kv_shared_layers": 2,
                                                         "intermediate_size": [48] * 6, "activation_sparsity_pattern": [0.0] * 6,
                                                         "layer_types": ["sliding_attention", "full_attention"] * 3,
                                                         "hidden_size_per_layer_input": 8, "laurel_rank": 4,
                                                         "vocab_size_per_layer_input": VOCAB}},
    "qwen2_vl": {"config": _ROTARY},
    "qwen2_5_vl": {"config": {**_ROTARY, "vision_config.window_size": 16, "vision_config.fullatt_block_indexes": [1, 3]}},
    "gemma4": {"model": "Gemma4ForCausalLM"},
    "mamba2": {"config": {"num_heads": 8, "head_dim": 8}},
    "pix2struct": {"call": {"flattened_patches": _normal(9, 18), "attention_mask": _ones(9), "input_ids": None},
                   "config": {"vision_config.patch_embed_hidden_size": 16}},
    "perceiver": {"config": {"d_latents": 32, "d_model": 32, "num_latents": 8, "num_blocks": 1,
                             "num_self_attends_per_block": 6, "num_self_attention_heads": 4,
                             "num_cross_attention_heads": 4, "qk_channels": 16, "v_channels": 32,
                             "max_position_embeddings": LENGTH}},
    "esm": {"config": {"vocab_size": VOCAB, "pad_token_id": 0, "mask_token_id": 3}},
    "gpt_neo": {"config": {"attention_types": [[["global", "local"], 2]], "window_size": 4, "num_layers": 4}},
    "flaubert": {"config": {"emb_dim": 32, "n_layers": 4, "n_heads": 4}},
    "xlm": {"config": {"emb_dim": 32, "n_layers": 4, "n_heads": 4}},
    "reformer": {"config": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [2, 4],
                            "attn_layers": ["local", "lsh", "local", "lsh"], "local_attn_chunk_length": 4,
                            "lsh_attn_chunk_length": 4, "num_hashes": 1, "num_buckets": 2, "is_decoder": False,
                            "feed_forward_size": 48}},
    "xmod": {"config": {"default_language": "en_XX"}},
    "jamba": {"config": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
                         "expert_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4}},
    "bamba": {"config": {"attn_layer_indices": [1, 3]}},
    "granitemoehybrid": {"config": {"layer_types": ["mamba", "attention"] * 2}},
    "zamba2": {"config": {"layer_types": ["mamba", "hybrid"] * 2, "layers_block_type": ["mamba", "hybrid"] * 2}},
    "swin": {"config": {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2],
                        "window_size": 4}},
    "swinv2": {"config": {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2],
                          "window_size": 4}},
    "donut": {"config": {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2],
                         "window_size": 4}},
    "swin2sr": {"config": {"image_size": 16, "patch_size": 1, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2],
                           "window_size": 4}},
    "splinter": {"call": {"input_ids": lambda c, f: torch.cat([torch.full((SAMPLES, 1), 104), text(c)[:, 1:]], 1)},
                 "config": {"vocab_size": 128}},
    "idefics": {"call": {"pixel_values": _normal(1, 3, SIDE, SIDE),
                         "image_attention_mask": lambda c, f: torch.ones(SAMPLES, LENGTH, 1, dtype=torch.long)}},
    "bridgetower": {"config": {"num_attention_heads": 4, "vision_config.hidden_size": 64, "text_config.hidden_size": 64,
                               "hidden_size": 64, "text_config.num_attention_heads": 4}},
    "sam3_video": {"model": "Sam3Model"},
}  # fmt: skip
"""What is special, by family: the model, ``config`` sizes and ``call`` arguments; ``None`` leaves one out."""
MODELS: dict[str, Callable[[], Case]] = {
    f"{family} {SPECIAL.get(family, {}).get('model', name)}": partial(make, family, kind, name)
    for family, kind, name in families()
}
