"""Costs of a model of transformers from its config file alone: no weights are needed, nor is a network."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from penstock.errors import InputFileError, UsageError
from penstock.plan.costs import Profile
from penstock.plan.devices import Device
from penstock.plan.predicting import predict

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LONGEST = 4096
"""Tokens of a sample by default, where the model takes as many."""


def next_token_loss(output: Any, target: Tensor) -> Tensor:
    """Mean cross-entropy of a language model, in float32, with targets that stand where their tokens do."""
    logits = output.logits.float()
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())


def predict_hf(
    config: str | Path,
    *,
    batch: int,
    device: Device | str,
    sequence: int | None = None,
    dtype: str = "bfloat16",
    stages: int = 1,
) -> Profile:
    """Predict what the units of a causal language model cost.

    Args:
        config: a file such as ``config.json``, or the folder it is in.
        batch: samples of a step.
        device: a name of :data:`penstock.plan.DEVICES`, or a :class:`penstock.plan.Device`.
        sequence: tokens of a sample; by default as many as the model takes, at most 4096.
        dtype: of its weights: ``bfloat16``, ``float16`` or ``float32``.
        stages: into how many stages the model may have to be cut.

    Raises:
        UsageError: no such file or dtype, or transformers is not there.
        InputFileError: it is no config of a causal language model.
    """
    if dtype not in DTYPES:
        raise UsageError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}")
    found = _config(Path(config))
    sequence = sequence or min(LONGEST, getattr(found, "max_position_embeddings", LONGEST))
    model = _model(found, Path(config)).to(DTYPES[dtype])
    tokens = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
    profile = predict(
        model,
        input_ids=tokens,
        target=tokens,
        loss_fn=next_token_loss,
        device=device,
        stages=stages,
        tokens=sequence,
    )
    profile.model = f"{profile.model} of {Path(config).name}"
    return profile


def _transformers() -> Any:
    try:
        return import_module("transformers")
    except ImportError:
        raise UsageError("hf= needs transformers: pip install 'penstock[hf]'") from None


def _config(path: Path) -> Any:
    if not path.exists():
        raise UsageError(
            f"hf={str(path)!r}: there is no such file; give a config.json of transformers"
        )
    try:
        found = _transformers().AutoConfig.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputFileError(
            f"{path}: no config of a model that transformers knows: {error}"
        ) from error
    found.use_cache = False
    return found


def _model(config: Any, path: Path) -> torch.nn.Module:
    try:
        with torch.device("meta"):
            model: torch.nn.Module = _transformers().AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputFileError(
            f"{path}: no causal language model of transformers: {error}"
        ) from error
    return model.train()
