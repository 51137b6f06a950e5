"""What a forward does between its units happens once, in the stage it belongs to, or is refused by name.

The programs stand in the catalogue, whose matrix cuts them into four stages.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.errors import PartitionError, PenstockError, PlanError
from penstock.testing import Case, compare
from tests.catalogue.between import (
    PROGRAMS,
    WIDTH,
    Caches,
    acting,
    between,
    first_at,
    make,
    rows,
    score,
    through,
    through_all,
)
from tests.catalogue.making import Does
from tests.processes import in_processes

TOLERANCE = 1e-12
TWO, FOUR = ["l.2"], ["l.1", "l.2", "l.3"]


def piped(model: nn.Module, stages: Any = TWO, **options: Any) -> penstock.Pipeline:
    """A pipeline of as many ranks as stages, by default of one microbatch."""
    usual: dict[str, Any] = {"schedule": "GPipe", "microbatches": 1, "loss_fn": score}
    count = stages if isinstance(stages, int) else len(stages) + isinstance(stages[0], str)
    return penstock.Pipeline(model, stages=stages, **usual | {"ranks": count} | options)


def refused(words: str, model: nn.Module, *args: Any, stages: Any = TWO) -> None:
    with pytest.raises(PartitionError, match=words):
        piped(model, stages).cut(*args or (rows(),))


def right(model: nn.Module, stages: Any = TWO, **options: Any) -> None:
    """Compare a step with the plain model's; several microbatches see what others have left."""
    options = {"schedule": "GPipe", "microbatches": 1, **options}
    case = Case(model, (rows(),), None, penstock.Loss(score, check=False))
    compare(case, stages=stages, **options).check(TOLERANCE)


@pytest.mark.parametrize("name", [n for n, one in PROGRAMS.items() if one.in_four != one.refused])
def test_what_two_stages_decide_otherwise_than_four(name: str) -> None:
    compare(between(name, 2), schedule="1F1B", stages=TWO, microbatches=4).check(TOLERANCE)


LATER = [name for name in PROGRAMS if "as made" in name or "after another stage" in name]


@pytest.mark.parametrize("name", LATER)
def test_values_are_as_made_where_all_forwards_come_first(name: str) -> None:
    compare(between(name), schedule="GPipe", stages=FOUR, microbatches=4).check(TOLERANCE)


@pytest.mark.parametrize("name", [n for n, one in PROGRAMS.items() if one.recomputed])
def test_units_are_recomputed(name: str) -> None:
    case = between(name)
    compare(case, schedule="ZB-H1", stages=FOUR, microbatches=4, recompute=True).check(TOLERANCE)


def test_a_later_call_is_recomputed_with_an_attribute_that_was_set_for_the_first() -> None:
    def gated(unit: Any, x: Tensor) -> Tensor:
        return torch.tanh(unit.lin(x) * unit.gate)

    def body(m: Any, x: Tensor) -> Tensor:
        m.l[1].gate = torch.tanh(m.l[0](x)).mean(0)
        return through(m, m.l[1](m.l[1](x)), 2)

    case = Case(
        make(body, acting(None, gated)), (rows(8),), None, penstock.Loss(score, check=False)
    )
    compare(case, schedule="1F1B", stages=TWO, microbatches=4, recompute=True).check(TOLERANCE)


@pytest.mark.parametrize("name", [n for n in PROGRAMS if PROGRAMS[n].refused and "data" not in n])
def test_a_refusal_leaves_the_model_as_it_was(name: str) -> None:
    model = between(name, 2).model
    before = [dict(vars(module)) for module in model.modules()]
    refused(PROGRAMS[name].refused, model)
    assert [dict(vars(module)) for module in model.modules()] == before


def test_what_an_earlier_microbatch_has_left_is_refused() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        h = m.l[1](m.l[0](x))
        before = getattr(m, "before", torch.zeros_like(x))
        m.before = h.detach()
        return through(m, h + before, 2)

    with pytest.raises(PartitionError, match="an earlier microbatch has left"):
        piped(make(body), microbatches=2).predict(rows())


def test_a_number_at_the_end_may_not_call_a_unit_of_another_stage() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        h = through_all(m, x)
        return m.l[0](h) if h.sum().item() < 0 else h

    with pytest.raises(PlanError, match=r"decides by numbers .* l\.0, which is in another stage"):
        piped(make(body)).step(rows())


@pytest.mark.parametrize("place", [0, 2])
def test_a_unit_that_begins_in_place_leaves_the_batch_alone(place: int) -> None:
    model = make(lambda m, x: through_all(m, x) + m.l[2](x), first_at(place, Tensor.relu_))
    batch = rows()
    piped(model, microbatches=2).step(batch)
    assert torch.equal(batch, rows())


@pytest.mark.parametrize("folder", ["torch", "penstock"])
def test_lines_are_the_authors_though_their_folder_is_called_like_a_library(folder: str) -> None:
    names: dict[str, Any] = {}
    code = "def body(m, x):\n    return m.l[3](m.l[2](x) if m.l[0](x).sum() > 0 else x)\n"
    exec(compile(code, f"/home/someone/{folder}/train.py", "exec"), names)
    refused(r"train\.py:2\): the model's code needs numbers", make(names["body"]))


# ---- what a unit keeps in attributes


class Notes(nn.Linear):
    """Keeps what it was given, what it gives, and numbers."""

    other: Any = None
    reads = ""

    def __init__(self, _: int) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        self.given, self.loss, self.number = x, h.square().mean(), float(h.detach().mean())
        self.calls = getattr(self, "calls", 0) + 1
        self.scale = self.calls
        read = getattr(self.other[0], self.reads) if self.other else 0
        return h * self.scale + torch.as_tensor(read).sum()


KEPT = ["given", "loss", "number", "calls", "scale"]


def notes(reader: int | None = None, of: int = 0, name: str = "", body: Any = through_all) -> Any:
    """A model of units that keep things, of which one may read what another keeps."""
    model: Any = make(body, Notes)
    if reader is not None:
        vars(model.l[reader]).update(other=(model.l[of],), reads=name)
    return model


@pytest.mark.parametrize("name", KEPT)
def test_what_a_unit_keeps_is_for_its_stage_alone(name: str) -> None:
    def body(m: Any, x: Tensor) -> Any:
        return through_all(m, x) * torch.as_tensor(getattr(m.l[0], name)).sum()

    cuts = ["l.1", "l.3"]
    if name in ("given", "loss"):  # a tensor travels
        right(notes(body=body), cuts, ranks=3)
    else:
        words = f"the model uses the attribute '{name}' of l.0"
        refused(words, notes(body=body), stages=cuts)
    if name != "given":  # an argument of the model, which all stages have
        words = r"l.3 in stage 2 reads a value that l.0 in stage 0 left"
        refused(words, notes(3, 0, name), stages=cuts)
        right(notes(3, 2, name))


@pytest.mark.parametrize("empties", [True, False])
def test_calls_that_share_what_a_unit_keeps_are_in_one_stage(empties: bool) -> None:
    def rounds(m: Any, x: Tensor) -> Any:
        m.one.cache = None
        return m.other(m.one(m.other(m.one(x))))

    model = Does(rounds, one=Caches(empties=empties), other=nn.Linear(WIDTH, WIDTH))
    with pytest.raises(PartitionError, match=r"one in stage 1 reads .* one in stage 0 left"):
        piped(model, 2, microbatches=2).step(rows())


class Logs(nn.Linear):
    """Goes by how many entries its list has."""

    def __init__(self, _: int) -> None:
        super().__init__(WIDTH, WIDTH)
        self.log: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(1)
        return super().forward(x) * len(self.log)


def test_a_layer_that_goes_by_its_list_is_called_in_one_stage() -> None:
    def rounds(m: Any, x: Tensor) -> Tensor:
        return through_all(m, through_all(m, x))

    def twice_each(m: Any, x: Tensor) -> Tensor:
        for unit in m.l:
            x = unit(torch.tanh(unit(x)))
        return x

    words = (
        "l.[01] is called in the stages 0 and 1, and changes what it keeps in its attribute 'log'"
    )
    refused(words, make(rounds, Logs), stages=2)
    right(make(twice_each, Logs), microbatches=4)


class Meter:
    """Counts, and does nothing else."""

    count = 0


class Borrows(nn.Linear):
    """Calls a module that it does not hold, and counts in an object of the model."""

    def __init__(self, _: int) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor, gate: Any = None, meter: Any = None) -> Tensor:
        meter.count += 1
        return super().forward(x) * (torch.sigmoid(gate(x)) if gate else 1)


def borrowing(units: int) -> nn.Module:
    """A model whose first units are given its gate."""

    def body(m: Any, x: Tensor) -> Any:
        for place, unit in enumerate(m.l):
            x = torch.tanh(unit(x, m.gate if place < units else None, m.meter))
        return x

    model: Any = make(body, Borrows)
    model.gate, model.meter = nn.Linear(WIDTH, WIDTH).double(), Meter()
    whole: nn.Module = model
    return whole


@pytest.mark.parametrize("units", [2, 4])
def test_units_may_use_a_module_that_they_are_given(units: int) -> None:
    right(borrowing(units))
    right(borrowing(units), stages=4)


@pytest.mark.parametrize("units", [2, 4])
@in_processes(2)
def test_the_gate_of_units_may_get_batches_of_other_sizes_and_learns_in_all_stages(
    group: Any, units: int
) -> None:
    model, plain = (borrowing(units) for _ in range(2))
    pipe = penstock.Pipeline(model, ranks=2, microbatches=2, mesh=group, loss_fn=score)
    for samples in (4, 6, 8):
        loss = score(plain(rows(samples)))
        loss.backward()
        assert float(pipe.step(rows(samples)).loss) == pytest.approx(loss.item(), abs=TOLERANCE)
    for name, weight in pipe.weights.here.named_parameters():
        torch.testing.assert_close(weight.grad, plain.get_parameter(name).grad)
    here = {name for name, _ in pipe.weights.here.named_parameters()}
    assert ("gate.weight" in here) == (units == 4 or not group.rank())
    mine: Any = model
    assert mine.meter.count == 3 * 2 * 2, "what a trial counts is put back"


# ---- what the author's code does to a unit around a call


class Scaled(nn.Linear):
    """Uses an attribute, and a context variable."""

    factor: Any = 1.0

    def __init__(self, _: int) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x) * self.factor * SCALE.get())


SCALE: ContextVar[float] = ContextVar("SCALE", default=1.0)


def sets_attributes(m: Any, x: Tensor) -> Tensor:
    for unit in m.l:
        unit.factor = torch.sigmoid(x * m.scale)
        x = unit(x)
    return x


def sets_attributes_in_a_checkpoint(m: Any, x: Tensor) -> Any:
    for unit in m.l:
        unit.factor = torch.sigmoid(x * m.scale)
        x = checkpoint(unit, x, use_reentrant=False)
    return x


def sets_a_context_variable(m: Any, x: Tensor) -> Tensor:
    for place, unit in enumerate(m.l):
        token = SCALE.set(0.5 + place)
        x = unit(x)
        SCALE.reset(token)
    return x


def quantised(x: Tensor) -> Tensor:
    return (x * 4).round() / 4


def quantises_what_is_saved(m: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(quantised, lambda saved: saved):
        x = m.l[0](x) * m.scale
        x = m.l[1](x)
    return through(m, x, 2)


AROUND = [sets_attributes, sets_attributes_in_a_checkpoint, sets_a_context_variable]


@pytest.mark.parametrize("body", [*AROUND, quantises_what_is_saved])
def test_what_surrounds_the_call_of_a_unit_surrounds_it_in_its_stage(body: Any) -> None:
    right(make(body, Scaled), FOUR, microbatches=4)
    right(make(body, Scaled), None, ranks=1, microbatches=4, schedule="1F1B")


@pytest.mark.parametrize("body", AROUND)
def test_what_surrounds_the_call_of_a_unit_does_when_it_is_recomputed(body: Any) -> None:
    right(make(body, Scaled), microbatches=4, recompute=True)


def with_other_weights(m: Any, unit: nn.Module, x: Tensor) -> Any:
    return torch.func.functional_call(unit, {"weight": m.l[0].weight * 2}, x)


def with_a_hook(m: Any, unit: nn.Module, x: Tensor) -> Any:
    handle = unit.register_forward_hook(lambda _, given, output: output * 2)
    output = unit(x)
    handle.remove()
    return output


def without_bias(m: Any, unit: Any, x: Tensor) -> Any:
    bias, unit.bias = unit.bias, None
    output = unit(x)
    unit.bias = bias
    return output


def with_another_forward(m: Any, unit: Any, x: Tensor) -> Any:
    before = unit.forward
    unit.forward = lambda given: before(given) * 2
    output = unit(x)
    del unit.forward
    return output


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (with_other_weights, r"calls l\.1 with other weights, parts or hooks for a while"),
        (with_a_hook, r"calls l\.1 with other weights, parts or hooks for a while"),
        (without_bias, r"calls l\.1 with other weights, parts or hooks for a while"),
        (with_another_forward, r"sets the forward of l\.1"),
    ],
)
def test_a_unit_that_is_another_for_a_while_is_refused(call: Any, words: str) -> None:
    refused(words, make(lambda m, x: through(m, call(m, m.l[1], m.l[0](x)), 2)))


def strict(m: Any, x: Tensor) -> Any:
    """A heavy part whose own code fails on made-up numbers, and goes by those of its parts."""
    gate = m.gate(x)
    if (gate == 1).all():
        raise ValueError("a gate of ones")
    back = m.back(m.wide(x))
    if m.chooses and gate.sum() > 0:
        back = m.back(m.wide(back))
    return back * gate


@pytest.mark.parametrize("chooses", [False, True])
def test_a_heavy_part_stays_whole_whose_code_goes_by_numbers(chooses: bool) -> None:
    sizes = {"gate": (WIDTH, WIDTH), "wide": (WIDTH, 64 * WIDTH), "back": (64 * WIDTH, WIDTH)}
    heavy = Does(strict, chooses=chooses, **{name: nn.Linear(*of) for name, of in sizes.items()})
    parts = {"first": nn.Linear(WIDTH, WIDTH), "heavy": heavy, "last": nn.Linear(WIDTH, WIDTH)}
    model = nn.Sequential(OrderedDict(parts))
    right(model.double(), None, ranks=2, microbatches=2)
    pipe = piped(copy.deepcopy(model), 2)
    pipe.cut(rows())
    assert "heavy" in pipe.units


def loss_that_reads(unit: Any, name: str) -> Any:
    return lambda output, _=None: output.mean() + torch.as_tensor(getattr(unit, name)).sum()


@pytest.mark.parametrize("name", KEPT)
def test_a_loss_may_read_what_the_last_stage_keeps(name: str) -> None:
    model, plain = notes(), notes()
    loss = loss_that_reads(plain.l[3], name)
    expected = sum(loss(plain(half)).item() / 2 for half in rows().chunk(2))
    pipe = piped(model, microbatches=2, loss_fn=loss_that_reads(model.l[3], name))
    assert pipe.step(rows()).loss == pytest.approx(expected, abs=1e-12)
    model = notes()
    pipe = piped(model, microbatches=2, loss_fn=loss_that_reads(model.l[0], name))
    with pytest.raises(PenstockError, match=f"{name}' of l.0.*penstock.add_loss"):
        pipe.step(rows())


def test_a_loss_that_counts_is_called_once_for_each_microbatch_if_it_is_not_checked() -> None:
    class Annealed:
        calls = 0

        def __call__(self, output: Tensor, target: Any = None) -> Tensor:
            self.calls += 1
            return output.mean()

    loss = Annealed()
    pipe = piped(make(through_all), microbatches=2, loss_fn=penstock.Loss(loss, check=False))
    pipe.step(rows())
    assert loss.calls == 2


# ---- hooks of modules


def hooked() -> Any:
    """Calls modules without weights between its others, some of them several times, one for nothing."""

    def run(m: Any, x: Tensor) -> Any:
        h = early = m.early(x)
        for unit in m.l:
            h = m.drop(m.act(unit(h)))
        return m.pair(h * 1) + m.act(h) + early + m.pair[1](early)

    torch.manual_seed(0)
    return Does(
        run, l=[nn.Linear(WIDTH, WIDTH) for _ in range(4)], act=nn.Tanh(), drop=nn.Dropout(0.0),
        early=nn.Flatten(), pair=nn.Sequential(nn.ReLU(inplace=True), nn.Sigmoid()),
    ).double()  # fmt: skip


def listen(model: nn.Module, heard: list[Any]) -> None:
    """Set all kinds of hooks; they note what they hear of it."""

    def hear(name: str) -> Callable[..., None]:
        def note(*arguments: Any) -> None:
            last = arguments[-1] if isinstance(arguments[-1], tuple) else arguments[-1:]
            heard.append((name, [float(t.detach().sum()) for t in last if t is not None]))

        return note

    for name in ("act", "drop", "early", "pair", "pair.1", "l.0", "l.2"):
        module = model.get_submodule(name)
        module.register_forward_pre_hook(hear(f"{name} comes"))
        module.register_forward_hook(hear(f"{name} goes"))
    for name in ("act", "drop", "l.1", "l.3"):
        module = model.get_submodule(name)
        module.register_full_backward_pre_hook(hear(f"{name} comes back"))
        module.register_full_backward_hook(hear(f"{name} goes back"))


def test_hooks_hear_once_what_they_hear_in_the_plain_model() -> None:
    plain, model, heard, expected = hooked(), hooked(), list[Any](), list[Any]()
    pipe = piped(model, ["l.1", "l.3"])
    for listens in (False, True):
        if listens:
            listen(plain, expected)
            listen(model, heard)
        score(plain(rows())).backward()
        pipe.step(rows())
    assert sorted(name for name, _ in heard) == sorted(name for name, _ in expected)
    for mine, theirs in zip(sorted(heard), sorted(expected), strict=True):
        assert mine[1] == pytest.approx(theirs[1], abs=1e-12)


def test_a_module_in_parts_has_no_hooks_and_was_not_compiled() -> None:
    last = nn.Linear(WIDTH, WIDTH).double()
    hooked, compiled = make(through_all), make(through_all)
    hooked.register_full_backward_hook(lambda *_: None)
    says = r"0 has backward hooks, and its parts are placed by"
    refused(says, nn.Sequential(hooked, last), stages=["0.l.2"])
    compiled.compile(backend="eager")
    says = r"0 \(a Model\) was compiled as a whole"
    refused(says, nn.Sequential(compiled, last), stages=["0.l.2"])


# ---- units that torch has made its own


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
def test_scripted_units() -> None:
    plain = make(through_all)
    model: Any = copy.deepcopy(plain)
    model.l[1] = torch.jit.script(model.l[1])
    assert torch.equal(piped(model, ["l.1", "l.3"]).predict(rows()), plain(rows()))


@pytest.mark.filterwarnings("ignore")
def test_compiled_units() -> None:
    plain = make(through_all)
    model: Any = copy.deepcopy(plain)
    model.l[1].compile(backend="eager")
    model.l[2] = torch.compile(model.l[2], backend="eager")
    loss = score(plain(rows()))
    loss.backward()
    assert piped(model, ["l.1", "l.3"]).step(rows()).loss == float(loss)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def encoder() -> Any:
    """Enters torch's encoder, which has a path of its own for padded batches in evaluation."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 4, 0.0, batch_first=True)
    return Does(
        lambda m, x, padding: m.head(m.encoder(x, src_key_padding_mask=padding)),
        encoder=nn.TransformerEncoder(layer, 2), head=nn.Linear(WIDTH, WIDTH),
    ).double()  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_that_drops_padding_in_evaluation() -> None:
    model = encoder()
    x, padding = rows()[None].clone(), torch.tensor([[False, False, True, True]])
    case = Case(model, (x, padding), None, score, evaluates=False)
    parts = ["encoder.layers.1"]
    compare(case, schedule="1F1B", stages=parts, microbatches=1).check(TOLERANCE)
    pipe = piped(copy.deepcopy(model), parts)
    pipe.cut(x, padding)
    with pytest.raises(PartitionError, match=r"encoder.*padded.*use_nested_tensor = False"):
        pipe.predict(x, padding)
    plain: Any = copy.deepcopy(model).eval()
    whole = piped(copy.deepcopy(model), [["encoder"], ["head"]])
    with torch.no_grad():
        assert torch.equal(whole.predict(x, padding), plain(x, padding))
        plain.encoder.use_nested_tensor = False
        changed = piped(copy.deepcopy(plain), parts)
        assert torch.equal(changed.predict(x, padding), plain(x, padding))


def test_hooks_on_the_whole_models_state_run() -> None:
    def double(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
        state.update({name: value * 2 for name, value in state.items()})

    model, plain = make(through_all), make(through_all)
    state = copy.deepcopy(plain.state_dict())
    for one in (model, plain):
        one.register_load_state_dict_pre_hook(double)  # type: ignore[no-untyped-call]
    piped(model).weights.load_state_dict(state)
    plain.load_state_dict(state)
    assert torch.equal(model(rows()), plain(rows()))


class Slotted:
    __slots__ = ("on",)

    def __init__(self, on: bool) -> None:
        self.on = on

    def __bool__(self) -> bool:
        return self.on


class Flagged(nn.Module):
    """Changes what it is given, if its flag says so."""

    def __init__(self, flag: Any) -> None:
        super().__init__()
        self.flag, self.lin = flag, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.lin(x * 1)
        if self.flag:
            x.add_(1)
        return 0.5 * x + result.tanh()


@pytest.mark.parametrize("kind", [np.bool_, np.int64, np.float64, Slotted])
def test_layers_that_differ_in_what_an_object_without_a_dictionary_says(kind: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[Flagged(kind(bool(index % 2))) for index in range(6)])
    x = torch.randn(8, WIDTH)
    case = Case(model, (x,), torch.randn(8, WIDTH), nn.functional.mse_loss)
    compare(case, schedule="1F1B", stages=2, ranks=2, microbatches=2).check(1e-6)
