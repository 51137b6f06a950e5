from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import Node

from penstock.backward import (
    _get_grad_fn_or_grad_acc,
    _null_coalesce_accumulate,
    construct_reverse_graph,
    get_param_groups,
    reverse_closure,
)


def leaf() -> Tensor:
    return torch.randn(3, 3, requires_grad=True)


def node(tensor: Tensor) -> Node:
    found = _get_grad_fn_or_grad_acc(tensor)
    assert found is not None
    return found


def groups_of(inputs: list[Tensor], weights: list[Tensor], output: Tensor) -> list[set[Node]]:
    reverse = construct_reverse_graph([node(output)])
    groups = get_param_groups([node(x) for x in inputs], [node(w) for w in weights], reverse)
    return [group["params"] for group in groups]


def test_a_leaf_has_its_accumulator_and_a_result_its_function() -> None:
    weight = leaf()
    assert node(weight) is (weight * 2).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    with torch.no_grad():
        assert _get_grad_fn_or_grad_acc(leaf()) is not None
    result = weight.exp()
    assert node(result) is result.grad_fn
    assert _get_grad_fn_or_grad_acc(torch.zeros(2)) is None


@pytest.mark.parametrize(
    ("lhs", "rhs", "total"), [(1, 2, 3), (None, 2, 2), (1, None, 1), (None, None, None)]
)
def test_sum_of_gradients_that_may_be_missing(
    lhs: int | None, rhs: int | None, total: int | None
) -> None:
    sides = [None if side is None else torch.tensor(side) for side in (lhs, rhs)]
    assert _null_coalesce_accumulate(*sides) == total


def test_reverse_graph_has_an_entry_per_edge() -> None:
    x = leaf()
    squared = x * x
    output = squared.sum()
    assert construct_reverse_graph([node(output), None]) == {
        node(output): [],
        node(squared): [node(output)],
        node(x): [node(squared)] * 2,
    }


def test_reverse_graph_of_nested_roots() -> None:
    first = leaf().exp()
    second = first.sin()
    reverse = construct_reverse_graph([node(first), node(second), node(first)])
    assert reverse[node(first)] == [node(second)]


def test_reverse_closure_stops_at_targets() -> None:
    x = leaf()
    first = x.exp()
    second = first.sin()
    third = second.cos()
    reverse = construct_reverse_graph([node(third)])
    closure, met = reverse_closure([node(x), None], {node(second)}, reverse)
    assert closure == {node(x), node(first)}
    assert met == {node(second)}


def test_weights_whose_paths_meet_before_the_inputs_path_share_a_group() -> None:
    x, first, second, third = (leaf() for _ in range(4))
    own = [[{node(first)}, {node(second)}], [{node(first), node(second)}]]
    assert groups_of([x], [first, second], (x @ first) @ second) == own[0]
    assert groups_of([x], [first, second], torch.addmm(second, x, first)) == own[1]
    assert groups_of([x], [first, second], x @ (first * second)) == own[1]
    joined = torch.addmm(third, torch.addmm(third, x, first), second)
    assert groups_of([x], [first, second, third], joined) == [
        {node(w) for w in (first, second, third)}
    ]
    # What no gradient reaches is left out; a weight that is an input counts as an input.
    assert groups_of([x], [third, first], x @ first) == [{node(first)}]
    assert groups_of([x, first], [first], x @ first) == []


def test_intermediates_are_where_weights_leave_the_path_to_the_inputs() -> None:
    x, weight = leaf(), leaf()
    first = x @ weight.t()
    second = first.relu() @ weight.t()
    reverse = construct_reverse_graph([node(second)])
    (group,) = get_param_groups([node(x)], [node(weight)], reverse)
    assert group["intermediates"] == {node(first), node(second)}


def test_an_output_of_weights_alone_is_an_intermediate() -> None:
    x, weight = leaf(), leaf()
    product, penalty = x @ weight, weight.square()
    roots = [node(product), node(penalty)]
    reverse = construct_reverse_graph(roots)
    (group,) = get_param_groups([node(x)], [node(weight)], reverse, roots)
    assert group["intermediates"] == {node(product), node(penalty)}
