"""A byte-level GPT and its optimizer.

The model is a chain of modules, so that it can be cut between any two of them:
pre-norm blocks with RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467), rotary positions (Su et al. 2021,
arXiv:2104.09864), SwiGLU (Shazeer 2020, arXiv:2002.05202) and a head that does not share the embedding's
weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from hashlib import sha256
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.train.config import TrainConfig

VOCABULARY = 256
"""Every byte is a token."""


class Attention(nn.Module):
    """Causal self-attention with rotary positions: ``(batch, length, width)`` to the same."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, width: int, heads: int, sequence: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        cosine, sine = rotations(sequence, width // heads)
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
    """SwiGLU: ``(batch, length, width)`` to the same.

    Its inner width is 8/3 of the outer one, rounded up to a multiple of 32.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = 32 * math.ceil(8 * width / 3 / 32)
        self.inputs = nn.Linear(width, 2 * hidden, bias=False)
        self.output = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position separately."""
        gate, value = self.inputs(x).chunk(2, dim=-1)
        result: Tensor = self.output(functional.silu(gate) * value)
        return result


class DecoderBlock(nn.Module):
    """Attention and feed-forward, each with a norm before it and added to the residual stream."""

    def __init__(self, width: int, heads: int, sequence: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(width, heads, sequence)
        self.feed_forward_norm = nn.RMSNorm(width)
        self.feed_forward = FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, length, width)`` to the same."""
        x = x + self.attention(self.attention_norm(x))
        result: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return result


class GPT(nn.Module):
    """The whole model: bytes ``(batch, length)`` int64 to logits ``(batch, length, 256)``.

    Its parts in call order are ``embed``, ``blocks.0`` …, ``norm``, ``head``: :meth:`chain` names them.

    Args:
        layers: number of blocks.
        width: features of the residual stream.
        heads: attention heads; ``width / heads`` must be an even whole number.
        sequence: the longest sequence, in bytes.
        seed: the seed of the weights, see :func:`initialise`.
    """

    def __init__(self, layers: int, width: int, heads: int, sequence: int, seed: int = 0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads, sequence) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        initialise(self, seed)
        self.parameter_count = sum(weight.numel() for weight in self.parameters())
        """The number of weights."""

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


def initialise(model: GPT, seed: int) -> None:
    """Draw every matrix from its own generator, seeded from ``seed`` and the matrix's name.

    So a weight depends neither on the cut nor on the weights made before it. Matrices that write to the
    residual stream are scaled down by the number of writers (GPT-2); the head starts at zero, so that the
    first loss is that of a uniform guess.
    """
    for name, weight in model.named_parameters():
        if weight.ndim < 2:
            continue
        spread: float = {"embed": 1.0, "head": 0.0}.get(
            name.split(".")[0], weight.shape[-1] ** -0.5
        )
        if name.endswith("output.weight"):
            spread /= math.sqrt(2 * len(model.blocks))
        digest = sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        nn.init.normal_(weight, 0.0, spread, generator)


def next_byte_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte: logits ``(batch, length, 256)``, target ``(batch, length)``."""
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten())


def even_stages(layers: int, stages: int) -> list[list[str]]:
    """The paths of each stage's modules: blocks dealt evenly, the ends of the model to the outer stages."""
    bounds = [math.ceil(stage * layers / stages) for stage in range(stages + 1)]
    blocks = [[f"blocks.{i}" for i in range(*ends)] for ends in pairwise(bounds)]
    blocks[0].insert(0, "embed")
    blocks[-1] += ["norm", "head"]
    return blocks


# ---- AdamW that decays matrices only, and the learning rate of each step


FINAL_SHARE = 0.1
"""The cosine ends at this share of the peak learning rate."""


def make_optimizer(
    parameters: Iterable[tuple[str, Tensor]], config: TrainConfig
) -> torch.optim.AdamW:
    """AdamW for named parameters; vectors (the gains of norms) and the embedding do not decay."""
    decaying, rest = list[Tensor](), list[Tensor]()
    for name, weight in parameters:
        (decaying if weight.ndim > 1 and not name.startswith("embed.") else rest).append(weight)
    groups = [
        {"params": decaying, "weight_decay": config.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of ``step``, counted from 1: linear warm-up, then a cosine down to a tenth."""
    if step <= config.warmup:
        return config.learning_rate * step / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * (FINAL_SHARE + (1 - FINAL_SHARE) * cosine)
