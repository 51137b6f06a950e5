"""First weights: the same bits for any cut, from the meta device too."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Pipeline, PipelineStage
from penstock.errors import UsageError
from penstock.partition import partition
from penstock.testing import WorkerPool
from tests.pipeline.models import mean_loss

WIDTH = 6


class Rotary(nn.Module):
    """Has a buffer that is not saved, and knows how to make it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.empty(WIDTH), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        found = 1.0 / 10 ** torch.arange(WIDTH, device=self.get_buffer("frequencies").device)
        self.get_buffer("frequencies").copy_(found)

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


def tied(device: str = "cpu") -> nn.Sequential:
    with torch.device(device):
        net = nn.Sequential(
            nn.Embedding(9, WIDTH),
            *[nn.Linear(WIDTH, WIDTH) for _ in range(3)],
            nn.Linear(WIDTH, 9),
        )
        net[4].weight = net[0].weight
        return net


def state(*modules: nn.Module) -> dict[str, Tensor]:
    named = [t for m in modules for t in (*m.named_parameters(), *m.named_buffers())]
    return {name: tensor.detach().clone() for name, tensor in named}


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


def whole(seed: int = 1) -> dict[str, Tensor]:
    net = model()
    penstock.init_weights(net, seed)
    return state(net)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_any_cut_gives_the_same(stages: int, device: str) -> None:
    parts = partition(model(device), stages).modules
    for part in parts:
        penstock.init_weights(part, 1)
    assert same(state(*parts), whole())


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("schedule", "ranks"), [("1F1B", 4), ("ZB-V", 2)])
def test_of_a_pipeline(schedule: str, ranks: int, device: str) -> None:
    with Pipeline(model(device), schedule=schedule, ranks=ranks, device="cpu") as pipe:
        penstock.init_weights(pipe, 1)
        assert same(state(*[stage.module for stage in pipe.stages]), whole())


def test_of_stages() -> None:
    parts = partition(model("meta"), 2).modules
    stages = [PipelineStage(part, index, 2, "cpu") for index, part in enumerate(parts)]
    penstock.init_weights(stages[0], 1)
    assert next(stages[1].module.parameters()).is_meta
    penstock.init_weights(stages, 1)
    assert same(state(*parts), whole())


def test_it_depends_on_the_seed_and_leaves_the_callers_generator() -> None:
    torch.manual_seed(1)
    first = whole()
    torch.manual_seed(2)
    assert same(whole(), first)
    assert not same(whole(2), first)
    net, before = model(), torch.get_rng_state()
    penstock.init_weights(net, 1)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(first["1.attend.in_proj_weight"], first["2.attend.in_proj_weight"])


def test_objects_stay_who_they_are() -> None:
    net = tied("meta")
    weight = net[0].weight
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    penstock.init_weights(net, 1)
    assert net[0].weight is weight is net[4].weight
    assert weight.device.type == "cpu"
    assert optimizer.param_groups[0]["params"][0] is weight


def tied_weights(group: Any) -> dict[str, Any]:
    """A worker's task: the weights of a pipeline whose first and last stage share one."""
    with Pipeline(tied("meta"), schedule="GPipe", device="cpu", group=group) as pipe:
        penstock.init_weights(pipe, 1)
        held = [stage.module for stage in pipe.stages]
        return {name: tensor.tolist() for name, tensor in state(*held).items()}


def test_a_tied_weight_is_that_of_its_first_module(workers: WorkerPool) -> None:
    net, alone = tied("meta"), nn.Sequential(nn.Embedding(9, WIDTH))
    penstock.init_weights(net, 1)
    penstock.init_weights(alone, 1)
    assert same(state(net[0]), state(alone[0]))
    wanted = {name: tensor.tolist() for name, tensor in net.state_dict().items()}
    answers = workers.run("tests.weights.test_init_weights:tied_weights", 2)
    tied_one = [answer["4.weight"] for answer in answers if "4.weight" in answer]
    assert tied_one == [wanted["4.weight"]]
    assert {**answers[0], **answers[1]} == wanted


class Titled(nn.Module):
    """A model with an initialiser for what is in it, as transformers have one."""

    def __init__(self) -> None:
        super().__init__()
        self.std = 0.01
        self.embed = nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 9)

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
    parts = partition(Titled(), [["embed", "blocks.0"], ["blocks.1", "head"]]).modules
    penstock.init_weights(parts, 1)
    assert same(state(*parts), wanted)


def test_the_users_initialiser_comes_in_its_place() -> None:
    net, seen = Titled(), list[str]()

    def init(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        if isinstance(module, nn.Embedding):
            nn.init.ones_(module.weight)

    penstock.init_weights(net, 1, init)
    assert bool((net.embed.weight == 1).all())
    assert net.head.weight.std() > 0.02
    assert seen == ["Linear", "Linear", "Embedding", "ModuleList", "Linear", "Titled"]


class Unknown(nn.Module):
    """Nobody knows how to fill what it has."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool), persistent=False)
        self.register_buffer("places", torch.arange(2))


def fill(module: Any) -> None:
    if isinstance(module, Unknown):
        module.scale.data.fill_(3.0)
        module.get_buffer("mask").fill_(True)
        module.get_buffer("places").copy_(torch.arange(2))


def unknown(device: str) -> nn.Sequential:
    with torch.device(device):
        return nn.Sequential(nn.Linear(2, 2), Unknown())


def test_what_nobody_fills_is_named_and_the_user_fills_it() -> None:
    net = unknown("meta")
    with pytest.raises(UsageError, match=r"1.scale \(Unknown\), 1.mask .*, 1.places .* pass init="):
        penstock.init_weights(unknown("meta"), 1)
    penstock.init_weights(net, 1, fill)
    assert net[1].get_parameter("scale").tolist() == [3.0, 3.0]
    assert net[1].get_buffer("places").tolist() == [0, 1]
    # What was built for real keeps what nobody knows.
    net = unknown("cpu")
    penstock.init_weights(net, 1)
    assert net[1].get_parameter("scale").tolist() == [1.0, 1.0]


def test_a_pipeline_of_a_meta_model_trains_after_it() -> None:
    losses = []
    for device in ("cpu", "meta"):
        net = nn.Sequential(*[nn.Linear(4, 4, device=device) for _ in range(4)])
        with Pipeline(net, ranks=2, loss_fn=mean_loss, device="cpu") as pipe:
            penstock.init_weights(pipe, 3)
            optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
            for _ in range(2):
                loss = pipe.step(torch.ones(8, 4), target=torch.zeros(8, 4)).loss
                optimizer.step()
        losses.append(loss)
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: penstock.init_weights(model(), 1.5), "whole number"),  # type: ignore[arg-type]
        (lambda: penstock.init_weights(3, 1), "has no weights"),
        (lambda: penstock.init_weights([model(), 3], 1), "is neither"),
        (
            lambda: penstock.init_weights(Pipeline(model(), ranks=2), 1, device="cpu"),
            "leave out device",
        ),
    ],
)
def test_what_cannot_be_initialised(call: Any, says: str) -> None:
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
    again = copy.deepcopy(real)
    penstock.init_weights(again, 1)
    assert same(state(again), state(real))
