from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.backward import stage_backward, stage_backward_input
from penstock.backward.full import describe, pair_with_gradients, tensors_in
from penstock.errors import UsageError

ONE = torch.ones(2, requires_grad=True)
GRAD = torch.zeros(2)


def test_tensors_are_paired_with_the_gradient_at_their_place() -> None:
    output = {"a": [ONE, 3, None], "b": (ONE, {"c": ONE})}
    gradient = {"a": (GRAD, None, None), "b": [None, {"c": GRAD}]}
    grads = [grad for _, grad in pair_with_gradients(output, gradient)]
    assert [grad is GRAD for grad in grads] == [True, False, True]


def test_none_stands_for_a_whole_container() -> None:
    assert list(pair_with_gradients({"a": [ONE], "b": ONE}, {"a": None, "b": GRAD})) == [
        (ONE, GRAD)
    ]


def test_tensors_without_gradient_are_skipped() -> None:
    assert list(pair_with_gradients([GRAD, torch.zeros(2, dtype=torch.int64)], ["x", GRAD])) == []


def test_tensors_in_a_nested_value_come_in_order() -> None:
    other = torch.ones(1, requires_grad=True)
    assert list(tensors_in({"a": (ONE, GRAD, 3), "b": [None, other]})) == [ONE, other]


@pytest.mark.parametrize(
    ("output", "gradient", "message"),
    [
        ({"a": [ONE, ONE]}, {"a": [GRAD]}, r"output\['a'\] has 2 entries.* has 1"),
        ({"a": ONE}, {"b": GRAD}, r"output has the keys \['a'\], .* \['b'\]"),
        ([{"a": ONE}], [[GRAD]], r"output\[0\] is a dict, .* is a list"),
        ((ONE,), GRAD, r"output is a tuple, .* is a Tensor"),
        ([ONE, ONE], [GRAD, 0.5], r"output\[1\] is a tensor, .* is a float"),
    ],
)
def test_a_mismatch_names_the_place(output: Any, gradient: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        stage_backward(output, gradient, ())
    with pytest.raises(UsageError, match=message):
        stage_backward_input(output, gradient, (), ())


def test_description_shows_shapes() -> None:
    assert describe({"a": [ONE, None], "b": 3}) == (
        "{'a': (float32[2], requires_grad, NoneType), 'b': int}"
    )
