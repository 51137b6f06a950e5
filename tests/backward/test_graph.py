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


def test_node_of_a_leaf_is_its_accumulator() -> None:
    weight = leaf()
    assert node(weight) is node(weight)
    assert node(weight) is (weight * 2).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


@torch.no_grad()
def test_node_of_a_leaf_is_found_where_gradients_are_off() -> None:
    assert _get_grad_fn_or_grad_acc(leaf()) is not None


def test_node_of_a_result_is_its_function() -> None:
    result = leaf().exp()
    assert node(result) is result.grad_fn


def test_no_node_without_gradient() -> None:
    assert _get_grad_fn_or_grad_acc(torch.zeros(2)) is None


@pytest.mark.parametrize(("lhs", "rhs", "total"), [(1, 2, 3), (None, 2, 2), (1, None, 1)])
def test_sum_of_gradients_that_may_be_missing(lhs: int | None, rhs: int | None, total: int) -> None:
    sides = [None if side is None else torch.tensor(side) for side in (lhs, rhs)]
    assert _null_coalesce_accumulate(*sides) == total


def test_sum_of_two_missing_gradients_is_missing() -> None:
    assert _null_coalesce_accumulate(None, None) is None


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


def test_reverse_closure_of_an_unknown_node_is_that_node() -> None:
    stranger = node(leaf())
    assert reverse_closure([stranger], set(), {}) == ({stranger}, set())


def test_weights_of_different_layers_stand_in_different_groups() -> None:
    x, first, second = leaf(), leaf(), leaf()
    output = (x @ first) @ second
    assert groups_of([x], [first, second], output) == [{node(first)}, {node(second)}]


def test_weights_with_a_common_intermediate_share_a_group() -> None:
    x, weight, bias = leaf(), leaf(), leaf()
    assert groups_of([x], [weight, bias], torch.addmm(bias, x, weight)) == [
        {node(weight), node(bias)}
    ]


def test_weights_that_meet_before_the_intermediate_share_a_group() -> None:
    x, direction, scale = leaf(), leaf(), leaf()
    assert len(groups_of([x], [direction, scale], x @ (direction * scale))) == 1


def test_groups_joined_by_a_later_weight_are_one() -> None:
    x, first, second, both = leaf(), leaf(), leaf(), leaf()
    output = torch.addmm(both, torch.addmm(both, x, first), second)
    assert groups_of([x], [first, second, both], output) == [
        {node(first), node(second), node(both)}
    ]


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


def test_weights_that_no_gradient_reaches_are_left_out() -> None:
    x, used, unused = leaf(), leaf(), leaf()
    assert groups_of([x], [unused, used], x @ used) == [{node(used)}]


def test_a_weight_that_is_an_input_counts_as_an_input() -> None:
    x, weight = leaf(), leaf()
    assert groups_of([x, weight], [weight], x @ weight) == []
