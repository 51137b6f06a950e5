"""A module call's stream: known by path and count, repeated by recomputation, free where none is drawn."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Generator, Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

from penstock import randomness
from penstock.rng import Draw, Generators, Streams, identity, noticed
from penstock.rng.drawing import may_draw, visible
from penstock.rng.streams import Place, following, seed_of

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
    place = Place().next(["a"]).next(["a.b"])
    assert place.address == "/a:0/b:0"
    assert place.seeds(Draw(1, 2).key(3)) == (3463959898936222447, 1997320790213849040)
    assert following(5) == 3567305580077179309
    assert seed_of(5, "a.b") == 4850198517244282512


# ---- what draws


def told(run: Callable[[], Any]) -> list[Generator | None]:
    seen: list[Generator | None] = []
    with torch.random.fork_rng([]), noticed(seen.append):
        run()
    return seen


QUERY = torch.ones(1, 1, 2, 4)
LSTM = nn.LSTM(2, 2, 3, dropout=0.5)
PAIRS = torch.ones(2, 2, 2)
DRAWING: dict[str, Callable[[], Any]] = {
    "in place": lambda: torch.empty(2).normal_(),
    "out": lambda: torch.normal(ONES, 1.0, out=torch.empty(64)),
    "method": lambda: ONES.bernoulli(0.5),
    "of numbers": lambda: torch.normal(0.0, 1.0, (2,)),
    "of tensors": lambda: torch.normal(ONES, ONES),
    "rejecting": lambda: torch._standard_gamma(ONES),
    "indices": lambda: torch.multinomial(ONES, 3),
    "attention": lambda: functional.scaled_dot_product_attention(
        QUERY, QUERY, QUERY, dropout_p=0.1
    ),
    "recurrent": lambda: LSTM(PAIRS),
    "alpha": lambda: functional.feature_alpha_dropout(PAIRS, training=True),
    "leaky": lambda: functional.rrelu(ONES, training=True),
    "torch's own": lambda: torch.rand(2, generator=torch.default_generator),
    "mapped": lambda: torch.vmap(lambda x: torch.rand_like(x), randomness="different")(PAIRS),
}
IDLE: list[Callable[[], Any]] = [
    lambda: functional.dropout(ONES, 0.0),
    lambda: functional.dropout(ONES, training=False),
    lambda: functional.rrelu(ONES),
    lambda: functional.scaled_dot_product_attention(QUERY, QUERY, QUERY),
    lambda: torch.relu(ONES),
]


@pytest.mark.parametrize("way", DRAWING)
def test_a_draw_is_noticed_once(way: str) -> None:
    assert told(DRAWING[way]) == [None]


def test_what_has_nothing_to_draw_draws_nothing() -> None:
    assert told(lambda: [run() for run in IDLE]) == []


def test_a_generator_of_ones_own_is_told() -> None:
    own = Generator()
    seen = told(lambda: (torch.rand(2, generator=own), ONES.clone().normal_(generator=own)))
    assert [identity(found) for found in seen] == [identity(own)] * 2


def test_after_the_context_nothing_is_noticed() -> None:
    outer: list[Any] = []
    inner: list[Any] = []
    first, second = noticed(outer.append), noticed(inner.append)
    with torch.random.fork_rng([]):
        first.__enter__()
        second.__enter__()
        # Not in the reverse order, as the tasks of several ranks in one thread end.
        first.__exit__(None, None, None)
        torch.rand(1)
        second.__exit__(None, None, None)
        torch.rand(1)
    assert (outer, inner) == ([], [None])


def test_torch_continues_where_it_was() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    drawn(Twice())
    assert torch.equal(torch.rand(3), expected)


class Repeats(nn.Module):
    """Checkpoints several calls of one block, with draws of its own around them, in one region or apart."""

    def __init__(self, *, nested: bool, **options: Any) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Tanh())
        self.nested, self.options = nested, options

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.twice, x) if self.nested else self.twice(x)

    def twice(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.again(self.block, x)
            x = x * functional.dropout(x)
            x = self.again(self.noisy, x)
        return x

    def noisy(self, x: Tensor) -> Tensor:
        x = functional.dropout(x)
        return self.block(x) + torch.rand_like(x) * functional.dropout(x)  # type: ignore[no-any-return]

    def again(self, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        found: Tensor = checkpoint(run, x, **self.options) if self.options else run(x)
        return found


def gradients(**options: Any) -> list[Tensor]:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = Repeats(**options)
    with randomness(model, seed=1):
        model(torch.ones(64, requires_grad=True)).sum().backward()
    return [cast("Tensor", p.grad) for p in model.parameters()]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("how", [{"use_reentrant": True}, {"use_reentrant": False}])
def test_recomputation_draws_the_same(how: dict[str, bool], kept: bool, nested: bool) -> None:
    found = gradients(nested=nested, preserve_rng_state=kept, **how)
    assert all(map(torch.equal, found, gradients(nested=False)))


def test_recomputation_to_the_end_too() -> None:
    found = gradients(nested=True, use_reentrant=False, early_stop=False)
    assert all(map(torch.equal, found, gradients(nested=False)))


def test_checkpoints_are_as_before_afterwards() -> None:
    before = vars(torch_checkpoint).copy()
    gradients(nested=False)
    assert vars(torch_checkpoint) == before


# ---- where in a model


class Shared(nn.Module):
    """Calls twice what others call too."""

    def __init__(self, drop: nn.Module) -> None:
        super().__init__()
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.drop(self.drop(x))
        return found


def test_a_module_that_several_share_draws_by_who_calls_it() -> None:
    drop = nn.Dropout(0.5)
    whole = nn.Sequential(Shared(drop), Shared(drop))
    seen: list[bytes] = []
    drop.register_forward_hook(lambda *_: seen.append(torch.rand(9).numpy().tobytes()))
    drawn(whole)
    part = nn.Module()
    part.add_module("1", whole[1])
    with randomness(part, seed=1):
        whole[1](ONES)
    assert len(set(seen[:4])) == 4
    assert seen[4:] == seen[2:4]


def test_a_module_that_raises_leaves_the_place() -> None:
    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad, self.drop = Raises(), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            with contextlib.suppress(ValueError):
                self.bad(x)
            found: Tensor = self.drop(x)
            return found

    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError

    part = nn.Module()
    part.add_module("drop", nn.Dropout(0.5))
    with randomness(part, seed=1):
        alone = part.get_submodule("drop")(ONES)
    assert torch.equal(drawn(Tries()), alone)


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


class Half(nn.Module):
    """Makes a weight of another."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def test_what_a_user_changes_between_steps_is_found_anew() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    streams = Streams(model, Generators())
    with streams.installed(Draw(0, 0)):
        assert not model[1]._forward_pre_hooks
    register_parametrization(model[1], "weight", Half())
    with streams.installed(Draw(0, 1)):
        assert model[1]._forward_pre_hooks
        assert not model[0]._forward_pre_hooks
        # Hooks of ours are none of the user's.
        streams.find()
        assert Streams(model, Generators()).names == streams.names
