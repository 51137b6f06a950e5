"""Write stages as safetensors files that together are the unsplit model's weights."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

INDEX = "model.safetensors.index.json"


def stage_file(stage: int, stages: int) -> str:
    """The name of a stage's file."""
    return f"model-{stage + 1:05d}-of-{stages:05d}.safetensors"


def save_stage(
    state: Mapping[str, Tensor], folder: Path, stage: int, stages: int
) -> dict[str, int]:
    """Write a stage's file.

    Args:
        state: the tensors by their names in the unsplit model.
        folder: where to; it is made where it is not there.
        stage: which one.
        stages: how many there are.

    Returns:
        The bytes of each tensor, by the name it has in the unsplit model.
    """
    tensors = _apart(state)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / stage_file(stage, stages)
    partial = target.with_suffix(".partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, target)
    return {name: _bytes(tensor) for name, tensor in tensors.items()}


def _apart(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that share no memory, as the format wants."""
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        data = tensor.detach().cpu().contiguous()
        place = data.untyped_storage().data_ptr()
        found[name] = data.clone() if place in seen else data
        seen.add(place)
    return found


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def save_index(
    folder: Path, sizes: Mapping[int, Mapping[str, int]], tied: Mapping[str, str] | None = None
) -> None:
    """Write which tensor is in which file, in the form that transformers reads.

    Args:
        folder: where the files are.
        sizes: for each stage, what :func:`save_stage` gave.
        tied: further names of tensors, each with the one that it is written under.
    """
    stages = len(sizes)
    about: dict[str, Any] = {"total_size": sum(sum(of.values()) for of in sizes.values())}
    if tied:
        about["tied"] = dict(tied)
    index: dict[str, Any] = {
        "metadata": about,
        "weight_map": {
            name: stage_file(stage, stages) for stage in sorted(sizes) for name in sizes[stage]
        },
    }
    partial = folder / f"{INDEX}.partial"
    partial.write_text(json.dumps(index, indent=2) + "\n")
    os.replace(partial, folder / INDEX)
