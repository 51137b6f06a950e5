"""Plain PyTorch models, cut by count, by path and by lists: the same numbers as the unsplit model."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipeline
from penstock._engine.values import map_tensors
from penstock.errors import PartitionError, UsageError
from penstock.partition import Partition, partition, unit_calls
from penstock.schedule import Placement
from penstock.testing import Case, compare
from tests.catalogue.making import Does, calls_of, loss_of
from tests.catalogue.models import MODELS, D, Residual, Universal

TOLERANCE = 1e-10


def rows() -> Tensor:
    return torch.randn(3, D, dtype=torch.float64)


def make(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A model of the catalogue, and the arguments of a microbatch."""
    program = MODELS[name]()
    args, kwargs = calls_of(program)[0]
    return program.model, tuple(args), dict(kwargs)


def cut(model: nn.Module, stages: Any, *args: Any) -> Partition:
    """Cut a model as the first batch does: by how the arguments look."""
    call = map_tensors((args, {}), lambda tensor: tensor.to("meta"))
    return partition(model, stages, example=call)


def right(case: Case, stages: Any = 3, **options: Any) -> None:
    """Compare with the plain model; the catalogue's matrix cuts each program into four."""
    options = {"schedule": "ZB-H1", "microbatches": 4, **options}
    compare(case, stages=stages, **options).check(TOLERANCE)


RECOMPUTED = (
    "a chain that begins in place",
    "a state handed from one lstm to the next",
    "noise that is taken off at the end",
    "one block with dropout again and again",
    "sums and parameters between modules",
)


@pytest.mark.parametrize("name", RECOMPUTED)
def test_units_that_are_recomputed(name: str) -> None:
    right(MODELS[name](), recompute=True)


def test_recomputed_units_by_path() -> None:
    case = MODELS["sums and parameters between modules"]()
    right(case, 2, recompute=["layers", "norm"])
    with pytest.raises(PartitionError, match="recompute='layer': must name a module that is pla"):
        right(case, 2, recompute=["layer"])


def test_what_is_recomputed_is_not_held() -> None:
    held: list[int] = []
    for recompute in (False, True):
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 8)) for _ in range(4))
        )
        loss_fn, saved = nn.functional.mse_loss, list[int]()
        pipe = Pipeline(model, ranks=2, microbatches=1, recompute=recompute, loss_fn=loss_fn)

        def pack(tensor: Tensor, saved: list[int] = saved) -> Tensor:
            saved.append(tensor.nbytes)
            return tensor

        pipe.step(torch.randn(64, 8), target=torch.randn(64, 8))  # which cuts the model
        # What is computed again is saved in a backward; what a forward saves comes first.
        pipe.on("*B*", before=lambda _, s=saved: held.append(sum(s)))  # type: ignore[misc]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            pipe.step(torch.randn(64, 8), target=torch.randn(64, 8))
    assert held[2] < held[0] / 10


POINTS = {
    "sums and parameters between modules": ["layers.1.1", "layers.2", "norm"],
    "U-Net": ["down2", "middle", "up1"],
    "two towers with a scale": ["words.2", "picture"],
    "modules that look at numbers": ["blocks.3"],
    "a chain that begins in place": ["3", "5"],
}


@pytest.mark.parametrize("name", sorted(POINTS))
def test_by_points(name: str) -> None:
    right(MODELS[name](), POINTS[name])


TRAVELS: dict[str, tuple[list[str], list[tuple[int, tuple[int, ...], bool]]]] = {
    # A sum travels, not its summands; and the embedding's weight, which the end uses.
    "sums and parameters between modules": (["layers.2"], [(0, (1,), True)] * 2),
    # Skips go to all who use them. What is between units is in the latest stage among its arguments'.
    "U-Net": (
        ["down2", "middle", "up2", "up1"],
        [
            (0, (1,), True),
            (0, (3,), True),
            *[(1, (2,), True)] * 2,
            (2, (3,), True),
            (3, (4,), True),
        ],
    ),
    # Gradients come back only where they can.
    "a tensor detached between modules": (
        ["blocks.1", "blocks.3"],
        [(0, (1,), False), (0, (2,), False), (1, (2,), True)],
    ),
}
"""Where a model is cut, and the source, targets and gradient of what travels."""


@pytest.mark.parametrize("name", TRAVELS)
def test_what_travels(name: str) -> None:
    model, args, _ = make(name)
    points, expected = TRAVELS[name]
    edges = cut(model, points, *args).plan(args, {}).edges
    assert sorted((e.source, e.targets, e.gradient) for e in edges) == expected
    with torch.no_grad():
        assert not any(edge.gradient for edge in cut(model, points, *args).plan(args, {}).edges)


# ---- loops


def test_a_loop_over_stages_shares_the_module() -> None:
    name, stages = "one block again and again", [["start", "block"], ["block"], ["block", "head"]]
    right(MODELS[name](), stages)
    model, args, _ = make(name)
    parts = cut(model, stages, *args)
    parts.plan(args, {})
    assert {one.stages for one in parts.shared} == {(0, 1, 2)}
    assert len(parts.shared) == len(list(model.get_submodule("block").parameters()))
    # Each has two of the six calls.
    assert min(parts.shares) > 0.3


def test_a_loop_that_cannot_be_cut() -> None:
    class Interleaved(Universal):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.start(self.block(x))
            return self.head(x)  # type: ignore[no-any-return]

    with pytest.raises(
        PartitionError, match=r"block in stage 0 uses start of stage 1.*in both lists"
    ):
        partition(Interleaved().double(), [["block"], ["start", "head"]]).plan((rows(),), {})


# ---- where units are


def backwards() -> nn.Module:
    """Holds its modules in another order than it calls them."""

    def run(m: Any, x: Tensor) -> Any:
        for layer in m.layers:
            x = torch.tanh(layer(x))
        return m.head(x)

    return Does(run, head=nn.Linear(D, 2), layers=[nn.Linear(D, D) for _ in range(3)]).double()


def test_a_call_shows_the_order_of_the_modules() -> None:
    with pytest.raises(PartitionError, match=r"a call shows: give example=\(args, kwargs\)"):
        partition(backwards(), 2)
    order = ["layers.0", "layers.1", "layers.2", "head"]
    assert unit_calls(backwards(), 2, ((rows(),), {})) == order


def test_a_chain_in_the_way_of_even_stages_is_taken_apart() -> None:
    body = nn.Sequential(*(nn.Linear(D, D) for _ in range(4)))
    ends = {"first": nn.Linear(D, D), "last": nn.Linear(D, D)}
    model = Does(lambda m, x: m.last(m.body(m.first(x))), body=body, **ends).double()
    paths = unit_calls(model, 2, ((rows(),), {}))
    assert paths == ["first", "body.0", "body.1", "body.2", "body.3", "last"]


def attends(m: Any, x: Tensor) -> Tensor:
    """Attention over rows, which is far more work than its product."""
    x = m.layer(x)[None, None]
    return nn.functional.scaled_dot_product_attention(x, x, x)[0, 0]


def test_attention_counts_as_work() -> None:
    attention = Does(attends, layer=nn.Linear(D, D))
    model = nn.Sequential(nn.Linear(D, D), attention, nn.Linear(D, D)).double()
    x = torch.randn(256, D).double()
    parts = cut(model, [["0"], ["1"], ["2"]], x)
    parts.plan((x,), {})
    unit, share = parts.heaviest
    assert unit == "1"
    assert share > 0.8


def test_a_model_without_data_is_cut() -> None:
    with torch.device("meta"):
        model = Residual()
    parts = cut(model, 3, torch.zeros(3, 6, dtype=torch.long))
    assert parts.plan((torch.zeros(3, 6, dtype=torch.long),), {}).edges
    assert parts.plan((torch.zeros(3, 6, dtype=torch.long, device="meta"),), {}).edges
    assert all(parameter.is_meta for stage in parts.modules for parameter in stage.parameters())


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        (["layers.9"], "no module 'layers.9' in the model; did you mean layers"),
        (40, "modules that can be placed, too few for 40 stages"),
        (["layers.1", "layers.1"], "leave a stage without modules; the model's order is embed, "),
        ([["embed"], ["layers", "norm"], []], r"stages \[2\] have no modules"),
        ([["embed"], ["norm"]], "in no stage: layers"),
        ([["embed", "layers"], ["layers.1", "norm"]], "also a module that contains them: layers.1"),
        ([["norm", "layers"], ["embed"]], "values go to later stages only"),
    ],
)
def test_refused_stages(stages: Any, text: str) -> None:
    model, args, _ = make("sums and parameters between modules")
    with pytest.raises(PartitionError, match=text):
        cut(model, stages, *args)


def compile_in_place(model: nn.Module) -> nn.Module:
    model.compile()
    return model


def compile_forward(model: nn.Module) -> nn.Module:
    model.forward = torch.compile(model.forward)
    return model


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("compiled", [torch.compile, compile_in_place, compile_forward])
def test_a_model_that_was_compiled_as_a_whole(compiled: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(
        PartitionError, match=r"the Universal was compiled as a whole.*block\.compile"
    ):
        partition(compiled(Universal()), 2)


# ---- nn.Sequential, and modules without a forward


def children(parts: Partition) -> list[list[str]]:
    return [[name for name, _ in stage.named_children()] for stage in parts.modules]


LOPSIDED = nn.Sequential(nn.Linear(4, 99), nn.Linear(99, 4), *(nn.Linear(4, 4) for _ in range(4)))
EXAMPLE: tuple[Any, dict[str, Any]] = ((torch.ones(2, 4),), {})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [["0", "1", "2"], ["3", "4", "5"]]),
        ({"stages": 4}, [["0", "1"], ["2", "3"], ["4"], ["5"]]),
        ({"stages": 1}, [["0", "1", "2", "3", "4", "5"]]),
        ({"balance": "parameters"}, [["0"], ["1", "2", "3", "4", "5"]]),
        ({"balance": "flops", "example": EXAMPLE}, [["0"], ["1", "2", "3", "4", "5"]]),
        ({"balance": [1, 1, 1, 1, 1, 9]}, [["0", "1", "2", "3", "4"], ["5"]]),
        ({"stages": 3, "placement": Placement((0, 1, 0))}, [["0"], ["1", "2", "3"], ["4", "5"]]),
    ],
)
def test_a_sequential_is_balanced_as_asked(
    options: dict[str, Any], expected: list[list[str]]
) -> None:
    assert children(partition(LOPSIDED, **({"stages": 2} | options))) == expected


@pytest.mark.parametrize(
    ("stages", "options", "says"),
    [
        (2, {"balance": [1.0]}, "balance= has 1 weights for 6 modules"),
        (2, {"balance": "flop"}, "balance='flop': must be flops, parameters"),
        (2, {"balance": "time"}, "balance='time'.*cut by times"),
        (2, {"balance": "flops"}, r"give example=\(args, kwargs\)"),
        (1, {"placement": Placement((0, 1))}, "the placement is for 2 stages, not 1"),
        (
            ["2"],
            {"balance": "parameters"},
            "the number of stages is given; stages= names the modules",
        ),
        (7, {}, "6 modules that can be placed, too few for 7 stages; use from 1 to 6"),
    ],
)
def test_what_a_sequential_cannot_be_balanced_by(stages: Any, options: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        partition(LOPSIDED, stages, **options)


@pytest.mark.parametrize("model", [nn.Sequential(), nn.ReLU()])
def test_what_cannot_be_cut_can_be_one_stage(model: nn.Module) -> None:
    with pytest.raises(PartitionError, match=r"0 modules .*2 stages; it can be one stage: ranks=1"):
        partition(model, 2)


class Both(nn.Module):
    """Takes two arguments, and gives two."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + y, x - y


def test_modules_without_a_forward_are_called_one_after_the_other() -> None:
    model = nn.ModuleDict({"a": Both(), "b": Both(), "c": nn.Bilinear(4, 4, 2)}).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    pipe = Pipeline(model, stages=[["a"], ["b", "c"]], microbatches=1, loss_fn=torch.dist)
    assert torch.equal(pipe.predict(x, y=x), model["c"](2 * x, 2 * x))
    with pytest.raises(
        PartitionError, match="a ModuleDict has no forward; name the modules of each stage"
    ):
        partition(model, 2)


@pytest.mark.parametrize("stages", [[["stem", "dense"], ["head"]], ["head"]])
def test_a_dict_of_modules_with_a_forward_of_its_own_is_a_part(stages: Any) -> None:
    right(MODELS["a dictionary of modules with a forward"](), stages)


# ---- what is left alone


def test_a_plan_leaves_no_trace() -> None:
    model, args, kwargs = make("U-Net")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, kinds = torch.get_rng_state(), [dict(vars(module)) for module in model.modules()]
    cut(model, 3, *args).plan(args, kwargs)
    assert torch.equal(torch.get_rng_state(), state)
    assert [dict(vars(module)) for module in model.modules()] == kinds
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def scaled() -> Any:
    """Has a parameter and buffers beside its units."""
    model = Does(
        lambda m, x: m.second(m.first(x) * m.weight + m.shift + m.lost),
        first=nn.Linear(D, D), second=nn.Linear(D, D), weight=nn.Parameter(torch.ones(D)),
        shift=torch.zeros(D),
    )  # fmt: skip
    model.register_buffer("lost", torch.zeros(D), persistent=False)
    return model


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("weight", lambda m: setattr(m, "weight", nn.Parameter(torch.zeros(D)))),
        ("shift", lambda m: m.register_buffer("shift", torch.ones(D))),
        ("lost", lambda m: setattr(m, "lost", torch.ones(D))),
        ("weight", lambda m: m.load_state_dict(m.state_dict(), assign=True)),
        ("shift", lambda m: m.double()),
        ("first", lambda m: setattr(m, "first", nn.Linear(D, D))),
    ],
)
def test_what_was_replaced_after_the_cut_is_named(name: str, change: Callable[[Any], Any]) -> None:
    model, x = scaled(), torch.ones(2, D)
    pipe = Pipeline(model, stages=2, ranks=2, microbatches=1, loss_fn=torch.dist)
    before = pipe.predict(x)
    model.get_buffer("lost").fill_(2)
    model.get_parameter("first.bias").requires_grad_(False)
    assert torch.equal(pipe.predict(x), model(x))
    assert not torch.equal(before, model(x))
    change(model)
    with pytest.raises(UsageError, match=rf"'{name}' was replaced.*in place.*new Pipeline"):
        pipe.predict(x)


class Batch(UserDict[str, Tensor]):
    """Such as a tokenizer gives."""


def test_a_mapping_as_an_argument() -> None:
    def run(m: Any, batch: Batch) -> Any:
        hidden = m.first(batch["x"]) * batch.data["mask"]
        return m.second(hidden) * batch["mask"]

    model = Does(run, first=nn.Linear(D, D), second=nn.Linear(D, D)).double()
    case = Case(model, (Batch(x=rows(), mask=rows().relu()),), None, loss_of)
    right(case, 2, microbatches=1, schedule="1F1B")
