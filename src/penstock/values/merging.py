"""Put the outputs of microbatches together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import MicrobatchError
from penstock.values.rules import OUTPUT, Rules, Split
from penstock.values.trees import Opened, opened


def output_dim(rules: Rules | None) -> int:
    """Along which dimension outputs are put together.

    Raises:
        MicrobatchError: arguments are split along another dimension than 0, and no rule says it of outputs.
    """
    if not isinstance(rules, Mapping):
        return 0
    given = rules.get(OUTPUT)
    if isinstance(given, Split):
        return given.dim
    if given is not None:
        raise MicrobatchError(
            f"rules={{'output': {given!r}}}: outputs are put together by Split(dim)"
        )
    dims = sorted({rule.dim for rule in rules.values() if isinstance(rule, Split)} - {0})
    if dims:
        raise MicrobatchError(
            f"arguments are split along dimension {dims[0]}; say along which one outputs are put "
            f"together: rules={{'output': Split({dims[0]})}} or Split(0)"
        )
    return 0


def merge(outputs: Sequence[Any], dim: int = 0) -> Any:
    """Put the outputs of microbatches together.

    Args:
        outputs: one for each microbatch, all of one structure. Tensors with dimensions are concatenated
            along ``dim``, those without are stacked; other values must be equal in all.
        dim: the dimension of the samples.

    Raises:
        MicrobatchError: the structures or values differ.
    """
    first = outputs[0]
    if any(type(output) is not type(first) for output in outputs):
        kinds = sorted({type(output).__name__ for output in outputs})
        raise MicrobatchError(f"microbatches gave outputs of different types: {kinds}")
    if isinstance(first, Tensor):
        return _joined(outputs, dim)
    parts = [found for found in map(opened, outputs) if found is not None]
    if parts:
        return parts[0].made([merge(items, dim) for items in _columns(parts)])
    if any(output != first for output in outputs):
        raise MicrobatchError(f"microbatches gave different values: {list(outputs)}")
    return first


def _joined(tensors: Sequence[Tensor], dim: int) -> Tensor:
    if not tensors[0].dim():
        return torch.stack(list(tensors))
    try:
        return torch.cat(list(tensors), dim)
    except (RuntimeError, IndexError) as error:
        shapes = [list(tensor.shape) for tensor in tensors]
        raise MicrobatchError(
            f"outputs of the shapes {shapes} cannot be put together along dimension {dim}; give "
            "Microbatches(...) instead of a batch to get them one by one"
        ) from error


def _columns(parts: Sequence[Opened]) -> list[list[Any]]:
    first = parts[0]
    if any(set(part.keys) != set(first.keys) for part in parts):
        lengths = sorted({len(part.keys) for part in parts})
        if all(isinstance(part.keys, range) for part in parts):
            raise MicrobatchError(f"microbatches gave outputs of different lengths: {lengths}")
        raise MicrobatchError("microbatches gave dicts with different keys")
    found = [dict(zip(part.keys, part.items, strict=True)) for part in parts]
    return [[items[key] for items in found] for key in first.keys]
