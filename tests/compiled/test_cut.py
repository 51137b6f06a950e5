"""Where a backward graph is cut: which half computes what, and what is kept between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from penstock._engine.compiled.halves import Halves, halved

pytestmark = pytest.mark.filterwarnings("ignore")
aten = torch.ops.aten
FUSED, PLAIN = True, False


def graph_of(function: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    graph: GraphModule = make_fx(function, tracing_mode="fake")(*inputs)
    for node, name in zip(list(graph.graph.nodes), function.__code__.co_varnames, strict=False):
        if node.op == "placeholder":
            node.name = node.target = name
    return graph


def operations(graph: GraphModule) -> Counter[str]:
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    return Counter(str(node.target).removeprefix("aten.").split(".")[0] for node in nodes)


def run_halves(halves: Halves, inputs: list[Tensor]) -> tuple[dict[int, Tensor], list[list[int]]]:
    """The gradients, and the sizes of what is kept between the halves."""
    first, second, saved, _ = halves
    results = first.graph(*(inputs[place] for place in first.arguments))
    rest = [inputs[place] for place in second.arguments]
    rest[saved:saved] = results[len(first.results) :]
    gradients = [*results[: len(first.results)], *second.graph(*rest)]
    sizes = sorted(list(tensor.shape) for tensor in rest)
    return dict(zip((*first.results, *second.results), gradients, strict=True)), sizes


class Case(NamedTuple):
    """A backward graph, and what is expected of its halves.

    Attributes:
        backward: gives one gradient for each argument of forward, the first of its input.
        shapes: of its arguments.
        fused: whether a compiler fuses.
        inputs: how often the inputs' half has some operations.
        weights: how often the weights' half has them.
        kept: the sizes of what is kept between them.
    """

    backward: Callable[..., Any]
    shapes: Sequence[Sequence[int]]
    fused: bool
    inputs: dict[str, int]
    weights: dict[str, int]
    kept: list[list[int]] | None = None


def layer(value: Tensor, hidden: Tensor, first: Tensor, second: Tensor, tangents_1: Tensor) -> Any:
    """The backward of ``gelu(value @ first) @ second``, by value, first and second."""
    of_hidden = aten.gelu_backward(tangents_1 @ second.t(), hidden)
    weights = value.t() @ of_hidden, aten.gelu(hidden).t() @ tangents_1
    return of_hidden @ first.t(), *weights


def first_layer(
    value: Tensor, hidden: Tensor, first: Tensor, second: Tensor, tangents_1: Tensor
) -> Any:
    return None, *layer(value, hidden, first, second, tangents_1)[1:]


def scaled(hidden: Tensor, weight: Tensor, tangents_1: Tensor) -> Any:
    of_hidden = (tangents_1 * hidden).tanh()
    return of_hidden @ weight, hidden.t() @ of_hidden


def viewed(value: Tensor, weight: Tensor, tangents_1: Tensor) -> Any:
    rows = tangents_1.view(6, 4)
    return (rows @ weight).view(2, 3, 4), value.t() @ rows


def norm(normal: Tensor, weight: Tensor, other: Tensor, tangents_1: Tensor) -> Any:
    of_norm = tangents_1 @ other
    return of_norm * weight, (of_norm * normal).sum(0), normal.t() @ tangents_1


def dropped(value: Tensor, mask: Tensor, tangents_1: Tensor) -> Any:
    masked = tangents_1 * (mask > 0)
    return masked * 2, value.t() @ masked, value.t() @ tangents_1


def noisy(value: Tensor, weight: Tensor, tangents_1: Tensor) -> Any:
    noise = torch.rand_like(tangents_1)
    return tangents_1 @ weight, (value + noise).t() @ tangents_1


def region(value: Tensor, weight: Tensor, tangents_1: Tensor) -> Any:
    """Of a checkpoint, whose products are computed in backward."""
    hidden = (value @ weight).tanh()
    return (tangents_1 * (1 - hidden * hidden)) @ weight.t(), hidden.t() @ tangents_1


def convolution(value: Tensor, weight: Tensor, tangents_1: Tensor) -> Any:
    options = [2], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True]
    return aten.convolution_backward(tangents_1, value, weight, *options)


LAYER = [(6, 4), (6, 8), (4, 8), (8, 4), (6, 4)]
SQUARE = [(6, 4), (4, 4), (6, 4)]
CASES = {
    "no product twice, what is cheap again": Case(
        *(layer, LAYER, FUSED, {"mm": 2}, {"mm": 2, "gelu": 1}),
        kept=[[6, 4], [6, 4], [6, 8], [6, 8]],
    ),
    "all that is heavy waits without an input": Case(
        *(first_layer, LAYER, FUSED, {"mm": 0, "gelu_backward": 0}, {"mm": 3})
    ),
    "what both need once without fusion": Case(*(scaled, SQUARE, PLAIN, {"tanh": 1}, {"tanh": 0})),
    "a view once without fusion": Case(
        *(viewed, [(6, 4), (4, 4), (2, 3, 4)], PLAIN, {"view": 2}, {"view": 0, "mm": 1}),
        kept=[[6, 4], [6, 4]],
    ),
    "a norm's weight at once": Case(
        *(norm, [(16, 4), (4,), (4, 4), (16, 4)], FUSED, {"sum": 1}, {"sum": 0, "mm": 1}),
        kept=[[16, 4], [16, 4]],
    ),
    "a checkpoint is kept": Case(*(region, [(6, 4), (4, 8), (6, 8)], PLAIN, {"mm": 2}, {"mm": 1})),
    "noise in the inputs' half": Case(*(noisy, SQUARE, FUSED, {"rand_like": 1}, {"rand_like": 0})),
    "a convolution's backward is two": Case(
        *(convolution, [(1, 2, 4, 4), (2, 2, 3, 3), (1, 2, 2, 2)], FUSED),
        {"convolution_backward": 1},
        {"convolution_backward": 1},
    ),
    "a mask in place of a product with it": Case(
        *(dropped, [(6, 4), (6, 4), (6, 4)], FUSED, {"mul": 2}, {"mul": 1, "mm": 2})
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_which_half_computes_what(name: str) -> None:
    case = CASES[name]
    inputs = [torch.randn(*shape, dtype=torch.float64) for shape in case.shapes]
    graph = graph_of(case.backward, *inputs)
    outputs: Any = next(iter(reversed(graph.graph.nodes))).args[0]
    waiting = range(1, len(outputs))
    free = ["weight"] if case.backward is region else ()
    halves = halved(graph, waiting, fused=case.fused, free=free)
    for half, counts in ((halves.inputs.graph, case.inputs), (halves.weights.graph, case.weights)):
        assert {op: operations(half)[op] for op in counts} == counts
    torch.manual_seed(0)
    expected = case.backward(*inputs)
    torch.manual_seed(0)
    gradients, sizes = run_halves(halves, inputs)
    assert all(torch.equal(gradients[i], x) for i, x in enumerate(expected) if x is not None)
    assert case.kept in (None, sizes)
