"""More architectures as people write them by hand; the tests' own are in ``tests.catalogue.models``.

What happens between their modules is what others in the catalogue show too: here they show breadth.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.testing import Case
from tests.catalogue.making import SAMPLES
from tests.catalogue.models import (
    Attention,
    D,
    Lstm,
    Stem,
    UNetTimes,
    Vit,
    add_to,
    blocks,
    lengths,
    mlp,
    pictures,
    rows,
    words,
)  # fmt: skip

MODELS: dict[str, Callable[[], Case]] = {}
add = partial(add_to, MODELS)


@add(
    "encoder of torch with padding",
    lambda: {"ids": words()[0], "mask": torch.arange(6) >= lengths()[:, None]},
)
class TorchEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, D), nn.Linear(D, 3)
        layer = nn.TransformerEncoderLayer(D, 2, 16, batch_first=True)
        self.inner = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.inner(self.embed(ids), src_key_padding_mask=mask).mean(1))


@add(
    "decoder that is fed step by step",
    lambda: (torch.randn(SAMPLES, 5, D), torch.randn(SAMPLES, 3, D)),
)
class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.GRU(D, D, batch_first=True) for _ in range(3))
        self.cell, self.attend, self.head = nn.GRUCell(2 * D, D), nn.Linear(D, D), nn.Linear(D, 3)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        for layer in self.encoder:
            source, last = layer(source)
        state, out = last[0], []
        for step in target.unbind(1):
            weights = (source @ self.attend(state)[..., None]).softmax(1)
            state = self.cell(torch.cat([step, (weights * source).sum(1)], 1), state)
            out.append(self.head(state))
        return torch.stack(out, 1)


@add(
    "speech with a loss of alignments",
    lambda: {
        "x": torch.randn(SAMPLES, 12, D),
        "y": torch.randint(1, 5, (SAMPLES, 3)),
        "count": torch.tensor([12, 10]),
    },
)
class Ctc(Lstm):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(D, 5)

    def forward(self, x: Tensor, y: Tensor, count: Tensor) -> Tensor:  # type: ignore[override]
        for layer in self.layers:
            x, _ = layer(x)
        logits = self.head(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(logits, y, count, torch.full((len(y),), 3))


@add("dilated convolutions with skips", rows(D, 12))
class Dilated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv1d(D, 2 * D, 2, dilation=2**n, padding=2**n) for n in range(5)
        )
        self.out, self.head = (
            nn.ModuleList(nn.Conv1d(D, D, 1) for _ in range(5)),
            nn.Conv1d(D, 3, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        total: Any = 0
        for conv, out in zip(self.convs, self.out, strict=True):
            a, b = conv(x)[..., : x.shape[-1]].chunk(2, 1)
            y = out(a.tanh() * b.sigmoid())
            total, x = total + y, x + y
        return self.head(total.relu())


@add("two loops inside each other", rows())
class Hierarchy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start, self.high, self.low = nn.Linear(D, D), blocks(2), blocks(2)
        self.head = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        high, low = x, x
        for _ in range(2):
            for _ in range(2):
                for block in self.low:
                    low = block(low + high)
            for block in self.high:
                high = block(high + low)
        return self.head(high)


@add("features in one long list", pictures)
class Vgg(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for a, b in ((3, 8), (8, 8), (8, 16), (16, 16)):
            parts += [nn.Conv2d(a, b, 3, padding=1), nn.ReLU(inplace=True)]
        self.features = nn.Sequential(*parts, nn.MaxPool2d(4))
        self.classifier = nn.Sequential(
            nn.Linear(256, 16), nn.ReLU(True), nn.Dropout(), nn.Linear(16, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.features(x), 1))


@add("hourglasses that all give outputs", pictures)
class Hourglass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stacks = (
            Stem(3, D),
            nn.ModuleList(nn.Sequential(Stem(D, D), Stem(D, D)) for _ in range(3)),
        )
        self.outs, self.back = (
            nn.ModuleList(nn.Conv2d(D, 3, 1) for _ in range(3)),
            nn.ModuleList(nn.Conv2d(3, D, 1) for _ in range(3)),
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        x, outputs = self.stem(x), []
        for stack, out, back in zip(self.stacks, self.outs, self.back, strict=True):
            y = out(stack(x))
            outputs.append(y)
            x = x + back(y)
        return outputs


@add("masked autoencoder", pictures)
class Mae(Vit):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.decoder = blocks(3, Attention), blocks(2, Attention)
        self.token, self.head = nn.Parameter(torch.zeros(1, 1, D)), nn.Linear(D, 48)
        del self.blocks

    def forward(self, x: Tensor) -> Tensor:
        patches = (
            x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        )
        h = self.patch(x).flatten(2).transpose(1, 2) + self.at[:, 1:]
        order = torch.rand(h.shape[:2]).argsort(1)
        back, keep = order.argsort(1), order[:, :6]
        h = torch.gather(h, 1, keep[..., None].expand(-1, -1, D))
        for layer in self.layers:
            h = layer(h)
        h = torch.cat([h, self.token.expand(len(h), 10, -1)], 1)
        h = torch.gather(h, 1, back[..., None].expand(-1, -1, D))
        for layer in self.decoder:
            h = layer(h)
        mask = (back >= 6).to(h.dtype)
        return ((self.head(h) - patches).square().mean(-1) * mask).sum() / mask.sum()


@add("MLP mixer", pictures)
class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.head = nn.Conv2d(3, D, 4, 4), nn.Linear(D, 3)
        self.tokens, self.channels = nn.ModuleList(mlp(16, 16) for _ in range(3)), blocks(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        for tokens, channels in zip(self.tokens, self.channels, strict=True):
            x = channels(x + tokens(x.mT).mT)
        return self.head(x.mean(1))


class Codes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(12, D))
        self.register_buffer("counts", torch.ones(12))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen = torch.cdist(x, self.table).argmin(-1)
        picked = self.table[chosen]
        with torch.no_grad():
            hot = F.one_hot(chosen, 12).to(x.dtype)
            self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            self.table.mul_(0.9).add_(hot.mT @ x / self.counts[:, None], alpha=0.1)
        return x + (picked - x).detach(), F.mse_loss(x, picked.detach())


@add("quantized by codes that move", rows())
class VqVae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.codes, self.decoder = blocks(3), Codes(), blocks(3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for block in self.encoder:
            x = block(x)
        x, commit = self.codes(x)
        for block in self.decoder:
            x = block(x)
        return {"x": x, "commit": commit}


@add("diffusion with its loss inside", pictures)
class Ddpm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = UNetTimes()
        self.register_buffer("alphas", torch.linspace(0.99, 0.1, 10))

    def forward(self, x: Tensor) -> Tensor:
        t, noise = torch.randint(0, 10, (len(x),)), torch.randn_like(x)
        a = self.alphas[t][:, None, None, None]
        return F.mse_loss(self.net(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)


class Coupling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(D // 2, D)

    def forward(self, x: Tensor, logdet: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, -1)
        scale, shift = self.net(a).chunk(2, -1)
        return torch.cat([b * scale.tanh().exp() + shift, a], -1), logdet + scale.tanh().sum(-1)


@add("a flow of couplings", rows())
class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Coupling() for _ in range(5))
        self.base = torch.distributions.Normal(0.0, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        logdet = torch.zeros(len(x), dtype=x.dtype)
        for layer in self.layers:
            x, logdet = layer(x, logdet)
        return -(self.base.log_prob(x).sum(-1) + logdet).mean()


@add("one encoder for two inputs", lambda: (torch.randn(SAMPLES, D), torch.randn(SAMPLES, D)))
class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = blocks(5), nn.Linear(2 * D, 3)

    def encode(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head(torch.cat([self.encode(a), self.encode(b)], -1))


@add("a frozen teacher inside", rows())
class Distilled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(*blocks(3)).requires_grad_(False)
        self.student = nn.Sequential(*blocks(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            there = self.teacher(x)
        return F.mse_loss(self.student(x), there)


@add("points with learned transforms", rows(3, 10))
class PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn, self.convs = (
            nn.Sequential(nn.Conv1d(3, D, 1), nn.ReLU()),
            nn.ModuleList(nn.Conv1d(3 if n == 0 else D, D, 1) for n in range(4)),
        )
        self.matrix, self.head = nn.Linear(D, 9), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        matrix = self.matrix(self.turn(x).amax(-1)).view(-1, 3, 3) + torch.eye(3, dtype=x.dtype)
        x = torch.bmm(matrix, x)
        for conv in self.convs:
            x = conv(x).relu()
        return self.head(x.amax(-1))


@add("fields with encoded positions and a skip", rows(3))
class Nerf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, D) for a in (18, D, D + 18, D, D))
        self.density, self.color = nn.Linear(D, 1), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        encoded = torch.cat([f(x * 2**n) for n in range(3) for f in (torch.sin, torch.cos)], -1)
        h = encoded
        for place, layer in enumerate(self.layers):
            h = layer(torch.cat([h, encoded], -1) if place == 2 else h).relu()
        return self.density(h).relu(), self.color(h).sigmoid()


@add(
    "tables of categories, and their products",
    lambda: (torch.randint(0, 9, (SAMPLES, 3)), torch.randn(SAMPLES, 4)),
)
class Dlrm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(9, D, mode="sum") for _ in range(3))
        self.bottom, self.top = mlp(4, D), mlp(D + 6, 1)

    def forward(self, kinds: Tensor, numbers: Tensor) -> Tensor:
        rows = [self.bottom(numbers)]
        rows += [table(kinds[:, n : n + 1]) for n, table in enumerate(self.tables)]
        stacked = torch.stack(rows, 1)
        products = (stacked @ stacked.mT)[:, *torch.triu_indices(4, 4, 1)]
        return self.top(torch.cat([rows[0], products], 1))


@add("factors", lambda: (torch.randint(0, 9, (SAMPLES,)), torch.randint(0, 9, (SAMPLES,))))
class Factors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(9, D), nn.Embedding(9, D)
        self.user_bias, self.item_bias = nn.Embedding(9, 1), nn.Embedding(9, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        dot = (self.users(users) * self.items(items)).sum(-1)
        return dot + self.user_bias(users)[:, 0] + self.item_bias(items)[:, 0]


@add("capsules that vote in rounds", rows(6, D))
class Capsules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(D, D), blocks(4)
        self.votes = nn.Parameter(torch.randn(6, 3, D, 4) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        votes = torch.einsum("bnd,nkde->bnke", x, self.votes)
        logits = torch.zeros(votes.shape[:3], dtype=x.dtype)
        for _ in range(3):
            out = (logits.softmax(2)[..., None] * votes).sum(1)
            logits = logits + (votes * out[:, None]).sum(-1)
        return out.norm(dim=-1)


@add("weights made by a network", lambda: (torch.randn(SAMPLES, D), torch.randn(4)))
class Hyper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.make, self.layers, self.head = mlp(4, D * D), blocks(4), nn.Linear(D, 3)

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        weight = self.make(task).view(D, D)
        for layer in self.layers:
            x = layer(F.linear(x, weight)) + x
        return self.head(x)


@add("layers that are sometimes left out, inside", rows())
class Depths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head, self.drop = blocks(6), nn.Linear(D, 3), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            keep = (torch.rand(len(x), 1) < 0.8).to(x.dtype)
            x = x + self.drop(block(x)) * keep
        return self.head(x)


@add("latents that ask their input", rows(9, D))
class Perceiver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(4, D))
        self.ask, self.layers = nn.MultiheadAttention(D, 2, batch_first=True), blocks(4, Attention)
        self.head = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.latents.expand(len(x), -1, -1)
        for layer in self.layers:
            z = layer(z + self.ask(z, x, x, need_weights=False)[0])
        return self.head(z.mean(1))


@add("a memory that steps write", rows(4, D))
class Turing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(5, D))
        self.control, self.key, self.erase, self.write = (
            nn.Linear(2 * D, D),
            nn.Linear(D, D),
            nn.Linear(D, D),
            nn.Linear(D, D),
        )
        self.head = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        memory = self.start.expand(len(x), -1, -1)
        read = memory.mean(1)
        for step in x.unbind(1):
            h = self.control(torch.cat([step, read], -1)).tanh()
            weight = (memory @ self.key(h)[..., None]).softmax(1)
            memory = (
                memory * (1 - weight * self.erase(h).sigmoid()[:, None])
                + weight * self.write(h)[:, None]
            )
            read = (weight * memory).sum(1)
        return self.head(read)


@add("squeeze and excite", pictures)
class Squeeze(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.convs = Stem(3, D), nn.ModuleList(Stem(D, D) for _ in range(4))
        self.gates, self.head = nn.ModuleList(mlp(D, D, 4) for _ in range(4)), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for conv, gate in zip(self.convs, self.gates, strict=True):
            y = conv(x)
            x = x + y * gate(y.mean((2, 3))).sigmoid()[..., None, None]
        return self.head(x.mean((2, 3)))


@add("texts by convolutions side by side", words)
class TextCnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, D), nn.Linear(4 * D, 3)
        self.convs = nn.ModuleList(nn.Conv1d(D, D, n) for n in (1, 2, 3, 4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).mT
        return self.head(torch.cat([conv(x).relu().amax(-1) for conv in self.convs], 1))


@add("pictures in time", rows(3, 3, 8, 8))
class ConvLstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = Stem(3, D), nn.Conv2d(D, 1, 1)
        self.cells = nn.ModuleList(nn.Conv2d(2 * D, 4 * D, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        frames = list(self.embed(x.flatten(0, 1)).unflatten(0, x.shape[:2]).unbind(1))
        for cell in self.cells:
            h = c = torch.zeros_like(frames[0])
            for place, frame in enumerate(frames):
                i, f, g, o = cell(torch.cat([frame, h], 1)).chunk(4, 1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                frames[place] = h = o.sigmoid() * c.tanh()
        return self.head(frames[-1])
