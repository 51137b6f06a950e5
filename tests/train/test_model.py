"""The model, its cut and its optimizer."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from penstock.train import GPT, TrainConfig
from penstock.train.model import even_stages, learning_rate, make_optimizer, next_byte_loss


def small(layers: int = 2, seed: int = 0) -> GPT:
    return GPT(layers=layers, width=16, heads=2, sequence=12, seed=seed)


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("length", [12, 5])
def test_it_starts_with_a_uniform_guess_for_each_byte(length: int) -> None:
    logits = small()(tokens(3, length))
    assert logits.shape == (3, length, 256)
    assert next_byte_loss(logits, tokens(3, length)).item() == pytest.approx(math.log(256))


def test_weights_follow_from_the_seed_and_their_names() -> None:
    first, same, other = (small(seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.embed.weight, same.embed.weight)
    assert not torch.equal(first.embed.weight, other.embed.weight)
    name = "blocks.1.attention.inputs.weight"
    assert torch.equal(small().get_parameter(name), small(layers=3).get_parameter(name))


@pytest.mark.parametrize(
    ("layers", "blocks"), [(4, [1, 1, 1, 1]), (5, [3, 2]), (7, [3, 2, 2]), (3, [3])]
)
def test_a_cut_deals_the_blocks_evenly_in_the_order_of_the_forward_pass(
    layers: int, blocks: list[int]
) -> None:
    dealt = even_stages(layers, len(blocks))
    assert [sum(path.startswith("blocks") for path in stage) for stage in dealt] == blocks
    assert [path for stage in dealt for path in stage] == small(layers).chain()


def test_a_position_sees_those_before_it_in_their_order_and_not_what_follows() -> None:
    model, before = small(), tokens(1, 12)
    nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(2))
    after = before.clone()
    after[0, 7:] = 0
    torch.testing.assert_close(model(before)[0, :7], model(after)[0, :7])
    assert not torch.equal(model(before)[0, 7:], model(after)[0, 7:])
    swapped = before[:, [1, 0, *range(2, 12)]]
    assert not torch.allclose(model(before)[0, -1], model(swapped)[0, -1])


@pytest.mark.parametrize(
    ("steps", "warmup", "rates"),
    [
        (110, 10, {1: 0.1, 5: 0.5, 10: 1.0, 60: 0.55, 110: 0.1}),
        (2, 10, {1: 0.1, 2: 0.2}),
        (2, 0, {1: 0.55, 2: 0.1}),
    ],
)
def test_the_rate_warms_up_and_falls_by_a_cosine(
    steps: int, warmup: int, rates: dict[int, float]
) -> None:
    config = TrainConfig(steps=steps, warmup=warmup, learning_rate=1.0)
    assert {step: learning_rate(step, config) for step in rates} == pytest.approx(rates)


def test_matrices_decay_but_not_embedding_and_norms() -> None:
    model = small()
    optimizer = make_optimizer(model.named_parameters(), TrainConfig(weight_decay=0.5))
    decaying, rest = optimizer.param_groups
    assert (decaying["weight_decay"], rest["weight_decay"]) == (0.5, 0.0)
    assert {weight.ndim for weight in decaying["params"]} == {2}
    assert any(weight is model.embed.weight for weight in rest["params"])
