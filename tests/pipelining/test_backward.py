"""The functions of torch's `_backward`; `tests/backward` shows that their gradients are right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import StageError, UsageError
from penstock.pipelining._backward import (
    ParamGroup,
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from tests.backward.graphs import linear, x


def mlp() -> nn.Sequential:
    return nn.Sequential(linear(), nn.Tanh(), linear())


def first_half(model: nn.Module, value: Tensor) -> tuple[Tensor | None, list[ParamGroup]]:
    loss = model(value).square().sum()
    (grad,), groups = stage_backward_input([loss], None, [value], model.parameters())
    return grad, groups


def plain(model: nn.Module, value: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(model(value).square().sum(), [value, *model.parameters()])


def assert_equal(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    torch.testing.assert_close(list(actual), list(expected), rtol=0, atol=0)


# ---- the whole


def test_inputs_keep_no_gradient_and_lend_none() -> None:
    value, unused = x(), x()
    value.grad = torch.full_like(value, 9)
    grads = stage_backward(value * 2, torch.ones_like(value), [3, value, None, unused, value])
    assert [None if grad is None else grad[0, 0].item() for grad in grads] == [
        None,
        2,
        None,
        None,
        2,
    ]
    assert value.grad is None


def test_positions_select_outputs() -> None:
    value = x()
    outputs, grads = [value * 2, value * 3, value * 5], [torch.ones_like(value)] * 3
    (grad,) = stage_backward(outputs, grads, [value], [0, 2])
    assert_equal([grad], [torch.full_like(value, 7)])


def test_nested_outputs_go_with_the_gradient_at_their_place() -> None:
    inputs, one = [torch.ones(2, requires_grad=True) for _ in range(4)], torch.ones(2)
    first, second, third, fourth = (value * 1 for value in inputs)
    output = {"a": [first, 3, None, one], "b": (second, {"c": third}), "d": [fourth]}
    gradient = {"a": (one, None, None, None), "b": [None, {"c": one + 1}], "d": None}
    gradients = stage_backward(output, gradient, inputs)
    assert [None if g is None else g.tolist() for g in gradients] == [[1, 1], None, [2, 2], None]


def test_a_gradient_that_does_not_fit_is_refused_by_its_place() -> None:
    output, one = {"a": [torch.ones(2, requires_grad=True) * 1]}, torch.ones(2)
    wrong: list[tuple[Any, str]] = [
        ({"a": [one], "b": one}, r"gradient\['b'\] is a Tensor, and the output has no"),
        ({"a": one}, r"gradient\['a'\] is a Tensor, and the output has no tensor there"),
        ({"a": [0.5]}, r"gradient\['a'\]\[0\] is a float, and the output has a tensor there"),
    ]
    for gradient, says in wrong:
        with pytest.raises(UsageError, match=says):
            stage_backward(output, gradient, ())


# ---- the inputs' half


def test_it_adds_to_the_inputs_grad_alone() -> None:
    model, value = mlp(), x()
    for times in (1, 2):
        grad, _ = first_half(model, value)
        assert_equal([grad], plain(model, value)[:1])
        assert_equal([value.grad], [times * plain(model, value)[0]])
    assert all(weight.grad is None for weight in model.parameters())
    # One that is passed twice is added once.
    value.grad = None
    loss = model(value).square().sum()
    grads, _ = stage_backward_input([loss], None, [value, 5, value], model.parameters())
    assert_equal([grads[0], grads[2], value.grad], [plain(model, value)[0]] * 3)


def test_outputs_are_detached_unless_they_are_views_or_inputs() -> None:
    weight, value = x(6), x()
    hidden = value * weight
    outputs = [hidden, hidden[:2], value, weight]
    (grad,), _ = stage_backward_input(outputs, None, [value], [weight])
    assert [output.requires_grad for output in outputs] == [False, True, True, True]
    # Missing output gradients mean ones.
    expected = weight.detach().expand(4, 6).clone() + 1
    expected[:2] += weight.detach()
    torch.testing.assert_close(grad, expected)


# ---- the weights' half


def test_it_returns_what_it_adds() -> None:
    model, value = mlp(), x()
    _, *expected = plain(model, value)
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    returned = stage_backward_weight(model.parameters(), first_half(model, value)[1])
    stage_backward_weight(model.parameters(), first_half(model, value)[1])
    assert_equal(returned, expected)
    assert_equal([w.grad for w in model.parameters()], [1 + grad + grad for grad in expected])


def test_only_the_weights_asked_for_change() -> None:
    model, value = mlp(), x()
    first, *_, last = model.parameters()
    _, dfirst, *_, dlast = plain(model, value)
    assert_equal(stage_backward_weight([last, first], first_half(model, value)[1]), [dlast, dfirst])
    assert [weight.grad is None for weight in model.parameters()] == [False, True, True, False]
    # Nor do those for which the inputs' half was not asked.
    loss = model(value).square().sum()
    _, groups = stage_backward_input([loss], None, [value], [last])
    assert_equal(stage_backward_weight([first, last], groups), [None, dlast])


def test_gradients_in_groups_may_be_replaced_or_left_out() -> None:
    model, value = mlp(), x()
    _, groups = first_half(model, value)
    hidden = model[:2](value).detach()
    groups[0]["grads"][0] = (None,)
    groups[1]["grads"] = [(torch.ones(4, 6).double(),)]
    groups[2]["grads"] = [(None,)]
    first, *_, weight, last = stage_backward_weight(model.parameters(), groups)
    assert first is None
    assert last is None
    torch.testing.assert_close(weight, torch.ones(6, 4).double() @ hidden)


def test_a_retained_graph_serves_again() -> None:
    model, value = mlp(), x()
    _, *expected = plain(model, value)
    _, groups = first_half(model, value)
    for _ in range(2):
        assert_equal(stage_backward_weight(model.parameters(), groups, retain_graph=True), expected)
    assert_equal([w.grad for w in model.parameters()], [2 * grad for grad in expected])


def test_used_groups_and_what_is_no_gradient_are_refused() -> None:
    model, value = linear(), x()
    group, *_ = first_half(model, value)[1]
    rows = group["grads"]
    wrong: list[tuple[Any, str]] = [
        (None, r"\(NoneType\)"), ([], r"\(\)"), ([None], r"\(NoneType\)"), ([()], r"\(\(\)\)"),
        ([rows[0] * 2], r"\(\(float64\[6\], float64\[6\]\)\)"), ([(1.0,)], r"\(\(float\)\)"),
    ]  # fmt: skip
    for grads, says in wrong:
        group["grads"] = grads
        with pytest.raises(RuntimeError, match=rf"param group 0: .* of 1 tuples .*found {says}"):
            stage_backward_weight(model.parameters(), [group])
    assert model.weight.grad is None
    group["grads"] = rows
    stage_backward_weight(model.parameters(), [group])
    with pytest.raises(RuntimeError, match=r"param group 0 .* used by an earlier"):
        stage_backward_weight(model.parameters(), [group])


def test_failures_keep_their_cause() -> None:
    def fail(_: Tensor) -> None:
        raise ZeroDivisionError("division by zero")

    model, value = mlp(), x()
    with pytest.raises(StageError, match=r"output=\(float64\[4, 6\].*gradient=\(float32\[5\]"):
        stage_backward_input([model(value)], [torch.ones(5)], [value], [])
    _, groups = first_half(model, value)
    next(model.parameters()).register_post_accumulate_grad_hook(fail)
    with pytest.raises(StageError, match="division by zero"):
        stage_backward_weight(model.parameters(), groups)


def test_the_halves_work_in_any_mode() -> None:
    model, value = mlp(), x()
    expected = plain(model, value)
    for mode in (torch.no_grad(), torch.enable_grad()):
        loss = model(value).square().sum()
        with mode:
            (grad,), groups = stage_backward_input([loss], None, [value], model.parameters())
            grads = stage_backward_weight(model.parameters(), groups)
        assert_equal([grad, *grads], expected)
