"""Torchvision's Python part beside a torch for which its compiled part was not built.

Its models need one operation of the compiled part, ``nms``; its own Python code has ``roi_align`` too.
"""

from __future__ import annotations

import importlib
import importlib.util
from importlib.metadata import requires
from typing import Any

import torch
from packaging.requirements import Requirement
from torch import Tensor

_LIBRARY: Any = None


def kept(boxes: Tensor, scores: Tensor, most: float) -> Tensor:
    """The boxes that no better one overlaps by more than ``most``, the best first."""
    order = scores.argsort(descending=True, stable=True)
    low, high = boxes[order, :2], boxes[order, 2:]
    sides = torch.minimum(high[:, None], high) - torch.maximum(low[:, None], low)
    both, areas = sides.clamp(min=0).prod(-1), (high - low).prod(-1)
    overlaps = both / (areas[:, None] + areas - both) > most
    stays = torch.ones(len(order), dtype=torch.bool)
    for place in range(len(order)):
        if stays[place]:
            stays[place + 1 :] &= ~overlaps[place, place + 1 :]
    return order[stays]


def have_torchvision() -> bool:
    """Make ``import torchvision`` work; returns whether it is installed."""
    global _LIBRARY
    if importlib.util.find_spec("torchvision") is None:
        return False
    needs = {need.name: need for need in map(Requirement, requires("torchvision") or ())}
    if needs["torch"].specifier.contains(torch.__version__):
        return True
    if _LIBRARY is None:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.impl("nms", kept, "CPU")
        _LIBRARY = library
        boxes: Any = importlib.import_module("torchvision.ops.boxes")
        boxes._assert_has_ops = lambda: None
        # Written in Python, but compiled at its first call.
        align: Any = importlib.import_module("torchvision.ops.roi_align")
        align._roi_align = align._roi_align.__wrapped__
    return True
