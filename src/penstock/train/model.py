"""A byte-level GPT, its optimizer, and how it generates text.

The model is a chain of modules, so that it can be cut between any two of them:
pre-norm blocks with RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467), rotary positions (Su et al. 2021,
arXiv:2104.09864), SwiGLU (Shazeer 2020, arXiv:2002.05202) and a head that does not share the embedding's
weights.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.errors import ConfigError
from penstock.train.config import TrainConfig

VOCABULARY = 256
"""Every byte is a token."""


@dataclass(frozen=True)
class Shape:
    """The size of a :class:`GPT`.

    Args:
        layers: number of blocks.
        width: features of the residual stream.
        heads: attention heads; ``width / heads`` must be an even whole number.
        sequence: the longest sequence, in bytes.

    Raises:
        ConfigError: the heads do not divide the width into even parts.
    """

    layers: int
    width: int
    heads: int
    sequence: int

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise ConfigError(
                f"width={self.width} with heads={self.heads}: each head needs an even number of "
                f"features; choose a width that {2 * self.heads} divides"
            )

    @property
    def hidden(self) -> int:
        """Features inside the feed-forward part: 8/3 of the width, rounded up to a multiple of 32."""
        return 32 * math.ceil(8 * self.width / 3 / 32)

    @property
    def flops(self) -> int:
        """Floating-point operations per byte of text, forward and backward: two per product and its sum."""
        products = self.parameters - (VOCABULARY + 1 + 2 * self.layers) * self.width
        attention = 2 * self.layers * self.width * self.sequence
        return 6 * (products + attention)

    @property
    def parameters(self) -> int:
        """How many weights the model has."""
        block = (4 * self.width + 3 * self.hidden + 2) * self.width
        return (2 * VOCABULARY + 1) * self.width + self.layers * block


class Attention(nn.Module):
    """Causal self-attention with rotary positions: ``(batch, length, width)`` to the same."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.inputs = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.output = nn.Linear(shape.width, shape.width, bias=False)
        cosine, sine = rotations(shape.sequence, shape.width // shape.heads)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix each position with the ones before it."""
        query, key, value = (self._by_head(part) for part in self.inputs(x).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(
            self._rotate(query), self._rotate(key), value, is_causal=True
        )
        joined: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return joined

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.heads, -1).transpose(1, 2)

    def _rotate(self, x: Tensor) -> Tensor:
        length = x.shape[-2]
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return x * self.cosine[:length] + turned * self.sine[:length]


class FeedForward(nn.Module):
    """SwiGLU: ``(batch, length, width)`` to the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.inputs = nn.Linear(shape.width, 2 * shape.hidden, bias=False)
        self.output = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position alone."""
        gate, value = self.inputs(x).chunk(2, dim=-1)
        result: Tensor = self.output(functional.silu(gate) * value)
        return result


class Block(nn.Module):
    """Attention and feed-forward, each normalised before and added to the stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width)
        self.attention = Attention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.width)
        self.feed_forward = FeedForward(shape)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, length, width)`` to the same."""
        x = x + self.attention(self.attention_norm(x))
        result: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return result


class GPT(nn.Module):
    """The whole model: bytes ``(batch, length)`` int64 to logits ``(batch, length, 256)``.

    Its parts in call order are ``embed``, ``blocks.0`` …, ``norm``, ``head``: :meth:`chain` names them.

    Args:
        shape: its size.
        seed: the seed of the weights, see :func:`initialise`.
    """

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        initialise(self, seed, shape.layers)

    def forward(self, x: Tensor) -> Tensor:
        """Predict at each position the byte that follows it."""
        for path in self.chain():
            x = self.get_submodule(path)(x)
        return x

    def chain(self) -> list[str]:
        """The paths of the modules that a forward pass calls, in order."""
        return ["embed", *(f"blocks.{index}" for index in range(len(self.blocks))), "norm", "head"]


def rotations(length: int, features: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, each ``(length, features)`` float32."""
    frequency = 10_000.0 ** (-torch.arange(0, features, 2, dtype=torch.float64) / features)
    angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency).repeat(1, 2)
    return angle.cos().float(), angle.sin().float()


def initialise(model: nn.Module, seed: int, layers: int) -> None:
    """Draw every matrix from a generator of its own, seeded from ``seed`` and its name.

    So a weight depends neither on the cut nor on the weights made before it. Matrices that write to the
    residual stream are scaled down by the number of writers (GPT-2); the head starts at zero, so that the
    first loss is that of a uniform guess.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            nn.init.normal_(
                parameter, 0.0, _spread(name, parameter, layers), _generator(seed, name)
            )


def _spread(name: str, parameter: Tensor, layers: int) -> float:
    if name.startswith("head."):
        return 0.0
    if name.startswith("embed."):
        return 1.0
    spread: float = parameter.shape[-1] ** -0.5
    return spread / math.sqrt(2 * layers) if name.endswith("output.weight") else spread


def _generator(seed: int, name: str) -> torch.Generator:
    digest = sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))


def next_byte_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte: logits ``(batch, length, 256)``, target ``(batch, length)``."""
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten())


def cut(layers: int, stages: int) -> list[list[str]]:
    """Deal the modules of a :class:`GPT` to stages: the blocks evenly, its ends to the first and last stage.

    Args:
        layers: how many blocks the model has.
        stages: how many stages to make.

    Returns:
        For each stage the paths of its modules in call order; if the blocks cannot be dealt evenly, earlier
        stages get one more.

    Raises:
        ConfigError: there are more stages than layers.
    """
    if stages > layers:
        raise ConfigError(
            f"{stages} stages for layers={layers}: every stage needs a layer; "
            f"ask for fewer ranks or stages per rank, or for at least {stages} layers"
        )
    bounds = [math.ceil(stage * layers / stages) for stage in range(stages + 1)]
    blocks = [[f"blocks.{i}" for i in range(*ends)] for ends in pairwise(bounds)]
    return [
        [
            *(["embed"] if stage == 0 else []),
            *paths,
            *(["norm", "head"] if stage == stages - 1 else []),
        ]
        for stage, paths in enumerate(blocks)
    ]


# ---- AdamW that decays matrices only, and the learning rate of each step


FINAL_SHARE = 0.1
"""The cosine ends at this share of the peak learning rate."""


def make_optimizer(
    parameters: Iterable[tuple[str, Tensor]], config: TrainConfig
) -> torch.optim.AdamW:
    """AdamW for named parameters; vectors (the gains of norms) and the embedding do not decay."""
    named = list(parameters)
    decaying = [weight for name, weight in named if _decays(name, weight)]
    rest = [weight for name, weight in named if not _decays(name, weight)]
    groups = [
        {"params": decaying, "weight_decay": config.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use ``rate`` for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of ``step``, counted from 1: linear warm-up, then a cosine down to a tenth."""
    if step <= config.warmup:
        return config.learning_rate * step / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * (FINAL_SHARE + (1 - FINAL_SHARE) * cosine)


def _decays(name: str, weight: Tensor) -> bool:
    return weight.ndim > 1 and not name.startswith("embed.")


# ---- text from a trained model, which is the same on every rank


Predict = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Sampling:
    """How text is drawn.

    Args:
        length: bytes to generate.
        temperature: below 1 the likely bytes become likelier.
        window: the longest context, in bytes, that the model takes.
        seed: the same seed draws the same text.
    """

    length: int
    temperature: float
    window: int
    seed: int


def generate(predict: Predict, prompt: bytes, sampling: Sampling) -> bytes:
    """Draw bytes that go on from a prompt, one at a time.

    Args:
        predict: ``(1, window)`` int64 to logits ``(1, window, 256)``.
        prompt: at least one byte.
        sampling: how to draw.

    Returns:
        The generated bytes, without the prompt.
    """
    random = torch.Generator().manual_seed(sampling.seed)
    text = bytearray(prompt)
    for _ in range(sampling.length):
        logits = _last_logits(predict, text[-sampling.window :], sampling.window)
        chances = torch.softmax(logits.double() / sampling.temperature, dim=-1)
        text.append(int(torch.multinomial(chances, 1, generator=random)))
    return bytes(text[len(prompt) :])


def _last_logits(predict: Predict, context: bytearray, window: int) -> Tensor:
    """The prediction after ``context``.

    What comes after the context cannot influence it, since attention only looks back; so the context is
    padded to a fixed length, and no shape changes from byte to byte.
    """
    padded = context.ljust(window, b"\0")
    tokens = torch.frombuffer(padded, dtype=torch.uint8).long()[None]
    return predict(tokens)[0, len(context) - 1].cpu()


def readable(text: bytes) -> str:
    """Bytes as text that is safe to print: invalid UTF-8 and terminal control characters are replaced."""
    return "".join(map(_printable, text.decode("utf-8", errors="replace")))


def _printable(character: str) -> str:
    control = unicodedata.category(character) in {"Cc", "Cf", "Cs"}
    return "\N{REPLACEMENT CHARACTER}" if control and character not in "\n\t" else character
