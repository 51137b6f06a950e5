"""Losses from hidden states: the numbers of torch's cross entropy, without logits as a whole."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock import Loss, Pipeline
from penstock.errors import UsageError
from penstock.losses import ChunkedHead, chunked_cross_entropy, cross_entropy, use_chunked_loss
from penstock.testing import Case, compare, plain_loop
from tests.processes import in_processes

WORDS = 50
TOKENS = torch.arange(40).view(8, 5) * 7 % WORDS
LABELS = TOKENS.roll(-1, 1).masked_fill(torch.arange(5) > torch.arange(8)[:, None], -100)
"""The rows have 1, 2, 3, 4 and then 5 labels that count."""
LOSS = Loss(cross_entropy, over="tokens")
OWN = Loss(lambda output, _: output, weight=lambda labels: (labels != -100).sum())
"""Of a model that returns its loss."""


class Language(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, 8)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        self.head: Any = nn.Linear(8, WORDS, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.blocks(self.embed(tokens)))


class WithLabels(Language):
    """The author computes the loss in its own forward."""

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        assert labels is not None
        hidden = self.blocks(self.embed(tokens))
        weight, bias = self.head.weight, self.head.bias
        return chunked_cross_entropy(hidden, weight, labels, bias=bias, chunk=16)


class WithLossInside(Language):
    """As models of transformers are: the loss follows the head in the forward."""

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        assert labels is not None
        return cross_entropy(super().forward(tokens), labels, chunk=16)


def chunked(*, tied: bool = False) -> Language:
    model = Language(tied=tied).double()
    model.head = ChunkedHead(model.head)
    return model


def whole(*, tied: bool = False) -> tuple[float, Any]:
    """The loss and gradients of the plain loop over whole logits."""
    return plain_loop(Case(Language(tied=tied).double(), (TOKENS,), LABELS, LOSS))


def assert_same(model: Pipeline, gradients: Any) -> None:
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-12, atol=1e-14)


# ---- the function


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_numbers_are_those_of_torch(reduction: Any, smoothing: float) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(*size).double() for size in [(8, 5, 6), (WORDS, 6), (WORDS,)]]
    hidden, weight, bias = [tensor.requires_grad_() for tensor in tensors]
    options: Any = {"reduction": reduction, "label_smoothing": smoothing}
    for chunk in (1, 7, 1000):
        found = chunked_cross_entropy(hidden, weight, LABELS, bias=bias, chunk=chunk, **options)
        logits = functional.linear(hidden, weight, bias)
        expected = cross_entropy(logits, LABELS, **options).view_as(found)
        torch.testing.assert_close(found, expected)
        seed = torch.randn_like(found)
        gradients = [torch.autograd.grad(loss, tensors, seed) for loss in (found, expected)]
        torch.testing.assert_close(*gradients)


def test_half_precision_and_autocast() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(40, 16), torch.randn(WORDS, 16)
    labels = LABELS.flatten()
    halves = [tensor.bfloat16().requires_grad_() for tensor in (hidden, weight)]
    logits = functional.linear(*halves).float()
    loss = chunked_cross_entropy(halves[0], halves[1], labels, chunk=16)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, functional.cross_entropy(logits, labels))
    wholes = [tensor.detach().float().requires_grad_() for tensor in halves]
    with torch.autocast("cpu", torch.bfloat16):
        under = chunked_cross_entropy(wholes[0], wholes[1], labels, chunk=16)
    torch.testing.assert_close(under, loss)
    under.backward()
    assert wholes[1].grad is not None
    assert wholes[1].grad.dtype == torch.float32


class Largest(TorchDispatchMode):
    """The numbers in the largest tensor that a function of torch has returned."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        self.numbers = max(self.numbers, *sizes, 0)
        return output


def test_no_tensor_holds_the_logits_of_all_tokens() -> None:
    hidden, weight = (
        torch.randn(512, 8, requires_grad=True),
        torch.randn(900, 8, requires_grad=True),
    )
    with Largest() as largest:
        chunked_cross_entropy(hidden, weight, torch.arange(512), chunk=32).backward()
    assert largest.numbers == 32 * 900


def test_what_does_not_fit_is_named() -> None:
    hidden, weight = torch.zeros(4, 8), torch.zeros(WORDS, 8)
    with pytest.raises(UsageError, match=r"hidden states of \[4, 8\].*target of \[3\]"):
        chunked_cross_entropy(hidden, weight, torch.zeros(3).long())
    options: list[dict[str, Any]]
    options = [{"reduction": "max"}, {"chunk": 0}, {"label_smoothing": 2.0}]
    for option in options:
        (name,) = option
        with pytest.raises(UsageError, match=f"{name}="):
            chunked_cross_entropy(hidden, weight, torch.zeros(4).long(), **option)
    with pytest.raises(UsageError, match="not of a Embedding"):
        ChunkedHead(nn.Embedding(4, 4))


# ---- in a pipeline


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1"])
def test_a_head_that_leaves_its_product_to_the_loss(schedule: str, tied: bool) -> None:
    loss, gradients = whole(tied=tied)
    model = chunked(tied=tied)
    assert [*model.state_dict()] == [*Language(tied=tied).state_dict()]
    pipe = Pipeline(model, schedule=schedule, ranks=2, microbatches=4, loss_fn=LOSS)
    with Largest() as largest:
        assert pipe.step(TOKENS, target=LABELS).loss == pytest.approx(loss, rel=1e-12)
    assert_same(pipe, gradients)
    assert pipe.evaluate(TOKENS, target=LABELS).loss == pytest.approx(loss, rel=1e-12)
    assert largest.numbers < TOKENS.numel() * WORDS
    # In evaluation mode there are logits, as who generates needs them.
    model.eval()
    assert pipe.evaluate(TOKENS, target=LABELS).loss == pytest.approx(loss, rel=1e-12)
    assert pipe.predict(TOKENS).shape == (8, 5, WORDS)


@pytest.mark.parametrize("kind", [WithLabels, WithLossInside])
@pytest.mark.parametrize("tied", [False, True])
def test_a_loss_in_the_models_own_forward(tied: bool, kind: type[Language]) -> None:
    loss, gradients = whole(tied=tied)
    model = kind(tied=tied).double()
    model.head = ChunkedHead(model.head)
    pipe = Pipeline(model, schedule="ZB-H1", ranks=2, microbatches=4, loss_fn=OWN)
    assert pipe.step(TOKENS, LABELS, target=LABELS).loss == pytest.approx(loss, rel=1e-12)
    assert_same(pipe, gradients)


@pytest.mark.parametrize("tied", [False, True])
@in_processes(2)
def test_several_processes(group: Any, tied: bool) -> None:
    case = Case(chunked(tied=tied), (TOKENS,), LABELS, LOSS)
    compare(case, schedule="ZB-H1", ranks=2, microbatches=4, mesh=group).check(1e-12)


@pytest.mark.parametrize("outside", [False, True])
@in_processes(4)
def test_a_head_that_is_sharded(group: Any, outside: bool) -> None:
    """By FSDP, over two replicas of two stages; the loss may be in the forward, or outside of it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    replica = mesh.get_local_rank("dp")

    def wrap(module: nn.Module, _: int) -> nn.Module:
        fully_shard(module, mesh=mesh["dp"])
        return module

    model = chunked() if outside else WithLossInside().double()
    model.head = ChunkedHead(model.head)
    loss = LOSS if outside else OWN
    pipe = Pipeline(model, mesh=mesh, replicas="dp", microbatches=2, loss_fn=loss, wrap=wrap)
    tokens, labels = TOKENS.chunk(2)[replica], LABELS.chunk(2)[replica]
    args = (tokens,) if outside else (tokens, labels)
    pipe.cut(*args)
    pipe.step(*args, target=labels)
    _, gradients = whole()
    here: list[Any] = [(n, p.grad) for n, p in pipe.weights.here.named_parameters()]
    for name, grad in here:
        torch.testing.assert_close(grad.full_tensor(), gradients[name], rtol=0, atol=1e-12)


# ---- models of transformers


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_of_transformers(tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=WORDS, num_hidden_layers=2, tie_word_embeddings=tied, **sizes
    )
    author = transformers.LlamaForCausalLM(config).train()
    model = copy.deepcopy(author)
    expected = author(TOKENS, labels=LABELS).loss
    expected.backward()
    use_chunked_loss(model, chunk=8)
    torch.testing.assert_close(model(TOKENS, labels=LABELS).loss, expected)
    pipe = Pipeline(model, schedule="ZB-H1", ranks=2, microbatches=4)
    assert pipe.step(TOKENS, labels=LABELS).loss == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in pipe.named_parameters():
        gradient = author.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
    items = model(TOKENS, labels=LABELS, num_items_in_batch=7).loss
    torch.testing.assert_close(items, author(TOKENS, labels=LABELS, num_items_in_batch=7).loss)
    model.eval()
    assert model(TOKENS).logits.shape == (8, 5, WORDS)
    torch.testing.assert_close(model(TOKENS, labels=LABELS).loss, expected)


def test_another_loss_of_transformers_is_refused() -> None:
    with pytest.raises(UsageError, match="the Language does not compute"):
        use_chunked_loss(Language())
