from __future__ import annotations

import pytest

from tests.backward.oracle import Engine, FullEngine, GraphEngine, SplitEngine, check, check_bits
from tests.backward.zoo import CHEAP, COSTLY, ZOO

ENGINES: dict[str, Engine] = {"graph": GraphEngine(), "split": SplitEngine()}


@pytest.mark.parametrize("name", CHEAP)
def test_halves_equal_plain_autograd(name: str) -> None:
    for seed in range(10):
        check(ENGINES, CHEAP[name], seed)


@pytest.mark.parametrize("name", COSTLY)
def test_halves_equal_plain_autograd_on_costly_stages(name: str) -> None:
    for seed in range(5):
        check(ENGINES, COSTLY[name], seed)


@pytest.mark.parametrize("name", ZOO)
def test_full_backward_equals_plain_autograd(name: str) -> None:
    check({"full": FullEngine()}, ZOO[name], seed=0)


@pytest.mark.parametrize(
    ("engine", "name"),
    # Where some of a sum's gradients are given from outside, the graph engine adds them in another order.
    [("graph", name) for name in ZOO if name != "nested_weight_outputs"]
    + [("split", name) for name in ZOO],
)
def test_halves_give_the_bits_of_plain_autograd(engine: str, name: str) -> None:
    check_bits(ENGINES[engine], ZOO[name], seed=0)
