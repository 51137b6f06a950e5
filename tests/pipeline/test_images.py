"""Batches with images, which differ in number and size from sample to sample and from step to step."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipeline
from penstock.errors import MicrobatchError, PenstockError
from penstock.testing import Case, plain_loop
from tests.pipeline.models import assert_same
from tests.processes import in_processes

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
        seen = torch.cat([image.reshape(-1, 4, SIZE).mean(1) * len(image) for image in images])
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


def pipeline(schedule: str = "1F1B", group: Any = None, **options: Any) -> Pipeline:
    ranks = None if group else 2
    sizes: dict[str, Any] = {"ranks": ranks, "microbatches": 2, "mesh": group}
    return Pipeline(model(), schedule=schedule, loss_fn=loss_of, seed=0, **sizes, **options)


def model() -> Describes:
    torch.manual_seed(0)
    return Describes().double()


def train(schedule: str, *, has_grid: bool, group: Any = None) -> None:
    """Steps, each with the loss and gradients of the whole batch, through one pipeline."""
    torch.manual_seed(0)
    with pipeline(schedule, group) as pipe:
        for images in BATCHES + BATCHES[::-1]:
            pipe.zero_grad()
            target = torch.randn(4, LENGTH, SIZE).double()
            batch = batch_of(images, has_grid=has_grid)
            loss, grads = plain_loop(Case(model(), (), target, loss_of, kwargs=batch))
            assert pipe.step(**batch, target=target).loss == pytest.approx(loss, rel=1e-12)
            here = {name: p.grad for name, p in pipe.weights.here.named_parameters()}
            # Of a tower that was given no images some have no gradients, and some zeros.
            zeros = torch.zeros(())
            assert_same(
                {name: zeros if grad is None else grad for name, grad in here.items()},
                {name: zeros if grads[name] is None else grads[name] for name in here},
            )


@pytest.mark.parametrize(("schedule", "has_grid"), [("1F1B", True), ("ZB-V", False)])
def test_images_differ_in_number_and_size(schedule: str, has_grid: bool) -> None:
    train(schedule, has_grid=has_grid)


@pytest.mark.parametrize(("schedule", "has_grid"), [("ZB-V", True), ("1F1B", False)])
@in_processes(2, 100.0)
def test_images_between_processes(group: Any, schedule: str, has_grid: bool) -> None:
    """Every rank is given the batch; then only one is, which sends it to the others."""
    train(schedule, has_grid=has_grid, group=group)
    batch = batch_of(BATCHES[0], has_grid=has_grid)
    target = torch.zeros(4, LENGTH, SIZE).double()
    with pipeline(schedule, group) as pipe:
        whole = pipe.step(**batch, target=target)
        part = pipe.step(**(batch if group.rank() else {}), target=target)
        assert part.loss == whole.loss


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


def batch_for(family: str, images: list[list[Grid]]) -> dict[str, Any]:
    """A batch as the processor of a family makes it, but for the order of its tokens."""
    batch = batch_of(images, has_grid=True)
    tokens, grid = batch["input_ids"].masked_fill(batch["input_ids"] == IMAGE, 40), None
    if "pixel_values" in batch:
        grid = batch["image_grid_thw"]
    if family == "qwen_vl":
        batch = {"input_ids": tokens, "mm_token_type_ids": (tokens == 40).int()}
        if grid is not None:
            batch |= {
                "pixel_values": torch.randn(int(grid.prod(1).sum()), 96),
                "image_grid_thw": grid,
            }
        return batch
    tokens = torch.zeros(4, 100, dtype=torch.long)
    for row, of in zip(tokens, images, strict=True):
        row[: 16 * len(of)] = 40
    pixels = {} if grid is None else {"pixel_values": torch.randn(len(grid), 3, 16, 16)}
    return {"input_ids": tokens, **pixels}


def next_tokens(output: Any, labels: Tensor) -> Tensor:
    logits = output.logits[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels[:, 1:].flatten())


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "schedule"), [("qwen_vl", "ZB-V"), ("llava", "1F1B")])
def test_models_of_transformers(family: str, schedule: str) -> None:
    pytest.importorskip("transformers")
    from tests.weights.test_families import MAKE

    torch.manual_seed(0)
    whole = MAKE[family]().train()
    sizes: dict[str, Any] = {"ranks": 2, "microbatches": 2, "loss_fn": next_tokens}
    pipe = Pipeline(copy.deepcopy(whole), schedule=schedule, **sizes)
    for images in BATCHES + BATCHES[::-1]:
        batch = batch_for(family, images)
        pipe.zero_grad()
        loss, grads = plain_loop(Case(whole, (), batch["input_ids"], next_tokens, kwargs=batch))
        assert pipe.step(**batch, target=batch["input_ids"]).loss == pytest.approx(loss, rel=1e-5)
        for name, weight in pipe.named_parameters():
            there, zeros = grads[name], torch.zeros_like(weight)
            torch.testing.assert_close(
                zeros if weight.grad is None else weight.grad,
                zeros if there is None else there,
                rtol=1e-3,
                atol=1e-5,
            )
