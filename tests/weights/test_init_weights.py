"""First weights: the same bits for any cut, from the meta device too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Pipeline, PipelineStage
from penstock.errors import UsageError
from penstock.partition import partition
from penstock.testing import WorkerPool

WIDTH = 6


class Rotary(nn.Module):
    """Has a buffer that is not saved, and knows how to make it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.empty(WIDTH), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        values = 1.0 / 10 ** torch.arange(WIDTH, device=self.get_buffer("frequencies").device)
        self.get_buffer("frequencies").copy_(values)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.cos(self.get_buffer("frequencies"))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.rotary = Rotary()
        self.norm = nn.BatchNorm1d(3)
        self.act = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.rotary(x))
        out: Tensor = x + self.act(self.attend(x, x, x, need_weights=False)[0])
        return out


def model(device: str = "cpu") -> nn.Sequential:
    with torch.device(device):
        return nn.Sequential(nn.Embedding(9, WIDTH), Block(), Block(), nn.Linear(WIDTH, 9))


def state(*modules: nn.Module) -> dict[str, Tensor]:
    named = [t for m in modules for t in (*m.named_parameters(), *m.named_buffers())]
    return {name: tensor.detach().clone() for name, tensor in named}


def same(values: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return values.keys() == wanted.keys() and all(torch.equal(values[n], wanted[n]) for n in wanted)


def whole(seed: int = 1) -> dict[str, Tensor]:
    net = model()
    penstock.init_weights(net, seed)
    return state(net)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_any_cut_gives_the_same(device: str) -> None:
    parts = partition(model(device), 4).modules
    for part in parts:
        penstock.init_weights(part, 1)
    assert same(state(*parts), whole())
    cuts: list[Any] = [
        [PipelineStage(m, i, 2, "cpu") for i, m in enumerate(partition(model(device), 2).modules)],
        Pipeline(model(device), schedule="1F1B", ranks=4, device="cpu"),
        Pipeline(model(device), schedule="ZB-V", ranks=2, device="cpu"),
        Pipeline(model(device), ranks=2),
    ]
    cuts[-1].cut(torch.zeros(4, 3, dtype=torch.int64))
    for cut in cuts:
        penstock.init_weights(cut, 1)
        stages = cut.stages if isinstance(cut, Pipeline) else cut
        assert same(state(*[stage.module for stage in stages]), whole())


def test_it_depends_on_the_seed_and_leaves_the_callers_generator() -> None:
    torch.manual_seed(1)
    first = whole()
    torch.manual_seed(2)
    assert same(whole(), first)
    net, before = model(), torch.get_rng_state()
    penstock.init_weights(net, 1)
    assert torch.equal(torch.get_rng_state(), before)
    assert not same(whole(2), first)
    assert not torch.equal(first["1.attend.in_proj_weight"], first["2.attend.in_proj_weight"])


def tied() -> nn.Sequential:
    with torch.device("meta"):
        middle = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        net = nn.Sequential(nn.Embedding(9, WIDTH), *middle, nn.Linear(WIDTH, 9))
        net[4].weight = net[0].weight
        return net


def tied_weights(group: Any) -> dict[str, Any]:
    """A worker's task: the weights of a pipeline whose first and last stage share one."""
    with Pipeline(tied(), schedule="GPipe", device="cpu", mesh=group) as pipe:
        penstock.init_weights(pipe, 1)
        held = [stage.module for stage in pipe.stages]
        return {name: tensor.tolist() for name, tensor in state(*held).items()}


def test_a_tied_weight_is_that_of_its_first_module(workers: WorkerPool) -> None:
    net, alone = tied(), nn.Sequential(nn.Embedding(9, WIDTH))
    weight, optimizer = net[0].weight, torch.optim.SGD(net.parameters(), 0.1)
    for one in (net, alone):
        penstock.init_weights(one, 1)
    assert same(state(net[0]), state(alone[0]))
    # Objects stay who they are.
    assert net[0].weight is weight is net[4].weight is optimizer.param_groups[0]["params"][0]
    wanted = {name: tensor.tolist() for name, tensor in net.state_dict().items()}
    first, second = workers.run(f"{__name__}:tied_weights", 2)
    assert (first | second, second["4.weight"]) == (wanted, wanted["4.weight"])


class Titled(nn.Module):
    """A model with an initialiser for what is in it, as transformers have one, and what nobody can fill."""

    def __init__(self) -> None:
        super().__init__()
        self.std = 0.01
        self.embed = nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 9)
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool), persistent=False)
        self.register_buffer("places", torch.arange(2))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=self.std)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def test_the_initialiser_of_the_model_goes_along_with_its_stages() -> None:
    net = Titled()
    penstock.init_weights(net, 1)
    wanted = state(net)
    assert wanted["head.weight"].std() < 0.02
    assert wanted["embed.weight"].std() > 0.5
    # What was built for real keeps what nobody fills.
    assert net.scale.tolist() == [1.0, 1.0]
    stages = [["embed", "blocks.0"], ["blocks.1", "head"]]
    example: Any = ((torch.zeros(2, 3, dtype=torch.long),), {})
    parts = partition(Titled(), stages, example=example).modules
    penstock.init_weights(parts, 1)
    of_parts = state(*parts)
    assert all(torch.equal(value, wanted[name]) for name, value in of_parts.items())
    assert wanted.keys() - of_parts.keys() <= {"scale", "mask", "places"}


class HalfFilled(nn.Module):
    """Forgets a part of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight[:2])


def test_the_users_initialiser_comes_in_its_place_and_must_fill_the_rest() -> None:
    with torch.device("meta"):
        bare, net, half = Titled(), Titled(), HalfFilled()

    def init(module: nn.Module) -> None:
        if isinstance(module, Titled):
            nn.init.ones_(module.embed.weight)
            module.scale.data.fill_(3.0)
            module.get_buffer("mask").fill_(True)
            module.get_buffer("places").copy_(torch.arange(2))

    penstock.init_weights(net, 1, init)
    assert bool((net.embed.weight == 1).all())
    assert net.head.weight.std() > 0.02
    assert net.scale.tolist() == [3.0, 3.0]
    assert net.get_buffer("places").tolist() == [0, 1]
    refused: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: penstock.init_weights(bare, 1),
            r"scale \(Titled\), mask .*, places .* pass init=",
        ),
        (lambda: penstock.init_weights(half, 1), r"no value was given to weight \(HalfFilled\)"),
        (lambda: penstock.init_weights(model(), 1.5), "whole number"),  # type: ignore[arg-type]
        (lambda: penstock.init_weights(3, 1), "has no weights"),
        (lambda: penstock.init_weights([model(), 3], 1), "is neither"),
        (
            lambda: penstock.init_weights(Pipeline(model(), ranks=2), 1, device="cpu"),
            "leave out dev",
        ),
    ]
    for call, says in refused:
        with pytest.raises(UsageError, match=says):
            call()


transformers = pytest.importorskip("transformers", reason="the models of transformers")


@pytest.mark.parametrize("kind", ["Llama", "GPT2"])
def test_a_model_of_transformers_from_the_meta_device(kind: str) -> None:
    sizes = {"vocab_size": 30, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = getattr(transformers, f"{kind}Config")(**sizes, intermediate_size=24)
    make = getattr(transformers, "LlamaForCausalLM" if kind == "Llama" else "GPT2LMHeadModel")
    real = make(config).eval()
    with torch.device("meta"):
        bare = make(config).eval()
    buffers = state(real)
    penstock.init_weights(real, 1)
    penstock.init_weights(bare, 1)
    assert same(state(bare), state(real))
    assert all(torch.equal(buffers[name], buffer) for name, buffer in real.named_buffers())
    tokens = torch.arange(6).reshape(1, 6)
    assert torch.equal(real(tokens).logits, bare(tokens).logits)
