"""Models that draw random numbers in every way there is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from penstock import Microbatches
from penstock.testing import Case

WIDTH, SAMPLES = 6, 8


class Block(nn.Module):
    """Drops in modules, between them, and before the first of them; perhaps again in backward."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.first, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4)
        self.last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.RReLU())

    def forward(self, x: Tensor) -> Tensor:
        again: Tensor = (
            checkpoint(self.mixed, x, use_reentrant=False) if self.recompute else self.mixed(x)
        )
        return again

    def mixed(self, x: Tensor) -> Tensor:
        hidden = self.drop(functional.silu(self.first(x)))
        hidden = functional.dropout(hidden, 0.2, self.training)
        hidden = self.drop(hidden)
        mixed: Tensor = x + hidden * self.last(hidden) + torch.rand_like(x)
        return mixed


def chain(recompute: bool = False) -> nn.Sequential:
    """Of eight modules, one of which is called twice."""
    blocks = [Block(recompute) for _ in range(3)]
    shared, head = nn.Dropout(0.5), nn.Linear(WIDTH, 3)
    layers = [nn.Dropout(0.1), blocks[0], shared, blocks[1], shared, blocks[2], nn.Tanh(), head]
    return nn.Sequential(*layers)


class Nested(nn.Module):
    """Drops before its first block, between blocks, and by one module that it calls many times."""

    def __init__(self) -> None:
        super().__init__()
        self.stem: nn.Module = nn.Identity()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(self.stem(x), 0.2)
        for block in self.blocks:
            x = functional.dropout(self.drop(block(x)), 0.1)
        output: Tensor = self.head(functional.dropout(self.drop(x), 0.1))
        return output


class Checkpointed(Nested):
    """Computes again what draws, in parts and as a whole, wherever it is cut."""

    def __init__(self, outer: bool, inner: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.outer, self.inner = outer, inner

    def part(self, x: Tensor, index: int) -> Tensor:
        x = functional.dropout(self.blocks[index](x), 0.2) * torch.rand_like(x)
        part: Tensor = self.drop(self.blocks[index + 1](x))
        return part

    def all(self, x: Tensor) -> Tensor:
        noise = torch.rand(WIDTH)
        for index in (0, 2):
            x = functional.dropout(x, 0.1)
            x = checkpoint(self.part, x, index, use_reentrant=self.inner) + noise
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(checkpoint(self.all, self.stem(x), use_reentrant=self.outer))
        output: Tensor = self.head(x)
        return output


# ---- every way to draw between modules


def attention(x: Tensor) -> Tensor:
    attended, _ = functional.multi_head_attention_forward(
        x[None], x[None], x[None], WIDTH, 2, torch.eye(WIDTH).repeat(3, 1), None, None, None, False,
        0.3, torch.eye(WIDTH), None,
    )  # fmt: skip
    return functional.dropout(attended[0], 0.2) + torch.rand_like(x)


def fused_attention(x: Tensor) -> Tensor:
    query = x[None, None]
    attended = functional.scaled_dot_product_attention(query, query, query, dropout_p=0.3)
    return attended[0, 0] + functional.dropout(x)


def into_views(x: Tensor) -> Tensor:
    noise = torch.zeros(3, WIDTH)
    noise[0].normal_()
    noise[1].uniform_()
    return x + noise.sum(0)


def by_init(x: Tensor) -> Tensor:
    noise = nn.init.normal_(torch.empty(WIDTH)) + nn.init.uniform_(x.new_empty(x.shape))
    return x @ nn.init.kaiming_uniform_(torch.empty(WIDTH, WIDTH)) + noise


def by_distributions(x: Tensor) -> Tensor:
    normal = torch.distributions.Normal(x, 1.0, validate_args=False)
    return normal.rsample() + torch.distributions.Gamma(torch.ones(WIDTH), 1.0).rsample()


def of_its_own(x: Tensor) -> Tensor:
    own = torch.Generator().manual_seed(7)
    return x + torch.randn(WIDTH, generator=own) + torch.randn(x.shape, generator=own)


WAYS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x + torch.normal(0.0, 1.0, x.shape) * torch.normal(x.detach(), 0.5),
    lambda x: x * torch.randint_like(x, 1, 3) + torch.randint(0, 3, (WIDTH,)),
    lambda x: x + x.new_empty(x.shape).normal_() * x.new_empty(WIDTH).exponential_(),
    lambda x: functional.dropout(functional.dropout(x, 0.2)) + torch.rand_like(x),
    lambda x: functional.feature_alpha_dropout(x[:, :, None], 0.2, True)[:, :, 0],
    lambda x: x * torch.bernoulli(torch.sigmoid(x.detach())) * (torch.rand(WIDTH) > 0.3),
    lambda x: functional.gumbel_softmax(x) + functional.rrelu(x, training=True),
    lambda x: x[:, torch.randperm(WIDTH)] + x[:, torch.multinomial(torch.ones(WIDTH), 1)],
    lambda x: x + torch.poisson(x.detach().abs() * 9) * torch.rand_like(x),
    attention,
    fused_attention,
    into_views,
    by_init,
    by_distributions,
    of_its_own,
]


class Noisy(nn.Module):
    """Draws before its blocks what it uses after some of them, and between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        noise, mask, idle = torch.randn(WIDTH), torch.rand_like(x), functional.dropout(x, 0.0)
        dropped = functional.dropout(idle, 0.3)
        for index, block in enumerate(self.blocks):
            x = block(x)
            for way in WAYS[index :: len(self.blocks)]:
                x = torch.tanh(way(x))
            if index == 1:
                x = x * mask + dropped
        output: Tensor = self.head(x + noise)
        return output


BETWEEN: dict[str, Callable[[], nn.Module]] = {
    "chain": chain,
    "chain with checkpoints": lambda: chain(recompute=True),
    "nested": Nested,
    "checkpoint": lambda: Checkpointed(outer=False, inner=False),
    "reentrant checkpoint": lambda: Checkpointed(outer=True, inner=True),
    "checkpoint of reentrant ones": lambda: Checkpointed(outer=False, inner=True),
    "between, all": Noisy,
}


def noisy_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output + 0.1 * torch.randn_like(output), target)


def noisy(name: str) -> Case:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = BETWEEN[name]()
    generator = torch.Generator().manual_seed(5)
    x, y = (
        torch.randn(SAMPLES, WIDTH, generator=generator),
        torch.randn(SAMPLES, 3, generator=generator),
    )
    return Case(model, [Microbatches(x.chunk(4))], y.chunk(4), noisy_loss)
