"""Plain PyTorch models, cut by count, by path and by lists: the same numbers as the unsplit model."""

from __future__ import annotations

import copy
import json
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.errors import PartitionError, UsageError
from penstock.partition import Partition, partition, unit_paths
from penstock.schedule import Placement
from penstock.stage import StageCall, StageModule
from tests.partition import zoo
from tests.partition.driver import check_equal, cut, forwards
from tests.partition.zoo import WIDTH

torch.set_num_threads(1)


def image(size: int = 8) -> Tensor:
    return torch.randn(2, 3, size, size, dtype=torch.float64)


def rows() -> Tensor:
    return torch.randn(3, WIDTH, dtype=torch.float64)


def begins_in_place() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)]
    return nn.Sequential(*layers)


def shared_in_a_row() -> nn.Module:
    act = nn.Tanh()
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), act, nn.Linear(WIDTH, WIDTH), act, nn.Linear(WIDTH, 2)
    )


def padded() -> Tensor:
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 3:] = True
    return mask


class Loose(nn.Module):
    """Uses parameters of its own between its units, and again later."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.pair = nn.ParameterDict({"a": torch.rand(WIDTH), "b": torch.rand(WIDTH)})
        self.row = nn.ParameterList([torch.rand(WIDTH)])
        self.register_buffer("shift", torch.rand(WIDTH))
        self.shift: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x) * self.pair["a"] + self.shift
        x = torch.tanh(self.layers[1](x)) * self.pair["b"]
        x = self.layers[3](torch.tanh(self.layers[2](x)) * self.row[0])
        found: Tensor = x * self.pair["a"] @ self.layers[0].weight
        return found


class Directly(zoo.Deciding):
    """Calls the forward of some modules itself, of those that draw too."""

    def __init__(self) -> None:
        super().__init__()
        self.dropped = nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.dropped.forward(self.blocks[0].forward(x)))
        return self.blocks[3](self.blocks[2].forward(x))  # type: ignore[no-any-return]


class Sharing(nn.Module):
    """Its layers share what they make in a dictionary of another class, as some decoders share their keys."""

    class Layer(nn.Linear):
        def forward(self, x: Tensor, shared: Any = None, mask: Any = None) -> Tensor:
            x = super().forward(x) * mask + shared.get("made", 0)
            shared["made"] = x
            return torch.tanh(x)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shared, mask = UserDict[str, Tensor](), (x > 0).to(x.dtype)
        for layer in self.layers:
            x = layer(x, shared, mask=mask)
        return x * shared["made"]


Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
CASES: dict[str, Callable[[], Call]] = {
    "residual": lambda: (zoo.Residual(), (torch.randint(0, 10, (3, 5)),), {}),
    "unet": lambda: (zoo.UNet(), (image(),), {}),
    "lstm": lambda: (zoo.LanguageModel(), (torch.randint(0, 12, (2, 4)),), {}),
    "records": lambda: (zoo.TakesRecords(), (zoo.Sample(rows(), rows().relu()),), {}),
    "deciding": lambda: (zoo.Deciding(), (rows(),), {}),
    "towers": lambda: (zoo.TwoTowers(), (rows(),), {"right": rows()}),
    "shared": lambda: (zoo.SharedInside(), (rows(),), {}),
    "loop": lambda: (zoo.Loop(), (rows(),), {}),
    "fills": lambda: (zoo.Fills(), (rows(),), {}),
    "noisy": lambda: (zoo.Noisy(), (rows(),), {}),
    "begins in place": lambda: (begins_in_place(), (rows(),), {}),
    "shared in a row": lambda: (shared_in_a_row(), (rows(),), {}),
    "encoder": lambda: (zoo.Encoder(), (torch.randn(2, 5, 4).double(), padded()), {}),
    "loose": lambda: (Loose(), (rows(),), {}),
    "detaches": lambda: (Detaches(), (rows(),), {}),
    "directly": lambda: (Directly(), (rows(),), {}),
}


def make(name: str) -> Call:
    torch.manual_seed(0)
    model, args, kwargs = CASES[name]()
    return model.double(), args, kwargs


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("name", sorted(CASES))
def test_by_count(name: str, stages: int, training: bool) -> None:
    model, args, kwargs = make(name)
    check_equal(model.train(training), stages, args, kwargs, draws=True, repeat=2)


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("name", ["residual", "begins in place", "lstm", "loop", "noisy"])
def test_units_that_are_recomputed(name: str, stages: int) -> None:
    model, args, kwargs = make(name)
    check_equal(model, stages, args, kwargs, draws=True, repeat=2, checkpoint=True)


def test_what_layers_share_in_a_dictionary_of_another_class() -> None:
    torch.manual_seed(0)
    check_equal(Sharing().double(), 3, (rows(),))


class Relative(nn.Module):
    """Gives a module the weight of another, which is constructed last and never called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.table = nn.LayerNorm(WIDTH), nn.Embedding(5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        table = self.norm(self.table.weight)
        for layer in self.layers:
            x = torch.tanh(layer(x)) + table.mean(0)
        return x


def test_a_weight_that_a_unit_is_given_places_its_module() -> None:
    torch.manual_seed(0)
    check_equal(Relative().double(), 3, (rows(),))


def test_recomputed_units_by_path() -> None:
    model, args, kwargs = make("residual")
    check_equal(model, 2, args, kwargs, draws=True, checkpoint=["layers", "norm"])
    with pytest.raises(
        PartitionError, match="checkpoint='layer': must name a module that is placed"
    ):
        cut(model, 2, args, kwargs, checkpoint=["layer"])


def test_what_is_recomputed_is_not_held() -> None:
    held: list[int] = []
    for checkpoint in (False, True):
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 8)) for _ in range(4))
        )
        parts, x = partition(model, 2, checkpoint=checkpoint), torch.randn(64, 8)
        plan = parts.plan((x,), {})
        saved: list[int] = []

        def pack(tensor: Tensor, saved: list[int] = saved) -> Tensor:
            saved.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            forwards(parts, (x,), plan=plan)
        held.append(sum(saved))
    assert held[1] < held[0] / 10


POINTS = {
    "residual": ["layers.1.1", "layers.2", "norm"],
    "unet": ["down2", "middle", "up1"],
    "towers": ["left.2", "right"],
    "deciding": ["blocks.3"],
    "begins in place": ["3", "5"],
}


@pytest.mark.parametrize("name", sorted(POINTS))
def test_by_points(name: str) -> None:
    model, args, kwargs = make(name)
    parts = check_equal(model, POINTS[name], args, kwargs, draws=True)
    assert len(parts.modules) == len(POINTS[name]) + 1


class Detaches(zoo.Deciding):
    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        mask = x > 0
        return self.blocks[3](self.blocks[2](self.blocks[1](x.detach()))) * mask  # type: ignore[no-any-return]


EDGES = {
    # A sum travels, not its summands; this model ends with the embedding's weight, and uses its scale late.
    "residual": (
        ["layers.2"],
        {
            ("add after layers.1.1", 0, (1,), True),
            ("embed.weight", 0, (1,), True),
        },
    ),
    # Skips go to all who use them. What is between units is in the latest stage among its arguments'.
    "unet": (
        ["down2", "middle", "up2", "up1"],
        {
            ("down1", 0, (3,), True),
            ("max_pool2d after down1", 0, (1,), True),
            ("down2", 1, (2,), True),
            ("max_pool2d after down2", 1, (2,), True),
            ("cat after middle", 2, (3,), True),
            ("cat after up2", 3, (4,), True),
        },
    ),
    # Gradients come back only where they can.
    "detaches": (
        ["blocks.1", "blocks.3"],
        {
            ("detach after blocks.0", 0, (1,), False),
            ("gt after blocks.0", 0, (2,), False),
            ("blocks.2", 1, (2,), True),
        },
    ),
}


@pytest.mark.parametrize("name", EDGES)
def test_what_travels(name: str) -> None:
    model, args, _ = make(name)
    points, expected = EDGES[name]
    edges = cut(model, points, args).plan(args, {}).edges
    assert {(e.value, e.source, e.targets, e.gradient) for e in edges} == expected


# ---- loops


LISTS = [["enter", "block"], ["block"], ["block", "leave"]]


def test_a_loop_over_stages_shares_the_module() -> None:
    parts = check_equal(zoo.Loop().double(), LISTS, (rows(),))
    assert [one.stages for one in parts.shared] == [(0, 1, 2), (0, 1, 2)]


@pytest.mark.parametrize("stages", [2, 5])
def test_a_loop_is_cut_by_count_between_its_calls(stages: int) -> None:
    torch.manual_seed(0)
    parts = check_equal(zoo.Loop().double(), stages, (rows(),))
    assert len(parts.modules) == stages


def test_a_loop_that_cannot_be_cut() -> None:
    class Interleaved(zoo.Loop):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = self.leave(self.block(x))
            return self.enter(x)  # type: ignore[no-any-return]

    with pytest.raises(
        PartitionError, match=r"block in stage 0 uses leave of stage 1.*in both lists"
    ):
        partition(Interleaved().double(), [["block"], ["leave", "enter"]]).plan((rows(),), {})


# ---- where units are


class Backwards(nn.Module):
    """Holds its modules in another order than it calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 2)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)  # type: ignore[no-any-return]


def test_a_call_shows_the_order_of_the_modules() -> None:
    with pytest.raises(PartitionError, match=r"a call shows: give example=\(args, kwargs\)"):
        partition(Backwards().double(), 2)
    check_equal(Backwards().double(), 2, (rows(),))
    order = ["layers.0", "layers.1", "layers.2", "head"]
    assert unit_paths(Backwards().double(), 2, ((rows(),), {})) == order


def test_a_model_without_data_is_cut() -> None:
    with torch.device("meta"):
        model = zoo.Residual()
    parts = cut(model, 3, (torch.zeros(3, 5, dtype=torch.long),))
    assert parts.plan((torch.zeros(3, 5, dtype=torch.long),), {}).edges
    assert parts.plan((torch.zeros(3, 5, dtype=torch.long, device="meta"),), {}).edges
    assert all(parameter.is_meta for stage in parts.modules for parameter in stage.parameters())


def test_a_process_lets_go_of_other_stages() -> None:
    model, args, _ = make("residual")
    expected = copy.deepcopy(model)(*args)
    parts = cut(model, 2, args)
    values = forwards(parts, args)
    parts.keep([1], [0, 1], torch.device("cpu"))
    kept = {
        name for name, parameter in parts.modules[1].named_parameters() if not parameter.is_meta
    }
    assert kept == {name for name, parameter in model.named_parameters() if not parameter.is_meta}
    assert kept
    assert len(kept) < len(list(model.parameters()))
    plan = parts.plan((args[0].to("meta"),), {})
    assert plan.edges == values.plan.edges
    output, sent = parts.modules[1](StageCall(plan, 0), values.sent[0], args[0].to("meta"))
    assert not sent
    assert torch.equal(output, expected)


def test_arguments_that_are_missing_are_named() -> None:
    class UsesAgain(zoo.Deciding):
        def forward(self, x: Tensor) -> Tensor:
            h = x
            for block in self.blocks:
                h = block(h) * x
            return h

    parts = cut(UsesAgain().double(), 2, (rows(),))
    done = forwards(parts, (rows(),))
    with pytest.raises(Exception, match=r"mul in stage 1 needs an argument .* was not given"):
        parts.modules[1](StageCall(done.plan, 0), done.sent[0], rows().to("meta"))


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
    model, args, _ = make("residual")
    with pytest.raises(PartitionError, match=text):
        cut(model, stages, args)


def compile_in_place(model: nn.Module) -> nn.Module:
    model.compile()
    return model


def compile_forward(model: nn.Module) -> nn.Module:
    model.forward = torch.compile(model.forward)
    return model


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("compiled", [torch.compile, compile_in_place, compile_forward])
def test_a_model_that_was_compiled_as_a_whole(compiled: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(PartitionError, match=r"the Loop was compiled as a whole.*block\.compile"):
        partition(compiled(zoo.Loop()), 2)


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
    done = forwards(partition(model, [["a"], ["b", "c"]]), (x,), {"y": x})
    assert torch.equal(done.output, model["c"](2 * x, 2 * x))
    with pytest.raises(
        PartitionError, match="a ModuleDict has no forward; name the modules of each stage"
    ):
        partition(model, 2)


class Features(nn.ModuleDict):
    """A dict of modules with a forward of its own, as backbones of vision models are."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, layer in self.items():
            x = torch.relu(layer(x)) + 1
            found[name] = x
        return {name: found[name] for name in ("a", "c")}


class OnFeatures(nn.Module):
    """Uses such a dict as a part."""

    def __init__(self) -> None:
        super().__init__()
        layers = {name: nn.Linear(WIDTH, WIDTH).double() for name in "abcd"}
        self.body, self.head = Features(layers), nn.Linear(WIDTH, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x)
        output: Tensor = self.head(features["a"] * features["c"])
        return output


@pytest.mark.parametrize("stages", [2, 3, [["body"], ["head"]], ["head"]])
def test_a_dict_of_modules_with_a_forward_of_its_own_runs_it(stages: Any) -> None:
    model, x = OnFeatures(), rows()
    check_equal(model, stages, (x,))
    inner = model.body
    done = forwards(cut(copy.deepcopy(inner), 2, (x,)), (x,))
    assert all(torch.equal(done.output[name], value) for name, value in inner(x).items())


# ---- what is left alone


def test_a_plan_leaves_no_trace() -> None:
    model, args, kwargs = make("unet")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, kinds = torch.get_rng_state(), [dict(vars(module)) for module in model.modules()]
    cut(model, 3, args, kwargs).plan(args, kwargs)
    assert torch.equal(torch.get_rng_state(), state)
    assert [dict(vars(module)) for module in model.modules()] == kinds
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_equal_calls_get_equal_plans_and_what_a_plan_depends_on_is_described() -> None:
    model, args, _ = make("residual")
    parts = cut(model, 2, args)
    states = [stage.state() for stage in parts.modules if isinstance(stage, StageModule)]
    assert parts.plan(args, {}).edges == parts.plan((args[0][:2] + 1,), {}).edges
    assert [stage.state() for stage in parts.modules if isinstance(stage, StageModule)] == states
    assert json.loads(json.dumps(states)) == json.loads(json.dumps(states))
    for change in (
        model.eval,
        lambda: next(model.parameters()).requires_grad_(False),
        lambda: next(iter(model.children())).register_forward_hook(lambda *_: None),
        lambda: setattr(model, "setting", 1),
    ):
        change()
        now = [stage.state() for stage in parts.modules if isinstance(stage, StageModule)]
        assert now != states
        states = now


class Scaled(nn.Module):
    """Has a parameter and buffers beside its units."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("shift", torch.zeros(WIDTH))
        self.register_buffer("lost", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * self.weight + self.shift + self.lost
        return self.second(h)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("weight", lambda m: setattr(m, "weight", nn.Parameter(torch.zeros(WIDTH)))),
        ("shift", lambda m: m.register_buffer("shift", torch.ones(WIDTH))),
        ("lost", lambda m: setattr(m, "lost", torch.ones(WIDTH))),
        ("weight", lambda m: m.load_state_dict(m.state_dict(), assign=True)),
        ("shift", lambda m: m.double()),
        ("first", lambda m: setattr(m, "first", nn.Linear(WIDTH, WIDTH))),
    ],
)
def test_what_was_replaced_after_the_cut_is_named(name: str, change: Callable[[Any], Any]) -> None:
    model = Scaled()
    parts = cut(model, 2, (torch.ones(2, WIDTH),))
    done = forwards(parts, (torch.ones(2, WIDTH),))
    model.get_buffer("lost").fill_(2)
    model.get_parameter("first.bias").requires_grad_(False)
    assert torch.equal(forwards(parts, (torch.ones(2, WIDTH),)).output, model(torch.ones(2, WIDTH)))
    assert not torch.equal(done.output, model(torch.ones(2, WIDTH)))
    parts.check_unchanged()
    change(model)
    with pytest.raises(UsageError, match=rf"'{name}' was replaced.*in place.*new Pipeline"):
        parts.check_unchanged()


class Batch(UserDict[str, Tensor]):
    """Such as a tokenizer gives."""


def test_a_mapping_as_an_argument() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, batch: Batch) -> Tensor:
            hidden = self.first(batch["x"]) * batch.data["mask"]
            return self.second(hidden) * batch["mask"]  # type: ignore[no-any-return]

    torch.manual_seed(0)
    check_equal(Model().double(), 2, (Batch(x=rows(), mask=rows().relu()),))
