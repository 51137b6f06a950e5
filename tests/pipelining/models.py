"""Models that are no chain of modules, and batches for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.pipelining import SplitPoint, pipe_split

SAMPLES = 8
MICROBATCHES = 4


class UNet(nn.Module):
    """Each level's output is used by the next and by the level that undoes it."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)])
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.up = nn.ModuleList([nn.Conv2d(16, 4, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)])

    def forward(self, image: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for level in self.down:
            image = functional.relu(level(image))
            skips.append(image)
            image = functional.max_pool2d(image, 2)
        image = torch.tanh(self.middle(image))
        for level in self.up:
            image = functional.interpolate(image, scale_factor=2.0)
            image = level(torch.cat([image, skips.pop()], 1))
        return image


class Residual(nn.Module):
    """A block of a ResNet, with its ReLU in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, image: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(image)))))
        out += image
        return self.relu(out)  # type: ignore[no-any-return]


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.layers = nn.Sequential(*(Residual(6) for _ in range(4)))
        self.head = nn.Linear(6, 5)

    def forward(self, image: Tensor) -> Tensor:
        image = self.layers(self.stem(image))
        return self.head(image.mean((2, 3)))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Masked, with dropout by function, and a constant that its code makes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        query, key, value = self.mix(self.norm(hidden)).chunk(3, -1)
        scores = query @ key.transpose(-1, -2) * torch.tensor(scale, dtype=hidden.dtype)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, :], -1e9)
        return hidden + self.out(scores.softmax(-1) @ value)  # type: ignore[no-any-return]


class Words(nn.Module):
    """Tied weights, arguments by name, positions that are no parameter, and a dict of outputs."""

    def __init__(self, *, tied: bool = True, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 12)
        self.register_buffer("positions", torch.linspace(0, 1, 32), persistent=False)
        self.blocks = nn.ModuleList(Attention(12) for _ in range(layers))
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 17, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(
        self, tokens: Tensor, mask: Tensor | None = None, *, scale: float = 0.3
    ) -> dict[str, Any]:
        batch, length = tokens.shape
        hidden = self.embed(tokens) + self.get_buffer("positions")[:length, None]
        for block in self.blocks:
            hidden = block(hidden, mask, scale)
        hidden = self.norm(hidden)
        return {
            "logits": self.head(hidden).view(batch * length, -1),
            "hidden": hidden,
            "cache": None,
        }


class Marked(nn.Module):
    """Cut where its code says; one value skips a stage, and one is used by two."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        first = self.parts[0](x).tanh()
        pipe_split()
        second = self.parts[1](first).tanh() * gate
        pipe_split()
        third = self.parts[2](second).tanh()
        pipe_split()
        return self.parts[3](third) + first * x  # type: ignore[no-any-return]


class InPlace(nn.Module):
    """Changes in place what it was given: an argument, and a value that a later part uses again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x * 1.5)
        x += 1.0
        second = self.b(first * 1.5)
        first.mul_(2.0)
        return self.d(self.c(second + first) + x)  # type: ignore[no-any-return]


def mean_square(output: Any, target: Tensor) -> Tensor:
    loss: Tensor = functional.mse_loss(output, target)
    return loss


def word_loss(output: dict[str, Any], target: Tensor) -> Tensor:
    penalty = output["hidden"].pow(2).mean()
    loss: Tensor = functional.cross_entropy(output["logits"], target.flatten())
    loss += 0.1 * penalty
    return loss


@dataclass(frozen=True)
class Example:
    """A model, where to cut it, a batch and a loss."""

    make: Callable[[], nn.Module]
    cuts: dict[str, SplitPoint]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Tensor
    loss: Callable[[Any, Tensor], Tensor]

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make().double()

    def microbatch(
        self, size: int = SAMPLES // MICROBATCHES
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def part(value: Any) -> Any:
            return value[:size] if isinstance(value, Tensor) else value

        return tuple(map(part, self.args)), {name: part(v) for name, v in self.kwargs.items()}


def before(*paths: str) -> dict[str, SplitPoint]:
    return dict.fromkeys(paths, SplitPoint.BEGINNING)


def after(*paths: str) -> dict[str, SplitPoint]:
    return dict.fromkeys(paths, SplitPoint.END)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _words(tied: bool, cuts: Iterable[str]) -> Example:
    tokens = torch.arange(SAMPLES * 5).view(SAMPLES, 5) % 17
    mask = torch.ones(SAMPLES, 5, dtype=torch.bool)
    mask[::2, -1] = False
    given = {"mask": mask, "scale": 0.5}
    make = (lambda: Words()) if tied else (lambda: Words(tied=False))
    return Example(make, before(*cuts), (tokens,), given, tokens.roll(-1, 1), word_loss)


_IMAGE = _random(SAMPLES, 3, 8, 8)
EXAMPLES = {
    "unet": Example(
        UNet,
        {**before("down.1", "middle"), **after("up.0")},
        (_IMAGE,),
        {},
        _random(SAMPLES, 3, 8, 8),
        mean_square,
    ),
    "resnet": Example(
        ResNet,
        {**after("layers.0", "layers.1"), **before("layers.3.conv2")},
        (_IMAGE,),
        {},
        _random(SAMPLES, 5),
        mean_square,
    ),
    "words": _words(True, ["blocks.1", "blocks.2", "norm"]),
    "untied": _words(False, ["blocks.1", "blocks.2", "norm"]),
    "marked": Example(
        Marked,
        {},
        (_random(SAMPLES, 6),),
        {"gate": _random(SAMPLES, 6)},
        _random(SAMPLES, 6),
        mean_square,
    ),
    "in place": Example(
        InPlace, before("b", "c", "d"), (_random(SAMPLES, 6),), {}, _random(SAMPLES, 6), mean_square
    ),
}
