"""Cutting models into stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import PartitionError, UsageError
from penstock.partition import Partition, cut_chain, cut_sequential, partition
from penstock.schedule import Placement

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Model(nn.Module):
    """A chain under nested names, as models of transformers have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        blocks = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)]
        self.body = nn.ModuleDict({"blocks": nn.Sequential(*blocks)})
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body["blocks"](self.embed(x)))


class First(nn.Module):
    """Takes a tuple as one argument."""

    def forward(self, both: tuple[Tensor, Any]) -> Tensor:
        return both[0]


class Both(nn.Module):
    """Takes a tuple as two arguments."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + y, x - y


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Any:
        return -self[0](x)


class Named(nn.Sequential):
    """A class of its own with the forward of nn.Sequential."""


def run(partition: Partition, *args: Any) -> Any:
    """The stages one after the other; a tuple comes as several arguments where the next one says so."""
    output: Any = args
    for module in partition.modules:
        spread = module is partition.modules[0] or (module.spreads and type(output) is tuple)
        output = module(*output) if spread else module(output)
    return output


def sequential(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))


def paths(partition: Partition) -> list[list[str]]:
    return [sorted({name.rpartition(".")[0] for name in m.state_dict()}) for m in partition.modules]


# ---- nn.Sequential


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (4, 2, [["0", "1"], ["2", "3"]]),
        (5, 2, [["0", "1", "2"], ["3", "4"]]),
        (4, 4, [["0"], ["1"], ["2"], ["3"]]),
        (3, 1, [["0", "1", "2"]]),
    ],
)
def test_a_sequential_is_cut_into_even_runs(
    layers: int, stages: int, expected: list[list[str]]
) -> None:
    assert paths(cut_sequential(sequential(layers), stages)) == expected


def reused() -> nn.Sequential:
    act = nn.Tanh()
    return nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4), act, nn.Linear(4, 4))


SEQUENTIALS: dict[str, Callable[[], nn.Sequential]] = {
    "plain": lambda: sequential(5),
    "one module at several places": reused,
    "tuples between modules": lambda: nn.Sequential(
        nn.LSTM(4, 4), First(), nn.LSTM(4, 4), First(), nn.Linear(4, 4)
    ),
    "nested": lambda: nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5))),
    "a subclass": lambda: Named(*sequential(5)),
}


@pytest.mark.parametrize("name", sorted(SEQUENTIALS))
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_the_stages_of_a_sequential_compute_what_it_does(name: str, stages: int) -> None:
    model = SEQUENTIALS[name]()
    assert torch.equal(run(cut_sequential(model, stages), X), model(X))


@pytest.mark.parametrize("stages", [0, 4])
def test_a_sequential_has_no_more_stages_than_modules(stages: int) -> None:
    with pytest.raises(PartitionError, match=f"3 modules cannot be cut into {stages} stages"):
        cut_sequential(sequential(3), stages)


def test_a_forward_of_its_own_is_no_chain() -> None:
    with pytest.raises(PartitionError, match="Residual has a forward of its own"):
        cut_sequential(Residual(*sequential(2)), 2)


# ---- module paths

CUT = [["embed", "body.blocks.0"], ["body.blocks.1"], ["body.blocks.2", "head"]]
CUTS = {
    "three": CUT,
    "two": [["embed", "body.blocks.0", "body.blocks.1"], ["body.blocks.2", "head"]],
    "one": [[path for paths in CUT for path in paths]],
    "whole branches": [["embed"], ["body.blocks"], ["head"]],
}


@pytest.mark.parametrize("name", sorted(CUTS))
def test_the_stages_of_a_chain_compute_what_the_model_does(name: str) -> None:
    model = Model().eval()
    assert torch.equal(run(cut_chain(model, CUTS[name]), X), model(X))


def test_stages_share_the_models_parameters_and_names() -> None:
    model = Model()
    found = {n: t for module in cut_chain(model, CUT).modules for n, t in module.named_parameters()}
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all(found[name] is tensor for name, tensor in model.named_parameters())


def test_stages_hold_the_models_buffers() -> None:
    stage = cut_chain(Model(), CUT).modules[1]
    assert "body.blocks.1.running_mean" in dict(stage.named_buffers())


def test_a_tuple_becomes_several_arguments() -> None:
    model = nn.ModuleDict({"a": Both(), "b": Both()})
    partition = cut_chain(model, [["a", "b"]])
    assert all(map(torch.equal, run(partition, X, X), (2 * X, 2 * X)))


def test_one_module_may_be_called_twice_in_a_stage() -> None:
    model = nn.ModuleDict({"lin": nn.Linear(4, 4)})
    (stage,) = cut_chain(model, [["lin", "lin"]]).modules
    assert torch.equal(stage(X), model["lin"](model["lin"](X)))


def test_a_module_with_two_names_is_found_under_both() -> None:
    act = nn.Tanh()
    model = nn.ModuleDict({"a": act, "lin": nn.Linear(4, 4), "b": act})
    partition = cut_chain(model, [["a", "lin"], ["b"]])
    assert torch.equal(run(partition, X), act(model["lin"](act(X))))


def test_the_first_module_gets_the_arguments_by_name() -> None:
    (stage,) = cut_chain(nn.ModuleDict({"a": Both()}), [["a"]]).modules
    assert torch.equal(stage(X, y=X)[0], 2 * X)


class Refusal(NamedTuple):
    stages: list[list[str]]
    says: str


REFUSALS = {
    "an unknown path": Refusal(
        [["embed", "blocks.0"], CUT[1], CUT[2]], "no module 'blocks.0' in the model"
    ),
    "the model itself": Refusal([[""]], "no module '' in the model; did you mean embed"),
    "no modules": Refusal([*CUT, []], r"stages \[3\] have no modules"),
    "what is left out": Refusal(CUT[:2], "in no stage: body.blocks.2.weight, .*head.bias"),
    "much is left out": Refusal(CUT[:1], "in no stage: .* and 4 more; name the modules"),
}


@pytest.mark.parametrize("name", sorted(REFUSALS))
def test_what_cannot_be_cut_is_refused(name: str) -> None:
    stages, says = REFUSALS[name]
    with pytest.raises(PartitionError, match=says):
        cut_chain(Model(), stages)


# ---- what a sequential is balanced by


LOPSIDED = nn.Sequential(nn.Linear(4, 99), nn.Linear(99, 4), *(nn.Linear(4, 4) for _ in range(4)))
EXAMPLE: tuple[Any, dict[str, Any]] = ((torch.ones(2, 4),), {})

BALANCED: dict[str, tuple[dict[str, Any], list[list[str]]]] = {
    "by their number": ({}, [["0", "1", "2"], ["3", "4", "5"]]),
    "by parameters": ({"balance": "parameters"}, [["0"], ["1", "2", "3", "4", "5"]]),
    "by what it computes": (
        {"balance": "flops", "example": EXAMPLE},
        [["0"], ["1", "2", "3", "4", "5"]],
    ),
    "by weights": ({"balance": [1, 1, 1, 1, 1, 9]}, [["0", "1", "2", "3", "4"], ["5"]]),
    "on ranks": (
        {"stages": 3, "placement": Placement((0, 1, 0))},
        [["0"], ["1", "2", "3"], ["4", "5"]],
    ),
}


@pytest.mark.parametrize("name", sorted(BALANCED))
def test_a_sequential_is_balanced_as_asked(name: str) -> None:
    options, expected = BALANCED[name]
    found = partition(LOPSIDED, **({"stages": 2} | options))
    assert [[name for name, _ in stage.named_children()] for stage in found.modules] == expected


@pytest.mark.parametrize(
    ("stages", "options", "says"),
    [
        (2, {"balance": [1.0]}, "balance= has 1 weights for 6 modules"),
        (2, {"balance": "flop"}, "balance='flop': must be one of time, flops"),
        (2, {"balance": 3}, "balance=3: must be one of time, flops"),
        (2, {"balance": "flops"}, r"give example=\(args, kwargs\)"),
        (1, {"placement": Placement((0, 1))}, "the placement is for 2 stages, not 1"),
        (
            ["2"],
            {"balance": "parameters"},
            "the number of stages is given; stages= names the modules",
        ),
    ],
)
def test_what_a_sequential_cannot_be_balanced_by(stages: Any, options: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        partition(LOPSIDED, stages, **options)


@pytest.mark.parametrize("model", [nn.Sequential(), nn.ReLU()])
def test_what_cannot_be_cut_can_be_one_stage(model: nn.Module) -> None:
    with pytest.raises(PartitionError, match=r"0 modules .*2 stages; it can be one stage: ranks=1"):
        partition(model, 2)
