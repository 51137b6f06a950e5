"""The sizes of the model's arguments, from the values of a stage that is called by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from penstock.partition.traced.trace import Trace


def sizes_by_hand(trace: Trace, stage: int, values: Sequence[Any]) -> list[Tensor]:
    """Stand-ins of the right sizes for the tensors among the model's arguments.

    What is free in the graph, such as the size of the batch, is read off the values; the rest is as traced.
    """
    known: dict[Any, int] = {}
    for node, value in zip(trace.wiring.slices[stage].takes, values, strict=True):
        if isinstance(value, Tensor) and isinstance(node.meta.get("val"), Tensor):
            known.update(_bound(node.meta["val"], value))
    inputs = [node for node in trace.exported.graph.nodes if node.op == "placeholder"]
    specs = trace.exported.call.tensors
    return [
        torch.empty(_shape(node, spec.shape, known), dtype=spec.torch_dtype, device="meta")
        for node, spec in zip(inputs, specs, strict=True)
    ]


def _bound(traced: Tensor, value: Tensor) -> Iterator[tuple[Any, int]]:
    for size, actual in zip(traced.shape, value.shape, strict=False):
        if isinstance(size, torch.SymInt):
            yield str(size), actual


def _shape(node: fx.Node, example: Sequence[int], known: dict[Any, int]) -> list[int]:
    traced = node.meta["val"].shape
    return [known.get(str(size), was) for size, was in zip(traced, example, strict=True)]
