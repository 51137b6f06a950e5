"""A new length of a sequence: units that are alike run once without data, and no number is another for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipeline
from penstock.errors import PlanError
from penstock.testing import Case, judge
from tests.catalogue.making import Does

LENGTHS = [4, 32, 8]
"""Seen at first."""
Body = Callable[[Tensor], Tensor]


def layer_of(m: Any, value: Tensor) -> Tensor:
    """A layer, and what a block does with its sequence."""
    result: Tensor = m.body(m.layer(value).tanh())
    return result


def mean_of(output: Tensor, target: Tensor) -> Tensor:
    return (output.mean(1) - target).square().mean()


def blocks(body: Body) -> nn.Sequential:
    torch.manual_seed(0)
    units = (Does(layer_of, layer=nn.Linear(4, 4), body=body) for _ in range(2))
    return nn.Sequential(nn.Linear(4, 4), *units).double()


def steps(model: nn.Module, pipe: Pipeline, lengths: list[int]) -> None:
    """Steps of batches of these lengths, each the same as in a plain loop."""
    for length in lengths:
        batch, target = torch.randn(2, length, 4).double(), torch.randn(2, 4).double()
        pipe.zero_grad()
        judge(Case(model, (batch,), target, mean_of, evaluates=False), pipe).check(1e-10)


def step(pipe: Pipeline, length: int) -> None:
    pipe.step(torch.randn(2, length, 4).double(), target=torch.randn(2, 4).double())


def calls_of(function: Any, run: Callable[[], object]) -> int:
    """How often a function is called meanwhile; what counts by itself would be something that it does."""
    calls = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code is function.__code__

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def pipeline(model: nn.Module) -> Pipeline:
    return Pipeline(model, ranks=2, stages=[["0"], ["1", "2"]], microbatches=2, loss_fn=mean_of)


def padded(value: Tensor) -> Tensor:
    return nn.functional.pad(value, (0, 0, 0, -value.shape[1] % 4))


def cropped(value: Tensor) -> Tensor:
    return value[:, :24]


def shorter(value: Tensor) -> Tensor:
    return value[:, :-1]


@pytest.mark.parametrize(
    ("body", "kinds"),
    # What a second block gets is another length than the first one gets, or the same.
    [(nn.functional.relu, 1), (padded, 2), (cropped, 2), (shorter, 2)],
)
def test_a_new_length_costs_one_run_of_each_kind_of_unit(body: Body, kinds: int) -> None:
    model = blocks(body)
    pipe = pipeline(model)
    steps(model, pipe, LENGTHS)
    # Two blocks, in each of two microbatches.
    for length, expected in [(33, kinds), (33, 0)]:
        calls = calls_of(layer_of, partial(step, pipe, length))
        assert calls == 4 + expected


def by_number(m: Any, value: Tensor) -> Any:
    """A layer that knows its number, and shortens its sequence if that is 2."""
    number = vars(m)["number"] if m.hides else m.number
    value = m.layer(value).tanh()
    return value[:, 1:] if number == 2 else value


def four(function: Callable[..., Any], **attributes: Any) -> tuple[nn.Module, Pipeline]:
    """Layers with numbers, each on a rank."""
    torch.manual_seed(0)
    layers = [Does(function, layer=nn.Linear(4, 4), number=n, **attributes) for n in range(4)]
    model = nn.Sequential(*layers).double()
    return model, Pipeline(model, ranks=4, microbatches=2, loss_fn=mean_of)


def test_lengths_off_the_grid_and_exceptions_are_planned_as_they_are() -> None:
    model = blocks(padded)
    steps(model, pipeline(model), [4, 8, 12, 16, 32, 40, 36, 10, 13])
    model = blocks(lambda v: v[:, :3] if v.shape[1] == 16 else v)
    steps(model, pipeline(model), [*LENGTHS, 16, 18])


def test_a_layer_that_uses_its_number_is_not_like_the_others() -> None:
    steps(*four(by_number, hides=False), [8, 8, 6])


def shortens(m: Any, value: Tensor) -> Any:
    """A layer that shortens its sequence, but not in training."""
    value = m.layer(value).tanh()
    return value if m.training else value[:, 1:]


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "in evaluation mode": lambda layer: layer.eval(),
    "with a hook": lambda layer: layer.register_forward_hook(lambda *call: call[-1][:, 1:]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_of_another_mode_or_with_a_hook_is_not_like_the_others(change: str) -> None:
    model, pipe = four(shortens)
    CHANGES[change](model.get_submodule("2"))
    steps(model, pipe, [8, 8, 6])


def test_a_layer_that_differs_where_python_does_not_show_it_is_named_and_runs_itself() -> None:
    model, pipe = four(by_number, hides=True)
    with pytest.raises(PlanError, match=r"2 in stage 2 gave a tensor of shape .* planned anew"):
        steps(model, pipe, [8])
    steps(model, pipe, [8, 8, 6])


def test_what_is_known_of_one_precision_tells_nothing_of_another() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    pipe = pipeline(model)
    losses, kind = [], torch.get_default_device().type
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        for length in (4, 8):
            batch = torch.linspace(-1, 1, 8 * length).view(2, length, 4)
            with torch.autocast(kind, dtype=dtype):
                losses.append(pipe.step(batch, target=torch.zeros(2, 4)).loss)
    assert losses[:2] == losses[4:]
    assert losses[:2] != losses[2:4]


def noting(m: Any, value: Tensor, notes: dict[str, int]) -> Any:
    if m.writes:
        notes["length"] = value.shape[1]
    return m.layer(value).tanh()


def hands_notes(m: Any, value: Tensor) -> Any:
    """Hands its blocks a dictionary, as transformers' models do; one may write into it."""
    notes: dict[str, int] = {}
    value = m.second(m.first(m.start(value), notes), notes)
    return value * notes.get("length", 1)


@pytest.mark.parametrize("writes", [False, True])
def test_a_unit_that_writes_into_a_dictionary_is_not_like_one_that_does_not(writes: bool) -> None:
    torch.manual_seed(0)
    first, second = (Does(noting, layer=nn.Linear(4, 4), writes=one) for one in (False, writes))
    model = Does(hands_notes, start=nn.Linear(4, 4), first=first, second=second).double()
    stages = [["start", "first"], ["second"]]
    pipe = Pipeline(model, ranks=2, stages=stages, microbatches=2, loss_fn=mean_of)
    steps(model, pipe, LENGTHS)
    calls = calls_of(noting, partial(step, pipe, 18))
    assert calls == 4 + 1 + writes


def more(m: Any, levels: list[Tensor]) -> list[Tensor]:
    """Adds levels to a list that it is given."""
    levels += [m.layer(levels[-1]), torch.tanh(m.layer(levels[-1]))]
    return levels


def joined(m: Any, levels: list[Tensor]) -> Tensor:
    return sum((m.layer(level).cos() for level in levels), torch.zeros(()).double())


def test_a_unit_that_is_given_what_another_has_added_to_a_list_gets_all_of_it() -> None:
    torch.manual_seed(0)
    model = Does(
        lambda m, value: m.last(m.join(m.more([m.first(value)]))),
        first=nn.Linear(4, 4), last=nn.Linear(4, 4),
        more=Does(more, layer=nn.Linear(4, 4)), join=Does(joined, layer=nn.Linear(4, 4)),
    ).double()  # fmt: skip
    stages = [["first", "more"], ["join", "last"]]
    pipe = Pipeline(model, ranks=2, stages=stages, microbatches=2, loss_fn=mean_of)
    steps(model, pipe, [*LENGTHS, 18, 33])
