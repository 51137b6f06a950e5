"""Compiled stages: the numbers are those of a plain loop without compilation, and weights' gradients wait."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import Loss, Microbatches, Pipeline, PipelineStage, add_loss
from penstock._engine.compiled import halves, names
from penstock._engine.compiled.halves import HalvesError
from penstock.backward import PendingGradients, SplitBackward
from penstock.errors import StageError, UsageError
from penstock.testing import Case, Verdict, judge
from tests.backward.graphs import GRAPHS, judged, of, rerun, x
from tests.catalogue.making import Does

pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH = 6
PLAIN = {"backend": "plain"}


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    torch.compiler.reset()
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
    value, target = torch.randn(
        2, 8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(8)
    )
    return value, target


def trained(model: nn.Module, plain: nn.Module, **options: Any) -> tuple[Pipeline, Verdict]:
    """Two steps of a pipeline of the model, beside the loop over microbatches of one as it is."""
    defaults: dict[str, Any] = {"schedule": "ZB-H1", "ranks": 2, "microbatches": 4, "seed": 1}
    pipe = Pipeline(model, loss_fn=loss_fn, **(defaults | options))
    values, targets = (tensor.chunk(4) for tensor in batch())
    case = Case(plain, [Microbatches(values)], targets, loss_fn)
    # An evaluation would be compiled too.
    verdict = judge(case, pipe, steps=2, evaluate=False)
    verdict.check(1e-12)
    return pipe, verdict


# ---- stages that a pipeline compiles


def test_equal_stages_are_compiled_once_and_never_again(
    waiting: list[int], logged: pytest.LogCaptureFixture
) -> None:
    counts: list[Any] = []

    def count() -> None:
        counts.append((names.graphs_compiled(), dict(torch._dynamo.utils.counters["frames"])))

    count()
    pipe, verdict = trained(sequence(), sequence(), ranks=4, compile=PLAIN)
    count()
    # The first stage's input needs no gradient.
    assert counts[1][0] - counts[0][0] == 2
    assert "stage 1: compiled 1 graphs" in logged.text
    assert "stage 2: compiled 0 graphs" in logged.text
    # The norm's wait in the first stage only, which has nothing to do in the inputs' half.
    assert sorted(waiting) == 2 * 12 * [4] + 2 * 4 * [6]
    # What runs as it is written has the same bits.
    assert trained(sequence(), sequence())[1].digest() == verdict.digest()
    value, target = batch()
    pipe.step(value, target=target)
    count()
    assert counts[2] == counts[1]
    with torch.no_grad():
        expected = loss_fn(sequence()(value), target)
    assert pipe.evaluate(value, target=target).loss == pytest.approx(expected.item(), abs=1e-12)


@pytest.mark.nightly
def test_shapes_may_change_and_are_compiled_twice_at_most(waiting: list[int]) -> None:
    counts = []
    for rows in [8], [8, 12, 8], [8, 12, 20, 8]:
        torch.compiler.reset()
        before, sizes = names.graphs_compiled(), iter(rows)
        stage = of(sequence(1))
        stage.make = partial(lambda left: x(next(left), WIDTH), sizes)
        judged(stage, "ZB-H1", microbatches=len(rows), compile=PLAIN).check(1e-12)
        counts.append(names.graphs_compiled() - before)
    assert counts[0] < counts[1] == counts[2]
    assert set(waiting) == {4}


def in_turn(m: Any, value: Tensor) -> Tensor:
    """A forward of a model's own, which is cut by its calls."""
    value = m.start(value).tanh()
    for block in m.blocks:
        value = block(value)
    return value


def looping() -> Any:
    torch.manual_seed(0)
    return Does(in_turn, start=linear(), blocks=[Dropping() for _ in range(4)])


def test_a_model_that_is_cut_by_its_calls_is_compiled_piece_by_piece(waiting: list[int]) -> None:
    model, before = looping(), names.graphs_compiled()
    trained(model, looping(), compile=PLAIN)
    # Blocks whose input needs a gradient, all of which do; the single layer runs as it is.
    assert names.graphs_compiled() - before == 1
    assert waiting.count(4) == 2 * 4 * 4
    assert model.start._compiled_call_impl is None


@pytest.mark.nightly
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs(name: str, logged: pytest.LogCaptureFixture) -> None:
    judged(GRAPHS[name](), "ZB-H1", compile=PLAIN).check(1e-12)
    refused = name in ("a gradient in forward", "lstm", "gru", "experts")
    runs_as_it_is = re.search("stage 0: .*(without|cannot capture)", logged.text) is not None
    assert runs_as_it_is == refused


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


def compiled_block() -> Block:
    block = Block()
    block.compile(backend="aot_eager")
    return block


def around() -> nn.Module:
    """A checkpoint around what is compiled, which is compiled in any case."""
    return Does(lambda m, value: rerun(m.block, value), block=compiled_block())


def tied() -> nn.Module:
    """Uses weights inside and outside of what is compiled."""
    return Does(
        lambda m, value: m.second(m.first(value)) @ m.second.up.weight + m.first.bias,
        first=linear(), second=compiled_block(),
    )  # fmt: skip


class Autocast(Block):
    def forward(self, value: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(value)


@pytest.mark.parametrize(
    ("kind", "weights", "how"),
    [
        (Breaks, [2, 2], PLAIN),
        (Remembers, [4], PLAIN),
        (tied, [1, 1, 4], None),
        *(
            pytest.param(*row, marks=pytest.mark.nightly)
            for row in [
                (Shares, [4], PLAIN),
                (Dropping, [4], PLAIN),
                (Twin, [3], PLAIN),
                (Frozen, [2], PLAIN),
                (Reruns, [4], PLAIN),
                (around, [4], None),
                (Autocast, [4], PLAIN),
            ]
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_halves_are_those_without_compilation(
    kind: Any, weights: list[int], how: Any, waiting: list[int]
) -> None:
    dtype = torch.float32 if kind is Autocast else torch.float64
    stage = of(sequence(1, kind), lambda: x(8, WIDTH, dtype=dtype)).to(dtype)
    judged(stage, "ZB-H1", compile=how).check(2e-2 if kind is Autocast else 1e-12)
    assert sorted(waiting) == sorted(2 * weights)


def test_a_stage_may_change_its_input(waiting: list[int]) -> None:
    trained(*(sequence(1).append(sequence(1, Changes)[0]) for _ in "ab"), compile=PLAIN)
    assert sorted(waiting) == 8 * [4] + 8 * [6]


def first_half() -> tuple[PipelineStage, Tensor, list[Tensor]]:
    """A compiled stage between the halves, the gradient of its output, and the gradients of its weights."""
    stage = PipelineStage(sequence(1), 1, 2, compile=PLAIN)
    output = stage.forward(0, [batch()[0].requires_grad_()])
    weights, ones = list(stage.module.parameters()), torch.ones_like(output)
    expected = torch.autograd.grad(output, weights, ones, retain_graph=True)
    return stage, ones, list(expected)


def test_hooks_run_once_for_each_microbatch_when_the_weights_half_does() -> None:
    stage, ones, _ = first_half()
    seen: list[Tensor] = []
    weight = stage.module.get_parameter("0.up.weight")
    weight.register_hook(seen.append)
    stage.backward_input(0, [ones])
    assert seen == []
    stage.backward_weight(0)
    assert len(seen) == 1
    assert torch.equal(seen[0], weight.grad)  # type: ignore[arg-type]
    # What is cut may run whole as well, and its weights may change or be frozen.
    with torch.no_grad():
        weight.mul_(1)
    stage.forward(1, [batch()[0].requires_grad_()])
    stage.backward(1, [ones])
    torch.testing.assert_close(weight.grad, 2 * seen[0])


def test_the_weights_half_does_not_hang_on_autocast_around_it() -> None:
    stage, ones, expected = first_half()
    stage.backward_input(0, [ones])
    with torch.autocast("cpu", torch.bfloat16):
        stage.backward_weight(0)
    torch.testing.assert_close([weight.grad for weight in stage.module.parameters()], expected)


def test_weights_may_change_their_data_or_be_frozen() -> None:
    stage = PipelineStage(sequence(1), 1, 2, compile=PLAIN)
    weight = stage.module.get_parameter("0.up.weight")
    for change in (
        lambda: weight.data.mul_(2),
        lambda: setattr(weight, "data", weight.data.clone() / 3),
        lambda: weight.requires_grad_(False),
    ):
        change()
        stage.module.zero_grad()
        plain, value = copy.deepcopy(stage.module), batch()[0].requires_grad_()
        ones = torch.ones_like(stage.forward(0, [value]))
        (gradient,) = stage.backward_input(0, [ones])
        stage.backward_weight(0)
        plain(value).backward(ones)
        actual = [gradient, *(one.grad for one in stage.module.parameters())]
        expected = [value.grad, *(one.grad for one in plain.parameters())]
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_what_waits_must_stay_as_it_is() -> None:
    stage, ones, _ = first_half()
    stage.backward_input(0, [ones])
    ones.zero_()
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


@pytest.mark.parametrize(
    "name", ["a function", *(pytest.param(n, marks=pytest.mark.nightly) for n in [*ALREADY][:5])]
)
def test_what_is_compiled_already(name: str, waiting: list[int]) -> None:
    trained(ALREADY[name](), sequence())
    # More than one weight at a time wait in what is compiled alone.
    assert max(waiting) > 1


# ---- what cannot be compiled or cut


@pytest.mark.nightly
def test_a_compiler_that_leaves_the_graphs_as_they_are(waiting: list[int]) -> None:
    leaves: dict[str, Any] = {"backend": lambda graph, inputs: graph.forward}
    trained(sequence(), sequence(), compile=leaves)
    assert set(waiting) == {1}


def test_what_cannot_be_captured_runs_without(logged: pytest.LogCaptureFixture) -> None:
    stage = PipelineStage(nn.LSTM(WIDTH, WIDTH, dtype=torch.float64), 0, 1, compile=PLAIN)
    with torch.no_grad():  # an evaluation, which says nothing of training
        stage.forward(0, [batch()[0]])
    for microbatch in range(2):
        output, _ = stage.forward(microbatch, [batch()[0]])
        stage.backward(microbatch, [torch.ones_like(output), None, None])
    assert logged.text.count("stage 0: torch.compile cannot capture any of it") == 1


def scales(m: Any, x: Tensor) -> Tensor:
    """Code between its units gives them tensors of the batch."""
    scale = x.abs().amax(-1, keepdim=True)
    for block in m.blocks:
        x = block(x * scale)
    return x


def test_a_unit_that_a_compiler_refuses_leaves_no_traces(logged: pytest.LogCaptureFixture) -> None:
    """By then the first unit has run, with what the score holds for it."""
    graphs: list[Any] = []

    def refuses_the_second(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        if len(graphs) > 1:
            raise RuntimeError("one graph is enough")
        return graph.forward

    model: Any = Does(scales, blocks=[Block() for _ in range(3)])
    model.blocks[1].append = linear()  # another kind of unit
    case = Case(model, (batch()[0],), batch()[0], functional.mse_loss)
    pipe = Pipeline(
        copy.deepcopy(model), schedule="1F1B", ranks=2, stages=["blocks.2"], microbatches=2,
        loss_fn=functional.mse_loss, compile={"backend": refuses_the_second},
    )  # fmt: skip
    judge(case, pipe).check(1e-12)
    assert "one graph is enough" in logged.text
    assert "it runs without compilation" in logged.text


def test_single_layers_are_not_compiled_and_it_is_said(logged: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    case = Case(model, (batch()[0],), batch()[0], functional.mse_loss)
    pipe = Pipeline(
        copy.deepcopy(model), schedule="1F1B", ranks=2, stages=2, microbatches=2,
        loss_fn=functional.mse_loss, compile=True,
    )  # fmt: skip
    judge(case, pipe).check(1e-12)
    assert logged.text.count("nothing of stage 1 is compiled, as it has single layers") == 1


def twice(m: Any, value: Tensor) -> Tensor:
    """Differentiates through its own gradient, adds a loss, and counts its calls in a buffer."""
    m.calls += 1
    energy = functional.dropout(m.layer(value).tanh(), 0.5).square().sum()
    add_loss("energy", energy, 0.1)
    torch._dynamo.graph_break()
    (force,) = torch.autograd.grad(energy, value, create_graph=True)
    return force


def differentiating() -> nn.Module:
    return Does(twice, layer=linear(), calls=torch.zeros(()))


def raises(*_: Any) -> Any:
    raise ArithmeticError("out of order")


@pytest.mark.parametrize(
    ("kind", "how", "says"),
    [
        (differentiating, PLAIN, "it differentiates twice through compiled code"),
        (Remembers, {"backend": raises}, "out of order"),
    ],
)
def test_what_fails_compiled_is_undone_and_runs_without(
    kind: Any, how: Any, says: str, logged: pytest.LogCaptureFixture
) -> None:
    stage = of(sequence(1, kind), lambda: x(8, WIDTH))
    judged(stage, "ZB-H1", compile=how).check(1e-12)
    assert says in logged.text
    assert "runs without" in logged.text
    # Also random numbers, where no pipeline gives each module its own.
    module, value = sequence(1, kind), batch()[0].requires_grad_()
    torch.manual_seed(5)
    expected = copy.deepcopy(module)(value)
    torch.manual_seed(5)
    actual = PipelineStage(module, 0, 1, compile=how).forward(0, [value])
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.nightly
def test_a_compiler_that_fails_is_done_without_in_a_pipeline(
    logged: pytest.LogCaptureFixture,
) -> None:
    model = looping()
    trained(model, looping(), compile={"backend": raises})
    assert "it runs without compilation" in logged.text
    assert model.blocks[0]._compiled_call_impl is None
    stage = PipelineStage(Block(), 0, 1, compile={"backend": raises, "fullgraph": True})
    with pytest.raises(Exception, match="out of order"):
        stage.forward(0, [batch()[0]])


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


def test_what_is_compiled_is_not_recomputed() -> None:
    with pytest.raises(UsageError, match="recompute= cannot be used with compile="):
        Pipeline(sequence(), ranks=2, recompute=True, compile=PLAIN)


@pytest.mark.nightly
def test_without_a_compiler_graphs_run_as_they_are(
    monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(names, "has_compiler", lambda device: False)
    trained(sequence(), sequence(), compile=True)
    assert "there is no compiler for cpu here" in logged.text


def test_what_is_not_finite_is_found_inside_a_compiled_stage() -> None:
    class Infinite(Block):
        def forward(self, value: Tensor) -> Any:
            return super().forward(value / 0)

    warns = Loss(loss_fn, nonfinite="warn")
    model = nn.Sequential(Infinite(), Block())
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
    how = {"backend": "inductor", "mode": "reduce-overhead"}
    judged(stage, "ZB-H1", compile=how).check(1e-5)
    assert waiting[0] == 2
    assert "compiled stages run without CUDA graphs" in logged.text
    assert "stage 0: torch.compile cannot" not in logged.text
