"""The model: its size, weights, cut, optimizer and learning rate, and the text it generates."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.train import GPT, TrainConfig
from penstock.train.model import (
    cut,
    generate,
    learning_rate,
    make_optimizer,
    next_byte_loss,
    readable,
    set_learning_rate,
)


def small(layers: int = 2, seed: int = 0) -> GPT:
    return GPT(layers=layers, width=16, heads=2, sequence=12, seed=seed)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(1))


def busy_model() -> GPT:
    """A model whose head is not zero, so that logits differ."""
    model = small()
    nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(2))
    return model


def test_it_counts_its_weights() -> None:
    model = small()
    assert model.parameter_count == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("length", [12, 5])
def test_it_gives_a_logit_for_each_byte_and_starts_with_a_uniform_guess(length: int) -> None:
    text = tokens(3, length)
    logits = small()(text)
    assert logits.shape == (3, length, 256)
    assert next_byte_loss(logits, text).item() == pytest.approx(math.log(256))


def test_weights_follow_from_the_seed_and_their_names() -> None:
    first, same, other = (small(seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.embed.weight, same.embed.weight)
    assert not torch.equal(first.embed.weight, other.embed.weight)
    name = "blocks.1.attention.inputs.weight"
    torch.rand(7)
    assert torch.equal(small().get_parameter(name), small(layers=3).get_parameter(name))


@pytest.mark.parametrize(
    ("layers", "stages", "blocks"),
    [(4, 4, [1, 1, 1, 1]), (5, 2, [3, 2]), (7, 3, [3, 2, 2]), (3, 1, [3])],
)
def test_a_cut_deals_the_blocks_evenly_in_the_order_of_the_forward_pass(
    layers: int, stages: int, blocks: list[int]
) -> None:
    dealt, model = cut(layers, stages), small(layers)
    assert [sum(path.startswith("blocks") for path in stage) for stage in dealt] == blocks
    nn.init.normal_(model.head.weight)
    value = tokens(2, 12)
    for path in (path for stage in dealt for path in stage):
        value = model.get_submodule(path)(value)
    assert torch.equal(value, model(tokens(2, 12)))


def test_a_position_sees_those_before_it_in_their_order_and_not_what_follows() -> None:
    model, before = busy_model(), tokens(1, 12)
    after = before.clone()
    after[0, 7:] = 0
    torch.testing.assert_close(model(before)[0, :7], model(after)[0, :7])
    assert not torch.equal(model(before)[0, 7:], model(after)[0, 7:])
    swapped = before[:, [1, 0, *range(2, 12)]]
    assert not torch.allclose(model(before)[0, -1], model(swapped)[0, -1])


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="5 stages for layers=4"):
        cut(4, 5)


# ---- the optimizer


RATES = TrainConfig(steps=110, warmup=10, learning_rate=1.0, weight_decay=0.5)


@pytest.mark.parametrize(("step", "rate"), [(1, 0.1), (5, 0.5), (10, 1.0), (60, 0.55), (110, 0.1)])
def test_warm_up_then_cosine(step: int, rate: float) -> None:
    assert learning_rate(step, RATES) == pytest.approx(rate)


@pytest.mark.parametrize(("warmup", "rates"), [(10, [0.1, 0.2]), (0, [0.55, 0.1])])
def test_a_run_may_be_shorter_than_its_warm_up_or_have_none(
    warmup: int, rates: list[float]
) -> None:
    config = TrainConfig(steps=2, warmup=warmup, learning_rate=1.0)
    assert [learning_rate(step, config) for step in (1, 2)] == pytest.approx(rates)


def test_matrices_decay_but_not_embedding_and_norms() -> None:
    model = small()
    optimizer = make_optimizer(model.named_parameters(), RATES)
    decaying, rest = optimizer.param_groups
    assert (decaying["weight_decay"], rest["weight_decay"]) == (0.5, 0.0)
    assert {weight.ndim for weight in decaying["params"]} == {2}
    assert any(weight is model.embed.weight for weight in rest["params"])
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


# ---- generated text


def counting(text: Tensor) -> Tensor:
    """A model that is sure: after byte b comes b + 1."""
    return 100.0 * nn.functional.one_hot((text + 1) % 256, 256).float()


def sampling(length: int = 10, temperature: float = 1.0, seed: int = 0) -> TrainConfig:
    return TrainConfig(sample_length=length, temperature=temperature, seed=seed, sequence=6)


@pytest.mark.parametrize(
    ("prompt", "length", "text"),
    [(b"abc", 10, b"defghijklm"), (b"0123456789abc", 3, b"def"), (b"a", 0, b"")],
)
def test_text_goes_on_from_the_prompt(prompt: bytes, length: int, text: bytes) -> None:
    shapes = set()

    def predict(padded: Tensor) -> Tensor:
        shapes.add(tuple(padded.shape))
        return counting(padded)

    assert generate(predict, prompt, sampling(length)) == text
    assert shapes <= {(1, 6)}, "a prompt longer than a sample is cut, a shorter one padded"


def test_the_seed_decides_and_a_low_temperature_takes_the_likeliest() -> None:
    def undecided(text: Tensor) -> Tensor:
        return torch.zeros(*text.shape, 256)

    def leaning(text: Tensor) -> Tensor:
        return 0.01 * counting(text)

    first, same, other = (generate(undecided, b"a", sampling(seed=seed)) for seed in (1, 1, 2))
    assert first == same != other
    assert generate(leaning, b"a", sampling(3, temperature=1e-3)) == b"bcd"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (b"def f():\n\treturn 1", "def f():\n\treturn 1"),
        ("größe".encode(), "größe"),
        (b"\x1b[31mred", "\ufffd[31mred"),
        (b"\xff\x80", "\ufffd\ufffd"),
        (b"a\rb\0", "a\ufffdb\ufffd"),
    ],
)
def test_what_would_steer_a_terminal_is_replaced(text: bytes, shown: str) -> None:
    assert readable(text) == shown
