"""Batches with images, which differ in number and size from sample to sample and from step to step."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipeline
from penstock._engine.elsewhere import is_elsewhere
from penstock.errors import MicrobatchError, PenstockError
from penstock.testing import WorkerPool

IMAGE, LENGTH, SIZE = 9, 16, 8
Grid = tuple[int, int]
BATCHES: list[list[list[Grid]]] = [
    [[(2, 2)], [(2, 2)], [(2, 2)], [(2, 2)]],
    [[], [(2, 2)], [(2, 4), (4, 4), (2, 2), (4, 2), (2, 4)], []],
    [[], [], [], []],
    [[(2, 2), (2, 4)], [], [(2, 4), (2, 2)], []],
    [[(2, 2)], [(2, 4)], [(2, 2), (2, 2), (2, 2)], []],
]
"""The images of each of four samples; in the last two, the microbatches have as many patches, and tokens."""


class Describes(nn.Module):
    """A tower, whose patches a number of tokens stands for, and layers; laid out as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(image_token_id=IMAGE)
        self.embed = nn.Embedding(10, SIZE)
        self.tower = nn.ModuleList([nn.Linear(3, SIZE), nn.Linear(SIZE, SIZE)])
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(4))

    def forward(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
    ) -> Tensor:
        hidden: Tensor = self.embed(input_ids)
        if pixel_values is not None:
            hidden = self.with_images(input_ids, hidden, pixel_values, image_grid_thw)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        return hidden

    def with_images(
        self, tokens: Tensor, hidden: Tensor, pixels: Tensor, grid: Tensor | None
    ) -> Tensor:
        for layer in self.tower:
            pixels = layer(pixels).tanh()
        images = [*pixels] if grid is None else pixels.split(grid.prod(1).tolist())
        # Four patches make a token.
        seen = torch.cat([image.reshape(-1, 4, SIZE).mean(1) * len(images) for image in images])
        places = tokens == IMAGE
        if int(places.sum()) != len(seen):
            raise ValueError(f"{int(places.sum())} tokens for images of {len(seen)}")
        return hidden.masked_scatter(places[..., None], seen)


def batch_of(images: list[list[Grid]], *, has_grid: bool) -> dict[str, Any]:
    """A batch with these images; without a grid, they all have one size."""
    grids = [(1, *(one if has_grid else (2, 4))) for of in images for one in of]
    tokens = torch.randint(0, IMAGE, (len(images), LENGTH))
    for row, of in zip(tokens, images, strict=True):
        at = 1
        for high, wide in of:
            number = high * wide // 4 if has_grid else 2
            row[at : at + number] = IMAGE
            at += number + 1
    batch = {"input_ids": tokens}
    if grids and has_grid:
        batch["image_grid_thw"] = torch.tensor(grids)
        batch["pixel_values"] = torch.randn(int(batch["image_grid_thw"].prod(1).sum()), 3).double()
    elif grids:
        batch["pixel_values"] = torch.randn(len(grids), 8, 3).double()
    return batch


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def train(schedule: str, *, has_grid: bool, group: Any = None) -> None:
    """Steps, each with the loss and the gradients of the plain model, over the same microbatches."""
    torch.manual_seed(0)
    model = Describes().double()
    plain = copy.deepcopy(model)
    pipe = Pipeline(
        model,
        schedule=schedule,
        ranks=None if group else 2,
        microbatches=2,
        loss_fn=loss_of,
        mesh=group,
    )
    for images in BATCHES + BATCHES[::-1]:
        batch = batch_of(images, has_grid=has_grid)
        target = torch.randn(4, LENGTH, SIZE).double()
        loss = 0.0
        plain.zero_grad()
        for samples, of in zip((slice(0, 2), slice(2, 4)), halves(images, batch), strict=True):
            part = loss_of(plain(**of), target[samples]) / 2
            part.backward()
            loss += part.item()
        pipe.zero_grad()
        assert pipe.step(**batch, target=target).loss == pytest.approx(loss, rel=1e-12)
        for name, weight in pipe.named_parameters():
            if not is_elsewhere(weight):
                expected = plain.get_parameter(name).grad
                zero = torch.zeros_like(weight)
                torch.testing.assert_close(
                    zero if weight.grad is None else weight.grad,
                    zero if expected is None else expected,
                    rtol=1e-10,
                    atol=1e-14,
                )
    pipe.close()


def halves(images: list[list[Grid]], batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Both halves of a batch, by hand."""
    first = sum(len(of) for of in images[:2])
    grid, pixels = batch.get("image_grid_thw"), batch.get("pixel_values")
    parts: list[dict[str, Any]] = []
    for samples, of in ((slice(0, 2), slice(0, first)), (slice(2, 4), slice(first, None))):
        part = {"input_ids": batch["input_ids"][samples]}
        if pixels is not None and any(images[samples]):
            part["pixel_values"] = pixels[of]
            if grid is not None:
                rows = pixels.split(grid.prod(1).tolist())
                part |= {"image_grid_thw": grid[of], "pixel_values": torch.cat(rows[of])}
        parts.append(part)
    return parts


@pytest.mark.parametrize(("schedule", "has_grid"), [("1F1B", True), ("ZB-V", False)])
def test_images_differ_in_number_and_size(schedule: str, has_grid: bool) -> None:
    train(schedule, has_grid=has_grid)


def run(group: Any, schedule: str, has_grid: bool) -> None:
    """A worker's task: every rank is given the batch; then only one is."""
    train(schedule, has_grid=has_grid, group=group)
    pipe = Pipeline(Describes().double(), microbatches=2, loss_fn=loss_of, mesh=group)
    batch = batch_of(BATCHES[0], has_grid=has_grid)
    target = torch.zeros(4, LENGTH, SIZE).double()
    with pytest.raises(PenstockError, match="give every rank the batch"):
        pipe.step(**({} if group.rank() else batch), target=target)
    pipe.close()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("schedule", "has_grid"), [("ZB-V", True), ("1F1B", False)])
def test_images_between_processes(workers: WorkerPool, schedule: str, has_grid: bool) -> None:
    workers.run(f"{__name__}:run", 2, 100.0, schedule=schedule, has_grid=has_grid)


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Describes()

    def forward(self, **arguments: Tensor) -> Tensor:
        return self.model(**arguments)  # type: ignore[no-any-return]


def pipeline(**options: Any) -> Pipeline:
    torch.manual_seed(0)
    return Pipeline(Wrapped().double(), ranks=2, microbatches=2, loss_fn=loss_of, **options)


def test_images_that_belong_to_nobody_are_refused() -> None:
    pipe, target = pipeline(), torch.zeros(4, LENGTH, SIZE).double()
    batch = batch_of(BATCHES[1], has_grid=True)
    batch["input_ids"][2, 9] = 0
    with pytest.raises(MicrobatchError, match=r"split=.*pixel_values"):
        pipe.step(**batch, target=target)
    batch["input_ids"][2, 8:10] = torch.tensor([0, IMAGE])
    batch["input_ids"][2, 1] = 0
    with pytest.raises(PenstockError, match="10 tokens for images of 11"):
        pipe.step(**batch, target=target)


def test_a_rule_of_the_users_comes_first() -> None:
    def by_pairs(value: Tensor, sizes: Any) -> list[Tensor | None]:
        assert list(sizes) == [2, 2]
        return [value[:1], value[1:]]

    batch = batch_of([[(2, 2)], [], [(2, 2), (2, 2)], []], has_grid=False)
    target = torch.zeros(4, LENGTH, SIZE).double()
    ruled, usual = pipeline(split={"pixel_values": by_pairs}), pipeline()
    assert ruled.step(**batch, target=target).loss == usual.step(**batch, target=target).loss


# ---- models of transformers


TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def qwen() -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = {**TEXT, "vocab_size": 20, "num_key_value_heads": 2, "use_cache": False}
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "patch_size": 4,
    }
    more = {"out_hidden_size": 32, "window_size": 16, "fullatt_block_indexes": [1]}
    config = Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config={**vision, **more},
        image_token_id=IMAGE,
        video_token_id=IMAGE + 1,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def gemma() -> Any:
    from transformers import (
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        Gemma3TextConfig,
        SiglipVisionConfig,
    )

    text = Gemma3TextConfig(**TEXT, vocab_size=20, head_dim=8, sliding_window=8, use_cache=False)
    vision = SiglipVisionConfig(**TEXT, image_size=16, patch_size=4, vision_use_head=False)
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_id=IMAGE
    )
    return Gemma3ForConditionalGeneration(config)


def batch_for(family: str, images: list[list[Grid]]) -> dict[str, Any]:
    """A batch as the processor of a family makes it, but for the order of its tokens."""
    batch = batch_of(images, has_grid=True)
    tokens, grid = batch["input_ids"], batch.pop("image_grid_thw", None)
    batch.pop("pixel_values", None)
    if family == "qwen":
        batch["mm_token_type_ids"] = (tokens == IMAGE).int()
        if grid is not None:
            pixels = torch.randn(int(grid.prod(1).sum()), 3 * 2 * 4 * 4)
            batch |= {"image_grid_thw": grid, "pixel_values": pixels}
        return batch
    tokens[tokens == IMAGE] = 0
    tokens = torch.cat([tokens, torch.zeros(4, 20, dtype=torch.long)], 1)
    for row, of in zip(tokens, images, strict=True):
        row[: 4 * len(of)] = IMAGE
    batch = {"input_ids": tokens, "token_type_ids": (tokens == IMAGE).long()}
    return batch | ({"pixel_values": torch.randn(len(grid), 3, 16, 16)} if grid is not None else {})


def next_tokens(output: Any, labels: Tensor) -> Tensor:
    logits = output.logits[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels[:, 1:].flatten())


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["qwen", "gemma"])
@pytest.mark.parametrize("schedule", ["1F1B", "ZB-V"])
def test_models_of_transformers(family: str, schedule: str) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = {"qwen": qwen, "gemma": gemma}[family]().train()
    plain = copy.deepcopy(model)
    pipe = Pipeline(model, schedule=schedule, ranks=2, microbatches=2, loss_fn=next_tokens)
    for images in BATCHES + BATCHES[::-1]:
        batch = batch_for(family, images)
        labels = batch["input_ids"]
        pipe.zero_grad()
        plain.zero_grad()
        expected = next_tokens(plain(**batch), labels)
        expected.backward()
        assert pipe.step(**batch, target=labels).loss == pytest.approx(expected.item(), rel=1e-5)
        for name, weight in plain.named_parameters():
            found, wanted = model.get_parameter(name).grad, weight.grad
            zero = torch.zeros_like(weight)
            torch.testing.assert_close(
                zero if found is None else found,
                zero if wanted is None else wanted,
                rtol=1e-3,
                atol=1e-5,
            )
