"""A model that is cut by calls draws, and begins with, what it does uncut."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import penstock
from penstock import Pipeline, PipelineStage
from penstock.errors import PenstockError
from penstock.partition import partition
from penstock.testing import WorkerPool
from tests.pipeline.noisy import MICROBATCHES, SEED, WIDTH, Block, batch, bits, noisy_loss

EVEN = torch.ones(WIDTH)


class Inner(nn.Module):
    """Drops before its first block, between blocks, and by one module that it calls many times."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block("") for _ in range(4)])
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(x, 0.2)
        for block in self.blocks:
            x = functional.dropout(self.drop(block(x)), 0.1)
        found: Tensor = self.drop(x)
        return found


class Top(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Inner()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(functional.dropout(self.model(x), 0.1))
        return found


def made() -> Top:
    model = Top()
    penstock.init_weights(model, 0)
    return model


def plain(model: Top) -> dict[str, str]:
    x, y = batch()
    penstock.init_weights(model, 0)
    pairs = zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True)
    for index, (part, target) in enumerate(pairs):
        with penstock.randomness(model, seed=SEED, microbatch=index):
            (noisy_loss(model(part), target) / MICROBATCHES).backward()
    return bits(model.named_parameters())


CUTS: list[tuple[Any, str, int]] = [
    (1, "GPipe", 1),
    (2, "1F1B", 2),
    (4, "ZB-V", 2),
    (["model.blocks.1", "model.blocks.2", "head"], "Interleaved1F1B", 2),
]
OPTIONS: dict[str, Any] = {"microbatches": MICROBATCHES, "loss_fn": noisy_loss, "seed": SEED}


@pytest.mark.parametrize(("stages", "schedule", "ranks"), CUTS)
def test_cut_by_calls(stages: Any, schedule: str, ranks: int) -> None:
    model, (x, y) = made(), batch()
    cut = partition(model, stages, example=((x[:2],), {}))
    with Pipeline(model, schedule=schedule, ranks=ranks, stages=cut, **OPTIONS) as pipe:
        pipe.step(x, target=y)
        assert bits(pipe.named_parameters()) == plain(Top())
        whole = copy.deepcopy(made())
        penstock.init_weights(whole, 1)
        penstock.init_weights(pipe, 1)
        found = pipe.state_dict()
        assert all(torch.equal(found[name], value) for name, value in whole.state_dict().items())


class Checkpointed(Top):
    """Computes again what draws, in parts and as a whole, wherever it is cut."""

    def __init__(self, outer: bool, inner: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.outer, self.inner = outer, inner

    def part(self, x: Tensor, index: int) -> Tensor:
        blocks = self.model.blocks
        x = functional.dropout(blocks[index](x), 0.2) * torch.rand_like(x)
        return self.model.drop(blocks[index + 1](x))  # type: ignore[no-any-return]

    def all(self, x: Tensor) -> Tensor:
        noise = torch.rand(WIDTH)
        for index in (0, 2):
            x = functional.dropout(x, 0.1)
            x = checkpoint(self.part, x, index, use_reentrant=self.inner) + noise
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(checkpoint(self.all, self.stem(x), use_reentrant=self.outer))
        found: Tensor = self.head(x)
        return found


# Torch says so of the inner one of two that are both reentrant, in the plain model too.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("outer", [True, False])
def test_checkpoints_around_a_cut_draw_what_they_do_uncut(outer: bool, inner: bool) -> None:
    model, (x, y) = Checkpointed(outer, inner), batch()
    expected = plain(model)
    for stages, schedule, ranks in CUTS[1:3]:
        model = Checkpointed(outer, inner)
        penstock.init_weights(model, 0)
        cut = partition(model, stages, example=((x[:2],), {}))
        with Pipeline(model, schedule=schedule, ranks=ranks, stages=cut, **OPTIONS) as pipe:
            pipe.step(x, target=y)
            assert bits(pipe.named_parameters()) == expected


# ---- every way to draw between modules


def attention(x: Tensor) -> Tensor:
    found, _ = functional.multi_head_attention_forward(
        x[None], x[None], x[None], WIDTH, 2, torch.eye(WIDTH).repeat(3, 1), None, None, None, False,
        0.3, torch.eye(WIDTH), None,
    )  # fmt: skip
    return functional.dropout(found[0], 0.2) + torch.rand_like(x)


def fused_attention(x: Tensor) -> Tensor:
    query = x[None, None]
    found = functional.scaled_dot_product_attention(query, query, query, dropout_p=0.3)
    return found[0, 0] + functional.dropout(x)


def into_views(x: Tensor) -> Tensor:
    noise = torch.zeros(3, WIDTH)
    noise[0].normal_()
    noise[1].uniform_()
    return x + noise.sum(0)


def into_views_like_a_value(x: Tensor) -> Tensor:
    return x @ nn.init.orthogonal_(torch.empty(WIDTH, WIDTH))


def written_by_init(x: Tensor) -> Tensor:
    noise = nn.init.normal_(torch.empty(WIDTH)) + nn.init.uniform_(x.new_empty(x.shape))
    mixed = nn.init.kaiming_uniform_(torch.empty(WIDTH, WIDTH))
    return x @ mixed + noise


def by_distributions(x: Tensor) -> Tensor:
    normal = torch.distributions.Normal(x, 1.0, validate_args=False)
    return normal.rsample() + torch.distributions.Gamma(torch.ones(WIDTH), 1.0).rsample()


def forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng([]):
        torch.manual_seed(4)
        noise = torch.rand(WIDTH) + torch.rand_like(x)
    return functional.dropout(x) + noise


def put_back(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    dropped = functional.dropout(x)
    torch.set_rng_state(state)
    return dropped + functional.dropout(x) * torch.rand_like(x)


def of_its_own(x: Tensor) -> Tensor:
    own = torch.Generator().manual_seed(7)
    return x + torch.randn(WIDTH, generator=own) + torch.randn(x.shape, generator=own)


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "numbers": lambda x: x + torch.normal(0.0, 1.0, x.shape) * torch.normal(x.detach(), 0.5),
    "integers": lambda x: x * torch.randint_like(x, 1, 3) + torch.randint(0, 3, (WIDTH,)),
    "in place": lambda x: x + x.new_empty(x.shape).normal_() * x.new_empty(WIDTH).exponential_(),
    "several": lambda x: functional.dropout(functional.dropout(x, 0.2)) + torch.rand_like(x),
    "features": lambda x: functional.feature_alpha_dropout(x[:, :, None], 0.2, True)[:, :, 0],
    "by hand": lambda x: x * torch.bernoulli(torch.sigmoid(x.detach())) * (torch.rand(WIDTH) > 0.3),
    "gumbel": lambda x: functional.gumbel_softmax(x) + functional.rrelu(x, training=True),
    "indices": lambda x: x[:, torch.randperm(WIDTH)] + x[:, torch.multinomial(EVEN, 1)],
    "rejecting": lambda x: x + torch.poisson(x.detach().abs() * 9) * torch.rand_like(x),
    "attention": attention,
    "fused attention": fused_attention,
    "views": into_views,
    "views like a value": into_views_like_a_value,
    "init": written_by_init,
    "distributions": by_distributions,
    "forked": forked,
    "put back": put_back,
    "own generator": of_its_own,
}


class Noisy(nn.Module):
    """Draws before its blocks what it uses after some of them, and between them."""

    def __init__(self, ways: Sequence[str]) -> None:
        super().__init__()
        self.ways = ways
        self.blocks = nn.ModuleList([Block("") for _ in range(4)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        noise, mask, idle = torch.randn(WIDTH), torch.rand_like(x), functional.dropout(x, 0.0)
        dropped = functional.dropout(idle, 0.3)
        for index, block in enumerate(self.blocks):
            x = block(x)
            for way in self.ways[index :: len(self.blocks)]:
                x = torch.tanh(WAYS[way](x))
            if index == 1:
                x = x * mask + dropped
        found: Tensor = self.head(x + noise)
        return found


def noisy_steps(
    group: Any = None, *, ways: Sequence[str], stages: int = 1, **options: Any
) -> dict[str, str]:
    """The gradients of a step that draws in these ways; also a worker's task."""
    model, (x, y) = Noisy(ways), batch()
    penstock.init_weights(model, 0)
    cut = partition(model, stages, example=((x[:2],), {}))
    with Pipeline(model, stages=cut, group=group, **OPTIONS, **options) as pipe:
        pipe.step(x, target=y)
        return bits(pipe.named_parameters())


GROUPS = [list(WAYS)[start::4] for start in range(4)]


def one_stage(ways: Sequence[str]) -> dict[str, str]:
    return noisy_steps(ways=ways, schedule="GPipe", ranks=1)


@pytest.mark.parametrize("ways", GROUPS, ids=", ".join)
def test_what_is_drawn_between_modules_does_not_depend_on_the_cut(ways: list[str]) -> None:
    one = one_stage(ways)
    assert noisy_steps(ways=ways, stages=3, schedule="1F1B", ranks=3) == one
    assert noisy_steps(ways=ways, stages=4, schedule="ZB-V", ranks=2) == one


def test_nor_in_processes_of_their_own(workers: WorkerPool) -> None:
    ways = ["in place", "attention", "init", "several"]
    answers = workers.run(
        "tests.pipeline.test_randomness_calls:noisy_steps", 2, ways=ways, stages=2, schedule="1F1B"
    )
    assert answers[0] | answers[1] == one_stage(ways)


class Truncated(nn.Module):
    """Draws again until the numbers please it, which it can see only where there are numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x)
        return found + nn.init.trunc_normal_(torch.empty(WIDTH), std=2.0)


def test_a_module_that_draws_until_it_is_pleased_comes_to_an_end() -> None:
    model = nn.Sequential(Truncated(), Truncated())
    one, two = (
        [out.clone() for out in outputs(model, schedule="1F1B", ranks=ranks)] for ranks in (1, 2)
    )
    assert all(map(torch.equal, one, two))


# ---- generators of the model's own


class Own(nn.Module):
    """Draws from a generator that it keeps, between its blocks or in them."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        self.inside = inside
        self.own = torch.Generator().manual_seed(3)
        self.blocks = nn.ModuleList([Adding(self.own if inside else None) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x = x if self.inside else x + torch.randn(WIDTH, generator=self.own)
        return x


class Adding(nn.Module):
    def __init__(self, own: torch.Generator | None) -> None:
        super().__init__()
        self.own = own
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x)
        return found if self.own is None else found + torch.randn(WIDTH, generator=self.own)


def outputs(model: nn.Module, **options: Any) -> list[Tensor]:
    """The output of each microbatch of a step."""
    seen: list[Tensor] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.append(output.detach())
        return output.sum()

    x = batch()[0]
    cut = partition(model, options["ranks"], example=((x[:2],), {}))
    with Pipeline(model, stages=cut, microbatches=2, loss_fn=loss, seed=1, **options) as pipe:
        pipe.step(x, target=x)
    return seen[-2:]


def test_a_generator_of_the_models_own_between_units_is_refused() -> None:
    with pytest.raises(PenstockError, match=r"the state of a torch\.Generator of the model"):
        outputs(Own(inside=False), schedule="1F1B", ranks=2)


def test_one_that_modules_of_several_stages_draw_from_is_refused() -> None:
    with pytest.raises(PenstockError, match=r"blocks\.1 in stage 1 draws from a torch\.Generator"):
        outputs(Own(inside=True), schedule="1F1B", ranks=2)


class Part(nn.Module):
    """A stage made by hand that draws in its own code."""

    def __init__(self, seen: list[bytes]) -> None:
        super().__init__()
        self.seen = seen
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(WIDTH)
        self.seen.append(noise.numpy().tobytes())
        return x + noise


def test_stages_by_hand_draw_apart_in_their_own_code() -> None:
    seen: list[bytes] = []
    stages = [PipelineStage(Part(seen), index, 2) for index in range(2)]
    options: dict[str, Any] = {"loss_fn": lambda output, _: output.mean(), "seed": 2}
    pipe = Pipeline.from_stages(stages, schedule="GPipe", microbatches=1, **options)
    x = batch()[0].requires_grad_()
    pipe.step(x, target=x)
    assert seen[-2] != seen[-1]
