"""The learning rate over a run, and which weights decay."""

from __future__ import annotations

import pytest

from penstock.train import GPT, TrainConfig
from penstock.train.model import Shape, learning_rate, make_optimizer, set_learning_rate

CONFIG = TrainConfig(steps=110, warmup=10, learning_rate=1.0, weight_decay=0.5)


@pytest.mark.parametrize(("step", "rate"), [(1, 0.1), (5, 0.5), (10, 1.0), (60, 0.55), (110, 0.1)])
def test_warm_up_then_cosine(step: int, rate: float) -> None:
    assert learning_rate(step, CONFIG) == pytest.approx(rate)


def test_a_run_may_be_shorter_than_its_warm_up() -> None:
    config = TrainConfig(steps=2, warmup=10, learning_rate=1.0)
    assert [learning_rate(step, config) for step in (1, 2)] == pytest.approx([0.1, 0.2])


def test_no_warm_up() -> None:
    assert learning_rate(1, TrainConfig(steps=1, warmup=0, learning_rate=1.0)) == pytest.approx(0.1)


def test_matrices_decay_but_not_embedding_and_norms() -> None:
    model = GPT(Shape(layers=1, width=8, heads=1, sequence=4))
    decaying, rest = make_optimizer(model.named_parameters(), CONFIG).param_groups
    assert (decaying["weight_decay"], rest["weight_decay"]) == (0.5, 0.0)
    assert {p.ndim for p in decaying["params"]} == {2}
    assert any(p is model.embed.weight for p in rest["params"])


def test_the_rate_is_set_for_all_weights() -> None:
    model = GPT(Shape(layers=1, width=8, heads=1, sequence=4))
    optimizer = make_optimizer(model.named_parameters(), CONFIG)
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
