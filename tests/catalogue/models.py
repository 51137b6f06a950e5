"""Architectures as people write them by hand: one of each common kind."""

from __future__ import annotations

from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import penstock
from penstock.errors import PartitionError
from penstock.testing import Case, Refusal
from tests.catalogue.making import MICROBATCHES, SAMPLES, case_of, mapped

D = 8
"""The width of most models."""
MODELS: dict[str, Callable[[], Case]] = {}


def add_to(
    table: dict[str, Callable[[], Case]], name: str, give: Callable[[], Any], **options: Any
) -> Callable[[Any], Any]:
    """Put a class of models into a table, with what makes the arguments of a microbatch.

    Args:
        table: where to.
        name: what the program is an example of.
        give: makes the arguments, by position or by name.
        options: of the Case, such as how it is refused.
    """

    def note(kind: Any) -> Any:
        def make() -> Case:
            torch.manual_seed(0)
            model = kind().train().double()
            given = [give() for _ in range(MICROBATCHES)]
            calls = [((), one) if isinstance(one, dict) else (tuple(one), {}) for one in given]
            return case_of(model, mapped(calls, double), example_of=name, **options)

        table[name] = make
        return kind

    return note


add = partial(add_to, MODELS)


def double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def rows(*sizes: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(SAMPLES, *(sizes or (D,))),)


def words(length: int = 6, most: int = 20) -> tuple[Tensor, ...]:
    return (torch.randint(1, most, (SAMPLES, length)),)


def pictures(size: int = 16, channels: int = 3) -> tuple[Tensor, ...]:
    return (torch.randn(SAMPLES, channels, size, size),)


def lengths(most: int = 6) -> Tensor:
    return torch.randint(2, most + 1, (SAMPLES,)).sort(descending=True).values


def mlp(a: int = D, b: int = D, wide: int = 2 * D) -> nn.Sequential:
    return nn.Sequential(nn.Linear(a, wide), nn.GELU(), nn.Linear(wide, b))


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int = D) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), mlp(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Attention(nn.Module):
    """Self-attention, with a bias and rotated by tables if they are given."""

    def __init__(self, width: int = D, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.rest = Block(width)

    def forward(self, x: Tensor, bias: Tensor | None = None, turn: Any = None) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        if turn is not None:
            cos, sin = turn
            q, k = (t * cos + torch.cat([-t[..., 1::2], t[..., ::2]], -1) * sin for t in (q, k))
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)
        )
        return self.rest(x)


def blocks(count: int = 6, kind: Any = Block) -> nn.ModuleList:
    return nn.ModuleList(kind() for _ in range(count))


class Stem(nn.Module):
    """Convolution, normalization, activation."""

    def __init__(self, a: int, b: int, stride: int = 1) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(a, b, 3, stride, 1), nn.BatchNorm2d(b)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)))


# ---- words


@add("gpt", words)
class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.at = nn.Embedding(20, D), nn.Parameter(torch.randn(16, D))
        self.layers, self.norm, self.head = (
            blocks(5, Attention),
            nn.LayerNorm(D),
            nn.Linear(D, 20, bias=False),
        )
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.at[: ids.shape[1]]
        bias = torch.full((ids.shape[1],) * 2, float("-inf"), dtype=x.dtype).triu(1)
        for layer in self.layers:
            x = layer(x, bias)
        return self.head(self.norm(x))


@add(
    "numbers of the kept labels differ",
    lambda: {"ids": words()[0], "y": words()[0].masked_fill(torch.rand(SAMPLES, 6) < 0.4, -100)},
)
class Masked(Gpt):
    def forward(self, ids: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        h = super().forward(ids)
        return F.cross_entropy(h[y != -100], y[y != -100])


@add(
    "true lengths of masks",
    lambda: {"ids": words()[0], "mask": torch.arange(6) < lengths()[:, None]},
)
class TrueLengths(Gpt):
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        longest = int(mask.sum(1).max())
        x = self.embed(ids)[:, :longest]
        kept = mask[:, :longest]
        for layer in self.layers:
            x = layer(x, kept[:, None, None])
        return (self.head(self.norm(x)) * kept[..., None]).sum(1)


@add(
    "masks made only where something is masked",
    lambda: {"ids": words()[0], "mask": torch.arange(6) < lengths()[:, None] + 3},
)
class MaybeMasked(Gpt):
    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x, bias = self.embed(ids), None if mask.all() else mask[:, None, None]
        for layer in self.layers:
            x = layer(x, bias)
        return self.head(self.norm(x))


class Alibi(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", None, persistent=False)
        self.register_buffer("slopes", torch.tensor([0.5, 0.25]), persistent=False)

    def forward(self, length: int) -> Tensor:
        if self.bias is not None and self.bias.shape[-1] >= length:
            return self.bias[..., :length, :length]
        places = torch.arange(length)
        bias = -(places[:, None] - places).abs() * self.slopes[:, None, None]
        self.register_buffer("bias", bias, persistent=False)
        return self.bias


# Trained right; an evaluation after it is refused, since 'alibi.bias' was replaced.
@add("ALiBi by a shared helper that caches", words, evaluates=False)
class WithAlibi(Gpt):
    def __init__(self) -> None:
        super().__init__()
        self.alibi = Alibi()
        for layer in self.layers:
            layer.alibi = self.alibi
            layer.forward = partial(self.biased, layer)

    @staticmethod
    def biased(layer: Any, x: Tensor) -> Tensor:
        return Attention.forward(layer, x, layer.alibi(x.shape[1]))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@add("a bias made by the first layer, for all", words)
class T5(Gpt):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].table = nn.Embedding(16, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x, bias = self.embed(ids), None
        places = torch.arange(ids.shape[1])
        for layer in self.layers:
            if bias is None:
                bias = self.layers[0].table((places[:, None] - places).abs()).squeeze(-1)
            x = layer(x, bias)
        return self.head(x)


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inverse", 1.0 / 100 ** (torch.arange(0, 4, 2) / 4), persistent=False)

    @torch.no_grad()
    def forward(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        angles = (places[..., None] * self.inverse).repeat_interleave(2, -1)[:, None]
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


@add("rotary tables", words)
class WithRotary(Gpt):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        turn = self.rotary(x, torch.arange(ids.shape[1])[None])
        for layer in self.layers:
            x = layer(x, turn=turn)
        return self.head(self.norm(x))


class LateRotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inverse", None, persistent=False)

    @torch.no_grad()
    def forward(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        if self.inverse is None:
            self.inverse = 1.0 / 100 ** (torch.arange(0, 4, 2, dtype=torch.int64).float() / 4)
        angles = (places[..., None] * self.inverse).repeat_interleave(2, -1)[:, None]
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


@add("a rotary buffer set by the forward", words)
class WithLateRotary(WithRotary):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = LateRotary()  # type: ignore[assignment]


@add("transformer of torch", lambda: (torch.randn(SAMPLES, 5, D), torch.randn(SAMPLES, 4, D)))
class TorchTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(D, 2, 3, 3, 16, batch_first=True)
        self.head = nn.Linear(D, 3)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(self.inner(source, target, tgt_mask=mask.to(source.dtype)))


@add("memories of segments", lambda: (words()[0], torch.randn(SAMPLES, 4, D)))
class Memories(Gpt):
    def forward(self, ids: Tensor, memory: Tensor) -> tuple[Tensor, list[Tensor]]:  # type: ignore[override]
        x, kept = self.embed(ids), []
        for layer in self.layers:
            x = torch.cat([memory, x], 1)
            kept.append(x[:, -4:].detach())
            x = layer(x)[:, 4:]
            memory = memory + kept[-1]
        return self.head(x), kept


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(D, 3), nn.ModuleList(mlp() for _ in range(3))
        self.balance: Any = None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, D)
        share, chosen = self.router(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            if len(row):
                out = out.index_add(0, row, expert(flat[row]) * share[row, place, None])
        penstock.add_loss("balance", share.var(), 0.1)
        return x + out.view_as(x)


@add("mixture of experts", words)
class Moe(Gpt):
    def __init__(self) -> None:
        super().__init__()
        self.layers = blocks(5, Experts)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


# ---- sequences


@add("lstm", rows(5, D))
class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(D, D, batch_first=True) for _ in range(4))
        self.head = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x[:, -1])


@add(
    "packed sequences, packed for each unit",
    lambda: (torch.randn(SAMPLES, 6, D), lengths()),
)
class Packed(Lstm):
    def forward(self, x: Tensor, count: Tensor) -> Tensor:  # type: ignore[override]
        for layer in self.layers:
            packed = pack_padded_sequence(x, count, batch_first=True)
            x, _ = pad_packed_sequence(layer(packed)[0], batch_first=True, total_length=6)
        return self.head(x.mean(1))


@add(
    "a packed sequence that travels",
    lambda: (torch.randn(SAMPLES, 6, D), lengths()),
)
class PackedTravels(Lstm):
    def forward(self, x: Tensor, count: Tensor) -> Tensor:  # type: ignore[override]
        packed: PackedSequence = pack_padded_sequence(x, count, batch_first=True)
        for layer in self.layers:
            packed, _ = layer(packed)
        return self.head(pad_packed_sequence(packed, batch_first=True, total_length=6)[0].mean(1))


@add("all cells called for each step", rows(3, D))
class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start, self.cells = nn.Linear(D, D), nn.ModuleList(nn.GRUCell(D, D) for _ in range(4))
        self.head = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        states = [torch.zeros_like(x[:, 0]) for _ in self.cells]
        for step in x.unbind(1):
            hidden = self.start(step)
            for number, cell in enumerate(self.cells):
                hidden = states[number] = cell(hidden, states[number])
        return self.head(states[-1])


# ---- rounds


@add("one block again and again", rows())
class Universal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start, self.block, self.head = nn.Linear(D, D), Block(), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for _ in range(6):
            x = self.block(x)
        return self.head(x)


class DroppedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.3, self.training)


@add("one block with dropout again and again", rows())
class Dropping(Universal):
    def __init__(self) -> None:
        super().__init__()
        self.block = DroppedLinear(D, D)


@add("blocks called again, a module between the rounds", rows())
class Rounds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start, self.blocks, self.head = nn.Linear(D, D), blocks(4), nn.Linear(D, 3)
        self.between = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for turn in range(2):
            if turn:
                x = self.between(x)
            for block in self.blocks:
                x = block(x)
        return self.head(x)


@add("levels with repeats", pictures)
class Cascade(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start, self.head = nn.Conv2d(3, D, 1), nn.Conv2d(D, 3, 1)
        self.down = nn.ModuleList(nn.ModuleList(Stem(D, D) for _ in range(2)) for _ in range(2))
        self.repeats = nn.ModuleList(nn.ModuleList([nn.Conv2d(D, D, 1)]) for _ in range(2))
        self.shrink = nn.ModuleList([nn.Identity(), nn.Conv2d(D, D, 2, 2)])
        self.up = nn.ModuleList(nn.ModuleList(Stem(D, D) for _ in range(2)) for _ in range(2))
        self.grow = nn.ModuleList([nn.ConvTranspose2d(D, D, 2, 2), nn.Identity()])

    def forward(self, x: Tensor) -> Tensor:
        x, levels = self.start(x), []
        for level, shrink, repeats in zip(self.down, self.shrink, self.repeats, strict=True):
            x = shrink(x)
            for turn in range(len(repeats) + 1):
                for block in level:
                    x = block(x)
                if turn < len(repeats):
                    x = repeats[turn](x)
            levels.insert(0, x)
        for place, (level, grow) in enumerate(zip(self.up, self.grow, strict=True)):
            x = levels[place] + x if place else levels[0]
            for block in level:
                x = block(x)
            x = grow(x)
        return self.head(x)


@add("a fixed point", rows())
class Equilibrium(Universal):
    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(4):
                z = self.block(z + x)
        return self.head(self.block(z + x))


class Runge(nn.Module):
    def __init__(self, field: nn.Module) -> None:
        super().__init__()
        self.field = field
        self.register_buffer("times", torch.linspace(0, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        for a, b in zip(self.times[:-1], self.times[1:], strict=True):
            step = (b - a).item()
            x = x + step * self.field(x + step / 2 * self.field(x))
        return x


@add("one solver whose times are a buffer", rows())
class Ode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start, self.head = nn.Linear(D, D), nn.Linear(D, 3)
        self.solvers = nn.ModuleList([Runge(nn.Sequential(mlp(), mlp()))])

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for solver in self.solvers:
            x = solver(x)
        return self.head(x)


# ---- pictures


@add("residual network", pictures)
class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool, self.fc = Stem(3, D), nn.AdaptiveAvgPool2d(1), nn.Linear(32, 3)
        self.layer1 = nn.Sequential(Stem(D, D), Stem(D, D))
        self.layer2 = nn.Sequential(Stem(D, 16, 2), Stem(16, 16))
        self.layer3 = nn.Sequential(Stem(16, 32, 2), Stem(32, 32))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(self.stem(x))))
        return self.fc(self.pool(x).flatten(1))


class Dense(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.conv = Stem(D + 4 * number, 4)

    def forward(self, features: list[Tensor]) -> Tensor:
        return self.conv(torch.cat(features, 1))


class DenseBlock(nn.ModuleDict):
    """A dictionary with a forward of its own, as in torchvision's DenseNet."""

    def __init__(self) -> None:
        super().__init__({f"layer{n}": Dense(n) for n in range(4)})

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


@add("a dictionary of modules with a forward", pictures)
class DenseNet2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.dense, self.head = Stem(3, D), DenseBlock(), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dense(self.stem(x)).mean((2, 3)))


@add("the model is a dictionary with a forward", pictures)
class Getter(nn.ModuleDict):
    def __init__(self) -> None:
        super().__init__(
            OrderedDict((f"layer{n}", Stem(3 if n == 0 else D, D, 1 + n % 2)) for n in range(6))
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        out = {}
        for name, module in self.items():
            x = module(x)
            if name in ("layer2", "layer5"):
                out[name] = x
        return out


def convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


@add("U-Net", pictures)
class UNet(nn.Module):
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
        return self.out(y)


@add(
    "U-Net with times, constructed in another order",
    lambda: (*pictures(), torch.randint(0, 10, (SAMPLES,))),
)
class UNetTimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.mid = nn.Conv2d(D, 3, 1), Stem(16, 16)
        self.ups = nn.ModuleList([Stem(32, D), Stem(16, D)])
        self.times = mlp(4, 16)
        self.downs = nn.ModuleList([Stem(D, D), Stem(D, 16)])
        self.start = nn.Conv2d(3, D, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        times = self.times(torch.stack([(t * 2.0**-n).to(x.dtype).sin() for n in range(4)], 1))
        x, kept = self.start(x), []
        for down in self.downs:
            x = down(x)
            kept.append(x)
        x = self.mid(x + times[..., None, None])
        for up in self.ups:
            x = up(torch.cat([x, kept.pop()], 1))
        return self.head(x)


@add("vision transformer", pictures)
class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.cls = nn.Conv2d(3, D, 4, 4), nn.Parameter(torch.zeros(1, 1, D))
        self.at = nn.Parameter(torch.randn(1, 17, D) * 0.1)
        self.blocks, self.norm, self.head = (
            nn.Sequential(*blocks(5, Attention)),
            nn.LayerNorm(D),
            nn.Linear(D, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.at
        return self.head(self.norm(self.blocks(x))[:, 0])


def _targets() -> dict[str, Any]:
    images = [torch.randn(3, 12, 12) for _ in range(SAMPLES)]
    boxes = [
        {"boxes": torch.rand(n, 4), "labels": torch.randint(0, 3, (n,))}
        for n in torch.randint(1, 4, (SAMPLES,)).tolist()
    ]
    return {"images": images, "targets": boxes}


@add("a detector with targets", _targets)
class Detector(ResNet):
    def __init__(self) -> None:
        super().__init__()
        self.box, self.kind = nn.Linear(32, 4), nn.Linear(32, 3)
        del self.fc

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:  # type: ignore[override]
        x = self.layer3(self.layer2(self.layer1(self.stem(torch.stack(images)))))
        x = self.pool(x).flatten(1)
        box, kind = self.box(x), self.kind(x)
        losses = [
            (F.l1_loss(box[n].expand_as(t["boxes"]), t["boxes"].to(box.dtype)),
             F.cross_entropy(kind[n].expand(len(t["labels"]), -1), t["labels"]))
            for n, t in enumerate(targets)
        ]  # fmt: skip
        return {
            "box": torch.stack([a for a, _ in losses]).mean(),
            "kind": torch.stack([b for _, b in losses]).mean(),
        }


@add("queries that ask an encoder", pictures)
class Detr(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Stem(3, D, 2), Stem(D, D, 2))
        self.queries = nn.Embedding(5, D)
        self.inner = nn.Transformer(D, 2, 2, 2, 16, batch_first=True)
        self.boxes, self.kinds = mlp(D, 4), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.body(x).flatten(2).mT
        h = self.inner(h, self.queries.weight[None].expand(len(h), -1, -1))
        return {"boxes": self.boxes(h).sigmoid(), "kinds": self.kinds(h)}


class CacheConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(D, D, 3)

    def forward(self, x: Tensor, cache: list[Any], place: list[int]) -> Tensor:
        at = place[0]
        before = cache[at] if cache[at] is not None else torch.zeros_like(x[..., :2])
        cache[at] = x[..., -2:].clone()
        place[0] += 1
        return x + self.conv(torch.cat([before, x], -1)).relu()


@add("a state list that is filled piece by piece", rows(D, 8))
class Streaming(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(CacheConv() for _ in range(5)), nn.Conv1d(D, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        cache: list[Any] = [None] * len(self.layers)
        out = []
        for piece in x.split(4, -1):
            place = [0]
            for layer in self.layers:
                piece = layer(piece, cache, place)
            out.append(piece)
        return self.head(torch.cat(out, -1))


@add("a state list kept by the model", rows(D, 8))
class StreamingKept(Streaming):
    def forward(self, x: Tensor) -> Tensor:
        self.cache: list[Any] = [None] * len(self.layers)
        out = []
        for piece in x.split(4, -1):
            self.place = [0]
            for layer in self.layers:
                piece = layer(piece, self.cache, self.place)
            out.append(piece)
        self.cache = [None] * len(self.layers)
        return self.head(torch.cat(out, -1))


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)
        self.state: Tensor | None = None
        self.is_first = False

    def forward(self, x: Tensor) -> Tensor:
        assert self.state is not None
        x = x if self.is_first else 3 * x
        self.is_first = False
        self.state = torch.tanh(self.lin(x) + self.state)
        return self.state


@add("a state and a flag that the model sets in its layers", rows())
class Resets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.cells = nn.Linear(D, D), nn.ModuleList(Cell() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        start = self.stem(x)
        for cell in self.cells:
            cell.state, cell.is_first = start, True
        for cell in self.cells:
            x = cell(x)
        return x


@add("a mask that vmap makes of the arguments", rows())
class VmapMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.vmap(lambda row: (row > row.mean()) & row.new_ones((), dtype=torch.bool))(x)
        for layer in self.layers:
            x = torch.tanh(layer(x)).masked_fill(mask, 0.0)
        return x


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, x: Tensor, kept: deque[Tensor]) -> Tensor:
        x = x + torch.tanh(self.lin(x))
        kept.append(x.square())
        return x


@add("a deque that layers fill and the model adds up", rows())
class Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Keeps() for _ in range(5)), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        kept: deque[Tensor] = deque(maxlen=3)
        for layer in self.layers:
            x = layer(x, kept)
        return self.head(sum(kept, x))


class Correlation(nn.Module):
    """State that one method leaves and the forward reads, as torchvision's RAFT has it."""

    def build(self, a: Tensor, b: Tensor) -> None:
        volume = torch.einsum("bci,bcj->bij", a.flatten(2), b.flatten(2))
        self.pyramid = [volume, volume[..., ::2]]

    def forward(self, flow: Tensor) -> Tensor:
        return torch.stack([level.mean(-1) for level in self.pyramid], 1) * flow.mean(
            1, keepdim=True
        ).flatten(2)


@add("flow between two images, refined in rounds", lambda: (*pictures(8), *pictures(8)))
class Raft(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(Stem(3, D), Stem(D, D))
        self.context, self.correlation = Stem(3, D), Correlation()
        self.update, self.flow = nn.Conv2d(D + 4, D, 3, padding=1), nn.Conv2d(D, 2, 3, padding=1)

    def forward(self, a: Tensor, b: Tensor) -> list[Tensor]:
        both = self.features(torch.cat([a, b]))
        one, two = both.chunk(2)
        self.correlation.build(one, two)
        hidden, flow, out = self.context(a), torch.zeros_like(a[:, :2]), []
        for _ in range(3):
            flow = flow.detach()
            related = self.correlation(flow).view(len(a), 2, 8, 8)
            hidden = self.update(torch.cat([hidden, related, flow], 1)).tanh()
            flow = flow + self.flow(hidden)
            out.append(flow)
        return out


# ---- generation and self-supervision


@add("a variational autoencoder", rows())
class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(*blocks(3)), nn.Sequential(*blocks(3))
        self.mean, self.spread = nn.Linear(D, 4), nn.Linear(D, 4)
        self.widen = nn.Linear(4, D)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.encoder(x)
        mean, spread = self.mean(h), self.spread(h)
        z = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        return {
            "x": self.decoder(self.widen(z)),
            "kl": (mean.square() + spread.exp() - spread - 1).mean(),
        }


@add(
    "generator, and critic of a detached sample",
    lambda: (torch.randn(SAMPLES, D), torch.randn(SAMPLES, D)),
)
class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.critic, self.generator = (
            nn.Sequential(*blocks(3), nn.Linear(D, 1)),
            nn.Sequential(*blocks(3)),
        )

    def forward(self, noise: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sample = self.generator(noise)
        return self.critic(sample), self.critic(sample.detach()), self.critic(real)


class Online(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.project = nn.Sequential(*blocks(3)), mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.body(x))


class Byol(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.online, self.target, self.predict = Online(), Online().requires_grad_(False), mlp()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        one, two = self.predict(self.online(a)), self.predict(self.online(b))
        with torch.no_grad():
            there, here = self.target(a), self.target(b)
        return 2 - F.cosine_similarity(one, here).mean() - F.cosine_similarity(two, there).mean()


@add(
    "BYOL that moves its target in the forward",
    lambda: (torch.randn(SAMPLES, D), torch.randn(SAMPLES, D)),
)
class ByolMoving(Byol):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, theirs in zip(
                self.target.parameters(), self.online.parameters(), strict=True
            ):
                mine.mul_(0.9).add_(theirs, alpha=0.1)
        return super().forward(a, b)


@add("two towers with a scale", lambda: (words()[0], *pictures()))
class Clip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.words, self.embed = nn.Sequential(*blocks(3)), nn.Embedding(20, D)
        self.picture = nn.Sequential(Stem(3, D, 2), Stem(D, D, 2), Stem(D, D, 2))
        self.a, self.b = nn.Linear(D, 4), nn.Linear(D, 4)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        one = F.normalize(self.a(self.words(self.embed(ids)).mean(1)), dim=-1)
        two = F.normalize(self.b(self.picture(x).mean((2, 3))), dim=-1)
        return self.scale.exp() * one @ two.mT


# ---- others


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D, 4, 3, 2) * 0.1)
        self.skip = nn.Conv2d(D, D, 1)

    def forward(self, x: Tensor) -> Tensor:
        there = torch.fft.rfft2(x)
        out = torch.zeros_like(there)
        weight = torch.view_as_complex(self.weight)
        out[:, :, :4, :3] = torch.einsum("bixy,ioxy->boxy", there[:, :, :4, :3], weight)
        return F.gelu(torch.fft.irfft2(out, s=x.shape[-2:]) + self.skip(x))


@add("Fourier neural operator", lambda: pictures(8))
class Fno(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift, self.down = nn.Conv2d(5, D, 1), nn.Conv2d(D, 1, 1)
        self.layers = nn.ModuleList(Spectral() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        line = torch.linspace(0, 1, x.shape[-1], dtype=x.dtype)
        grid = torch.stack(torch.meshgrid(line, line, indexing="ij")).expand(len(x), -1, -1, -1)
        x = self.lift(torch.cat([x, grid], 1))
        for layer in self.layers:
            x = layer(x)
        return self.down(x)


@add("a complex network", lambda: (torch.randn(SAMPLES, D, dtype=torch.complex64),))
class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D, dtype=torch.complex64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))
        return x.abs()


class GraphLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mine, self.other = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        there = torch.zeros_like(x).index_add(0, edges[1], self.other(x)[edges[0]])
        return (self.mine(x) + there).relu()


@dataclass
class Data:
    x: Tensor
    edges: Tensor


@add("weights with norms and low ranks", rows())
class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        norm, spectral = (
            nn.utils.parametrizations.weight_norm,
            nn.utils.parametrizations.spectral_norm,
        )
        self.layers = nn.ModuleList(norm(nn.Linear(D, D)) for _ in range(4))
        self.last, self.head = spectral(nn.Linear(D, D)), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu() + x
        return self.head(self.last(x))


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -gradient


@add("gradients reversed between units", rows())
class Domains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.kind, self.domain = blocks(4), nn.Linear(D, 3), mlp(D, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.body:
            x = block(x)
        return self.kind(x), self.domain(Reverse.apply(x))


@add("heads by name", lambda: {"x": torch.randn(SAMPLES, D), "tasks": ["b", "a"]})
class Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = blocks(4)
        self.heads = nn.ModuleDict({"a": nn.Linear(D, 2), "b": mlp(D, 3), "c": nn.Linear(D, 4)})

    def forward(self, x: Tensor, tasks: list[str]) -> dict[str, Tensor]:
        for block in self.body:
            x = block(x)
        return {task: self.heads[task](x) for task in tasks}


class Exits(NamedTuple):
    last: Tensor
    all: tuple[Tensor, ...]


@add("an exit after each block", rows())
class EarlyExits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.exits = blocks(5), nn.ModuleList(nn.Linear(D, 3) for _ in range(5))

    def forward(self, x: Tensor) -> Exits:
        out = []
        for block, leave in zip(self.blocks, self.exits, strict=True):
            x = block(x)
            out.append(leave(x))
        return Exits(out[-1], tuple(out))


@add("losses added on the way", rows())
class DeepSupervision(EarlyExits):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        for place, (block, leave) in enumerate(zip(self.blocks, self.exits, strict=True)):
            x = block(x)
            penstock.add_loss(f"exit {place}", leave(x).square().mean(), 0.1)
        return x


@add("an energy whose gradient is the output, in units", rows(), evaluates=False)
class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Score() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Score(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(D, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = x if x.requires_grad else x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.net(y).sum(), y, create_graph=True)
        return x - slope


@add(
    "an equation: gradients of the output",
    rows(2),
    refused=Refusal(PartitionError, "takes gradients between its units"),
)
class Pinn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2 if n == 0 else D, D) for n in range(4))
        self.head = nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        h = x
        for layer in self.layers:
            h = layer(h).tanh()
        (slope,) = torch.autograd.grad(self.head(h).sum(), x, create_graph=True)
        return slope


@add(
    "an argument that is a dataclass",
    lambda: {"data": Data(torch.randn(6, D), torch.randint(0, 6, (2, 9)))},
)
class Dataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(GraphLayer() for _ in range(5)), nn.Linear(D, 3)

    def forward(self, data: Data) -> Tensor:
        x = data.x
        for layer in self.layers:
            x = layer(x, data.edges)
        return self.head(x)


@add(
    "a running mean outside of units",
    rows(),
    refused=Refusal(PartitionError, "changes the buffer 'mean'"),
)
class RunningMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = blocks(5), nn.Linear(D, 3)
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.head(x - self.mean)


# ---- between modules


@add("sums and parameters between modules", words)
class Residual(nn.Module):
    """Adds between its modules, has parameters of its own, and ends with the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(20, D), nn.Parameter(torch.randn(6, D))
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(D, D), mlp()]) for _ in range(4))
        self.scale = nn.Parameter(torch.randn(D))
        self.norm, self.drop = nn.LayerNorm(D), nn.Dropout(0.0)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embed(tokens) + self.position)
        for layer in self.layers:
            x = layer[0](x) + x
            x = layer[1](x) + x
        return F.linear(self.norm(x) * self.scale, self.embed.weight)


@add("parameters used again, beside a buffer", rows())
class Loose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(4))
        self.pair = nn.ParameterDict({"a": torch.rand(D), "b": torch.rand(D)})
        self.row = nn.ParameterList([torch.rand(D)])
        self.register_buffer("shift", torch.rand(D))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x) * self.pair["a"] + self.shift
        x = torch.tanh(self.layers[1](x)) * self.pair["b"]
        x = self.layers[3](torch.tanh(self.layers[2](x)) * self.row[0])
        return x * self.pair["a"] @ self.layers[0].weight


@add("a module that is given another's weight, which is never called", rows())
class GivenWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(4))
        self.norm, self.table = nn.LayerNorm(D), nn.Embedding(5, D)

    def forward(self, x: Tensor) -> Tensor:
        table = self.norm(self.table.weight)
        for layer in self.layers:
            x = torch.tanh(layer(x)) + table.mean(0)
        return x


@add("a state handed from one lstm to the next", words)
class HandsOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, D), nn.Linear(D, 12)
        self.first, self.second = (nn.LSTM(D, D, batch_first=True) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, state = self.first(self.embed(tokens))
        hidden, (last, _) = self.second(hidden, state)
        return self.head(hidden + last[-1].unsqueeze(1))


@add("a buffer that is made anew where it is too short", words)
class Grows(nn.Module):
    """Adds to what units give the distances of tokens, which it keeps for as many as there were."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, D), nn.Linear(D, 12)
        self.layers = blocks(2, lambda: nn.Linear(D, D))
        self.register_buffer("distances", torch.arange(2.0), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        if len(self.distances) < length:
            self.distances = torch.arange(float(length))
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden)) - self.distances[:length, None]
        return self.head(hidden)


@dataclass
class Sample:
    x: Tensor
    mask: Tensor
    scale: float = 2.0


class MaskedSample(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(D, D)

    def forward(self, sample: Sample) -> Sample:
        return Sample(self.lin(sample.x) * sample.mask, sample.mask, sample.scale)


@add(
    "a dataclass between modules",
    lambda: (Sample(torch.randn(SAMPLES, D), torch.randn(SAMPLES, D).relu()),),
)
class TakesSamples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = blocks(4, MaskedSample), nn.Linear(D, 2)

    def forward(self, sample: Sample) -> Tensor:
        for layer in self.layers:
            sample = layer(sample)
        return self.head(sample.x) * sample.scale


class Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).tanh() if x.sum() > 0 else self.down(x) - float(x.detach().max())


@add("modules that look at numbers", rows())
class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks(4, Decides)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@add("a tensor detached between modules", rows())
class Detaches(Deciding):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        mask = x > 0
        return self.blocks[3](self.blocks[2](self.blocks[1](x.detach()))) * mask


@add("forwards called without their modules", rows())
class Directly(Deciding):
    def __init__(self) -> None:
        super().__init__()
        self.dropped = nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.dropped.forward(self.blocks[0].forward(x)))
        return self.blocks[3](self.blocks[2].forward(x))


class UsesCommon(nn.Module):
    def __init__(self, common: nn.Module) -> None:
        super().__init__()
        self.common, self.mine = common, nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.mine(x) + self.common(x))


@add("one layer inside all blocks", rows())
class SharedInside(Deciding):
    def __init__(self) -> None:
        super().__init__()
        common = nn.Linear(D, D)
        self.blocks = nn.ModuleList(UsesCommon(common) for _ in range(4))


@add("noise that is taken off at the end", rows())
class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn_like(x)
        x = x + noise
        for layer in self.layers:
            x = layer(x)
        return x - noise


class SharingLinear(nn.Linear):
    def forward(self, x: Tensor, shared: Any = None, mask: Any = None) -> Tensor:
        x = super().forward(x) * mask + shared.get("latest", 0)
        shared["latest"] = x
        return torch.tanh(x)


@add("a dictionary of another class that layers share", rows())
class Sharing(nn.Module):
    """As some decoders share their keys."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SharingLinear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shared, mask = UserDict(), (x > 0).to(x.dtype)
        for layer in self.layers:
            x = layer(x, shared, mask=mask)
        return x * shared["latest"]


@add("a chain that begins in place", rows())
def begins_in_place() -> nn.Module:
    parts = [(nn.ReLU(inplace=True), nn.Linear(D, D), nn.Dropout(0.3)) for _ in range(3)]
    return nn.Sequential(*(module for three in parts for module in three))


@add("a chain with one activation twice", rows())
def shared_in_a_row() -> nn.Module:
    act = nn.Tanh()
    return nn.Sequential(nn.Linear(D, D), act, nn.Linear(D, D), act, nn.Linear(D, 2))
