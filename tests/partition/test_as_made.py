"""A value is what it was when it was made; state is that of a plain loop, or refused by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.errors import PartitionError, PlanError, StageError
from penstock.testing import WorkerPool
from tests.partition.driver import cut, forwards

WIDTH, PARTS = 4, 4


class Unit(nn.Module):
    """A linear layer, and what a program does around it."""

    def __init__(self, act: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.lin, self.act = nn.Linear(WIDTH, WIDTH), act
        self.register_buffer("scale", torch.ones(WIDTH))
        self.codes = torch.ones(WIDTH)
        self.calls, self.on = 0, False

    def forward(self, x: Tensor, *rest: Any) -> Any:
        return self.lin(x) if self.act is None else self.act(self, x, *rest)


class Model(nn.Module):
    """Four units in two stages, and what a program does between them."""

    def __init__(self, body: Callable[..., Any] | None = None, **acts: Any) -> None:
        super().__init__()
        for name in "abcd":
            self.add_module(name, Unit(acts.get(name)))
        self.body, self.level = body, 0

    def forward(self, x: Tensor) -> Any:
        if self.body is not None:
            return self.body(self, x)
        for name in "abcd":
            x = torch.tanh(self.get_submodule(name)(x))
        return x


def make(*args: Any, **acts: Any) -> Model:
    torch.manual_seed(0)
    return Model(*args, **acts).double()


def data(seed: int = 1) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    x, target = torch.randn(2, 8, WIDTH, dtype=torch.float64)
    return x, target


def pipeline(model: nn.Module, schedule: str = "1F1B", **options: Any) -> penstock.Pipeline:
    return penstock.Pipeline(
        model,
        stages=[["a", "b"], ["c", "d"]],
        ranks=None if "mesh" in options else 2,
        schedule=schedule,
        microbatches=PARTS,
        loss_fn=nn.functional.mse_loss,
        **options,
    )


def plain_step(model: nn.Module, seed: int) -> float:
    total = 0.0
    for x, target in zip(*(t.chunk(PARTS) for t in data(seed)), strict=True):
        loss = nn.functional.mse_loss(model(x), target) / PARTS
        loss.backward()
        total += loss.item()
    return total


Change = Callable[[Model, int], Any]


def compare(
    build: Callable[[], Model], steps: int = 2, change: Change | None = None, **options: Any
) -> None:
    """Check losses, gradients, buffers and weights of a few steps against the plain loop's."""
    mine, plain = build(), build()
    pipe = pipeline(mine, **options)
    for step in range(steps):
        for model in (mine, plain):
            if change is not None:
                change(model, step)
        x, target = data(step)
        loss = pipe.step(x, target=target).loss
        assert loss == pytest.approx(plain_step(plain, step), abs=1e-12), step
        expected = dict(plain.named_parameters())
        for name, one in pipe.weights.here.named_parameters():
            other = expected[name]
            assert (one.grad is None) == (other.grad is None), (name, step)
            if one.grad is not None:
                torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-12)
        torch.optim.SGD(plain.parameters(), 0.1).step()
        torch.optim.SGD([p for _, p in pipe.weights.here.named_parameters()], 0.1).step()
        plain.zero_grad()
        pipe.zero_grad()
    if "mesh" not in options:
        for here, there in zip(mine.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(here, there, rtol=0, atol=1e-12)


def refused(build: Callable[[], Model], words: str, **options: Any) -> None:
    x, target = data()
    with pytest.raises(PartitionError, match=words):
        pipeline(build(), **options).step(x, target=target)


# ---- tensors that units change later


def scales(unit: Any, x: Tensor) -> Any:
    h = unit.lin(x)
    unit.scale.mul_(0.5).add_(h.detach().abs().mean())
    return h


def codes(unit: Any, x: Tensor) -> Any:
    h = unit.lin(x)
    unit.codes.add_(h.detach().abs().mean())
    return h


def gives_scale(unit: Any, x: Tensor) -> Any:
    return scales(unit, x), unit.scale


def keeps(unit: Any, x: Tensor) -> Any:
    h = unit.lin(x)
    unit.codes.mul_(0).add_(h.detach().mean())
    return h, unit.codes[None]


def in_order(m: Any, h: Any) -> Any:
    return m.d(torch.tanh(m.c(torch.tanh(m.b(h)))))


LATER: dict[str, Callable[[], Model]] = {
    "a buffer": lambda: make(lambda m, x: in_order(m, m.a(x)) * m.a.scale, a=scales),
    "a view of it": lambda: make(lambda m, x: in_order(m, m.a(x)) * m.a.scale[None], a=scales),
    "an attribute": lambda: make(lambda m, x: in_order(m, m.a(x)) * m.a.codes.double(), a=codes),
    "given": lambda: make(lambda m, x: (lambda h, s: in_order(m, h) * s)(*m.a(x)), a=gives_scale),
    "a view given": lambda: make(lambda m, x: (lambda h, s: in_order(m, h) * s)(*m.a(x)), a=keeps),
    "a weight": lambda: make(lambda m, x: in_order(m, m.a(x)) @ m.a.lin.weight),
}


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZB-H1"])
@pytest.mark.parametrize("name", LATER)
def test_tensors_of_units_are_taken_as_made(name: str, schedule: str) -> None:
    compare(LATER[name], schedule=schedule)


@pytest.mark.parametrize("name", LATER)
def test_what_a_stage_has_sent_stays_as_it_was(name: str) -> None:
    model, (x, other) = LATER[name](), data()
    parts = cut(model, [["a", "b"], ["c", "d"]], (x,))
    sent = forwards(parts, (x,)).sent[0]
    before = {edge: tensor.detach().clone() for edge, tensor in sent.items()}
    assert len(before) > 1
    forwards(parts, (other,))
    assert all(torch.equal(sent[edge], tensor) for edge, tensor in before.items())


def test_a_buffer_that_its_unit_changes_after_another_stage_has_used_it() -> None:
    def body(m: Any, x: Tensor) -> Any:
        used = torch.tanh(m.c(m.b(m.a(x)) * m.a.scale))
        return m.d(used * m.a.scale) + m.a(x)

    refused(lambda: make(body, a=scales), r"a in stage 0 changes a\.scale")


# ---- attributes that change between steps


def frozen_at_first(unit: Any, x: Tensor) -> Any:
    with nullcontext() if unit.on else torch.no_grad():
        return unit.lin(x)


def skipped_at_first(unit: Any, x: Tensor) -> Any:
    return unit.lin(x) if unit.on else x


def in_place_later(unit: Any, x: Tensor) -> Any:
    return unit.lin(x.mul_(2) if unit.on else x * 2)


def of_less_precision(unit: Any, x: Tensor) -> Any:
    return unit.lin(x).float() if unit.on else unit.lin(x)


def in_full_precision(m: Any, x: Tensor) -> Any:
    return m.d(m.c(m.b(m.a(x)).double()))


def passes_both(m: Any, x: Tensor) -> Any:
    h = m.a(x) * 1
    return m.d(m.c(m.b(h) + h))


BODIES = {in_place_later: passes_both, of_less_precision: in_full_precision}
"""What happens between units, where it is not the usual."""


@pytest.mark.parametrize("act", [frozen_at_first, skipped_at_first, in_place_later])
@pytest.mark.parametrize("place", ["a", "b", "c"])
def test_an_attribute_of_a_unit_may_change_between_steps(act: Any, place: str) -> None:
    def change(model: Any, step: int) -> None:
        getattr(model, place).on = step > 0

    compare(lambda: make(BODIES.get(act), **{place: act}), 3, change)


def depth(m: Any, x: Tensor) -> Any:
    x = m.b(m.a(x))
    for _ in range(m.level):
        x = m.c(torch.tanh(x))
    return m.d(x) if m.d.training else m.d(x * 2)


def test_what_chooses_the_way_may_change_between_steps() -> None:
    def change(model: Any, step: int) -> None:
        model.level = step
        model.d.training = step != 1

    compare(lambda: make(depth), 3, change)


def test_hooks_may_come_after_the_first_step() -> None:
    def change(model: Any, step: int) -> None:
        if step == 1:
            model.b.register_forward_hook(lambda unit, args, out: (out * 2).detach())
            model.c.register_forward_pre_hook(lambda unit, args: (args[0].clone(),))

    compare(make, 3, change)


@pytest.mark.parametrize(
    "act", [frozen_at_first, skipped_at_first, in_place_later, of_less_precision]
)
def test_what_nobody_could_foresee_is_right_or_an_error_and_the_next_step_is_right(
    act: Any,
) -> None:
    flag = {"on": False}

    class Hidden:
        """Looks like a constant."""

        def __bool__(self) -> bool:
            return flag["on"]

    def build() -> Model:
        model = make(BODIES.get(act), b=act)
        vars(model.b)["on"] = Hidden()
        return model

    flag["on"] = False
    mine, plain = build(), build()
    pipe = pipeline(mine)
    x, target = data(0)
    assert pipe.step(x, target=target).loss == pytest.approx(plain_step(plain, 0))
    flag["on"] = True
    if act in (frozen_at_first, of_less_precision):
        with pytest.raises(PlanError, match=r"in stage 0 .*planned anew at the next step"):
            pipe.step(x, target=target)
    mine.zero_grad()
    plain.zero_grad()
    assert pipe.step(x, target=target).loss == pytest.approx(plain_step(plain, 0))
    for one, other in zip(mine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-12)


# ---- objects that the forward makes and units change


class State:
    def __init__(self) -> None:
        self.n, self.h = 1, 0.0


def by_list(unit: Any, x: Tensor, c: Any) -> Any:
    c[0] += 1
    return unit.lin(x) * c[0]


def by_append(unit: Any, x: Tensor, c: Any) -> Any:
    c.append(x.shape[-1])
    return unit.lin(x) * len(c)


def by_pop(unit: Any, x: Tensor, c: Any) -> Any:
    return unit.lin(x) * c.pop()


def by_key(unit: Any, x: Tensor, c: Any) -> Any:
    c["n"] = c.get("n", 0) + 1
    return unit.lin(x) * c["n"]


def by_object(unit: Any, x: Tensor, c: Any) -> Any:
    c.n += 1
    return unit.lin(x) * c.n


def by_next(unit: Any, x: Tensor, c: Any) -> Any:
    return unit.lin(x) * next(c)


def by_tensor(unit: Any, x: Tensor, c: Any) -> Any:
    h = unit.lin(x) + c.get("h", 0.0)
    c["h"] = h * 0.5
    return h


def by_tensors(unit: Any, x: Tensor, c: Any) -> Any:
    c.append(unit.lin(x))
    return c[-1] + c[0]


def by_tensor_of_object(unit: Any, x: Tensor, c: Any) -> Any:
    h = unit.lin(x) + c.h
    c.h = torch.tanh(h)
    return h


def by_set(unit: Any, x: Tensor, c: Any) -> Any:
    c.add(len(c))
    return unit.lin(x) * len(c)


def numbers() -> Iterator[int]:
    yield from (1, 2, 3, 4)


OBJECTS: dict[str, tuple[Callable[[], Any], Any]] = {
    "a counter in a list": (lambda: [0], by_list),
    "append": (list, by_append),
    "pop": (lambda: [1, 2, 3, 4], by_pop),
    "a key": (dict, by_key),
    "an attribute": (State, by_object),
    "a set": (set, by_set),
    "count": (lambda: itertools.count(1), by_next),
    "an iterator": (lambda: iter([1, 2, 3, 4]), by_next),
    "a generator": (numbers, by_next),
    "a tensor under a key": (dict, by_tensor),
    "tensors in a list": (list, by_tensors),
    "a tensor of an object": (State, by_tensor_of_object),
}


def with_object(start: Callable[[], Any]) -> Callable[[Any, Tensor], Any]:
    def body(m: Any, x: Tensor) -> Any:
        c = start()
        for unit in (m.a, m.b, m.c, m.d):
            x = torch.tanh(unit(x, c))
        return x

    return body


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_travels_as_what_it_became(name: str) -> None:
    start, act = OBJECTS[name]
    if name in ("a set", "count", "an iterator", "a generator"):
        says = "gives a (a set that it changes|an iterator)"
        refused(lambda: make(with_object(start), **dict.fromkeys("abcd", act)), says)
    else:
        compare(lambda: make(with_object(start), **dict.fromkeys("abcd", act)))


def test_an_object_with_an_argument_in_it() -> None:
    def body(m: Any, x: Tensor) -> Any:
        c: dict[str, Any] = {"x": x, "n": 0}
        for unit in (m.a, m.b, m.c, m.d):
            x = torch.tanh(unit(x, c)) + c["x"]
        return x * c["n"]

    compare(lambda: make(body, **dict.fromkeys("abcd", by_key)))


def test_code_between_units_sees_what_units_made_of_an_object() -> None:
    def body(m: Any, x: Tensor) -> Any:
        c = [0]
        h = m.b(m.a(x, c), c) * c[0]
        return m.d(m.c(h, c), c) * c[0]

    compare(lambda: make(body, **dict.fromkeys("abcd", by_list)))


def test_a_number_that_depends_on_data_in_an_object() -> None:
    def act(unit: Any, x: Tensor, c: Any) -> Any:
        c.append(float(x.detach().sum()))
        return unit.lin(x) * len(c)

    says = "a in stage 0 gave .* in place of"
    refused(lambda: make(with_object(list), **dict.fromkeys("abcd", act)), says)


def test_an_array_that_units_change() -> None:
    np = pytest.importorskip("numpy")

    def act(unit: Any, x: Tensor, c: Any) -> Any:
        c[0] += 1
        return unit.lin(x) * float(c[0])

    start = lambda: np.zeros(1)  # noqa: E731
    says = "gives a a ndarray that it changes"
    refused(lambda: make(with_object(start), **dict.fromkeys("abcd", act)), says)


# ---- what lies outside of the model


SHARED: dict[str, Any] = {}
ITEMS: list[Any] = []


def test_a_number_in_a_global_dictionary_that_nobody_else_reads() -> None:
    def leaves(unit: Any, x: Tensor) -> Any:
        SHARED["n"] = SHARED.get("n", 0) + 1
        return unit.lin(x)

    x, target = data()
    pipeline(make(a=leaves)).step(x, target=target)  # nobody else reads it
    SHARED.clear()


def test_a_tied_embedding_with_a_largest_norm() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Embedding(5, WIDTH, max_norm=0.5)
            self.b, self.c = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.d = nn.Linear(WIDTH, 5, bias=False)
            self.d.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = self.d(self.c(self.b(self.a(x))))
            return h

    pipe = pipeline(Tied())
    with pytest.raises(
        PartitionError, match=r"a in stage 0 changes a\.weight in place, which stages 0, 1"
    ):
        pipe.step(torch.zeros(8, dtype=torch.long), target=torch.zeros(8, 5))


def test_what_is_written_and_never_read_elsewhere() -> None:
    def body(m: Any, x: Tensor) -> Any:
        m.deltas = x.mean(0)
        return in_order(m, m.a(x)) + m.deltas

    compare(lambda: make(body))


def test_a_switch_that_turns_in_every_call() -> None:
    def body(m: Any, x: Tensor) -> Any:
        m.turned = not getattr(m, "turned", False)
        return in_order(m, m.a(x)) * (2 if m.turned else 1)

    compare(lambda: make(body))


def test_a_flag_in_an_object_that_turns_in_every_call() -> None:
    def body(m: Any, x: Tensor) -> Any:
        m.config.turned = not m.config.turned
        return in_order(m, m.a(x)) * (2 if m.config.turned else 1)

    def build() -> Model:
        model: Any = make(body)
        model.config = Config()
        model.config.turned = False
        return model  # type: ignore[no-any-return]

    compare(build)


def test_what_the_first_microbatch_leaves_is_read_by_others() -> None:
    def body(m: Any, x: Tensor) -> Any:
        if getattr(m, "first", None) is None:
            m.first = x.mean()
        return in_order(m, m.a(x)) * m.first

    compare(lambda: make(body))


# ---- recomputation


def spectral(unit: Any, x: Tensor) -> Any:
    unit.scale.copy_(nn.functional.normalize(unit.lin.weight.detach() @ unit.scale, dim=0))
    sigma = unit.scale @ unit.lin.weight @ unit.scale
    unit.calls += 1
    return nn.functional.linear(x, unit.lin.weight / (1 + sigma**2)) * unit.calls


def assigns(unit: Any, x: Tensor) -> Any:
    unit.scale = unit.scale * 0.5 + x.detach().abs().mean()
    return unit.lin(x) * unit.scale


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__()
        for name in "abcd":
            lin = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))
            self.add_module(name, nn.Sequential(lin, nn.BatchNorm1d(WIDTH)))
        self.double()


def normed() -> Any:
    torch.manual_seed(0)
    return Normed()


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1"])
@pytest.mark.parametrize(
    "build",
    [lambda: make(b=spectral, d=spectral), lambda: make(a=assigns, c=assigns), normed],
    ids=["in place", "assigned", "torch's"],
)
def test_recomputation_leaves_buffers_as_they_were(build: Any, schedule: str) -> None:
    compare(build, 3, schedule=schedule, recompute=True)


# ---- in two processes


def thaws_by_itself(unit: Any, x: Tensor) -> Any:
    unit.calls += 1
    with nullcontext() if unit.calls > 2 * PARTS else torch.no_grad():
        return unit.lin(x)


def frozen_in_evaluation(unit: Any, x: Tensor) -> Any:
    with nullcontext() if unit.lin.training else torch.no_grad():
        return unit.lin(x)


def run_in_two(group: Any) -> list[str]:
    """Compare with a plain loop on each rank; what differs, by case."""

    def thaw(model: Any, step: int) -> None:
        model.a.on = model.c.on = step > 0

    cases: dict[str, Callable[[], None]] = {
        "freezes": lambda: compare(
            lambda: make(a=frozen_at_first, c=skipped_at_first), 3, thaw, mesh=group
        ),
    }
    for name in ("a buffer", "an attribute", "given"):
        cases[name] = lambda name=name: compare(LATER[name], schedule="ZB-H1", mesh=group)  # type: ignore[misc]
    for name in ("a tensor under a key", "a key"):
        start, act = OBJECTS[name]
        cases[name] = lambda start=start, act=act: compare(  # type: ignore[misc]
            lambda: make(with_object(start), **dict.fromkeys("abcd", act)), mesh=group
        )
    differences = []
    for name, case in cases.items():
        try:
            case()
        except Exception as error:
            differences.append(f"{name}: {error}")
    return differences


def test_between_processes(workers: WorkerPool) -> None:
    for differences in workers.run(f"{__name__}:run_in_two", 2, 200.0):
        assert differences == []


# ---- what is refused in words


def returns(kind: str) -> Callable[[Any, Tensor], Any]:
    def body(m: Any, x: Tensor) -> Any:
        h = in_order(m, m.a(x))
        if kind == "generator":
            return (row for row in h)
        return map(torch.sin, h) if kind == "map" else zip(h, h, strict=True)

    return body


@pytest.mark.parametrize("kind", ["generator", "map", "zip"])
def test_a_forward_that_returns_what_runs_later(kind: str) -> None:
    refused(lambda: make(returns(kind)), rf"the Model's forward .*test_as_made.* returns a {kind}")


def test_a_forward_that_returns_an_object_of_its_own() -> None:
    class Output:
        def __init__(self, one: Tensor, other: Tensor) -> None:
            self.one, self.other = one, other

    def body(m: Any, x: Tensor) -> Any:
        h = m.a(x)
        return Output(h, in_order(m, h))

    def loss(output: Any, target: Tensor) -> Tensor:
        gap: Tensor = output.one * output.other - target
        return gap.square().mean()

    mine, plain, (x, target) = make(body), make(body), data()
    pipe = penstock.Pipeline(
        mine, stages=["c"], ranks=2, schedule="1F1B", microbatches=1, loss_fn=loss
    )
    mine_loss = pipe.step(x, target=target).loss
    expected = loss(plain(x), target)
    expected.backward()
    assert mine_loss == pytest.approx(expected.item(), abs=1e-12)
    for one, other in zip(mine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_an_output_of_another_structure_is_told_in_few_words() -> None:
    class Sometimes:
        pairs = False

    def act(unit: Any, x: Tensor) -> Any:
        h = unit.lin(x)
        return (h, "more") if Sometimes.pairs else (h, 1)

    def body(m: Any, x: Tensor) -> Any:
        return m.d(m.c(m.b(m.a(x)[0])))

    model = make(body, a=act)
    pipe, (x, target) = pipeline(model), data()
    pipe.step(x, target=target)
    Sometimes.pairs = True
    with pytest.raises(PlanError, match=r"gave 'more' in place of 1") as error:
        pipe.step(x, target=target)
    assert "tensor(" not in str(error.value)


def test_gradients_of_a_function_in_a_recomputed_unit() -> None:
    def act(unit: Any, x: Tensor) -> Any:
        return unit.lin(x) + torch.func.grad(lambda t: t.sin().sum())(x)

    refused(
        lambda: make(b=act),
        "b takes gradients by torch.func, .*leave this module out",
        recompute=True,
    )
    compare(lambda: make(b=act), recompute=["a", "c", "d"])


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
def test_a_scripted_function_between_units() -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    scripted = torch.jit.script(double)

    def unused(m: Any, x: Tensor) -> Any:
        h = m.a(x)
        scripted(h)
        return in_order(m, h)

    for body in (unused, lambda m, x: in_order(m, scripted(m.a(x)))):
        refused(lambda body=body: make(body), r"test_as_made.*compiled code .* torch\.jit")  # type: ignore[misc]


class Attention(nn.Module):
    """In evaluation, PyTorch's attention takes another way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        mask = torch.ones(3, 3, dtype=torch.bool).triu(1)
        return self.last(self.first(x, x, x, attn_mask=mask, need_weights=False)[0])


def test_attention_is_evaluated() -> None:
    x = torch.linspace(-1, 1, 24).reshape(2, 3, 4)
    model = Attention()
    pipe = penstock.Pipeline(model, ranks=2, microbatches=1, loss_fn=torch.dist)
    torch.testing.assert_close(pipe.predict(x), model.eval()(x))


def test_an_example_with_which_the_model_fails() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(3, 4))

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Any:
            return self.inner[1](self.inner[0](x))

    with pytest.raises(StageError, match=r"'inner.1' .*before the first microbatch: RuntimeError"):
        penstock.Pipeline(Whole(), stages=2, ranks=2, loss_fn=torch.dist).cut(torch.ones(2, 4))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_of_a_units_forward(reentrant: bool) -> None:
    def body(m: Any, x: Tensor) -> Any:
        h = m.a(x)
        for unit in (m.b, m.c, m.d):
            h = checkpoint(unit.forward, h, use_reentrant=reentrant)
        return h

    compare(lambda: make(body))


class Config:
    """What a model and its units have in common, as in transformers."""

    kind: str | None = None
    turned = False


def with_config(model: Model) -> Model:
    config: Any = Config()
    model.config = config
    for name in "abcd":
        model.get_submodule(name).config = config
    return model


def given_to_the_next(unit: Any, x: Tensor) -> Any:
    h = scales(unit, x)
    return h, unit.scale.expand_as(h)


def used_by_the_next(m: Any, x: Tensor) -> Any:
    h, scale = m.a(x)
    return m.d(m.c(m.b(h * scale) * m.a.scale))


@pytest.mark.parametrize("schedule", ["GPipe", "ZB-H1"])
def test_a_backward_in_the_stage_that_changes_a_buffer_later(schedule: str) -> None:
    compare(lambda: make(used_by_the_next, a=given_to_the_next), schedule=schedule)


def test_a_unit_that_cannot_have_its_buffer_as_it_was_is_named() -> None:
    def act(unit: Any, x: Tensor) -> Any:
        return scales(unit, x) * unit.scale.expand_as(x)

    x, target = data()
    with pytest.raises(penstock.errors.UsageError, match=r"needs a view of a\.scale \(Unit\) as"):
        pipeline(make(a=act), "GPipe").step(x, target=target)
