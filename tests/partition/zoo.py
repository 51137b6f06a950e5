"""Plain models that are hard to cut."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 6


class Residual(nn.Module):
    """Adds between its modules, has parameters of its own, and ends with the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, WIDTH)
        self.position = nn.Parameter(torch.randn(5, WIDTH))
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Linear(WIDTH, WIDTH), self.feed()]) for _ in range(4)
        )
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.0)

    @staticmethod
    def feed() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embed(tokens) + self.position)
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleList)
            x = layer[0](x) + x
            x = layer[1](x) + x
        return functional.linear(self.norm(x) * self.scale, self.embed.weight)


def convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Values skip stages."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = convolution(3, 4), convolution(4, 8)
        self.pool, self.up = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)
        self.middle = convolution(8, 8)
        self.up2, self.up1 = convolution(16, 4), convolution(8, 4)
        self.out = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(self.pool(a))
        y = self.middle(self.pool(b))
        y = self.up2(torch.cat([self.up(y), b], 1))
        y = self.up1(torch.cat([self.up(y), a], 1))
        found: Tensor = self.out(y)
        return found


class LanguageModel(nn.Module):
    """Modules that give tuples of tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, WIDTH)
        self.first = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.second = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, state = self.first(self.embed(tokens))
        hidden, (last, _) = self.second(hidden, state)
        found: Tensor = self.head(hidden + last[-1].unsqueeze(1))
        return found


@dataclass
class Sample:
    x: Tensor
    mask: Tensor
    scale: float = 2.0


class TakesRecords(nn.Module):
    """A dataclass goes in, and between its modules too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Masked(), Masked()
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, sample: Sample) -> Tensor:
        sample = self.second(self.first(sample))
        found: Tensor = self.head(sample.x) * sample.scale
        return found


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, sample: Sample) -> Sample:
        return Sample(self.lin(sample.x) * sample.mask, sample.mask, sample.scale)


class Deciding(nn.Module):
    """Its modules look at the data; what happens between them does not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Decides() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return torch.tanh(self.up(x))
        found: Tensor = self.down(x) - float(x.detach().max())
        return found


class TwoTowers(nn.Module):
    """Two inputs, two chains, and a parameter for the end."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 4))
        self.right = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 4))
        self.temperature = nn.Parameter(torch.tensor(0.3))

    def forward(self, left: Tensor, *, right: Tensor) -> Tensor:
        a = functional.normalize(self.left(left), dim=-1)
        b = functional.normalize(self.right(right), dim=-1)
        return a @ b.T * self.temperature.exp()


class SharedInside(nn.Module):
    """All blocks hold one module."""

    def __init__(self) -> None:
        super().__init__()
        common = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Uses(common) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Uses(nn.Module):
    def __init__(self, common: nn.Module) -> None:
        super().__init__()
        self.common, self.own = common, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.own(x) + self.common(x))


class Loop(nn.Module):
    """Calls one module again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.block, self.leave = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for _ in range(4):
            x = torch.tanh(self.block(x)) + x
        found: Tensor = self.leave(x)
        return found


class Fills(nn.Module):
    """Writes results into a tensor of its own, and changes others in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.zeros(6, *x.shape, dtype=x.dtype)
        for index, layer in enumerate(self.layers):
            x = layer(x)
            x += 1
            kept[index] = x
        kept.mul_(2)
        return kept.sum(0) + x


class Noisy(nn.Module):
    """Draws random numbers between its modules, and uses them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        x = x + noise
        for layer in self.layers:
            x = layer(x)
        return x - noise


class Encoder(nn.Module):
    """Enters torch's encoder, which has a path of its own for padded batches in evaluation."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 4, 0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, layers), nn.Linear(4, 4)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        found: Tensor = self.head(self.encoder(x, src_key_padding_mask=padding))
        return found
