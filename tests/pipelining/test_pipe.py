"""pipeline() and what it gives: the model's numbers, names and training, stage by stage."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining as peer
from torch import Tensor, fx, nn

from penstock import Pipeline
from penstock.errors import PartitionError, UsageError
from penstock.pipelining import (
    Pipe,
    PipelineStage,
    ScheduleInterleaved1F1B,
    SplitPoint,
    build_stage,
    pipe_split,
    pipeline,
)
from penstock.pipelining.schedules import get_schedule_class
from penstock.testing import WorkerPool
from tests.pipelining.models import EXAMPLES, MICROBATCHES, SAMPLES, Example, Marked, Words, before


def cut(example: Example, model: nn.Module) -> Pipe:
    args, kwargs = example.microbatch()
    return pipeline(model, args, kwargs, split_spec=example.cuts or None)


def fresh(example: Example) -> tuple[Any, ...]:
    """The arguments, which a model may change in place."""
    return copy.deepcopy(example.args)


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.fixture(params=["unet", "resnet", "words", "marked", "in place"])
def example(request: pytest.FixtureRequest) -> Example:
    return EXAMPLES[request.param]


def test_a_pipe_computes_what_the_model_does(example: Example) -> None:
    model = example.model()
    pipe = cut(example, model)
    assert pipe.num_stages == 4
    for training in (True, False):
        pipe.train(training)
        args, kwargs = example.microbatch()
        expected = copy.deepcopy(model).train(training)(*copy.deepcopy(args), **kwargs)
        close(pipe.split_gm(*copy.deepcopy(args), **kwargs), expected)


def test_stages_have_the_names_of_the_model(example: Example) -> None:
    model = example.model()
    pipe = cut(example, model)
    states = [pipe.get_stage_module(index).state_dict() for index in range(4)]
    names = [name for state in states for name in state]
    assert sorted(names) == sorted(model.state_dict())
    buffers = [n for i in range(4) for n, _ in pipe.get_stage_module(i).named_buffers()]
    # Beside them are constants that the model's code makes.
    buffers = [name for name in buffers if "lifted_tensor" not in name]
    assert sorted(buffers) == sorted(name for name, _ in model.named_buffers())


def scheduled(example: Example, pipe: Pipe, kind: Any = ScheduleInterleaved1F1B) -> Any:
    """The stages of a pipe in one process, under a schedule."""
    stages: list[PipelineStage] = [pipe.build_stage(index, "cpu") for index in range(3)]
    stages.append(build_stage(pipe.get_stage_module(3), 3, pipe.info(), torch.device("cpu")))
    return kind(stages, MICROBATCHES, loss_fn=example.loss)


def test_a_cut_model_trains_as_the_model_does(example: Example) -> None:
    model, expected = example.model(), example.model()
    schedule = scheduled(example, cut(example, model))
    for _ in range(2):
        losses: list[Tensor] = []
        schedule.step(*fresh(example), target=example.target, losses=losses, **example.kwargs)
        mean = float(torch.stack(losses).mean())
        assert mean == pytest.approx(plain_step(expected, example, MICROBATCHES), abs=1e-12)
        gradients = {name: p.grad for name, p in model.named_parameters()}
        close(gradients, {name: p.grad for name, p in expected.named_parameters()})
        descend(model), descend(expected)
    close(dict(model.named_buffers()), dict(expected.named_buffers()))


def plain_step(model: nn.Module, example: Example, microbatches: int) -> float:
    size, total = SAMPLES // microbatches, 0.0
    for start in range(0, SAMPLES, size):

        def part(value: Any, start: int = start) -> Any:
            return value[start : start + size].clone() if isinstance(value, Tensor) else value

        output = model(
            *map(part, example.args), **{name: part(v) for name, v in example.kwargs.items()}
        )
        loss = example.loss(output, part(example.target)) / microbatches
        loss.backward()
        total += float(loss.detach())
    return total


@torch.no_grad()
def descend(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.sub_(0.1 * parameter.grad)
            parameter.grad = None


def test_skips_are_sent_once_from_their_maker() -> None:
    example = EXAMPLES["unet"]
    edges = cut(example, example.model()).info().edges
    assert edges is not None
    used = [(edge.source, edge.targets) for edge in edges]
    assert sorted(used) == [(0, (1,)), (0, (3,)), (1, (2,)), (1, (2,)), (2, (3,))]


class Forked(nn.Module):
    """Takes another path for long inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, flip: bool = False) -> Tensor:
        x = self.a(x)
        if x.shape[1] > 3:
            x = x * 2
        return self.b(-x if flip else x)  # type: ignore[no-any-return]


def test_calls_unlike_the_traced_one_are_refused() -> None:
    pipe = pipeline(Forked(), (torch.ones(2, 2, 4),), {"flip": False}, split_spec=before("b"))
    pipe.split_gm(torch.ones(2, 2, 4), flip=False)
    with pytest.raises(UsageError, match=r"float32\[2, 6, 4\] instead of float32\[2, 2, 4\]"):
        pipe.split_gm(torch.ones(2, 6, 4), flip=False)
    with pytest.raises(UsageError, match="True instead of False"):
        pipe.split_gm(torch.ones(2, 2, 4), flip=True)
    with pytest.raises(UsageError, match="their number or structure"):
        pipe.split_gm(torch.ones(2, 2, 4))


def piped(group: Any, name: str, schedule: str) -> float:
    """Two steps of this process's stages; the largest gap to the model's gradients."""
    example = EXAMPLES[name]
    model, expected = example.model(), example.model()
    pipe = cut(example, model)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    kind = get_schedule_class(schedule)
    here = [rank] if ranks == 4 else [rank, 3 - rank]
    stages = [pipe.build_stage(index, "cpu", group) for index in here]
    made: Any = kind(stages[0] if ranks == 4 else stages, MICROBATCHES, loss_fn=example.loss)
    for _ in range(2):
        args = fresh(example) if rank == 0 else ()
        kwargs = example.kwargs if rank == 0 else {}
        target = example.target if any(stage.is_last for stage in stages) else None
        made.step(*args, target=target, **kwargs)
        plain_step(expected, example, MICROBATCHES)
    gaps = [0.0]
    for stage in stages:
        for path, parameter in stage.submod.named_parameters():
            wanted = expected.get_parameter(path).grad
            assert parameter.grad is not None
            assert wanted is not None
            gaps.append(float((parameter.grad - wanted).abs().max()))
    return max(gaps)


@pytest.mark.parametrize(("schedule", "ranks"), [("1F1B", 4), ("ZBVZeroBubble", 2)])
@pytest.mark.parametrize("name", ["unet", "words", "marked"])
def test_a_pipe_over_processes(workers: WorkerPool, name: str, schedule: str, ranks: int) -> None:
    gaps = workers.run(f"{__name__}:piped", ranks, 100.0, name=name, schedule=schedule)
    assert max(gaps) < 1e-12


# ---- torch's names


def test_stages_are_called_by_hand_in_a_chain() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.Linear(4, 2))
    pipe = pipeline(model, (torch.ones(2, 4),), split_spec={**before("2"), "2": SplitPoint.END})
    x = torch.randn(2, 4)
    hidden = pipe.get_stage_module(0)(x)
    torch.testing.assert_close(pipe.get_stage_module(1)(hidden), model(x))


def test_a_stage_by_hand_is_given_values_by_name() -> None:
    model = Marked()
    x, gate = torch.randn(3, 6), torch.randn(3, 6)
    pipe = pipeline(model, (x, gate))
    values = pipe.get_stage_module(0)(x, gate)
    values["stage1_0"] = pipe.get_stage_module(1)(**values)
    values["stage2_0"] = pipe.get_stage_module(2)(values["stage1_0"])
    torch.testing.assert_close(pipe.get_stage_module(3)(**values), model(x, gate))
    with pytest.raises(UsageError, match=r"takes 3 values .* but was given 1"):
        pipe.get_stage_module(3)(values["stage2_0"])
    with pytest.raises(RuntimeError, match="values skip stages"):
        pipe.build_stage(1, "cpu")._prepare_forward_infra(2, (x,))


def test_a_chain_makes_a_pipeline() -> None:
    example = EXAMPLES["resnet"]
    model, expected = example.model(), example.model()
    pipe = cut(example, model)
    stages = [pipe.build_stage(index, "cpu") for index in range(4)]
    run = Pipeline.from_stages(stages, schedule="GPipe", microbatches=4, loss_fn=example.loss)
    loss = run.step(*example.args, target=example.target).loss
    assert loss == pytest.approx(plain_step(expected, example, 4), abs=1e-12)


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(nn.functional.dropout(self.a(x), 0.5, self.training))  # type: ignore[no-any-return]


def test_dropout_follows_the_mode() -> None:
    model, x = Drops().eval(), torch.ones(8, 4)
    pipe = pipeline(model, (x,), split_spec=before("b"))
    assert not pipe.get_stage_module(0).training
    torch.testing.assert_close(pipe.split_gm(x), model(x))
    pipe.train()
    torch.manual_seed(0)
    found = pipe.split_gm(x)
    torch.manual_seed(0)
    torch.testing.assert_close(found, model.train()(x))


def test_a_policy_puts_cuts_into_the_graph() -> None:
    def halve(module: fx.GraphModule) -> fx.GraphModule:
        calls = [n for n in module.graph.nodes if n.op == "call_function" and "linear" in n.name]
        with module.graph.inserting_before(calls[len(calls) // 2]):
            module.graph.call_function(pipe_split)
        module.recompile()
        return module

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    pipe = pipeline(model, (torch.ones(2, 4),), split_policy=halve)
    assert [sorted(pipe.get_stage_module(i).state_dict()) for i in range(2)] == [
        ["0.bias", "0.weight", "1.bias", "1.weight"],
        ["2.bias", "2.weight", "3.bias", "3.weight"],
    ]
    x = torch.randn(2, 4)
    torch.testing.assert_close(pipe.split_gm(x), model(x))


def test_a_pipe_reads_well(capsys: pytest.CaptureFixture[str]) -> None:
    pipe = cut(EXAMPLES["unet"], EXAMPLES["unet"].model())
    assert str(pipe).splitlines()[:2] == [
        "Pipe of UNet, 4 stages",
        "  stage 0: 112 parameters",
    ]
    assert "  stage 0 gives stage0_0 to [3]" in str(pipe).splitlines()
    pipe.print_readable()
    assert "conv2d" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["unet", "resnet", "untied"])
def test_torch_cuts_the_same(name: str) -> None:
    example = EXAMPLES[name]
    args, kwargs = example.microbatch()
    model = example.model().eval()
    ours = pipeline(model, args, kwargs, split_spec=example.cuts)
    theirs_spec = {path: peer.SplitPoint[where.name] for path, where in example.cuts.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peer.pipeline(copy.deepcopy(model), args, kwargs, split_spec=theirs_spec)
    assert ours.num_stages == theirs.num_stages
    for index in range(ours.num_stages):
        own, other = ours.get_stage_module(index), theirs.get_stage_module(index)
        assert {n for n, _ in own.named_parameters()} == {n for n, _ in other.named_parameters()}
        # Torch's stages lose buffers that only training uses, and save those that do not persist.
        assert other.state_dict().keys() & model.state_dict().keys() <= own.state_dict().keys()
    close(tensors_of(ours(*args, **kwargs)), tensors_of(theirs(*args, **kwargs)))


def tensors_of(output: Any) -> list[Tensor]:
    values = output.values() if isinstance(output, dict) else output
    return [output] if isinstance(output, Tensor) else [v for v in values if v is not None]


# ---- what is refused

X = torch.ones(2, 4)


def chain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


class Counted(nn.Module):
    """Its control flow depends on its numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x if bool(x.sum() > 0) else -x


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 100


class Chained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


class OwnBackward(Chained):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(Twice.apply(self.a(x)))  # type: ignore[no-any-return,no-untyped-call]


class Hooked(Chained):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x)
        hidden.register_hook(lambda grad: 2 * grad)
        return self.b(hidden)  # type: ignore[no-any-return]


class Fenced(Chained):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.b(self.a(x))  # type: ignore[no-any-return]


class Views(nn.Module):
    """Changes one of two values that share their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        view = x[:, :2]
        y = self.b(x.clone())
        view.add_(1.0)
        return y + x  # type: ignore[no-any-return]


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "unknown path": (
        lambda: Words(),
        {"split_spec": before("block.1")},
        r"no module 'block.1' in the model; did you mean blocks.1",
    ),
    "not a point": (chain, {"split_spec": {"1": 2}}, r"split_spec\['1'\] is 2: must be SplitPoint"),
    "both": (chain, {"split_spec": {}, "split_policy": lambda m: m}, r"cannot both be given"),
    "all in one": (chain, {"split_spec": before("0")}, r"leave the whole model in one stage"),
    "not called": (
        lambda: Forgetful(),
        {"split_spec": before("b")},
        r"b \(BEGINNING\): the module was not called",
    ),
    "cannot be traced": (
        lambda: nn.Sequential(nn.Linear(4, 4), Counted()),
        {"split_spec": before("1")},
        r"torch.export cannot trace this Sequential: .*data-dependent.*penstock.Pipeline",
    ),
    "own backward": (
        OwnBackward,
        {"split_spec": before("b")},
        r"uses Twice, with a backward of its own",
    ),
    "hook": (Hooked, {"split_spec": before("b")}, r"a hook on the gradient of a tensor"),
    "in a region": (Fenced, {"split_spec": before("b")}, r"a cut lies within a region .*no_grad"),
    "views": (Views, {"split_spec": before("b")}, r"add_.* in stage 1 changes .* in place"),
}


class Forgetful(Chained):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_cut_is_refused_with_the_reason(what: str) -> None:
    make, options, message = REFUSED[what]
    args = (torch.ones(2, 4, dtype=torch.int64),) if make is REFUSED["unknown path"][0] else (X,)
    with pytest.raises((PartitionError, UsageError), match=message):
        pipeline(make(), args, **options)


def test_no_cut_is_one_stage_and_said_so() -> None:
    model = chain()
    with pytest.warns(UserWarning, match="no split point in the Sequential"):
        assert pipeline(model, (X,)).num_stages == 1
    pipe = Pipe.from_tracing(model, (X,))
    torch.testing.assert_close(pipe(X), (model(X),))


def test_stages_that_do_not_exist_are_refused() -> None:
    pipe = pipeline(chain(), (X,), split_spec=before("1"))
    with pytest.raises(UsageError, match="stage 2 of 2"):
        pipe.get_stage_module(2)
    with pytest.raises(UsageError, match="mb_args must be a tuple"):
        pipeline(chain(), X)  # type: ignore[arg-type]


def test_tracing_leaves_the_model_alone() -> None:
    model = EXAMPLES["resnet"].model()
    before_state = copy.deepcopy(model.state_dict())
    noise = torch.get_rng_state()
    cut(EXAMPLES["resnet"], model)
    close(model.state_dict(), before_state)
    assert torch.equal(noise, torch.get_rng_state())
    seen: list[Any] = []
    model.register_forward_hook(lambda *_: seen.append(1))
    model(*EXAMPLES["resnet"].microbatch()[0])
    assert seen == [1]


def test_arguments_that_later_stages_use_are_handed_on() -> None:
    """Their ranks need not be given the batch, as those who call ``step()`` there expect."""
    model = Marked()
    pipe = pipeline(model, (torch.randn(2, 6),), {"gate": torch.randn(2, 6)})
    assert any(edge.source == 0 and 3 in edge.targets for edge in pipe.info().edges or ())
    x, gate = torch.randn(2, 6), torch.randn(2, 6)
    stages = [PipelineStage(pipe.get_stage_module(i), i, 4, "cpu") for i in range(4)]
    for stage in stages:
        stage.edges = pipe.info().edges
    schedule = ScheduleInterleaved1F1B(stages, 1)
    torch.testing.assert_close(schedule.eval(x, gate=gate), model(x, gate))
