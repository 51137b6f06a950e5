"""Write stages as safetensors files that together are the unsplit model's weights."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

INDEX = "model.safetensors.index.json"


def stage_file(stage: int, stages: int) -> str:
    """The name of a stage's file."""
    return f"model-{stage + 1:05d}-of-{stages:05d}.safetensors"


def save_stage(module: nn.Module, folder: Path, stage: int, stages: int) -> dict[str, int]:
    """Write a stage's file.

    Returns:
        The bytes of each tensor, by the name it has in the unsplit model.
    """
    tensors = _apart(module.state_dict())
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / stage_file(stage, stages)
    partial = target.with_suffix(".partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, target)
    return {name: _bytes(tensor) for name, tensor in tensors.items()}


def _apart(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that share no memory, as the format wants; tied ones are written under each name."""
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


def save_index(folder: Path, sizes: Mapping[int, Mapping[str, int]]) -> None:
    """Write which tensor is in which file, in the form that transformers reads.

    Args:
        folder: where the files are.
        sizes: for each stage, what :func:`save_stage` gave.
    """
    stages = len(sizes)
    index: dict[str, Any] = {
        "metadata": {"total_size": sum(sum(of.values()) for of in sizes.values())},
        "weight_map": {
            name: stage_file(stage, stages) for stage in sorted(sizes) for name in sizes[stage]
        },
    }
    partial = folder / f"{INDEX}.partial"
    partial.write_text(json.dumps(index, indent=2) + "\n")
    os.replace(partial, folder / INDEX)
