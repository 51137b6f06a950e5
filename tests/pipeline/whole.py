"""Whole models of many kinds, each with five batches: what training runs are shown with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import collect_losses
from penstock.schedule import Edge
from tests.pipeline.test_losses import draw, experts, plain_model, token_loss, valid
from tests.pipeline.vision import images, vision

STEPS = 5
WIDTH, WORDS = 8, 11


# ---- a U-Net: what the first half makes is used by the second half, in the reverse order


class Enter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.down = nn.Conv2d(4, 6, 2, stride=2)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        outer = torch.tanh(self.conv(image))
        return {"outer": outer, "half": self.down(outer)}


class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 6)
        self.conv = nn.Conv2d(6, 6, 3, padding=1)
        self.down = nn.Conv2d(6, 8, 2, stride=2)

    def forward(self, half: Tensor) -> dict[str, Tensor]:
        inner = functional.silu(self.conv(self.norm(half)))
        return {"inner": inner, "quarter": self.down(inner)}


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.conv = nn.Conv2d(12, 6, 3, padding=1)

    def forward(self, inner: Tensor, quarter: Tensor) -> Tensor:
        return functional.silu(self.conv(torch.cat([inner, self.up(quarter)], 1)))


class Leave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.conv = nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, outer: Tensor, low: Tensor) -> Tensor:
        image: Tensor = self.conv(torch.cat([outer, self.up(low)], 1))
        return image


class UNet(nn.Module):
    """Its parts give and take what would be edges by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.down, self.up, self.leave = Enter(), Down(), Up(), Leave()

    def forward(self, image: Tensor) -> Tensor:
        entered = self.enter(image)
        low = self.up(**self.down(entered["half"]))
        found: Tensor = self.leave(entered["outer"], low=low)
        return found


UNET = (
    Edge("outer", 0, (3,)),
    Edge("half", 0, (1,)),
    Edge("inner", 1, (2,)),
    Edge("quarter", 1, (2,)),
    Edge("low", 2, (3,)),
)


def pictures(step: int) -> tuple[list[Any], list[Tensor]]:
    """Of another size in each step."""
    generator = torch.Generator().manual_seed(step)
    side = 4 * (1 + step % 2)
    x, y = torch.randn(2, 4, 2, 3, side, side, generator=generator, dtype=torch.float64)
    return list(x), list(y)


# ---- an encoder and a decoder: what the encoder makes is used by every stage of the decoder


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.mix = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, source: Tensor) -> Tensor:
        hidden = self.embed(source)
        mixed: Tensor = self.mix(hidden, hidden, hidden, key_padding_mask=source == 0)[0]
        out: Tensor = hidden + mixed
        return out


class Begin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.embed = nn.Embedding(WORDS, WIDTH)

    def forward(self, memory: Tensor, *, said: Tensor) -> dict[str, Tensor]:
        return {"normed": self.norm(memory), "hidden": self.embed(said)}


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, normed: Tensor, hidden: Tensor) -> Tensor:
        found: Tensor = self.attend(hidden, normed, normed, need_weights=False)[0]
        return hidden + torch.tanh(self.lin(found))


class Answer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decode = Decoder()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, normed: Tensor, better: Tensor) -> Tensor:
        logits: Tensor = self.head(self.decode(normed, better))
        return logits


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.begin, self.decode, self.answer = Encoder(), Begin(), Decoder(), Answer()

    def forward(self, source: Tensor, said: Tensor) -> Tensor:
        begun = self.begin(self.encode(source), said=said)
        better = self.decode(**begun)
        found: Tensor = self.answer(begun["normed"], better)
        return found


TRANSLATOR = (
    Edge("memory", 0, (1,)),
    Edge("normed", 1, (2, 3)),
    Edge("hidden", 1, (2,)),
    Edge("better", 2, (3,)),
)


def sentences(step: int) -> tuple[list[Any], list[Tensor]]:
    """Both lengths are others in each microbatch."""
    parts, targets = [], []
    for i in range(4):
        source, said = words(2, 3 + (step + i) % 3, 10 * step + i), words(2, 2 + i % 3, 50 + step)
        parts.append({"source": source, "said": said})
        targets.append(said.roll(-1, 1))
    return parts, targets


def words(rows: int, length: int, seed: int) -> Tensor:
    return torch.randint(1, WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))


# ---- activations in dicts


class Keyed(nn.Module):
    """Takes and gives a dict: a tensor, a mask, a count and a list."""

    def __init__(self, *, first: bool = False, last: bool = False) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.first, self.last = first, last

    def forward(self, state: Any) -> Any:
        if self.first:
            state = {"hidden": state, "mask": state[:, :1] > -0.5, "calls": 0, "all": []}
        hidden = torch.where(state["mask"], self.lin(state["hidden"]).tanh(), state["hidden"])
        kept = [*state["all"], hidden]
        if self.last:
            return torch.stack(kept).sum(0) / (state["calls"] + 1)
        return state | {"hidden": hidden, "calls": state["calls"] + 1, "all": kept}


def keyed() -> nn.Sequential:
    return nn.Sequential(Keyed(first=True), Keyed(), Keyed(), Keyed(), Keyed(last=True))


def rows(step: int) -> tuple[list[Any], list[Tensor]]:
    """Other numbers of rows in each microbatch, other numbers of microbatches in each step."""
    generator = torch.Generator().manual_seed(step)
    sizes = [1 + (step + i) % 3 for i in range(4 + step % 3)]
    x, y = torch.randn(2, sum(sizes), WIDTH, generator=generator, dtype=torch.float64)
    return list(x.split(sizes)), list(y.split(sizes))


# ---- ragged tokens, part of which counts; pictures for batch norms


def tokens(step: int) -> tuple[list[Any], list[Tensor]]:
    """Other lengths, rows and numbers of microbatches in each step; of one microbatch nothing counts."""
    parts = [
        draw(1 + i % 2, 2 + (step + 3 * i) % 5, seed=10 * step + i) for i in range(4 + step % 3)
    ]
    targets = [part.roll(-1, 1).masked_fill(part == 3, -100) for part in parts]
    return list(parts), [*targets[:-1], torch.full_like(parts[-1], -100)]


def photos(step: int) -> tuple[list[Any], list[Tensor]]:
    x, y = images(8 + 4 * (step % 2))
    return list(x.chunk(4)), list(y.chunk(4))


# ---- all of them


@dataclass(frozen=True)
class Whole:
    """A model, its batches of each step as microbatches, and its loss.

    ``edges`` say how its children are four stages by hand, where they are.
    """

    make: Callable[[], nn.Module]
    batches: Callable[[int], tuple[list[Any], list[Tensor]]]
    loss_fn: Callable[[Tensor, Tensor], Tensor] = functional.mse_loss
    weight: Callable[[Tensor], Tensor] | None = None
    edges: tuple[Edge, ...] | None = None

    def model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return self.make().double()


MODELS = {
    "U-Net": Whole(UNet, pictures, edges=UNET),
    "encoder-decoder": Whole(Translator, sentences, token_loss, valid, TRANSLATOR),
    "ragged": Whole(plain_model, tokens, token_loss, valid),
    "experts": Whole(experts, tokens, token_loss, valid),
    "vision": Whole(vision, photos),
    "dicts": Whole(keyed, rows),
}
LIMIT = 0.1
"""Of the gradients' norm."""


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def plain(whole: Whole) -> tuple[list[list[float]], list[Tensor]]:
    """Loss and norm of each step of a plain loop over the microbatches, and the weights after them."""
    model = whole.model()
    optimizer, seen = optimizer_of(model.parameters()), []
    for step in range(STEPS):
        loss = plain_step(whole, model, *whole.batches(step))
        norm = nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
        optimizer.zero_grad()
        seen.append([loss, float(norm)])
    return seen, [*model.state_dict().values()]


def plain_step(whole: Whole, model: nn.Module, parts: list[Any], targets: list[Tensor]) -> float:
    weigh = whole.weight or len
    weights = [float(weigh(target)) for target in targets]
    total = 0.0
    for part, target, weight in zip(parts, targets, weights, strict=True):
        if weight:
            with collect_losses() as added:
                output = model(**part) if isinstance(part, dict) else model(part)
            loss = (whole.loss_fn(output, target) + added.total()) * (weight / sum(weights))
            loss.backward()
            total += float(loss.detach())
    return total
