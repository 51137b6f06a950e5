"""What changes between steps, and what only a run shows: as in a plain loop, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import PartitionError, PlanError, StageError, UsageError
from penstock.testing import Case, compare, judge
from tests.catalogue.between import (
    WIDTH,
    Acts,
    acting,
    make,
    rows,
    scales,
    score,
    through,
    through_all,
)
from tests.catalogue.making import Does
from tests.processes import in_processes

TWO = ["l.2"]


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x, target = torch.randn(2, 8, WIDTH, dtype=torch.float64)
    return x, target


def case_of(model: nn.Module) -> Case:
    """With a loss of each microbatch, since a batch as a whole would go other ways."""
    x, target = data()
    loss = penstock.Loss(nn.functional.mse_loss, check=False)
    return Case(model, (x,), target, loss, evaluates=False)


def pipeline(case: Case, schedule: str = "1F1B", group: Any = None) -> penstock.Pipeline:
    return penstock.Pipeline(
        copy.deepcopy(case.model), stages=TWO, ranks=2, schedule=schedule, microbatches=4,
        loss_fn=case.loss, mesh=group,
    )  # fmt: skip


Change = Callable[[Any, int], Any]


def steps(model: nn.Module, change: Change, group: Any = None) -> None:
    """Compare three steps, before each of which the model changes."""
    case = case_of(model)
    with pipeline(case, group=group) as pipe:
        for step in range(3):
            change(case.model, step)
            change(pipe.model, step)
            judge(case, pipe).check(1e-12)
            pipe.zero_grad()


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


def passes_both(m: Any, x: Tensor) -> Any:
    h = m.l[0](x) * 1
    return m.l[3](m.l[2](m.l[1](h) + h))


BODIES: dict[Any, Any] = {
    in_place_later: passes_both,
    of_less_precision: lambda m, x: m.l[3](m.l[2](m.l[1](m.l[0](x)).double())),
}
"""What happens between units, where it is not the usual."""


def one_that(act: Any, place: int) -> Any:
    """A model of which one unit does something."""
    acts = [act if index == place else None for index in range(4)]
    return make(BODIES.get(act, through_all), acting(*acts))


@pytest.mark.parametrize("act", [frozen_at_first, skipped_at_first, in_place_later])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_attribute_of_a_unit_may_change_between_steps(act: Any, place: int) -> None:
    def change(model: Any, step: int) -> None:
        model.l[place].on = step > 0

    steps(one_that(act, place), change)


def thaw(model: Any, step: int) -> None:
    model.l[0].on = model.l[2].on = step > 0


@in_processes(2)
def test_it_may_change_between_processes(group: Any) -> None:
    steps(make(through_all, acting(frozen_at_first, None, skipped_at_first, None)), thaw, group)


def depth(m: Any, x: Tensor) -> Any:
    x = m.l[1](m.l[0](x))
    for _ in range(m.level):
        x = m.l[2](torch.tanh(x))
    return m.l[3](x) if m.l[3].training else m.l[3](x * 2)


def choose(model: Any, step: int) -> None:
    model.level = step
    model.l[3].training = step != 1


def hook(model: Any, step: int) -> None:
    if step == 1:
        model.l[1].register_forward_hook(lambda unit, args, out: (out * 2).detach())
        model.l[2].register_forward_pre_hook(lambda unit, args: (args[0].clone(),))


def test_what_chooses_the_way_and_hooks_may_come_after_the_first_step() -> None:
    steps(make(depth), choose)
    steps(make(through_all), hook)


class Hidden:
    """Looks like a constant."""

    on = False

    def __bool__(self) -> bool:
        return Hidden.on

    def __deepcopy__(self, _: Any) -> Hidden:
        return self


@pytest.mark.parametrize(
    "act", [frozen_at_first, skipped_at_first, in_place_later, of_less_precision]
)
def test_what_nobody_could_foresee_is_right_or_an_error_and_the_next_step_is_right(
    act: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = one_that(act, 1)
    model.l[1].on = Hidden()
    case, (x, target) = case_of(model), data()
    pipe = pipeline(case)
    judge(case, pipe).check(1e-12)
    monkeypatch.setattr(Hidden, "on", True)
    if act in (frozen_at_first, of_less_precision):
        with pytest.raises(PlanError, match=r"in stage 0 .*planned anew at the next step"):
            pipe.step(x, target=target)
    pipe.zero_grad()
    judge(case, pipe).check(1e-12)


# ---- what is refused, or told, in words


def refused(words: str, model: nn.Module, **options: Any) -> None:
    with pytest.raises(PartitionError, match=words):
        compare(case_of(model), schedule="1F1B", microbatches=4, stages=TWO, **options)


def test_a_tied_embedding_with_a_largest_norm() -> None:
    model = nn.Sequential(nn.Embedding(5, WIDTH, max_norm=0.5), nn.Linear(WIDTH, 5, bias=False))
    model[1].weight = model[0].weight
    pipe = penstock.Pipeline(model, ranks=2, microbatches=2, loss_fn=nn.functional.mse_loss)
    with pytest.raises(PartitionError, match=r"0 in stage 0 changes 0\.weight in place, which st"):
        pipe.step(torch.zeros(8, dtype=torch.long), target=torch.zeros(8, 5))


def test_a_unit_that_cannot_have_its_buffer_as_it_was_is_named() -> None:
    def act(unit: Any, x: Tensor) -> Any:
        return scales(unit, x) * unit.scale.expand_as(x)

    with pytest.raises(UsageError, match=r"needs a view of l\.0\.scale \(Acts\) as"):
        compare(
            case_of(make(through_all, acting(act, None))),
            schedule="GPipe",
            microbatches=4,
            stages=TWO,
        )


def test_an_output_of_another_structure_is_told_in_few_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def act(unit: Any, x: Tensor) -> Any:
        return unit.lin(x), ("more" if Hidden.on else 1)

    model = make(lambda m, x: through(m, m.l[0](x)[0], 1), acting(act, None))
    pipe, (x, target) = pipeline(case_of(model)), data()
    pipe.step(x, target=target)
    monkeypatch.setattr(Hidden, "on", True)
    with pytest.raises(PlanError, match=r"gave 'more' in place of 1") as error:
        pipe.step(x, target=target)
    assert "tensor(" not in str(error.value)


def test_gradients_of_a_function_in_a_recomputed_unit() -> None:
    def act(unit: Any, x: Tensor) -> Any:
        return unit.lin(x) + torch.func.grad(lambda t: t.sin().sum())(x)

    model = make(through_all, acting(None, act, None, None))
    refused("l.1 takes gradients by torch.func, .*leave this module out", model, recompute=True)
    options: dict[str, Any] = {"schedule": "1F1B", "microbatches": 4, "stages": TWO}
    compare(case_of(model), recompute=["l.0", "l.2", "l.3"], **options).check(1e-12)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
@pytest.mark.parametrize("used", [False, True])
def test_a_scripted_function_between_units(used: bool) -> None:
    def double(x: Tensor) -> Tensor:
        return x * 2

    scripted = torch.jit.script(double)

    def body(m: Any, x: Tensor) -> Any:
        h = m.l[0](x)
        return through(m, scripted(h) if used else (scripted(h), h)[1], 1)

    x, _ = data()
    pipe = penstock.Pipeline(make(body), stages=TWO, ranks=2, microbatches=1, loss_fn=score)
    with pytest.raises(PartitionError, match=r"test_as_made.*compiled code .* torch\.jit"):
        pipe.step(x)


def test_an_object_of_the_authors_own_class_may_be_returned() -> None:
    class Output:
        def __init__(self, one: Tensor, other: Tensor) -> None:
            self.one, self.other = one, other

    def body(m: Any, x: Tensor) -> Any:
        h = m.l[0](x)
        return Output(h, through(m, h, 1))

    loss = penstock.Loss(lambda output, y: score(output.one * output.other), check=False)
    case = Case(make(body), (rows(),), None, loss)
    compare(case, schedule="1F1B", microbatches=1, stages=TWO).check(1e-12)


def test_attention_is_evaluated() -> None:
    """PyTorch's takes another way then."""

    def attend(m: Any, x: Tensor) -> Any:
        mask = torch.ones(3, 3, dtype=torch.bool).triu(1)
        return m.last(m.first(x, x, x, attn_mask=mask, need_weights=False)[0])

    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    x, model = (
        torch.linspace(-1, 1, 24).reshape(2, 3, 4),
        Does(attend, first=attention, last=nn.Linear(4, 4)),
    )
    pipe = penstock.Pipeline(model, ranks=2, microbatches=1, loss_fn=torch.dist)
    torch.testing.assert_close(pipe.predict(x), model.eval()(x))


def test_an_example_with_which_the_model_fails() -> None:
    model = make(through_all)
    model.l[1] = Acts(lambda unit, x: unit.lin(x[:, :2]))
    with pytest.raises(StageError, match=r"'l.1.*before the first microbatch: RuntimeError"):
        pipeline(case_of(model.double())).cut(rows())
