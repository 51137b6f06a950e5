from __future__ import annotations

import pytest

from tests.backward.oracle import Engine, FullEngine, GraphEngine, check, check_bits
from tests.backward.zoo import CHEAP, COSTLY, ZOO

ENGINES = {"graph": GraphEngine()}


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("name", CHEAP)
def test_halves_equal_plain_autograd(engine: Engine, name: str) -> None:
    for seed in range(50):
        check(engine, CHEAP[name], seed)


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("name", COSTLY)
def test_halves_equal_plain_autograd_on_costly_stages(engine: Engine, name: str) -> None:
    for seed in range(5):
        check(engine, COSTLY[name], seed)


@pytest.mark.parametrize("name", ZOO)
def test_full_backward_equals_plain_autograd(name: str) -> None:
    check(FullEngine(), ZOO[name], seed=0)


# There the sum of three gradients of one weight expression, one of them given from outside, is taken
# in another order than by plain autograd.
@pytest.mark.parametrize("name", [name for name in ZOO if name != "nested_weight_outputs"])
def test_halves_give_the_bits_of_plain_autograd(name: str) -> None:
    check_bits(GraphEngine(), ZOO[name], seed=0)
