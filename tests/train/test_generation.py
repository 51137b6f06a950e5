"""Generated text: drawn from the model's chances, repeatable, safe to print."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.train.model import Sampling, generate, readable

WINDOW = 6


def counting(tokens: Tensor) -> Tensor:
    """A model that is sure: after byte b comes b + 1."""
    return 100.0 * torch.nn.functional.one_hot((tokens + 1) % 256, 256).float()


def undecided(tokens: Tensor) -> Tensor:
    return torch.zeros(*tokens.shape, 256)


def sampling(length: int = 10, temperature: float = 1.0, seed: int = 0) -> Sampling:
    return Sampling(length, temperature, WINDOW, seed)


def test_goes_on_from_the_prompt() -> None:
    assert generate(counting, b"abc", sampling()) == b"defghijklm"


def test_a_prompt_longer_than_the_window_is_cut() -> None:
    assert generate(counting, b"0123456789abc", sampling(3)) == b"def"


def test_the_model_always_sees_one_shape() -> None:
    shapes = set()

    def predict(tokens: Tensor) -> Tensor:
        shapes.add(tuple(tokens.shape))
        return counting(tokens)

    generate(predict, b"a", sampling(20))
    assert shapes == {(1, WINDOW)}


def test_nothing_to_generate() -> None:
    assert generate(counting, b"a", sampling(0)) == b""


def test_the_seed_decides() -> None:
    first, same, other = (generate(undecided, b"a", sampling(seed=seed)) for seed in (1, 1, 2))
    assert first == same != other


def test_a_low_temperature_takes_the_likeliest() -> None:
    def leaning(tokens: Tensor) -> Tensor:
        return 0.01 * counting(tokens)

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
