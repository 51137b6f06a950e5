"""pipeline() and what it gives: the model's numbers, names and training, stage by stage."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from penstock import Pipeline
from penstock.errors import PartitionError, UsageError
from penstock.pipelining import (
    Pipe,
    PipelineStage,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    SplitPoint,
    pipe_split,
    pipeline,
)
from penstock.pipelining.schedules import get_schedule_class
from penstock.testing import Case, judge
from tests.catalogue.making import calls_of, case_of, loss_of
from tests.catalogue.models import MODELS
from tests.integrations.trainers import make_model
from tests.pipelining.stages import CHUNKS, THEIRS, placed
from tests.processes import in_processes

X = torch.ones(2, 4)


class Marked(nn.Module):
    """Cut where its code says; one value skips a stage, and one is used by two."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        first = self.parts[0](x).tanh()
        pipe_split()
        second = self.parts[1](first).tanh() * gate
        pipe_split()
        third = self.parts[2](second).tanh()
        pipe_split()
        return self.parts[3](third) + first * x  # type: ignore[no-any-return]


class Named(nn.Module):
    """Arguments by place or name, and sizes that stages far from the arguments use."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor | None = None, *, scale: float = 2.0) -> Tensor:
        count, length, _ = x.shape
        hidden = self.parts[0](x).view(count, length, 2, 2)
        pipe_split()
        hidden = self.parts[1](hidden.reshape(count * length, 4)).tanh()
        pipe_split()
        hidden = self.parts[2](hidden).view(count, length, 4) * scale
        pipe_split()
        out: Tensor = self.parts[3](hidden)
        return out if y is None else out + y


class Chained(nn.Module):
    """Layers with the letters as names, and a function of them and the input."""

    def __init__(self, run: Callable[..., Any], names: str = "ab", width: int = 4) -> None:
        super().__init__()
        self.run = run
        for name in names:
            setattr(self, name, nn.Linear(width, width))

    def forward(self, x: Tensor, **more: Any) -> Any:
        return self.run(self, x, **more)


def in_place(m: Any, x: Tensor) -> Any:
    """Changes in place what it was passed: an argument, and a value that a later part uses again."""
    first = m.a(x * 1.5)
    x += 1.0
    second = m.b(first * 1.5)
    first.mul_(2.0)
    return m.d(m.c(second + first) + x)


def counts_and_uses(m: Any, x: Tensor) -> Any:
    """Counts its calls in a buffer, and uses the count in later parts."""
    m.count += 1.0
    first = m.a(x)
    return m.d(m.c(m.b(first) + m.count)) + m.count


def sets_and_uses(m: Any, x: Tensor) -> Any:
    """Sets a buffer to another value in the first part, and uses that in later ones."""
    m.count = m.count + x.detach().mean()
    return m.d(m.c(m.b(m.a(x)) + m.count)) + m.count


def counting(run: Callable[..., Any], names: str = "ab", width: int = 4) -> nn.Module:
    model = Chained(run, names, width)
    model.register_buffer("count", torch.zeros(()))
    return model


def before(*paths: str) -> dict[str, SplitPoint]:
    return dict.fromkeys(paths, SplitPoint.BEGINNING)


def after(*paths: str) -> dict[str, SplitPoint]:
    return dict.fromkeys(paths, SplitPoint.END)


def of(kind: Callable[[], nn.Module], *sizes: int, count: int = 1) -> Callable[[], Case]:
    """A case with as many random tensors as arguments."""

    def make() -> Case:
        torch.manual_seed(0)
        given = torch.randn(CHUNKS, count, 2, *sizes, dtype=torch.float64)
        return case_of(kind().double(), [(tuple(args), {}) for args in given])

    return make


EXAMPLES: dict[str, tuple[Callable[[], Case], dict[str, SplitPoint] | None]] = {
    "unet": (MODELS["U-Net"], before("down2", "middle") | after("up2")),
    "resnet": (
        MODELS["residual network"],
        after("layer1.0", "layer1.1") | before("layer2.1.norm"),
    ),
    "words": (MODELS["gpt"], before("layers.1", "layers.3", "norm")),
    "marked": (of(Marked, 6, count=2), None),
    "sizes": (of(Named, 3, 4), None),
    "in place": (of(lambda: Chained(in_place, "abcd", 6), 6), before("b", "c", "d")),
    "mean": (of(lambda: counting(sets_and_uses, "abcd", 6), 6), before("b", "c", "d")),
    "counter": (of(lambda: counting(counts_and_uses, "abcd", 6), 6), before("b", "c", "d")),
}
"""What makes a case, and where its model is cut; None where its code says."""


def cut(name: str, model: nn.Module) -> Pipe:
    make, cuts = EXAMPLES[name]
    (args, kwargs), *_ = copy.deepcopy(calls_of(make()))
    return pipeline(model, tuple(args), dict(kwargs), split_spec=cuts)


def close(value: Any, expected: Any) -> None:
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)


def stages_of(pipe: Pipe, group: Any = None, here: Any = range(4)) -> list[PipelineStage]:
    return [pipe.build_stage(index, "cpu", group) for index in here]


def batch_of(case: Case) -> dict[str, Any]:
    """Its microbatches, as a schedule takes them."""
    args, kwargs = zip(*copy.deepcopy(calls_of(case)), strict=True)
    targets = [torch.zeros(2)] * CHUNKS
    return {"arg_mbs": [*args], "kwarg_mbs": [*kwargs], "target_mbs": targets}


def plain_step(model: nn.Module, case: Case) -> float:
    """The mean loss of the microbatches, whose gradients are in the model."""
    losses = [loss_of(model(*args, **kwargs)) for args, kwargs in copy.deepcopy(calls_of(case))]
    mean = torch.stack(losses).mean()
    mean.backward()
    return float(mean.detach())


# ---- numbers and names


WORDS = pytest.param("words", marks=pytest.mark.nightly)
"""A model of transformers' kind; by day one of theirs is cut below."""


@pytest.mark.parametrize(
    "name", ["unet", "resnet", WORDS, "marked", "in place", "sizes", "counter", "mean"]
)
def test_a_cut_model_computes_and_trains_as_the_model_does_under_its_names(name: str) -> None:
    case = EXAMPLES[name][0]()
    model, expected = case.model, copy.deepcopy(case.model)
    pipe = cut(name, model)
    stages = stages_of(pipe)
    names = [name for stage in stages for name in stage.submod.state_dict()]
    assert sorted(names) == sorted(model.state_dict())
    # Beside the model's buffers are constants that its code makes.
    buffers = [name for stage in stages for name, _ in stage.submod.named_buffers()]
    assert sorted(n for n in buffers if "lifted_tensor" not in n) == sorted(
        n for n, _ in model.named_buffers()
    )
    # A stage sees all microbatches before the next stage sees one.
    schedule = ScheduleLoopedBFS(stages, CHUNKS, loss_fn=loss_of)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (model, expected)]
    for _ in range(2):
        losses: list[Tensor] = []
        schedule.step(**batch_of(case), losses=losses)
        mean = float(torch.stack(losses).mean())
        assert mean == pytest.approx(plain_step(expected, case), abs=1e-12)
        gradients = {name: p.grad for name, p in model.named_parameters()}
        close(gradients, {name: p.grad for name, p in expected.named_parameters()})
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    close(dict(model.named_buffers()), dict(expected.named_buffers()))
    for training in (True, False):
        pipe.train(training)
        args, kwargs = calls_of(case)[0]
        plain = expected.train(training)(*copy.deepcopy(args), **kwargs)
        close(pipe.split_gm(*copy.deepcopy(args), **kwargs), plain)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        *[("marked", "Interleaved1F1B"), ("sizes", "ZBVZeroBubble")],
        pytest.param("words", "Interleaved1F1B", marks=pytest.mark.nightly),
    ],
)
@in_processes(2, 100.0)
def test_a_pipe_over_processes(group: Any, name: str, schedule: str) -> None:
    """Two steps of this process's stages: the gradients are the model's."""
    case, rank = EXAMPLES[name][0](), dist.get_rank(group)
    model, expected = case.model, copy.deepcopy(case.model)
    stages = stages_of(cut(name, model), group, placed(schedule, 2)[rank])
    one = get_schedule_class(schedule)(stages, CHUNKS, loss_fn=loss_of)
    for _ in range(2):
        batch = batch_of(case)
        if rank:
            del batch["arg_mbs"], batch["kwarg_mbs"]
        if not any(stage.is_last for stage in stages):
            del batch["target_mbs"]
        for each in (model, expected):
            each.zero_grad()
        one.step(**batch)
        plain_step(expected, case)
    for stage in stages:
        for path, parameter in stage.submod.named_parameters():
            close(parameter.grad, expected.get_parameter(path).grad)


def test_torch_cuts_the_same() -> None:
    case, cuts = EXAMPLES["resnet"][0](), EXAMPLES["resnet"][1] or {}
    (args, _), *_ = calls_of(case)
    model = case.model.eval()
    spec = {path: THEIRS.SplitPoint[where.name] for path, where in cuts.items()}
    # Ours takes torch's split points, too.
    ours = pipeline(model, (*args,), split_spec=spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = THEIRS.pipeline(copy.deepcopy(model), (*args,), split_spec=spec)
    assert ours.num_stages == theirs.num_stages
    for index in range(ours.num_stages):
        pair = (pipe.get_stage_module(index) for pipe in (ours, theirs))
        names, others = ({name for name, _ in stage.named_parameters()} for stage in pair)
        assert names == others
    outputs = [[v for v in pipe(*args) if v is not None] for pipe in (ours, theirs)]
    close(*outputs)


# ---- what travels, and what stages take


def test_skips_are_sent_once_from_their_maker(capsys: pytest.CaptureFixture[str]) -> None:
    pipe = cut("unet", EXAMPLES["unet"][0]().model)
    used = [(edge.source, edge.targets) for edge in pipe.info().edges or ()]
    assert sorted(used) == [(0, (1,)), (0, (3,)), (1, (2,)), (1, (2,)), (2, (3,))]
    lines = str(pipe).splitlines()
    assert lines[:2] == ["Pipe of UNet, 4 stages", "  stage 0: 120 parameters"]
    assert "  stage 0 gives stage0_0 to [3]" in lines
    pipe.print_readable()
    assert "conv2d" in capsys.readouterr().out


def test_a_stage_by_hand_takes_values_by_name() -> None:
    model = Marked()
    x, gate = torch.randn(3, 6), torch.randn(3, 6)
    pipe = pipeline(model, (x, gate))
    values = pipe.get_stage_module(0)(x, gate)
    values["stage1_0"] = pipe.get_stage_module(1)(**values)
    values["stage2_0"] = pipe.get_stage_module(2)(values["stage1_0"])
    torch.testing.assert_close(pipe.get_stage_module(3)(**values), model(x, gate))
    with pytest.raises(UsageError, match=r"takes 3 values .* but got 1"):
        pipe.get_stage_module(3)(values["stage2_0"])


def test_a_chain_makes_a_pipeline() -> None:
    case = EXAMPLES["resnet"][0]()
    stages = stages_of(cut("resnet", copy.deepcopy(case.model)))
    options: dict[str, Any] = {"schedule": "GPipe", "microbatches": 4, "loss_fn": case.loss}
    judge(case, Pipeline.from_stages(stages, **options)).check(1e-12)


def test_dropout_follows_the_mode() -> None:
    model = Chained(lambda m, x: m.b(nn.functional.dropout(m.a(x), 0.5, m.training))).eval()
    x = torch.ones(8, 4)
    pipe = pipeline(model, (x,), split_spec=before("b"))
    assert not pipe.get_stage_module(0).training
    torch.testing.assert_close(pipe.split_gm(x), model(x))
    pipe.train()
    torch.manual_seed(0)
    output = pipe.split_gm(x)
    torch.manual_seed(0)
    torch.testing.assert_close(output, model.train()(x))


def test_a_model_that_is_traced_in_one_mode_only_stays_in_it() -> None:
    model = Chained(lambda m, x: m.b(m.a(x) if m.training or m.a(x).sum() > 0 else x))
    pipe = pipeline(model, (X,), split_spec=before("b"))
    torch.testing.assert_close(pipe.split_gm(X), model(X))
    with pytest.raises(UsageError, match=r"in the other mode only; call eval\(\) on it before"):
        pipe.eval().split_gm(X)


def test_a_policy_puts_cuts_into_the_graph() -> None:
    def halve(module: fx.GraphModule) -> fx.GraphModule:
        calls = [n for n in module.graph.nodes if n.op == "call_function" and "linear" in n.name]
        with module.graph.inserting_before(calls[len(calls) // 2]):
            module.graph.call_function(pipe_split)
        module.recompile()
        return module

    model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), torch.randn(2, 4)
    pipe = pipeline(model, (x,), split_policy=halve)
    names = [list(pipe.get_stage_module(i).state_dict()) for i in range(2)]
    assert [sorted({name[0] for name in part}) for part in names] == [["0", "1"], ["2", "3"]]
    torch.testing.assert_close(pipe.split_gm(x), model(x))


def test_tracing_leaves_the_model_alone() -> None:
    model = EXAMPLES["resnet"][0]().model
    state, noise = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    cut("resnet", model)
    close(model.state_dict(), state)
    assert torch.equal(noise, torch.get_rng_state())
    assert not any(module._forward_pre_hooks for module in model.modules())


# ---- what is refused


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


class Choosy(Chained):
    """Takes another path for long inputs, for many samples, and if asked to."""

    a: nn.Linear
    b: nn.Linear

    def forward(  # type: ignore[override]
        self, x: Tensor, *, flip: bool, y: Tensor | None = None, where: Any = SplitPoint.END
    ) -> Tensor:
        x = self.a(x) * (2 if x.shape[1] > 3 else 1) * (2 if x.shape[0] > 6 else 1)
        x = x if y is None else x + y
        return self.b(-x if flip else x)  # type: ignore[no-any-return]


def test_calls_unlike_the_traced_one_are_refused() -> None:
    model = Choosy(None)  # type: ignore[arg-type]
    pipe = pipeline(model, (torch.ones(2, 2, 4),), {"flip": False}, split_spec=before("b"))
    x = torch.ones(4, 2, 4)
    pipe.split_gm(x, flip=False)
    wrong: dict[str, dict[str, Any]] = {
        "float32[4, 6, 4] instead of float32[2 or more, 2, 4]": {"x": torch.ones(4, 6, 4)},
        "float64[4, 2, 4] instead of": {"x": x.double()},
        "float32[1, 2, 4] instead of": {"x": x[:1]},
        "it needs x.size()[0] <= 6": {"x": x.repeat(2, 1, 1)},
        "True instead of False": {"flip": True},
        "y, which the trace left to its default": {"y": x},
        "where, which the trace left": {"where": SplitPoint.BEGINNING},
        "got an unexpected keyword argument 'z'": {"z": x},
    }
    for says, call in wrong.items():
        with pytest.raises(UsageError, match=re.escape(says)):
            pipe.split_gm(**{"x": x, "flip": False, **call})


@pytest.mark.parametrize("by", [(), ("y",), ("x", "y"), ("scale",)])
def test_a_pipe_takes_what_the_model_takes(by: tuple[str, ...]) -> None:
    """However the trace was given its arguments, by place, by name or not; and other batch sizes."""
    model = Named().eval()
    x, y = torch.randn(2, 2, 3, 4)
    values = {"x": x, "y": y, "scale": 2.0}
    placed = tuple(values[name] for name in ("x", "y") if name not in by)
    pipe = pipeline(model, placed, {name: values[name] for name in by})
    stages = stages_of(pipe)
    schedule = get_schedule_class("Interleaved1F1B")(stages, 2)
    for samples in (2, 4, 6):
        x, y = torch.randn(2, samples, 3, 4)
        expected = model(x, y)
        for args, kwargs in [((x, y), {}), ((x,), {"y": y}), ((), {"y": y, "scale": 2.0, "x": x})]:
            torch.testing.assert_close(pipe(*args, **kwargs)[0], expected)
    halves = zip(x.chunk(2), y.chunk(2), strict=True)
    expected = torch.cat([model(*half) for half in halves])
    with torch.no_grad():
        torch.testing.assert_close(schedule.step(x, y), expected)
        torch.testing.assert_close(schedule.step(x, y=y), expected)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 100


def hooked(model: Any, x: Tensor) -> Any:
    hidden = model.a(x)
    hidden.register_hook(lambda grad: 2 * grad)
    return model.b(hidden)


def fenced(model: Any, x: Tensor) -> Any:
    with torch.no_grad():
        return model.b(model.a(x))


def views(model: Any, x: Tensor) -> Any:
    """Changes one of two values that share their memory."""
    x = model.a(x)
    view = x[:, :2]
    y = model.b(x.clone())
    view.add_(1.0)
    return y + x


def reused(model: Any, x: Tensor) -> Any:
    """Changes in the last stage what the one before used, too."""
    hidden = model.a(x)
    out = model.c(model.b(hidden))
    return out + hidden.mul_(2.0)


def counted(model: Any, x: Tensor) -> Tensor:
    """Changes in place a buffer that the other stage uses."""
    hidden = model.a(x) + model.count
    out = model.b(hidden)
    model.count.add_(1.0)
    return out  # type: ignore[no-any-return]


IN_B = {"split_spec": before("b")}
REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "unknown path": (
        lambda: MODELS["gpt"]().model,
        {"split_spec": before("layer.1")},
        r"no module 'layer.1' in the model; did you mean layers.1",
    ),
    "not a point": (chain, {"split_spec": {"1": 2}}, r"split_spec\['1'\] is 2: must be SplitPoint"),
    "both": (chain, {"split_spec": {}, "split_policy": lambda m: m}, r"cannot both be given"),
    "no tuple": (chain, {"mb_args": X}, "mb_args must be a tuple"),
    "all in one": (chain, {"split_spec": before("0")}, r"leave the whole model in one stage"),
    "not called": (
        lambda: Chained(lambda m, x: m.a(x)),
        IN_B,
        r"b \(BEGINNING\): the module was not called",
    ),
    "cannot be traced": (
        lambda: Chained(lambda m, x: m.b(x) if x.sum() > 0 else x),
        IN_B,
        r"torch.export cannot trace this Chained: .*data-dependent.*penstock.Pipeline",
    ),
    "own backward": (
        lambda: Chained(lambda m, x: m.b(Twice.apply(m.a(x)))),  # type: ignore[no-untyped-call]
        IN_B,
        r"uses Twice, with a backward of its own",
    ),
    "hook": (lambda: Chained(hooked), IN_B, r"a hook on the gradient of a tensor"),
    "in a region": (lambda: Chained(fenced), IN_B, r"a cut lies within a region .*no_grad"),
    "views": (lambda: Chained(views), IN_B, r"add_.* in stage 1 changes .* in place"),
    "a value of two": (
        lambda: Chained(reused, "abc"),
        {"split_spec": before("b", "c")},
        r"mul_.* in stage 2 changes a value of stage 0 in place",
    ),
    "a buffer": (
        lambda: counting(counted),
        IN_B,
        r"add_.* in stage 1 changes count in place, which stage 0 uses too",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_cut_is_refused_with_the_reason(what: str) -> None:
    make, options, message = REFUSED[what]
    with pytest.raises((PartitionError, UsageError), match=message):
        pipeline(make(), **{"mb_args": (X,), **options})


# ---- a model of transformers, unedited


def square(output: Any, target: Tensor) -> Tensor:
    return (output[0] - target[:, None, None]).square().mean()  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_model_is_cut_unedited() -> None:
    """Outputs and gradients are those of the unsplit model."""
    model = make_model("llama").double().eval()
    model.config.use_cache = False
    kwargs: dict[str, Any] = {
        "input_ids": torch.arange(28).reshape(4, 7),
        "attention_mask": torch.ones(4, 7),
    }
    samples = 4
    half = {key: value[: samples // 2] for key, value in kwargs.items()}
    pipe = pipeline(model, (), half, split_spec=before("model.layers.1", "model.layers.2"))
    target = torch.arange(samples, dtype=torch.float64)
    expected = model(**kwargs)
    parameters = list(model.parameters())
    wanted = torch.autograd.grad(square(expected, target), parameters, allow_unused=True)
    schedule = ScheduleInterleaved1F1B(stages_of(pipe, here=range(3)), 2, loss_fn=square)
    close(schedule.step(target=target, **kwargs)[0], expected[0])
    close([parameter.grad for parameter in parameters], list(wanted))
