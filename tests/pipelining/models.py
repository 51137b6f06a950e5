"""Models that are traced and cut, with batches for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.pipelining import SplitPoint, pipe_split
from tests.catalogue.models import UNet, convolution

SAMPLES = 8
MICROBATCHES = 4


class Attends(nn.Module):
    """Masked attention with a constant that its code makes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor, mask: Tensor, scale: float) -> Tensor:
        query, key, value = self.mix(hidden).chunk(3, -1)
        scores = query @ key.transpose(-1, -2) * torch.tensor(scale, dtype=hidden.dtype)
        scores = scores.masked_fill(~mask[:, None, :], -1e9)
        return hidden + self.out(scores.softmax(-1) @ value)  # type: ignore[no-any-return]


class Words(nn.Module):
    """Tied weights, arguments by name, positions that are no parameter, and a dict of outputs."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 12)
        self.register_buffer("positions", torch.linspace(0, 1, 32), persistent=False)
        self.blocks = nn.ModuleList(Attends(12) for _ in range(4))
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 17, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, mask: Tensor, *, scale: float = 0.3) -> dict[str, Any]:
        hidden = self.embed(tokens) + self.get_buffer("positions")[: tokens.shape[1], None]
        for block in self.blocks:
            hidden = block(hidden, mask, scale)
        hidden = self.norm(hidden)
        return {"logits": self.head(hidden), "hidden": hidden, "cache": None}


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


class Named(nn.Module):
    """Arguments by place or name, and sizes that stages far from the arguments use."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor | None = None, *, scale: float = 2.0) -> Tensor:
        count, length, _ = x.shape
        hidden = self.parts[0](x).view(count, length, 2, 2)
        pipe_split()
        hidden = self.parts[1](hidden.reshape(count * length, 4)).tanh()
        pipe_split()
        hidden = self.parts[2](hidden).view(count, length, 4) * scale
        pipe_split()
        out: Tensor = self.parts[3](hidden)
        return out if y is None else out + y


class InPlace(nn.Module):
    """Changes in place what it was passed: an argument, and a value that a later part uses again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x * 1.5)
        x += 1.0
        second = self.b(first * 1.5)
        first.mul_(2.0)
        return self.d(self.c(second + first) + x)  # type: ignore[no-any-return]


def word_loss(output: dict[str, Any], target: Tensor) -> Tensor:
    loss = functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten())
    return loss + 0.1 * output["hidden"].pow(2).mean()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Example:
    """A model, where to cut it, a batch and a loss."""

    make: Callable[[], nn.Module]
    cuts: dict[str, SplitPoint]
    args: tuple[Any, ...]
    target: Tensor
    kwargs: dict[str, Any] = field(default_factory=dict)
    loss: Callable[[Any, Tensor], Tensor] = functional.mse_loss

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make().double()

    def microbatch(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def part(value: Any) -> Any:
            return value[: SAMPLES // MICROBATCHES] if isinstance(value, Tensor) else value

        return tuple(map(part, self.args)), {name: part(v) for name, v in self.kwargs.items()}


def before(*paths: str) -> dict[str, SplitPoint]:
    return dict.fromkeys(paths, SplitPoint.BEGINNING)


def after(*paths: str) -> dict[str, SplitPoint]:
    return dict.fromkeys(paths, SplitPoint.END)


def _random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, *shape, generator=generator, dtype=torch.float64)


def _words(tied: bool) -> Example:
    tokens = torch.arange(SAMPLES * 5).view(SAMPLES, 5) % 17
    mask = torch.ones(SAMPLES, 5, dtype=torch.bool)
    mask[::2, -1] = False
    cuts, named = before("blocks.1", "blocks.2", "norm"), {"mask": mask, "scale": 0.5}
    return Example(lambda: Words(tied=tied), cuts, (tokens,), tokens.roll(-1, 1), named, word_loss)


class Bottleneck(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = convolution(width, width), nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.second(self.first(x)))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = convolution(3, 4)
        self.layer1 = nn.Sequential(Bottleneck(4), Bottleneck(4))
        self.widen = convolution(4, 8, stride=2)
        self.layer2 = nn.Sequential(Bottleneck(8), Bottleneck(8))
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.widen(self.layer1(self.stem(x))))
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


_SIX, _IMAGE = _random(6), _random(3, 8, 8)
EXAMPLES = {
    "unet": Example(
        UNet, {**before("down2", "middle"), **after("up2")}, (_IMAGE,), _random(1, 8, 8)
    ),
    "resnet": Example(
        ResNet,
        {**after("layer1.0", "layer1.1"), **before("layer2.1.second")},
        (_IMAGE,),
        _random(3),
    ),
    "words": _words(tied=True),
    "untied": _words(tied=False),
    "marked": Example(Marked, {}, (_SIX,), _SIX, {"gate": _SIX + 1}),
    "sizes": Example(Named, {}, (_random(3, 4),), _random(3, 4)),
    "in place": Example(InPlace, before("b", "c", "d"), (_SIX,), _SIX),
}
