"""Where a backward graph is cut: which half computes what, and what is kept between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from penstock.compiled.halves import Halves, Policy, cut
from penstock.compiled.names import function_of

pytestmark = pytest.mark.filterwarnings("ignore")
aten = torch.ops.aten

FUSED = Policy(fused=True)
PLAIN = Policy(fused=False)


def graph_of(function: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    made: GraphModule = make_fx(function, tracing_mode="fake")(*inputs)
    for node, name in zip(list(made.graph.nodes), function.__code__.co_varnames, strict=False):
        if node.op == "placeholder":
            node.name = node.target = name
    return made


def operations(graph: GraphModule) -> Counter[str]:
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    return Counter(str(node.target).removeprefix("aten.").split(".")[0] for node in nodes)


def kept(halves: Halves, inputs: list[Tensor]) -> list[tuple[int, ...]]:
    """The shapes of what the weights' half is given."""
    made = function_of(halves.inputs)([inputs[place] for place in halves.taken])
    held = [inputs[place] for place in halves.held]
    return [tuple(tensor.shape) for tensor in (*held, *made[len(halves.given) :])]


def check(halves: Halves, function: Callable[..., Any], inputs: list[Tensor]) -> None:
    """Check that the halves give what the whole gives, bit for bit."""
    expected = function(*inputs)
    first = function_of(halves.inputs)([inputs[place] for place in halves.taken])
    held = [inputs[place] for place in halves.held]
    rest = halves.in_order(held, first[len(halves.given) :])
    second = function_of(halves.weights)(rest)
    found = dict(zip(halves.given, first, strict=False)) | dict(
        zip(halves.left, second, strict=True)
    )
    assert all(torch.equal(found[i], each) for i, each in enumerate(expected) if each is not None)


def cut_of(
    function: Callable[..., Any],
    inputs: list[Tensor],
    waiting: list[int],
    policy: Policy,
    free: Sequence[str] = (),
) -> Halves:
    halves = cut(graph_of(function, *inputs), waiting, policy, free)
    check(halves, function, inputs)
    return halves


def layer(value: Tensor, hidden: Tensor, first: Tensor, second: Tensor, tangents_1: Tensor) -> Any:
    """The backward of ``gelu(value @ first) @ second``, by value, first and second."""
    of_gelu = tangents_1 @ second.t()
    of_hidden = aten.gelu_backward(of_gelu, hidden)
    return (
        of_hidden @ first.t(),
        value.t() @ of_hidden,
        aten.gelu(hidden).t() @ tangents_1,
    )


def layer_inputs() -> list[Tensor]:
    shapes = (6, 4), (6, 8), (4, 8), (8, 4), (6, 4)
    return [torch.randn(*shape, dtype=torch.float64) for shape in shapes]


def test_no_product_is_computed_twice_and_what_is_cheap_is_computed_again() -> None:
    inputs = layer_inputs()
    halves = cut_of(layer, inputs, [1, 2], FUSED)
    assert operations(halves.inputs)["mm"] == 2
    assert operations(halves.weights) == {"mm": 2, "gelu": 1, "t": 2}
    assert sorted(kept(halves, inputs)) == [(6, 4), (6, 4), (6, 8), (6, 8)]


def test_without_fusion_what_both_halves_need_is_computed_once() -> None:
    def run(hidden: Tensor, weight: Tensor, tangents_1: Tensor) -> Any:
        scaled = (tangents_1 * hidden).tanh()
        return scaled @ weight, hidden.t() @ scaled

    inputs = [torch.randn(6, 4), torch.randn(4, 4), torch.randn(6, 4)]
    assert operations(cut_of(run, inputs, [1], PLAIN).weights)["tanh"] == 0
    assert operations(cut_of(run, inputs, [1], PLAIN).inputs)["tanh"] == 1


def test_without_fusion_a_view_that_both_halves_need_is_made_once() -> None:
    def run(value: Tensor, weight: Tensor, tangents_1: Tensor) -> Any:
        rows = tangents_1.view(6, 4)
        return (rows @ weight).view(2, 3, 4), value.t() @ rows, tangents_1.sum((0, 1))

    inputs = [torch.randn(6, 4), torch.randn(4, 4), torch.randn(2, 3, 4)]
    halves = cut_of(run, inputs, [1], PLAIN)
    assert operations(halves.weights) == {"t": 1, "mm": 1}
    assert sorted(kept(halves, inputs)) == [(6, 4), (6, 4)]


def test_a_norms_weight_gradient_is_computed_where_it_is_smaller_than_what_it_is_made_of() -> None:
    def run(normal: Tensor, weight: Tensor, other: Tensor, tangents_1: Tensor) -> Any:
        of_norm = tangents_1 @ other
        return of_norm * weight, (of_norm * normal).sum(0), normal.t() @ tangents_1

    inputs = [torch.randn(16, 4), torch.randn(4), torch.randn(4, 4), torch.randn(16, 4)]
    halves = cut_of(run, inputs, [1, 2], FUSED)
    assert operations(halves.inputs)["sum"] == 1
    assert (halves.given, halves.left) == ((0, 1), (2,))
    assert sorted(kept(halves, inputs)) == [(16, 4), (16, 4)]


def test_a_smaller_source_is_kept_in_place_of_what_is_made_of_it() -> None:
    def run(mask: Tensor, value: Tensor, tangents_1: Tensor) -> Any:
        dropped = tangents_1 * mask
        return dropped * 2, value.t() @ dropped, value.t() @ tangents_1

    inputs = [torch.ones(6, 4, dtype=torch.bool), torch.randn(6, 4), torch.randn(6, 4)]
    halves = cut_of(run, inputs, [1, 2], FUSED)
    assert 0 in halves.held
    assert operations(halves.weights)["mul"] == 1


def test_a_convolutions_backward_is_two() -> None:
    def run(value: Tensor, weight: Tensor, tangents_1: Tensor) -> Any:
        options = [2], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True]
        return aten.convolution_backward(tangents_1, value, weight, *options)

    inputs = [torch.randn(1, 2, 4, 4), torch.randn(2, 2, 3, 3), torch.randn(1, 2, 2, 2)]
    halves = cut_of(run, inputs, [1, 2], FUSED)
    masks = [
        node.args[-1]
        for half in (halves.inputs, halves.weights)
        for node in half.graph.nodes
        if node.target is aten.convolution_backward.default
    ]
    assert masks == [[True, False, False], [False, True, True]]


def test_where_no_input_needs_a_gradient_all_that_is_heavy_waits() -> None:
    inputs = layer_inputs()

    def run(
        value: Tensor, hidden: Tensor, first: Tensor, second: Tensor, tangents_1: Tensor
    ) -> Any:
        return None, *layer(value, hidden, first, second, tangents_1)[1:]

    halves = cut_of(run, inputs, [1, 2], FUSED)
    assert not operations(halves.inputs)
    assert operations(halves.weights)["mm"] == 3


@pytest.mark.parametrize(("again", "products"), [(False, (2, 1)), (True, (2, 2))])
def test_a_checkpoint_is_kept_or_computed_again(again: bool, products: tuple[int, int]) -> None:
    def run(value: Tensor, weight: Tensor, tangents_1: Tensor) -> Any:
        hidden = (value @ weight).tanh()
        of_hidden = tangents_1 * (1 - hidden * hidden)
        return of_hidden @ weight.t(), hidden.t() @ tangents_1

    inputs = [torch.randn(6, 4), torch.randn(4, 8), torch.randn(6, 8)]
    policy = Policy(fused=False, checkpoints=again)
    halves = cut_of(run, inputs, [1], policy, free=["weight"])
    found = operations(halves.inputs)["mm"], operations(halves.weights)["mm"]
    assert found == products


def test_what_changes_something_stays_in_the_inputs_half() -> None:
    def run(value: Tensor, weight: Tensor, tangents_1: Tensor) -> Any:
        noise = torch.rand_like(tangents_1)
        return tangents_1 @ weight, (value + noise).t() @ tangents_1

    inputs = [torch.randn(6, 4), torch.randn(4, 4), torch.randn(6, 4)]
    halves = cut(graph_of(run, *inputs), [1], FUSED)
    assert operations(halves.inputs)["rand_like"] == 1
    assert operations(halves.weights)["rand_like"] == 0


def test_a_graph_as_a_function_lets_go_of_its_arguments() -> None:
    inputs = layer_inputs()
    given = list(inputs)
    function_of(graph_of(layer, *inputs))(given)
    assert given == []
