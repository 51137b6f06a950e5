"""Models of torchvision: classification, segmentation, detection, optical flow, video."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from campaigns.zoo.operators import have_torchvision
from penstock.testing import Case
from tests.catalogue.making import MICROBATCHES, SAMPLES, case_of

have_torchvision()

from torchvision import models
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.models.feature_extraction import create_feature_extractor

WHOLE = {"weights": None, "weights_backbone": None}
LARGE = 32
"""The side of images, where a model takes any."""
CLASSIFIERS = {
    "alexnet": 64, "convnext_tiny": 64, "densenet121": 64, "efficientnet_b0": 64, "efficientnet_v2_s": 64,
    "googlenet": 64, "inception_v3": 128, "maxvit_t": 224, "mnasnet0_5": 64, "mobilenet_v2": 64,
    "mobilenet_v3_small": 64, "mobilenet_v3_large": 64, "regnet_x_400mf": 64, "regnet_y_400mf": 64,
    "resnet18": 64, "resnet50": 64, "resnext50_32x4d": 64, "wide_resnet50_2": 64, "shufflenet_v2_x0_5": 64,
    "squeezenet1_0": 64, "squeezenet1_1": 64, "swin_t": 64, "swin_v2_t": 64, "vgg11": 64, "vgg16_bn": 64,
    "vit_b_16": 64,
}  # fmt: skip
SEGMENTERS = (
    "deeplabv3_mobilenet_v3_large",
    "deeplabv3_resnet50",
    "fcn_resnet50",
    "lraspp_mobilenet_v3_large",
)
VIDEOS = {"mc3_18": (4, 32), "r2plus1d_18": (4, 32), "r3d_18": (4, 32), "s3d": (16, 64), "mvit_v1_b": (16, 224),
          "mvit_v2_s": (16, 224), "swin3d_t": (4, 64)}  # fmt: skip
DETECTORS = (
    "fasterrcnn_resnet50_fpn", "fasterrcnn_resnet50_fpn_v2", "fasterrcnn_mobilenet_v3_large_fpn",
    "fasterrcnn_mobilenet_v3_large_320_fpn", "fcos_resnet50_fpn", "keypointrcnn_resnet50_fpn",
    "maskrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn_v2", "retinanet_resnet50_fpn", "retinanet_resnet50_fpn_v2",
    "ssd300_vgg16", "ssdlite320_mobilenet_v3_large",
)  # fmt: skip


def _example(model: nn.Module, give: Callable[[], dict[str, Any] | tuple[Any, ...]]) -> Case:
    calls = [give() for _ in range(MICROBATCHES)]
    split = [((), call) if isinstance(call, dict) else (call, {}) for call in calls]
    return case_of(model.train(), split)  # type: ignore[arg-type]


def classifier(name: str, size: int) -> Case:
    options: dict[str, Any] = {"num_classes": 10}
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = False
    if name == "vit_b_16":
        options["image_size"] = size
    model = models.get_model(name, weights=None, **options)
    return _example(model, lambda: (torch.randn(SAMPLES, 3, size, size),))


def segmenter(name: str) -> Case:
    model = models.get_model(name, **WHOLE, num_classes=5)
    return _example(model, lambda: (torch.randn(SAMPLES, 3, 48, 48),))


def video(name: str, frames: int, size: int) -> Case:
    options = {"num_classes": 10}
    if name == "mvit_v1_b" or name == "mvit_v2_s":
        kind = models.video.mvit._mvit
        settings = [
            models.video.mvit.MSBlockConfig(
                num_heads=2, input_channels=16, output_channels=16, kernel_q=[3, 3, 3], kernel_kv=[3, 3, 3],
                stride_q=[1, 1, 1], stride_kv=[1, 2, 2],
            )
            for _ in range(6)
        ]  # fmt: skip
        v2: dict[str, Any] = (
            {"residual_pool": True, "residual_with_cls_embed": False, "rel_pos_embed": True}
            if name == "mvit_v2_s"
            else {"residual_pool": False}
        )
        model = kind(
            spatial_size=(32, 32), temporal_size=8, block_setting=settings, weights=None, progress=False,
            stochastic_depth_prob=0.0, num_classes=10, **v2,
        )  # fmt: skip
        return _example(model, lambda: (torch.randn(SAMPLES, 3, 8, 32, 32),))
    model = models.get_model(name, weights=None, **options)
    return _example(model, lambda: (torch.randn(SAMPLES, 3, frames, size, size),))


def _boxes(name: str, size: int) -> dict[str, Any]:
    images = [torch.rand(3, size, size) for _ in range(SAMPLES)]
    targets = []
    for _ in images:
        count = int(torch.randint(1, 4, ()))
        corner = torch.rand(count, 2) * size / 2
        boxes = torch.cat([corner, corner + size / 4 + torch.rand(count, 2) * size / 8], 1)
        target: dict[str, Tensor] = {"boxes": boxes, "labels": torch.randint(1, 4, (count,))}
        if name.startswith("mask"):
            target["masks"] = (torch.rand(count, size, size) < 0.5).to(torch.uint8)
        if name.startswith("keypoint"):
            target["keypoints"] = torch.cat([boxes.view(count, 2, 2), torch.ones(count, 2, 1)], -1)
            target["labels"] = torch.ones(count, dtype=torch.long)
        targets.append(target)
    return {"images": images, "targets": targets}


def detector(name: str) -> Case:
    size = 320 if name.startswith("ssdlite") else 300 if name.startswith("ssd") else 64
    options: dict[str, Any] = {"num_classes": 4}
    if "rcnn" in name:
        options |= {
            "min_size": size, "max_size": size, "box_batch_size_per_image": 8, "rpn_pre_nms_top_n_train": 40,
            "rpn_post_nms_top_n_train": 20, "rpn_batch_size_per_image": 16,
        }  # fmt: skip
        if name.startswith("keypoint"):
            options |= {"num_classes": 2, "num_keypoints": 2}
    elif not name.startswith("ssd"):
        options |= {"min_size": size, "max_size": size}
    model = models.get_model(name, **WHOLE, **options)
    return _example(model, lambda: _boxes(name, size))


def flow(name: str) -> Case:
    def give() -> dict[str, Any]:
        a, b = torch.rand(2, SAMPLES, 3, 128, 128)
        return {"image1": a, "image2": b, "num_flow_updates": 3}

    return _example(models.get_model(name, weights=None), give)


def features(kind: str) -> Case:
    body = models.resnet18(weights=None)
    layers = {"layer2": "a", "layer4": "b"}
    model = (
        IntermediateLayerGetter(body, layers)
        if kind == "getter"
        else create_feature_extractor(body, layers)
    )
    return _example(model, lambda: (torch.randn(SAMPLES, 3, 64, 64),))


MODELS: dict[str, Callable[[], Case]] = {
    **{name: partial(classifier, name, size) for name, size in CLASSIFIERS.items()},
    **{name: partial(segmenter, name) for name in SEGMENTERS},
    **{name: partial(video, name, *shape) for name, shape in VIDEOS.items()},
    **{name: partial(detector, name) for name in DETECTORS},
    **{name: partial(flow, name) for name in ("raft_small", "raft_large")},
    **{
        f"features of resnet18 by {kind}": partial(features, kind)
        for kind in ("getter", "extractor")
    },
}
