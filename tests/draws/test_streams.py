"""A module call's stream: known by path and count, repeated by recomputation, free where none is drawn."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from penstock import randomness
from penstock.draws import Draw, Generators, Streams
from penstock.draws.drawing import may_draw, visible
from penstock.draws.keys import seed_of, seeds_of

ONES = torch.ones(64)


class Twice(nn.Module):
    """Calls one dropout twice, and drops with no module before, between and after."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [
            functional.dropout(x),
            self.drop(x),
            functional.dropout(x),
            self.drop(x),
            functional.dropout(x),
        ]


def drawn(model: nn.Module, **key: int) -> Any:
    with randomness(model, **({"seed": 1} | key)):
        return model(ONES)


def test_every_place_draws_its_own() -> None:
    masks = {tuple(mask.tolist()) for mask in drawn(Twice())}
    assert len(masks) == 5


@pytest.mark.parametrize("other", [{"seed": 2}, {"step": 1}, {"microbatch": 1}])
def test_what_is_drawn_depends_on_seed_step_and_microbatch(other: dict[str, int]) -> None:
    first, again, others = drawn(Twice()), drawn(Twice()), drawn(Twice(), **other)
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, others))


def test_what_a_call_draws_does_not_depend_on_what_ran_before_it() -> None:
    whole = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 64), nn.Dropout(0.5))
    seen: list[Tensor] = []
    whole[2].register_forward_hook(lambda _, args, output: seen.append(output / args[0]))
    drawn(whole)
    part = nn.Module()
    part.add_module("2", nn.Dropout(0.5))
    with randomness(part, seed=1):
        assert torch.equal(part.get_submodule("2")(ONES), seen[0].detach())


def test_seeds_are_the_same_in_every_process() -> None:
    key = Draw(1, 2).key(3)
    assert seeds_of(key, b"a.b", 4) == (1740662261961446843, 2535168534894144300)
    assert seed_of(5, "a.b") == 4850198517244282512


def test_torch_continues_where_it_was() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    drawn(Twice())
    assert torch.equal(torch.rand(3), expected)


class Repeats(nn.Module):
    """Checkpoints several calls of one block, each one apart."""

    def __init__(self, *, kept: bool, early: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Tanh())
        self.kept, self.early = kept, early

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(
                self.block,
                x,
                use_reentrant=False,
                preserve_rng_state=self.kept,
                early_stop=self.early,
            )
            x = x * functional.dropout(x)
        return x


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("early", [True, False])
def test_recomputation_draws_the_same(kept: bool, early: bool) -> None:
    model = Repeats(kept=kept, early=early)
    seen: list[bytes] = []
    model.block[1].register_forward_hook(
        lambda _, args, output: seen.append((output == 0).numpy().tobytes())
    )
    with randomness(model, seed=1):
        model(ONES.requires_grad_()).sum().backward()
    first, second, *again = seen
    assert first != second
    assert again == [second, first]


def test_reentrant_recomputation_too() -> None:
    seen: list[bytes] = []
    model = nn.Dropout(0.5)
    model.register_forward_hook(
        lambda _, args, output: seen.append((output == 0).numpy().tobytes())
    )
    with randomness(model, seed=1):
        x = torch.ones(64, requires_grad=True)
        once = checkpoint(model, x, use_reentrant=True)
        checkpoint(model, once, use_reentrant=True).sum().backward()
    assert seen[2:] == [seen[1], seen[0]]


# ---- what may draw


class Own(nn.Module):
    """A user's module."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def changed(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(
    "module",
    [
        nn.Dropout(0.0),
        nn.AlphaDropout(),
        nn.RReLU(),
        nn.LSTM(2, 2, 2, dropout=0.1),
        nn.MultiheadAttention(4, 2),
        nn.FractionalMaxPool2d(2, 2),
        Own(),
        changed(nn.Linear(2, 2)),
        nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
        changed(nn.Sequential()),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_may_draw(module: nn.Module) -> None:
    assert may_draw(module)


@pytest.mark.parametrize(
    "module",
    [nn.Linear(2, 2), nn.LSTM(2, 2), nn.Sequential(nn.Dropout()), nn.TransformerEncoderLayer(4, 2)],
    ids=lambda module: type(module).__name__,
)
def test_what_draws_nothing_itself(module: nn.Module) -> None:
    assert not may_draw(module)


def test_a_module_that_cannot_draw_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    streams = Streams(model, Generators())
    with streams.installed(Draw(0, 0)):
        assert not any(module._forward_pre_hooks for module in model.modules())
        assert not any(module._forward_hooks for module in model.modules())
        before = torch.get_rng_state()
        streams.forward(0)
        assert torch.equal(torch.get_rng_state(), before)


def test_no_hook_stays() -> None:
    model = nn.Sequential(Twice(), nn.Linear(4, 4))
    drawn(model[0])
    with Streams(model, Generators()).installed(Draw(0, 0)):
        assert any(module._forward_pre_hooks for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


def compiled(module: nn.Module) -> nn.Module:
    found: Any = torch.compile(module, backend="eager")
    return cast("nn.Module", found)


class Stand(nn.Module):
    """Stands in a stage for a module whose own forward runs, and holds what the stage has of it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__["stands_for"] = module


def test_a_module_that_stands_for_another_leads_to_it() -> None:
    real, stage = nn.Sequential(Twice()), nn.Module()
    stage.add_module("0", Stand(real[0]))
    assert visible(stage)[real[0]] == ("0",)
    with Streams(stage, Generators()).installed(Draw(0, 0)):
        assert real[0]._forward_pre_hooks


def test_names_do_not_depend_on_wrappers() -> None:
    assert may_draw(compiled(nn.Linear(2, 2)))
    inner = nn.Sequential(nn.Linear(2, 2))
    model = nn.Sequential(compiled(inner))
    names = {path for paths in visible(model).values() for path in paths}
    assert names == {"", "0"}
    assert inner[0] not in visible(model)


def test_what_is_compiled_draws_the_same_each_time() -> None:
    model = nn.Sequential(nn.Dropout(0.5))
    model.compile(backend="eager")
    assert torch.equal(drawn(model), drawn(model))
    assert not torch.equal(drawn(model), drawn(model, step=1))
