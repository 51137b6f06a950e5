"""Compiled stages in pipelines: the numbers are those without compilation, and weights' gradients wait."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import checkpoint

from penstock import Pipeline, PipelineStage
from penstock.backward import PendingGradients, SplitBackward
from penstock.compiled import halves, names
from penstock.compiled.halves import HalvesError
from penstock.compiled.stages import tally
from penstock.errors import StageError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH = 6
PLAIN = {"backend": "plain"}


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "penstock")
    return caplog


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many weights each use that the weights' half computes has."""
    found: list[int] = []
    weight_half = SplitBackward.weight_half

    def counted(self: SplitBackward, pending: PendingGradients) -> None:
        found.extend(len(use.edges) for use in pending.uses)
        weight_half(self, pending)

    monkeypatch.setattr(SplitBackward, "weight_half", counted)
    return found


def linear(out: int = WIDTH) -> nn.Linear:
    return nn.Linear(WIDTH, out, dtype=torch.float64)


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


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(rows)
    return tuple(torch.randn(rows, WIDTH, dtype=torch.float64, generator=made) for _ in "ab")  # type: ignore[return-value]


class Trained(NamedTuple):
    loss: float
    grads: list[Tensor | None]
    pipe: Pipeline


def trained(model: nn.Module, *, steps: int = 2, **options: Any) -> Trained:
    """The last of some steps, each with gradients of its own."""
    asked: dict[str, Any] = {"schedule": "ZB-H1", "ranks": 2, "microbatches": 4, "seed": 1}
    pipe = Pipeline(model, loss_fn=loss_fn, **(asked | options))
    value, target = batch()
    for _ in range(steps):
        for parameter in pipe.parameters():
            parameter.grad = None
        result = pipe.step(value, target=target)
    assert result.loss is not None
    return Trained(result.loss, [parameter.grad for parameter in pipe.parameters()], pipe)


def check_alike(found: Trained, expected: Trained, tolerance: float = 0.0) -> None:
    assert found.loss == pytest.approx(expected.loss, abs=tolerance)
    torch.testing.assert_close(found.grads, expected.grads, rtol=tolerance, atol=tolerance)


def run_halves(stage: PipelineStage, *values: Tensor) -> list[Any]:
    """Outputs and gradients of a microbatch for each value, whose backward is in two halves, and buffers."""
    found: list[Any] = []
    for microbatch, value in enumerate(values or [batch()[0].requires_grad_()]):
        torch.manual_seed(microbatch)
        output = stage.forward(microbatch, [value])
        outputs = output if isinstance(output, tuple) else (output,)
        roots = [each.detach() ** 2 for each in outputs if each.requires_grad]
        dinputs = stage.backward_input(microbatch, roots)
        stage.backward_weight(microbatch)
        found += [*(each.detach().clone() for each in outputs), *dinputs]
    return [*found, *(p.grad for p in stage.module.parameters()), *stage.module.buffers()]


@pytest.fixture(scope="module")
def eager() -> Trained:
    return trained(sequence())


# ---- stages that a pipeline compiles


def test_equal_stages_are_compiled_once_and_never_again(
    eager: Trained, waiting: list[int], told: pytest.LogCaptureFixture
) -> None:
    torch.compiler.reset()
    before = tally.compiled
    found = trained(sequence(), steps=1, ranks=4, compile=PLAIN)
    # The first stage's input needs no gradient.
    assert tally.compiled - before == 2
    assert "stage 1: 1 graphs, 1 of them compiled now" in told.text
    assert "stage 2: 1 graphs, 0 of them compiled now" in told.text
    # The norm's wait in the first stage only, which has nothing to do in the inputs' half.
    assert sorted(waiting) == [4] * 12 + [6] * 4
    check_alike(found, eager)
    compiled, frames = tally.compiled, dict(torch._dynamo.utils.counters["frames"])
    for _ in range(2):
        found.pipe.step(batch()[0], target=batch()[1])
    assert tally.compiled == compiled
    assert dict(torch._dynamo.utils.counters["frames"]) == frames


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-V"])
def test_every_schedule_gives_the_same_bits(eager: Trained, schedule: str) -> None:
    found = trained(sequence(), schedule=schedule, compile=PLAIN)
    check_alike(found, eager)
    value, target = batch()
    evaluated = [of.pipe.eval(value, target=target).loss for of in (found, eager)]
    assert evaluated[0] == evaluated[1]
    torch.testing.assert_close(found.pipe.predict(value), eager.pipe.predict(value), rtol=0, atol=0)


def test_shapes_may_change_and_are_compiled_twice_at_most(waiting: list[int]) -> None:
    torch.compiler.reset()
    found, plain = (
        Pipeline(sequence(), schedule="ZB-H1", ranks=2, loss_fn=loss_fn, compile=compiled)
        for compiled in (PLAIN, None)
    )
    compiled, largest = [], []
    for rows in (8, 12, 20, 8):
        value, target = batch(rows)
        theirs = plain.step(value, target=target)
        waiting.clear()
        ours = found.step(value, target=target)
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-12)
        compiled.append(tally.compiled)
        largest.append(max(waiting))
    assert compiled[0] < compiled[1] == compiled[2] == compiled[3]
    assert largest == [6] * 4
    for mine, other in zip(found.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-12)


class Autocast(Block):
    def forward(self, value: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(value.float()).double()


@pytest.mark.parametrize("around", [False, True])
def test_autocast(around: bool, waiting: list[int]) -> None:
    make = (lambda: Block().float()) if around else (lambda: Autocast().float())
    value = batch()[0].to(torch.float32 if around else torch.float64).requires_grad_()
    found = []
    for compiled in (PLAIN, None):
        stage = PipelineStage(sequence(1, make), 1, 2, compile=compiled)
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            found.append(run_halves(stage, value))
    assert waiting
    torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)


class Dropping(Block):
    def forward(self, value: Tensor) -> Any:
        return functional.dropout(super().forward(value), 0.5, self.training)


def test_masks_do_not_depend_on_the_schedule() -> None:
    first, second = (
        trained(sequence(2, Dropping), schedule=name, compile=PLAIN) for name in ("ZB-H1", "GPipe")
    )
    check_alike(first, second)


class Own(nn.Module):
    """A model with a forward of its own, which is cut by its calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.start, self.blocks = linear(), nn.ModuleList(Block() for _ in range(4))

    def forward(self, value: Tensor) -> Any:
        value = self.start(value).tanh()
        for block in self.blocks:
            value = block(value)
        return value


def test_a_model_that_is_cut_by_its_calls_is_compiled_piece_by_piece(waiting: list[int]) -> None:
    expected = trained(Own())
    waiting.clear()
    torch.compiler.reset()
    model, before = Own(), tally.compiled
    found = trained(model, compile=PLAIN, steps=1)
    check_alike(found, expected)
    # Blocks whose input needs a gradient, all of which do; the single layer runs as it is.
    assert tally.compiled - before == 1
    assert waiting.count(4) == 4 * 4
    assert model.start._compiled_call_impl is None
    frames = dict(torch._dynamo.utils.counters["frames"])
    found.pipe.step(batch()[0], target=batch()[1])
    assert dict(torch._dynamo.utils.counters["frames"]) == frames


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
        made = super().forward(value)
        return made.view(-1), value, made[:3]


class Changes(Block):
    """Changes its input, what it computes and a view of that in place."""

    def forward(self, value: Tensor) -> Any:
        value.mul_(2)
        hidden = self.up(value)
        hidden[:2].add_(1)
        return self.down(hidden.tanh_()).relu_()


class Remembers(Block):
    """Has buffers, which it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, value: Tensor) -> Any:
        self.calls += 1  # type: ignore[assignment, operator]
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


@pytest.mark.parametrize(
    ("kind", "weights"),
    [
        (Breaks, [2, 2]),
        (Shares, [4]),
        (Changes, [4]),
        (Dropping, [4]),
        (Remembers, [4]),
        (Twin, [3]),
        (Frozen, [2]),
    ],
)
def test_halves_are_those_without_compilation(
    kind: Any, weights: list[int], waiting: list[int]
) -> None:
    values = [batch()[0].requires_grad_() for _ in range(2)]
    found = []
    for compiled in (None, PLAIN):
        waiting.clear()
        stage = PipelineStage(sequence(1, kind), 1, 2, compile=compiled)
        found.append(run_halves(stage, *values))
    assert sorted(waiting) == sorted(2 * weights)
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_hooks_run_once_for_each_microbatch_when_the_weights_half_does() -> None:
    stage = PipelineStage(sequence(1), 1, 2, compile=PLAIN)
    seen: list[Tensor] = []
    weight: Any = stage.module[0].up.weight  # type: ignore[index]
    weight.register_hook(seen.append)
    value = batch()[0].requires_grad_()
    output = stage.forward(0, [value])
    stage.backward_input(0, [torch.ones_like(output)])
    assert seen == []
    stage.backward_weight(0)
    assert len(seen) == 1
    assert torch.equal(seen[0], weight.grad)


def test_weights_that_change_their_data_or_are_frozen() -> None:
    stages = [PipelineStage(sequence(1), 0, 1, compile=compiled) for compiled in (PLAIN, None)]
    for change in (_scale, _replace, _freeze):
        found = []
        for stage in stages:
            change(stage.module[0].up)  # type: ignore[index]
            stage.module.zero_grad()
            found.append(run_halves(stage))
        torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def _scale(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.mul_(2)


def _replace(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data.clone() / 3


def _freeze(layer: nn.Linear) -> None:
    layer.weight.requires_grad_(False)


def test_what_waits_must_stay_as_it_is() -> None:
    stage = PipelineStage(nn.Sequential(linear()), 1, 2, compile=PLAIN)
    output = stage.forward(0, [batch()[0].requires_grad_()])
    grad = torch.ones_like(output)
    stage.backward_input(0, [grad])
    grad.zero_()
    with pytest.raises(StageError, match="was changed in place between the inputs' half"):
        stage.backward_weight(0)


def test_the_same_weight_in_compiled_blocks_and_outside(waiting: list[int]) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = linear(), Block()

        def forward(self, value: Tensor) -> Any:
            return self.second(self.first(value)) @ self.second.up.weight + self.first.bias

    found = []
    for compiled in (True, False):
        torch.manual_seed(0)
        model = Tied()
        if compiled:
            model.second.compile(backend="aot_eager")
        found.append(run_halves(PipelineStage(model, 1, 2)))
    assert 4 in waiting
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


class Rerun(Block):
    def forward(self, value: Tensor) -> Any:
        return checkpoint.checkpoint(super().forward, value, use_reentrant=False)


@pytest.mark.parametrize("checkpoints", ["keep", "again"])
def test_checkpointed_regions(eager: Trained, checkpoints: str, waiting: list[int]) -> None:
    settings = {**PLAIN, "checkpoints": checkpoints}
    check_alike(trained(sequence(4, Rerun), compile=settings), eager, 1e-12)
    assert set(waiting) == {4, 6}


def test_a_checkpoint_around_a_compiled_block(eager: Trained, waiting: list[int]) -> None:
    model = sequence(4, Around)
    check_alike(trained(model), eager, 1e-12)
    assert set(waiting) == {4, 6}


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.block.compile(backend="aot_eager")

    def forward(self, value: Tensor) -> Any:
        return checkpoint.checkpoint(self.block, value, use_reentrant=False)


# ---- what the model's author has compiled


def compiled_module(module: nn.Module) -> nn.Module:
    return cast("nn.Module", torch.compile(module, backend="aot_eager"))


def compiled_in_place() -> nn.Module:
    model = sequence()
    model.compile(backend="aot_eager")
    return model


def compiled_blocks() -> nn.Module:
    return nn.Sequential(*map(compiled_module, sequence()))


def blocks_compiled_in_place() -> nn.Module:
    model = sequence()
    for block in model:
        block.compile(backend="aot_eager")
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


@pytest.mark.parametrize(
    "make",
    [
        lambda: compiled_module(sequence()),
        compiled_in_place,
        compiled_blocks,
        blocks_compiled_in_place,
        lambda: sequence(make=Decorated),
        lambda: sequence(make=CallsCompiled),
    ],
)
@pytest.mark.parametrize("schedule", ["ZB-H1", "1F1B"])
def test_what_is_compiled_already(
    make: Callable[[], nn.Module], schedule: str, eager: Trained, waiting: list[int]
) -> None:
    check_alike(trained(make(), schedule=schedule), eager, 1e-12)
    assert bool(waiting) == (schedule == "ZB-H1")
    # More than one weight at a time wait in what is compiled alone.
    assert schedule != "ZB-H1" or max(waiting) > 1


def test_what_torch_has_without_a_graph_does_all_at_once(
    told: pytest.LogCaptureFixture, waiting: list[int]
) -> None:
    torch.compiler.reset()
    stage = PipelineStage(compiled_module(sequence(1)), 1, 2)
    output = stage.forward(0, [batch()[0].requires_grad_()])
    expected = torch.autograd.grad(
        output, list(stage.module.parameters()), torch.ones_like(output), retain_graph=True
    )
    run = type(output.grad_fn)._forward_cls._backward_impl
    place = run.__code__.co_freevars.index("backward_compiler")
    # As it is where it comes from a cache on disk.
    run.__closure__[place].cell_contents.lazy_backward_info = None
    stage.backward_input(0, [torch.ones_like(output)])
    stage.backward_weight(0)
    torch.compiler.reset()
    grads = [parameter.grad for parameter in stage.module.parameters()]
    torch.testing.assert_close(grads, list(expected), rtol=1e-12, atol=1e-12)
    assert waiting == []
    assert "torch took it from its cache on disk" in told.text


def own_compiler(graph: Any, inputs: Any) -> Any:
    return graph.forward


def test_a_compiler_that_leaves_the_graphs_as_they_are(eager: Trained, waiting: list[int]) -> None:
    check_alike(trained(sequence(), compile={"backend": own_compiler}), eager)
    assert set(waiting) == {1}


# ---- what cannot be compiled


def test_what_cannot_be_captured_runs_without(
    waiting: list[int], told: pytest.LogCaptureFixture
) -> None:
    stage = PipelineStage(nn.LSTM(WIDTH, WIDTH, dtype=torch.float64), 0, 1, compile=PLAIN)
    for microbatch in range(2):
        output, _ = stage.forward(microbatch, [batch()[0]])
        stage.backward(microbatch, [torch.ones_like(output), None, None])
    assert told.text.count("stage 0: torch.compile cannot capture any of it") == 1


class Twice(nn.Module):
    """Differentiates through its own gradient, and counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, value: Tensor) -> Any:
        self.calls += 1  # type: ignore[assignment, operator]
        energy = functional.dropout(self.layer(value).tanh(), 0.5).square().sum()
        torch._dynamo.graph_break()
        (force,) = torch.autograd.grad(energy, value, create_graph=True)
        return force


def test_what_fails_compiled_is_undone_and_runs_without(told: pytest.LogCaptureFixture) -> None:
    found = []
    for compiled in (PLAIN, None):
        torch.manual_seed(0)
        found.append(run_halves(PipelineStage(Twice(), 0, 1, compile=compiled)))
    assert "stage 0: it differentiates twice through compiled code; it runs without" in told.text
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def broken(*_: Any) -> Any:
    raise ArithmeticError("out of order")


@pytest.mark.parametrize("backend", ["inductor", "plain"])
def test_a_compiler_that_fails_is_done_without(
    backend: str, monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    torch.compiler.reset()
    expected = trained(sequence(2))
    monkeypatch.setattr(names, "compile_with_inductor", broken)
    monkeypatch.setattr(names, "compile_plainly", broken)
    found = trained(sequence(2), compile={"backend": backend})
    torch.compiler.reset()
    check_alike(found, expected)
    assert "ArithmeticError: out of order" in told.text
    assert "it runs without compilation" in told.text


def test_what_cannot_be_cut_does_all_at_once(
    monkeypatch: pytest.MonkeyPatch, waiting: list[int], told: pytest.LogCaptureFixture
) -> None:
    def uncut(*_: Any) -> Any:
        raise HalvesError("too hard")

    torch.compiler.reset()
    expected = trained(sequence(2))
    waiting.clear()
    monkeypatch.setattr(halves, "cut", uncut)
    check_alike(trained(sequence(2), compile=PLAIN), expected, 1e-12)
    torch.compiler.reset()
    assert waiting == []
    assert "weight gradients do not wait in a compiled part of a stage: too hard" in told.text


# ---- options


@pytest.mark.parametrize(
    ("compile_", "said"),
    [
        ("inductor", "compile='inductor': must be True, False, or options"),
        ({"speed": 3}, "compile= has no option speed"),
        ({"checkpoints": "drop"}, "checkpoints='drop': must be one of"),
    ],
)
def test_options_that_are_none(compile_: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        PipelineStage(sequence(1), 0, 1, compile=compile_)


def test_without_a_compiler_graphs_run_as_they_are(
    monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture, eager: Trained
) -> None:
    monkeypatch.setattr(names, "has_compiler", lambda device: False)
    check_alike(trained(sequence(), compile=True), eager)
    assert "there is no compiler for cpu here" in told.text


def test_what_is_not_finite_is_found_inside_a_compiled_stage() -> None:
    class Infinite(Block):
        def forward(self, value: Tensor) -> Any:
            return super().forward(value / 0)

    model = nn.Sequential(Infinite(), Block())
    asked: dict[str, Any] = {"schedule": "1F1B", "ranks": 2, "loss_fn": loss_fn}
    pipe = Pipeline(model, compile=PLAIN, nonfinite="warn", **asked)
    value, target = batch()
    pipe.step(value, target=target)
    found = pipe.find_nonfinite(value, target=target)
    assert found is not None
    assert found.module == "0"
    assert pipe.stages[0].compiles


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not names.has_compiler("cpu"), reason="there is no C++ compiler")
def test_inductor(waiting: list[int], told: pytest.LogCaptureFixture) -> None:
    found = []
    for compiled in ({"backend": "inductor"}, None):
        torch.manual_seed(0)
        # Each elementwise operation and each sum over rows is seconds of a C++ compiler.
        module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False))
        stage = PipelineStage(module, 1, 2, compile=compiled)
        found.append(run_halves(stage, torch.ones(4, 8).requires_grad_()))
    assert waiting[0] == 2
    assert "could not be compiled" not in told.text
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
