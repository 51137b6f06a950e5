"""What makes a kind of call, on all ranks: shapes, modes, hooks, weights that learn; how many are kept."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Microbatches, Pipeline, PipelineStage
from penstock.errors import AgreementError, MicrobatchError, StageError, UsageError
from penstock.testing import Case, judge
from tests.catalogue.making import Does
from tests.pipeline.models import X, Y, chain, make, mean_loss
from tests.processes import in_processes


@pytest.mark.parametrize("by_pipe", [True, False])
@in_processes(2)
def test_a_frozen_stage_learns_later(group: Any, by_pipe: bool) -> None:
    """By the model, or as a recipe does by the weights here."""
    model, case = chain(), Case(chain(), (X,), Y, mean_loss)
    with make(model, stages=[["0", "1"], ["2"]], mesh=group) as pipe:
        for learns in (False, True, False):
            case.model.get_submodule("0").requires_grad_(learns)
            named = pipe.named_parameters() if by_pipe else model.named_parameters()
            for name, parameter in named:
                parameter.requires_grad_(learns or not name.startswith("0."))
            pipe.zero_grad()
            judge(case, pipe).check(1e-12)


@in_processes(2)
def test_ranks_that_freeze_different_weights_are_told(group: Any) -> None:
    model = chain()
    with make(model, stages=[["0", "1"], ["2"]], mesh=group) as pipe:
        pipe.step(X, target=Y)
        if pipe.rank == 1:
            for parameter in pipe.parameters():
                parameter.requires_grad_(False)
        with pytest.raises(AgreementError) as caught:
            pipe.step(X, target=Y)
    text = str(caught.value)
    assert text.startswith("the ranks train different weights: the value '1' travels from stage 0")
    assert "comes back on rank 0, but not on rank 1; give requires_grad the same" in text


@in_processes(2)
def test_a_call_of_many_steps_is_another_one_when_something_changes(group: Any) -> None:
    """Its shapes, what is given where, how much microbatches count, and a refusal."""
    model = chain()
    whole, last = deepcopy(model), group.rank() == 1
    losses = [mean_loss(whole(x), y).item() for x, y in zip(X.chunk(2), Y.chunk(2), strict=True)]
    usual = sum(losses) / 2
    with make(model, stages=2, mesh=group, microbatches=2) as pipe:

        def step(*args: Any, **options: Any) -> float:
            pipe.zero_grad()
            return pipe.step(*args, **{"target": Y, **options}).loss

        for _ in range(4):
            assert step(X) == pytest.approx(usual)
        assert step(X, loss_weight=[3, 1]) == pytest.approx((3 * losses[0] + losses[1]) / 4)
        assert step(X) == pytest.approx(usual)
        fewer = mean_loss(whole(X[:6]), Y[:6]).item()
        assert step(X[:6], target=Y[:6]) == pytest.approx(fewer)
        assert (step() if last else step(X, target=None)) == pytest.approx(usual)
        for _ in range(3):
            assert step(X) == pytest.approx(usual)
        with pytest.raises(MicrobatchError, match="samples"):
            step(X, target=Y[:7] if last else Y)
        assert step(X, microbatches=4) == pytest.approx(usual)
        assert step(X) == pytest.approx(usual)


# ---- what the code between units asks for


def by_what_it_is_asked(m: Any, x: Tensor, number: int = 0) -> Any:
    """Goes another way as a part's mode, an attribute, a hook or an argument says."""
    x = m.part(x)
    if m.part.training:
        x = m.middle(x)
    if number % 2:
        x = torch.tanh(x)
    return m.last(x)


def layers(function: Callable[..., Any], *names: str) -> Any:
    torch.manual_seed(0)
    return Does(function, **{name: nn.Linear(4, 4) for name in names}).double()


def asks(function: Callable[..., Any] = by_what_it_is_asked) -> Any:
    return layers(function, "part", "middle", "last")


CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda model: None,
    "evaluation mode": lambda model: model.part.eval(),
    "a hook": lambda model: model.part.register_forward_hook(lambda *call: call[-1] * 2),
    "training mode": lambda model: model.part.train(),
}


def test_what_the_code_between_units_asks_for_makes_a_new_plan() -> None:
    """A mode, a hook, an argument, a gradient of an argument or of the target."""
    model, case = asks(), Case(asks(), (X,), Y, mean_loss)
    pipe = make(model, stages=["middle", "last"], ranks=3)
    for change in CHANGES.values():
        for one in (model, case.model):
            change(one)
        for number in (0, 1, 2):
            pipe.zero_grad()
            judge(replace(case, args=(X, number)), pipe, evaluate=False).check(1e-12)
    model.requires_grad_(False)
    case.model.requires_grad_(False)
    pipe.zero_grad()
    learns = replace(case, args=(X.clone().requires_grad_(), 1))
    judge(learns, pipe, evaluate=False).check(1e-12)


def test_a_target_with_a_graph_of_its_own_gets_its_gradient() -> None:
    base, alone = (Y.clone().requires_grad_() for _ in range(2))
    make().step(X, target=base * 2)
    mean_loss(chain()(X), alone * 2).backward()
    assert base.grad is not None
    torch.testing.assert_close(base.grad, alone.grad)


def test_a_kind_may_first_be_met_in_inference_mode() -> None:
    model = asks().eval()
    expected = pytest.approx(float(mean_loss(model(X), Y).detach()))
    for predicts in (True, False):
        pipe = make(model, stages=["middle", "last"], ranks=3)
        with torch.inference_mode():
            if predicts:
                assert torch.allclose(pipe.predict(X), model(X))
            else:
                assert pipe.evaluate(X, target=Y).loss == expected
        # What it has found out serves a call with gradients as well.
        assert pipe.evaluate(X, target=Y).loss == expected
        pipe.step(X, target=Y)


def refuses(m: Any, x: Tensor) -> Any:
    """Refuses numbers that are all large, as the ones of a run without data are."""
    if bool((m.part(x) * 0 + x > 0.9).all()):
        raise ValueError("all of them are large")
    return by_what_it_is_asked(m, x)


def test_an_error_without_data_says_what_the_numbers_were() -> None:
    with pytest.raises(
        StageError, match=r"all of them are large; this run had no data: numbers that"
    ):
        make(asks(refuses), stages=["middle", "last"], ranks=3).step(X, target=Y)


# ---- what is kept


def test_as_many_kinds_are_kept_as_were_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock._engine.runtime.kinds.MOST_KINDS", 3)
    model = asks()
    pipe = make(model, stages=["middle", "last"], ranks=3)
    pipe.cut(X[:4])
    for rows in (4, 8, 4, 12, 16, 4, 8, 8):
        batch = X.repeat(2, 1)[:rows]
        expected = mean_loss(model(batch), batch)
        assert pipe.step(batch, target=batch).loss == pytest.approx(float(expected.detach()))


# ---- who may bring what


def two() -> Any:
    return layers(lambda m, x, scale: m.two(m.one(x) * scale), "one", "two")


@in_processes(2)
def test_a_rank_brings_all_arguments_or_the_target_alone(group: Any) -> None:
    """Rank 0 brings all, rank 1 the target; then each brings some of the arguments."""
    pipe, rank = make(two(), stages=["two"], mesh=group), group.rank()
    alone = pipe.step(X, scale=Y) if rank == 0 else pipe.step(target=Y)
    with pytest.raises(
        UsageError, match=r"rank 0 was given the arguments \[0\] .* rank 1 \['scale'"
    ):
        pipe.step(X, target=Y) if rank == 0 else pipe.step(scale=Y, target=Y)
    both = pipe.step(X, scale=Y, target=Y)
    pipe.close()
    expected = float(mean_loss(two()(X, Y), Y).detach())
    assert [alone.loss, both.loss] == [pytest.approx(expected)] * 2


class Scaled(nn.Linear):
    """A last stage that takes a keyword argument."""

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        return super().forward(x) if scale is None else super().forward(x * scale)


def test_a_keyword_goes_to_the_stages_by_hand_that_take_it_and_no_others() -> None:
    first, last = nn.Linear(4, 4).double(), Scaled(4, 4).double()
    stages = [PipelineStage(first, 0, 2), PipelineStage(last, 1, 2)]
    pipe = Pipeline.from_stages(stages, schedule="1F1B", microbatches=2, loss_fn=mean_loss)
    expected = float(mean_loss(last(first(X), scale=Y), Y).detach())
    assert pipe.step(X, scale=Y, target=Y).loss == pytest.approx(expected)


# ---- microbatches of several kinds in one step


def skips(m: Any, x: Tensor, skip: int) -> Any:
    """Its first layer's value goes also to the last layer, if the call says so."""
    first = m.first(x)
    second = m.second(first)
    return m.third(second, first) if skip else m.third(second)


def skipping() -> Any:
    torch.manual_seed(0)
    parts = [Does(lambda m, x, more=0: m.layer(x + more), layer=nn.Linear(4, 4)) for _ in range(3)]
    return Does(skips, first=parts[0], second=parts[1], third=parts[2]).double()


@in_processes(3)
def test_a_value_goes_to_other_stages_in_each_microbatch(group: Any) -> None:
    """In either order."""
    case = Case(skipping(), (), Y.split(4), mean_loss, evaluates=False)
    with make(skipping(), stages=["second", "third"], ranks=3, mesh=group) as pipe:
        for ways in ((0, 1), (1, 0), (0, 1)):
            calls = list(zip(X.split(4), ways, strict=True))
            pipe.zero_grad()
            judge(replace(case, args=[Microbatches(calls)]), pipe).check(1e-12)


# ---- what travels


def sometimes(m: Any, x: Tensor) -> dict[str, Tensor]:
    """Gives two values, one of which has no gradient from the third microbatch on."""
    m.calls += 1
    a, b = m.layer(x), m.layer(-x)
    return {"a": a.detach() if m.calls > 2 else a, "b": b}


def sums(m: Any, x: dict[str, Tensor]) -> Any:
    return m.layer(x["a"] * 2 + x["b"])


@in_processes(2)
def test_a_value_that_stops_to_require_grad_is_named(group: Any) -> None:
    torch.manual_seed(0)
    function = sums if group.rank() else sometimes
    module = Does(function, layer=nn.Linear(4, 4), calls=0).double()
    stage = PipelineStage(module, group.rank(), 2)
    pipe = Pipeline.from_stages(
        [stage], schedule="GPipe", microbatches=4, loss_fn=mean_loss, mesh=group
    )
    says = r"0SEND_F2: float64\[2, 4\] where the first message of this kind had float64\[2, 4\] that re"
    with pytest.raises(Exception, match=says):
        pipe.step(X, target=Y)
