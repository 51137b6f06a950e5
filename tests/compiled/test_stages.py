"""Compiled stages: the numbers are those without compilation, and weights' gradients wait."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import Loss, Microbatches, Pipeline, PipelineStage
from penstock._engine.compiled import halves, names
from penstock._engine.compiled.halves import HalvesError
from penstock.backward import PendingGradients, SplitBackward
from penstock.errors import StageError, UsageError
from penstock.testing import Case, Verdict, judge
from tests.backward.graphs import Stage, of, rerun, x
from tests.backward.oracle import Staged, check, trained

pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH = 6
PLAIN = {"backend": "plain"}


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "penstock")
    return caplog


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many weights each use that the weights' half computes has."""
    counts: list[int] = []
    weight_half = SplitBackward.weight_half

    def counted(self: SplitBackward, pending: PendingGradients) -> None:
        counts.extend(len(use.edges) for use in pending.uses)
        weight_half(self, pending)

    monkeypatch.setattr(SplitBackward, "weight_half", counted)
    return counts


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.up, self.down = linear(), linear()

    def forward(self, value: Tensor) -> Any:
        return value + self.down(self.up(self.norm(value)).tanh())


def sequence(blocks: int = 4, make: Callable[[], nn.Module] = Block) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(make() for _ in range(blocks)))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def batch() -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(8)
    value, target = torch.randn(2, 8, WIDTH, dtype=torch.float64, generator=drawn)
    return value, target


def judged(model: nn.Module, plain: nn.Module, **options: Any) -> tuple[Pipeline, Verdict]:
    """Two steps of a pipeline of the model, beside the loop over microbatches of one as it is."""
    defaults: dict[str, Any] = {"schedule": "ZB-H1", "ranks": 2, "microbatches": 4, "seed": 1}
    pipe = Pipeline(model, loss_fn=loss_fn, **(defaults | options))
    values, targets = (tensor.chunk(4) for tensor in batch())
    case = Case(plain, [Microbatches(values)], targets, loss_fn)
    # An evaluation would be compiled too.
    verdict = judge(case, pipe, steps=2, evaluate=False)
    verdict.check(1e-12)
    return pipe, verdict


def stage_of(make: Callable[[], nn.Module] = Block, dtype: torch.dtype = torch.float64) -> Stage:
    """A block of a kind, and microbatches of eight rows."""
    return of(sequence(1, make), lambda: x(8, WIDTH, dtype=dtype)).to(dtype)


# ---- stages that a pipeline compiles


def test_equal_stages_are_compiled_once_and_never_again(
    waiting: list[int], logged: pytest.LogCaptureFixture
) -> None:
    torch.compiler.reset()
    counts: list[Any] = []

    def count() -> None:
        counts.append((names.graphs_compiled(), dict(torch._dynamo.utils.counters["frames"])))

    count()
    pipe, verdict = judged(sequence(), sequence(), ranks=4, compile=PLAIN)
    count()
    # The first stage's input needs no gradient.
    assert counts[1][0] - counts[0][0] == 2
    assert "stage 1: compiled 1 graphs" in logged.text
    assert "stage 2: compiled 0 graphs" in logged.text
    # The norm's wait in the first stage only, which has nothing to do in the inputs' half.
    assert sorted(waiting) == 2 * 12 * [4] + 2 * 4 * [6]
    # What runs as it is written has the same bits.
    assert judged(sequence(), sequence())[1].digest() == verdict.digest()
    value, target = batch()
    pipe.step(value, target=target)
    count()
    assert counts[2] == counts[1]
    with torch.no_grad():
        expected = loss_fn(sequence()(value), target)
    assert pipe.evaluate(value, target=target).loss == pytest.approx(expected.item(), abs=1e-12)


def test_shapes_may_change_and_are_compiled_twice_at_most(waiting: list[int]) -> None:
    torch.compiler.reset()
    stage, counts = stage_of(), []
    staged = Staged(stage, compile=PLAIN)
    for rows in (8, 12, 20, 8):
        stage.make = partial(x, rows, WIDTH)
        check(lambda: stage, staged, tolerance=1e-12)
        assert waiting[-1] == 4
        counts.append(names.graphs_compiled())
    assert counts[0] < counts[1] == counts[2] == counts[3]


class Loops(nn.Module):
    """A model with a forward of its own, which is cut by its calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.start, self.blocks = linear(), nn.ModuleList(Dropping() for _ in range(4))

    def forward(self, value: Tensor) -> Any:
        value = self.start(value).tanh()
        for block in self.blocks:
            value = block(value)
        return value


def test_a_model_that_is_cut_by_its_calls_is_compiled_piece_by_piece(waiting: list[int]) -> None:
    torch.compiler.reset()
    model, before = Loops(), names.graphs_compiled()
    # Also the masks of dropout are those of the plain loop.
    judged(model, Loops(), compile=PLAIN)
    # Blocks whose input needs a gradient, all of which do; the single layer runs as it is.
    assert names.graphs_compiled() - before == 1
    assert waiting.count(4) == 2 * 4 * 4
    assert model.start._compiled_call_impl is None


# ---- what may not change anything


class Breaks(Block):
    """Two graphs."""

    def forward(self, value: Tensor) -> Any:
        hidden = self.up(self.norm(value)).tanh()
        torch._dynamo.graph_break()
        return value + self.down(hidden)


class Shares(Block):
    """Gives its input back as it is, and what it made of it twice, as two views."""

    def forward(self, value: Tensor) -> Any:
        result = super().forward(value)
        return result.view(-1), value, result[:3]


class Changes(Block):
    """Changes its input, what it computes and a view of that in place."""

    def forward(self, value: Tensor) -> Any:
        value.mul_(2)
        hidden = self.up(value)
        hidden[:2].add_(1)
        return self.down(hidden.tanh_()).relu_()


class Dropping(Block):
    def forward(self, value: Tensor) -> Any:
        return functional.dropout(super().forward(value), 0.5, self.training)


class Remembers(Block):
    """Has buffers, which it changes."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, value: Tensor) -> Any:
        self.calls = self.calls + 1
        return self.batch_norm(super().forward(value)) / self.calls


class Twin(Block):
    """Uses one weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.down.weight = self.up.weight


class Frozen(Block):
    """Some of its weights need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)
        self.norm.bias.requires_grad_(False)


class Reruns(Block):
    """A checkpoint inside of what is compiled."""

    def forward(self, value: Tensor) -> Any:
        return rerun(super().forward, value)


class Around(nn.Module):
    """A checkpoint around what is compiled, which is compiled in any case."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.block.compile(backend="aot_eager")

    def forward(self, value: Tensor) -> Any:
        return rerun(self.block, value)


class Tied(nn.Module):
    """Uses weights inside and outside of what is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), Block()
        self.second.compile(backend="aot_eager")

    def forward(self, value: Tensor) -> Any:
        return self.second(self.first(value)) @ self.second.up.weight + self.first.bias


class Autocast(Block):
    def forward(self, value: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(value)


@pytest.mark.parametrize(
    ("kind", "weights", "how"),
    [
        (Breaks, [2, 2], PLAIN),
        (Shares, [4], PLAIN),
        (Changes, [4], PLAIN),
        (Dropping, [4], PLAIN),
        (Remembers, [4], PLAIN),
        (Twin, [3], PLAIN),
        (Frozen, [2], PLAIN),
        (Reruns, [4], PLAIN),
        (Around, [4], None),
        (Tied, [1, 1, 4], None),
        (Autocast, [4], PLAIN),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_halves_are_those_without_compilation(
    kind: Any, weights: list[int], how: Any, waiting: list[int]
) -> None:
    torch.compiler.reset()
    half = kind is Autocast
    stage = stage_of(kind, torch.float32 if half else torch.float64)
    with torch.compiler.set_stance("force_eager"):
        expected = trained(stage, Staged(stage))
    waiting.clear()
    actual = trained(stage, Staged(stage, compile=how))
    assert sorted(waiting) == sorted(2 * weights)
    close = 2e-2 if half else 1e-12
    torch.testing.assert_close(actual, expected, rtol=close, atol=close)


def test_hooks_run_once_for_each_microbatch_when_the_weights_half_does() -> None:
    stage = PipelineStage(sequence(1), 1, 2, compile=PLAIN)
    seen: list[Tensor] = []
    weight = stage.module.get_parameter("0.up.weight")
    weight.register_hook(seen.append)
    output = stage.forward(0, [batch()[0].requires_grad_()])
    stage.backward_input(0, [torch.ones_like(output)])
    assert seen == []
    stage.backward_weight(0)
    assert len(seen) == 1
    assert torch.equal(seen[0], weight.grad)  # type: ignore[arg-type]
    # What is cut may run whole as well.
    stage.forward(1, [batch()[0].requires_grad_()])
    stage.backward(1, [torch.ones_like(output)])
    torch.testing.assert_close(weight.grad, 2 * seen[0])


def test_the_weights_half_does_not_hang_on_autocast_around_it() -> None:
    stage = PipelineStage(sequence(1).float(), 1, 2, compile=PLAIN)
    value = batch()[0].float().requires_grad_()
    output = stage.forward(0, [value])
    weights, ones = list(stage.module.parameters()), torch.ones_like(output)
    expected = torch.autograd.grad(output, weights, ones, retain_graph=True)
    stage.backward_input(0, [ones])
    with torch.autocast("cpu", torch.bfloat16):
        stage.backward_weight(0)
    torch.testing.assert_close([weight.grad for weight in weights], list(expected))


def test_weights_may_change_their_data_or_be_frozen() -> None:
    stage = stage_of()
    staged = Staged(stage, compile=PLAIN)
    weight = stage.get_parameter("module.0.up.weight")
    for change in (
        lambda: weight.data.mul_(2),
        lambda: setattr(weight, "data", weight.data.clone() / 3),
        lambda: weight.requires_grad_(False),
    ):
        change()
        check(lambda: stage, staged, tolerance=1e-12)


def test_what_waits_must_stay_as_it_is() -> None:
    stage = PipelineStage(nn.Sequential(linear()), 1, 2, compile=PLAIN)
    output = stage.forward(0, [batch()[0].requires_grad_()])
    grad = torch.ones_like(output)
    stage.backward_input(0, [grad])
    grad.zero_()
    with pytest.raises(StageError, match="was changed in place between the inputs' half"):
        stage.backward_weight(0)


# ---- what the model's author has compiled


def compiled_module(module: Any) -> Any:
    return torch.compile(module, backend="aot_eager")


def in_place(model: nn.Sequential, *modules: nn.Module) -> nn.Module:
    for module in modules or model:
        module.compile(backend="aot_eager")
    return model


class Decorated(Block):
    @torch.compile(backend="aot_eager")
    def forward(self, value: Tensor) -> Any:
        return super().forward(value)


class CallsCompiled(Block):
    def __init__(self) -> None:
        super().__init__()
        self.rest = torch.compile(self.run, backend="aot_eager")

    def run(self, value: Tensor) -> Any:
        return self.down(self.up(value).tanh())

    def forward(self, value: Tensor) -> Any:
        return value + self.rest(self.norm(value))


ALREADY: dict[str, Callable[[], nn.Module]] = {
    "a model": lambda: compiled_module(sequence()),
    "a model in place": lambda: in_place(model := sequence(), model),
    "blocks": lambda: nn.Sequential(*map(compiled_module, sequence())),
    "blocks in place": lambda: in_place(sequence()),
    "a forward": lambda: sequence(make=Decorated),
    "a function": lambda: sequence(make=CallsCompiled),
}


@pytest.mark.parametrize("name", ALREADY)
def test_what_is_compiled_already(name: str, waiting: list[int]) -> None:
    judged(ALREADY[name](), sequence())
    # More than one weight at a time wait in what is compiled alone.
    assert max(waiting) > 1


def leaves_graphs(graph: Any, inputs: Any) -> Any:
    return graph.forward


def test_a_compiler_that_leaves_the_graphs_as_they_are(waiting: list[int]) -> None:
    judged(sequence(), sequence(), compile={"backend": leaves_graphs})
    assert set(waiting) == {1}


# ---- what cannot be compiled or cut


def test_what_cannot_be_captured_runs_without(logged: pytest.LogCaptureFixture) -> None:
    stage = PipelineStage(nn.LSTM(WIDTH, WIDTH, dtype=torch.float64), 0, 1, compile=PLAIN)
    with torch.no_grad():  # an evaluation, which says nothing of training
        stage.forward(0, [batch()[0]])
    for microbatch in range(2):
        output, _ = stage.forward(microbatch, [batch()[0]])
        stage.backward(microbatch, [torch.ones_like(output), None, None])
    assert logged.text.count("stage 0: torch.compile cannot capture any of it") == 1


class Twice(nn.Module):
    """Differentiates through its own gradient, and counts its calls in buffers."""

    calls: Tensor
    replaced: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))

    def forward(self, value: Tensor) -> Any:
        self.calls += 1
        self.replaced = self.replaced + 1
        energy = functional.dropout(self.layer(value).tanh(), 0.5).square().sum()
        torch._dynamo.graph_break()
        (force,) = torch.autograd.grad(energy, value, create_graph=True)
        return force


def raises(*_: Any) -> Any:
    raise ArithmeticError("out of order")


@pytest.mark.parametrize(
    ("kind", "how", "says"),
    [
        (Twice, PLAIN, "it differentiates twice through compiled code; it runs without"),
        (Remembers, {"backend": raises}, "ArithmeticError: out of order"),
    ],
)
def test_what_fails_compiled_is_undone_and_runs_without(
    kind: Any, how: Any, says: str, logged: pytest.LogCaptureFixture
) -> None:
    torch.compiler.reset()
    stage = stage_of(kind)
    check(lambda: stage, Staged(stage, compile=how), tolerance=1e-12)
    assert f"stage 1: {says}" in logged.text.replace(
        "BackendCompilerFailed: backend='raises' raised:\n", ""
    )
    staged = Staged(Block(), compile={"backend": raises, "fullgraph": True})
    with pytest.raises(Exception, match="out of order"):
        staged.call(batch()[0])


def test_a_compiler_that_fails_is_done_without_in_a_pipeline(
    logged: pytest.LogCaptureFixture,
) -> None:
    model = Loops()
    judged(model, Loops(), compile={"backend": raises})
    assert "out of order" in logged.text
    assert "it runs without compilation" in logged.text
    assert model.blocks[0]._compiled_call_impl is None


def uncut(*_: Any, **__: Any) -> Any:
    raise HalvesError("too hard")


def as_from_a_cache(output: Tensor) -> None:
    run = type(output.grad_fn)._forward_cls._backward_impl  # type: ignore[union-attr]
    place = run.__code__.co_freevars.index("backward_compiler")
    run.__closure__[place].cell_contents.lazy_backward_info = None


@pytest.mark.parametrize("says", ["too hard", "torch took it from its cache on disk"])
def test_what_cannot_be_cut_does_all_at_once(
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    waiting: list[int],
    logged: pytest.LogCaptureFixture,
) -> None:
    torch.compiler.reset()
    stage = PipelineStage(sequence(1), 1, 2, compile=PLAIN)
    output = stage.forward(0, [batch()[0].requires_grad_()])
    weights, ones = list(stage.module.parameters()), torch.ones_like(output)
    expected = torch.autograd.grad(output, weights, ones, retain_graph=True)
    if says == "too hard":
        monkeypatch.setattr(halves, "halved", uncut)
    else:
        as_from_a_cache(output)
    stage.backward_input(0, [ones])
    stage.backward_weight(0)
    torch.compiler.reset()
    torch.testing.assert_close([w.grad for w in weights], list(expected), rtol=1e-12, atol=1e-12)
    assert waiting == []
    assert "weight gradients do not wait in a compiled part of a stage: " + says in logged.text


# ---- options


@pytest.mark.parametrize(
    ("compile_", "says"),
    [
        ("inductor", "compile='inductor': must be True, False, or options"),
        ({"speed": 3}, "compile= has no option speed"),
    ],
)
def test_options_that_there_are_not(compile_: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        PipelineStage(sequence(1), 0, 1, compile=compile_)


def test_without_a_compiler_graphs_run_as_they_are(
    monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(names, "has_compiler", lambda device: False)
    stage = stage_of()
    check(lambda: stage, Staged(stage, compile=True), tolerance=1e-12)
    assert "there is no compiler for cpu here" in logged.text


def test_what_is_not_finite_is_found_inside_a_compiled_stage() -> None:
    class Infinite(Block):
        def forward(self, value: Tensor) -> Any:
            return super().forward(value / 0)

    model = nn.Sequential(Infinite(), Block())
    warns = Loss(loss_fn, nonfinite="warn")
    pipe = Pipeline(model, compile=PLAIN, schedule="1F1B", ranks=2, loss_fn=warns)
    value, target = batch()
    pipe.step(value, target=target)
    place = pipe.find_nonfinite(value, target=target)
    assert place is not None
    assert place.module == "0"
    assert pipe.stages[0].compiles


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.skipif(not names.has_compiler("cpu"), reason="there is no C++ compiler")
def test_inductor(waiting: list[int], logged: pytest.LogCaptureFixture) -> None:
    # Each elementwise operation and each sum over rows is seconds of a C++ compiler.
    module = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False))
    stage = of(module, lambda: x(8, WIDTH, dtype=torch.float32)).float()
    staged = Staged(stage, compile={"backend": "inductor", "mode": "reduce-overhead"})
    check(lambda: stage, staged, tolerance=1e-5)
    assert waiting[0] == 2
    assert "compiled stages run without CUDA graphs" in logged.text
    assert "runs without compilation" not in logged.text
