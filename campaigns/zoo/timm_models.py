"""The smallest model of each family of timm."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from campaigns.zoo.operators import have_torchvision
from penstock.testing import Case
from tests.catalogue.making import MICROBATCHES, SAMPLES, case_of

have_torchvision()

import timm

SIZES = [
    "test",
    "zepto",
    "atto",
    "femto",
    "pico",
    "nano",
    "xxs",
    "xx_small",
    "xs",
    "x_small",
    "extra",
    "tiny",
    "mini",
    "small",
    "light",
    "_s",
    "_t",
    "_0",
    "18",
    "05",
    "b0",
    "10",
    "12",
]
"""What the names of small models have, the smallest first."""
SMALL = 64
"""The side of images, where a model takes it."""


def smallest() -> Iterator[tuple[str, str]]:
    """Each family, and the name of a small model of it."""
    for family in timm.list_modules():
        names = timm.list_models(module=family)
        if names:
            yield family, min(names, key=lambda name: (_rank(name), len(name)))


def _rank(name: str) -> int:
    return next(
        (n for n, size in enumerate(SIZES) if re.search(f"(^|_|[a-z]){size}($|_|[0-9])", name)),
        len(SIZES),
    )


def make(name: str, **options: object) -> Case:
    """A model with its calls, for small images if it takes them."""
    errors: list[Exception] = []
    for more, size in (({"img_size": SMALL}, SMALL), ({}, SMALL), ({}, None)):
        try:
            model = timm.create_model(name, **options, **more)
            side = size or model.default_cfg["input_size"][-1]
            return _tried(model, side)
        except Exception as error:
            errors.append(error)
    raise errors[-1]


def _tried(model: nn.Module, side: int) -> Case:
    channels = getattr(model, "default_cfg", {}).get("input_size", (3,))[0]
    with torch.no_grad():
        model.train()(torch.randn(SAMPLES, channels, side, side))
    calls = [((torch.randn(SAMPLES, channels, side, side),), {}) for _ in range(MICROBATCHES)]
    return case_of(model, calls)


MODELS: dict[str, Callable[[], Case]] = {
    **{f"{family} {name}": partial(make, name, num_classes=10) for family, name in smallest()},
    **{
        f"features of {name}": partial(make, name, features_only=True)
        for name in (
            "resnet18",
            "convnext_atto",
            "efficientnet_b0",
            "vgg11",
            "swin_tiny_patch4_window7_224",
        )
    },
}
