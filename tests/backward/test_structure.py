"""Outputs may be nested, and their gradients with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.backward import SplitBackward, stage_backward, stage_backward_input
from penstock.errors import UsageError

ONE = torch.ones(2, requires_grad=True)
GRAD = torch.zeros(2)

CALLS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "stage_backward": stage_backward,
    "stage_backward_input": lambda output, grads, inputs: stage_backward_input(
        output, grads, inputs, ()
    )[0],
    "input_half": lambda *args: SplitBackward(nn.Identity()).input_half(*args)[0],
    "full": lambda *args: SplitBackward(nn.Identity()).full(*args),
}


@pytest.mark.parametrize("call", CALLS)
def test_tensors_go_with_the_gradient_at_their_place(call: str) -> None:
    inputs = [torch.ones(2, requires_grad=True) for _ in range(3)]
    first, second, third = (value * 1 for value in inputs)
    output = {"a": [first, 3, None, GRAD], "b": (second, {"c": third})}
    gradient = {"a": (GRAD + 1, None, None, "x"), "b": [None, {"c": GRAD + 2}]}
    found: tuple[Tensor | None, ...] = CALLS[call](output, gradient, inputs)
    assert [None if grad is None else grad.tolist() for grad in found] == [[1, 1], None, [2, 2]]


@pytest.mark.parametrize("call", CALLS)
def test_none_stands_for_a_whole_container(call: str) -> None:
    leaf = torch.ones(2, requires_grad=True)
    (found,) = CALLS[call]({"a": [leaf * 5], "b": leaf * 1}, {"a": None, "b": GRAD + 1}, [leaf])
    assert found.tolist() == [1, 1]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("output", "gradient", "message"),
    [
        ({"a": [ONE, ONE]}, {"a": [GRAD]}, r"output\['a'\] has 2 entries.* has 1"),
        ({"a": ONE}, {"b": GRAD}, r"output has the keys \['a'\], .* \['b'\]"),
        ([{"a": ONE}], [[GRAD]], r"output\[0\] is a dict, .* is a list"),
        ((ONE,), GRAD, r"output is a tuple, .* is a Tensor"),
        ([ONE, ONE], [GRAD], r"output has 2 entries.* has 1"),
        ([ONE, ONE], [GRAD, 0.5], r"output\[1\] is a tensor, .* is a float"),
    ],
)
def test_a_mismatch_names_the_place(call: str, output: Any, gradient: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CALLS[call](output, gradient, ())
