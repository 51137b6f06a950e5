"""Random numbers of a call of a unit: which calls draw the same ones, and which do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock._engine.rng import Draws, generators_kept

PLACE: dict[str, Any] = {"seed": 3, "step": 5, "microbatch": 1, "path": "layers.0", "number": 0}


def draw(**place: Any) -> list[float]:
    """What a call at a place draws."""
    path, number = place.pop("path"), place.pop("number")
    with generators_kept():
        Draws(**place, device=None).enter(path, number)
        numbers: list[float] = torch.rand(3).tolist()
    return numbers


def test_a_call_draws_the_same_whatever_was_drawn_before() -> None:
    first = draw(**PLACE)
    torch.rand(7)
    assert draw(**PLACE) == first


@pytest.mark.parametrize(
    ("what", "other"),
    [("seed", 4), ("step", 6), ("microbatch", 2), ("path", "layers.1"), ("number", 1)],
)
def test_any_other_call_draws_other_numbers(what: str, other: Any) -> None:
    assert draw(**(PLACE | {what: other})) != draw(**PLACE)


def test_the_generators_of_the_caller_are_kept() -> None:
    before = torch.get_rng_state()
    draw(**PLACE)
    assert torch.equal(torch.get_rng_state(), before)
