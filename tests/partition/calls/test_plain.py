"""Plain PyTorch models, cut by count and by path: the same numbers as the unsplit model."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import penstock
from penstock.errors import PartitionError, StageError, UsageError
from penstock.partition import Partition, partition
from tests.partition.calls import models
from tests.partition.calls.driving import check_equal, describe, run
from tests.partition.calls.models import WIDTH

torch.set_num_threads(1)


class Made(NamedTuple):
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def image(size: int = 8) -> torch.Tensor:
    return torch.randn(2, 3, size, size, dtype=torch.float64)


def rows() -> torch.Tensor:
    return torch.randn(3, WIDTH, dtype=torch.float64)


CASES: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]] = {
    "residual": lambda: (models.Residual(), (torch.randint(0, 10, (3, 5)),), {}),
    "unet": lambda: (models.UNet(), (image(),), {}),
    "resnet": lambda: (models.ResNet(), (image(),), {}),
    "lstm": lambda: (models.LanguageModel(), (torch.randint(0, 12, (2, 4)),), {}),
    "records": lambda: (models.TakesRecords(), (models.Sample(rows(), rows().relu()),), {}),
    "deciding": lambda: (models.Deciding(), (rows(),), {}),
    "towers": lambda: (models.TwoTowers(), (rows(),), {"right": rows()}),
    "shared": lambda: (models.SharedInside(), (rows(),), {}),
    "fills": lambda: (models.Fills(), (rows(),), {}),
}


def compile_in_place(model: nn.Module) -> nn.Module:
    model.compile()
    return model


def made(name: str) -> Made:
    torch.manual_seed(0)
    model, args, kwargs = CASES[name]()
    return Made(model.double(), args, kwargs)


def by_count(count: int) -> Callable[[nn.Module], Partition]:
    return lambda model: partition(model, count, how="calls")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", sorted(CASES))
def test_by_count(name: str, stages: int, training: bool) -> None:
    model, args, kwargs = made(name)
    check_equal(model.train(training), by_count(stages), args, kwargs)


POINTS = {
    "residual": ["layers.1.1", "layers.2", "norm"],
    "unet": ["down2", "middle", "up1"],
    "resnet": ["layer1.1", "layer2", "fc"],
    "towers": ["left.2", "right"],
    "deciding": ["blocks.3"],
}


@pytest.mark.parametrize("name", sorted(POINTS))
def test_by_points(name: str) -> None:
    model, args, kwargs = made(name)
    found = check_equal(model, lambda m: partition(m, POINTS[name]), args, kwargs)
    assert len(found.modules) == len(POINTS[name]) + 1
    assert (found.how, found.reason) == ("calls", "it has a forward of its own")


def test_a_sum_travels_not_its_summands() -> None:
    model, args, _ = made("residual")
    found = describe(partition(model, ["layers.2"]), args, {})
    # The model ends with the embedding's weight.
    assert [(e.value, e.source, e.targets) for e in found.edges] == [
        ("add after layers.1.1", 0, (1,)),
        ("embed.weight", 0, (1,)),
    ]


def test_skips_go_to_all_who_use_them() -> None:
    model, args, _ = made("unet")
    found = describe(partition(model, ["down2", "middle", "up2", "up1"]), args, {})
    assert {(e.value, e.source, e.targets) for e in found.edges} == {
        ("down1", 0, (4,)),
        ("max_pool2d after down1", 0, (1,)),
        ("down2", 1, (3,)),
        ("max_pool2d after down2", 1, (2,)),
        ("middle", 2, (3,)),
        ("up2", 3, (4,)),
    }


def test_a_loop_over_stages_shares_the_module() -> None:
    torch.manual_seed(0)
    lists = [["enter", "block"], ["block"], ["block", "leave"]]
    cut = check_equal(models.Loop().double(), lambda m: partition(m, lists), (rows(),))
    assert [one.stages for one in cut.shared] == [(0, 1, 2), (0, 1, 2)]


def test_random_numbers_are_drawn_once() -> None:
    torch.manual_seed(0)
    model, x = models.Noisy().double(), rows()
    torch.manual_seed(1)
    expected = copy.deepcopy(model)(x)
    cut = partition(model, 3)
    describe(cut, (x,), {})
    torch.manual_seed(1)
    assert torch.equal(run(cut, (x,)), expected)


def test_describing_leaves_no_trace() -> None:
    model, args, kwargs = made("resnet")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    kinds = [type(module) for module in model.modules()]
    cut = partition(model, 3)
    describe(cut, args, kwargs)
    assert torch.equal(torch.get_rng_state(), state)
    assert [type(module) for module in model.modules()] == kinds
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_running_leaves_the_model_as_it_was() -> None:
    model, args, kwargs = made("unet")
    whole = copy.deepcopy(model).eval()
    cut = partition(model.eval(), 3)
    run(cut, args, kwargs)
    assert torch.equal(model(*args), whole(*args))
    assert not any("training" in vars(module) for module in cut.modules)


def test_stages_share_the_modes_of_the_model() -> None:
    model, *_ = made("unet")
    cut = partition(model, 2)
    for stage in cut.modules:
        stage.eval()
    assert not any(module.training for module in model.modules())


def test_an_analysis_is_made_once_for_each_kind_of_call() -> None:
    model, args, _ = made("residual")
    cut = partition(model, 2)
    first = describe(cut, args, {})
    assert describe(cut, args, {}) is first
    other = describe(cut, (args[0][:2],), {})
    assert other is not first
    assert other.edges == first.edges


@pytest.mark.parametrize(
    ("stages", "text"),
    [
        (["layers.9"], "no module 'layers.9' in the model; did you mean layers"),
        (40, "modules that can be placed, too few for 40 stages"),
        (["layers.2", "layers.1"], "leave a stage without modules; the model's order is embed, "),
        ([["embed"], ["layers", "norm"], []], r"stages \[2\] have no modules"),
        ([["embed"], ["norm"]], "in no stage: layers"),
        ([["embed", "layers"], ["layers.1", "norm"]], "also a module that contains them: layers.1"),
        ([["norm", "layers"], ["embed"]], "values travel to later stages only"),
    ],
)
def test_refusals(stages: Any, text: str) -> None:
    model, args, _ = made("residual")
    with pytest.raises(PartitionError, match=text):
        run(partition(model, stages), args)


def test_a_loop_that_cannot_be_cut() -> None:
    class Interleaved(models.Loop):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = self.leave(self.block(x))
            return self.enter(x)  # type: ignore[no-any-return]

    cut = partition(Interleaved().double(), [["block"], ["leave", "enter"]])
    with pytest.raises(
        PartitionError, match=r"block is called 3 times, .* a loop .* cannot be cut"
    ):
        run(cut, (rows(),))


class Rounds(models.Loop):
    """Calls its modules in turn, again and again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(self.leave(self.block(self.enter(x)))) + x
        return x


@pytest.mark.parametrize("stages", [2, 5])
def test_a_loop_is_cut_by_count_between_its_calls(stages: int) -> None:
    torch.manual_seed(0)
    model, x = Rounds().double(), rows()
    cut = check_equal(model, lambda m: partition(m, stages, example=((x,), {})), (x,))
    assert len(cut.modules) == stages
    target = torch.zeros_like(x)
    pipe = penstock.Pipeline(
        Rounds().double(), stages=stages, example=((x,), {}), loss_fn=nn.functional.mse_loss
    )
    with pipe:
        assert pipe.step(x, target=target).finite
    with pytest.raises(
        UsageError, match="example= is used to cut a model, but stages= is a Partition"
    ):
        penstock.Pipeline(model, stages=cut, example=((x,), {}))


def test_a_loop_stays_in_one_stage_where_it_can() -> None:
    model = models.Loop()
    cut = partition(model, 2, example=((torch.randn(3, WIDTH),), {}))
    assert cut.shared == ()
    with (
        pytest.raises(StageError, match="Give example="),
        penstock.Pipeline(Rounds(), stages=2, loss_fn=nn.functional.mse_loss) as pipe,
    ):
        pipe.step(torch.randn(4, WIDTH), target=torch.randn(4, WIDTH))


class Scaled(nn.Module):
    """Uses its own parameters as it says; the text tells that of some only."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scale, self.shift = (nn.Parameter(torch.rand(WIDTH)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.scale
        return x + self.shift


class Hidden(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = self.blocks
        x = first(x)
        for block in others:
            x = torch.tanh(block(x)) * self.scale
        return x + self.shift


@pytest.mark.parametrize("kind", [Scaled, Hidden])
def test_where_a_parameter_is_used_first(kind: type[Scaled]) -> None:
    torch.manual_seed(0)
    model, x = kind().double(), rows()
    example: Any = ((x,), {}) if kind is Hidden else None
    cut = check_equal(
        model, lambda m: partition(m, ["blocks.1", "blocks.3"], example=example), (x,)
    )
    held = [{n for n, _ in module.named_parameters() if "." not in n} for module in cut.modules]
    assert held == [set(), {"scale"}, {"shift"}] if example else [{"scale"}, set(), {"shift"}]


class Spare(Scaled):
    """Has parameters that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        for name in "abcdefgh":
            setattr(self, name, nn.Parameter(torch.rand(1)))


def test_parameters_without_a_use_are_where_what_stands_before_them_is() -> None:
    # In every process alike, however it orders the names in a set.
    cut = partition(Spare(), ["blocks.1", "blocks.3"], how="calls")
    assert [n for n, _ in cut.modules[2].named_parameters()][:9] == ["shift", *"abcdefgh"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("compiled", [torch.compile, compile_in_place])
def test_a_model_that_was_compiled_as_a_whole(
    compiled: Callable[[nn.Module], nn.Module],
) -> None:
    with pytest.raises(PartitionError, match=r"the Loop was compiled as a whole.*block\.compile"):
        partition(compiled(models.Loop()), 2)


class Batch(UserDict[str, torch.Tensor]):
    """Such as a tokenizer gives."""


def test_a_mapping_as_an_argument() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, batch: Batch) -> torch.Tensor:
            hidden = self.first(batch["x"]) * batch.data["mask"]
            return self.second(hidden) * batch["mask"]  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, batch = Model().double(), Batch(x=rows(), mask=rows().relu())
    check_equal(model, by_count(2), (batch,))
    pipe = penstock.Pipeline(model, stages=2, microbatches=2, loss_fn=nn.functional.mse_loss)
    with pipe:
        torch.testing.assert_close(pipe.predict(batch), model(batch))


def test_a_decision_between_modules_is_refused() -> None:
    class Between(models.Deciding):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[1](self.blocks[0](x))
            if x.sum() > 0:
                x = self.blocks[2](x)
            return self.blocks[3](x)  # type: ignore[no-any-return]

    cut = partition(Between().double(), 2)
    with pytest.raises(PartitionError, match=r"after blocks.1 depends on .*__bool__"):
        run(cut, (rows(),))


def test_a_transform_between_modules_is_refused() -> None:
    class Mapped(models.Deciding):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[1](torch.vmap(torch.sin)(self.blocks[0](x)))  # type: ignore[no-any-return]

    cut = partition(Mapped().double(), [["blocks.0"], ["blocks.1", "blocks.2", "blocks.3"]])
    with pytest.raises(PartitionError, match=r"calls sin under a transform of torch.func"):
        run(cut, (rows(),))


class Casts(nn.Module):
    """Does not run without data: it asks for a number, and for the bytes of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.lin.weight.data_ptr() != 0
        return torch.tanh(self.lin(x))


def test_a_unit_that_needs_data_is_analysed_with_some() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Casts(), Casts()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    check_equal(Model().double(), by_count(2), (rows(),))
