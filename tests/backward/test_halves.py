from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.backward import ParamGroup, stage_backward_input, stage_backward_weight
from penstock.errors import StageError


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape or (4, 3), dtype=torch.float64, requires_grad=True)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def first_half(model: nn.Module, x: Tensor) -> tuple[Tensor | None, list[ParamGroup]]:
    loss = model(x).square().sum()
    (grad,), groups = stage_backward_input([loss], None, [x], model.parameters())
    return grad, groups


def plain(model: nn.Module, *inputs: Tensor) -> tuple[Tensor, ...]:
    loss = torch.stack([model(x).square().sum() for x in inputs]).sum()
    return torch.autograd.grad(loss, [*inputs, *model.parameters()])


def assert_all_close(actual: Sequence[Tensor | None], expected: Sequence[Tensor]) -> None:
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


# ---- the inputs' half


def test_inputs_half_touches_no_weight() -> None:
    model, x = mlp(), leaf()
    grad, _ = first_half(model, x)
    assert_all_close([grad], plain(model, x)[:1])
    assert all(weight.grad is None for weight in model.parameters())


def test_inputs_half_adds_to_the_inputs_grad() -> None:
    model, x = mlp(), leaf()
    (expected, *_) = plain(model, x)
    first_half(model, x)
    first_half(model, x)
    assert_all_close([x.grad], [2 * expected])


def test_an_input_named_twice_is_added_once() -> None:
    model, x = mlp(), leaf()
    (expected, *_) = plain(model, x)
    loss = model(x).square().sum()
    grads, _ = stage_backward_input([loss], None, [x, 5, x], model.parameters())
    assert_all_close([grads[0], grads[2], x.grad], [expected] * 3)


def test_inputs_and_outputs_stay_as_they_are_for_the_runtime() -> None:
    model, x = mlp(), leaf()
    output = model(x)
    stage_backward_input(output, None, [x], model.parameters(), accumulate_grad=False)
    assert x.grad is None
    assert output.grad_fn is not None


def test_outputs_are_detached_unless_they_are_views_or_inputs() -> None:
    weight, x = leaf(3), leaf()
    hidden = x * weight
    outputs = [hidden, hidden[:2], x, weight]
    stage_backward_input(outputs, None, [x], [weight])
    assert [output.requires_grad for output in outputs] == [False, True, True, True]


def test_missing_output_gradients_mean_ones() -> None:
    weight, x = leaf(3), leaf()
    (grad,), _ = stage_backward_input([x * weight], None, [x], [weight])
    assert_all_close([grad], [weight.detach().expand_as(x)])


def test_groups_name_captured_gradients_along_intermediates() -> None:
    model, x = mlp(), leaf()
    _, groups = first_half(model, x)
    assert len(groups) == 2
    for group in groups:
        assert len(group["grads"]) == len(group["intermediates"]) == 1
        assert len(group["params"]) == 2
    # The last layer comes first, as backward reached it.
    assert [group["grads"][0][0].shape for group in groups] == [(4, 3), (4, 5)]


def test_inputs_half_fails_with_the_values() -> None:
    x = leaf()
    with pytest.raises(StageError, match=r"output=\(float64\[4, 3\].*gradient=\(float32\[5\]"):
        stage_backward_input([x * 2], [torch.ones(5)], [x], [])


# ---- the weights' half


def _fail(_: Tensor) -> None:
    raise ZeroDivisionError("division by zero")


def test_weights_half_returns_what_it_adds() -> None:
    model, x = mlp(), leaf()
    _, *expected = plain(model, x)
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    returned = stage_backward_weight(model.parameters(), first_half(model, x)[1])
    assert_all_close(returned, expected)
    assert_all_close([w.grad for w in model.parameters()], [grad + 1 for grad in expected])


def test_returned_gradients_do_not_change_later() -> None:
    model, x = mlp(), leaf()
    _, *expected = plain(model, x)
    returned = stage_backward_weight(model.parameters(), first_half(model, x)[1])
    stage_backward_weight(model.parameters(), first_half(model, x)[1])
    assert_all_close(returned, expected)


def test_only_the_weights_asked_for_change() -> None:
    model, x = mlp(), leaf()
    first, *_, last = model.parameters()
    _, dfirst, *_, dlast = plain(model, x)
    returned = stage_backward_weight([last, first], first_half(model, x)[1])
    assert_all_close(returned, [dlast, dfirst])
    assert [weight.grad is None for weight in model.parameters()] == [False, True, True, False]


def test_entries_set_to_none_are_skipped() -> None:
    model, x = mlp(), leaf()
    _, groups = first_half(model, x)
    groups[0]["grads"] = [(None,)]
    returned = stage_backward_weight(model.parameters(), groups)
    assert [grad is None for grad in returned] == [False, False, True, True]


def test_captured_gradients_may_be_replaced() -> None:
    model, x = mlp(), leaf()
    _, groups = first_half(model, x)
    groups[0]["grads"] = [(torch.ones(4, 3, dtype=torch.float64),)]
    *_, bias = stage_backward_weight(model.parameters(), groups)
    assert_all_close([bias], [torch.full((3,), 4.0, dtype=torch.float64)])


def test_a_retained_graph_serves_again() -> None:
    model, x = mlp(), leaf()
    _, groups = first_half(model, x)
    once = stage_backward_weight(model.parameters(), groups, retain_graph=True)
    twice = stage_backward_weight(model.parameters(), groups)
    for first, second in zip(once, twice, strict=True):
        assert first is not None
        assert second is not None
        assert torch.equal(first, second)


def test_used_groups_are_refused() -> None:
    model, x = mlp(), leaf()
    _, groups = first_half(model, x)
    stage_backward_weight(model.parameters(), groups)
    with pytest.raises(RuntimeError, match=r"param group 0 .* used by an earlier"):
        stage_backward_weight(model.parameters(), groups)


REPLACED: dict[str, tuple[Callable[[list[Any]], Any], str]] = {
    "nothing": (lambda _: None, "expected grads to be a list of 1 tuples.* found NoneType"),
    "fewer rows": (lambda _: [], "a list of 1 tuples, one for each intermediate, found 0"),
    "no row": (lambda _: [None], r"expected grads\[0\] to be a tuple of tensors, found NoneType"),
    "less in a row": (lambda _: [()], r"expected grads\[0\] to hold 1 for Addmm.*, found 0"),
    "more in a row": (lambda rows: [rows[0] * 2], "to hold 1 for Addmm.*, found 2"),
    "no tensors": (lambda _: [(1.0,)], "to hold tensors or None, found float"),
}


@pytest.mark.parametrize("how", sorted(REPLACED))
def test_gradients_that_were_replaced_are_told(how: str) -> None:
    replace, told = REPLACED[how]
    model, x = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)
    (group,) = first_half(model, x)[1]
    group["grads"] = replace(group["grads"])
    with pytest.raises(RuntimeError, match=f"param group 0: .*{told}"):
        stage_backward_weight(model.parameters(), [group])
    assert model.weight.grad is None


def test_weights_half_fails_with_the_cause() -> None:
    model, x = mlp(), leaf()
    _, groups = first_half(model, x)
    next(model.parameters()).register_post_accumulate_grad_hook(_fail)
    with pytest.raises(StageError, match="division by zero"):
        stage_backward_weight(model.parameters(), groups)


@pytest.mark.parametrize("mode", [torch.no_grad(), torch.enable_grad()])
def test_halves_work_in_any_mode(mode: AbstractContextManager[object]) -> None:
    model, x = mlp(), leaf()
    expected = plain(model, x)
    loss = model(x).square().sum()
    with mode:
        (grad,), groups = stage_backward_input([loss], None, [x], model.parameters())
        grads = stage_backward_weight(model.parameters(), groups)
    assert_all_close([grad, *grads], expected)


def test_autocast_gives_the_plain_bits() -> None:
    model, x = mlp().float(), torch.randn(4, 3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        losses = [model(x).float().square().sum() for _ in range(2)]
    expected = torch.autograd.grad(losses[0], [x, *model.parameters()])
    dinputs, groups = stage_backward_input(losses[1:], None, [x], model.parameters())
    actual = *dinputs, *stage_backward_weight(model.parameters(), groups)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
