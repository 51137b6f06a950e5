"""A new length of a sequence: units that are alike run once without data, and no number is another for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipeline
from penstock.errors import PlanError

LENGTHS = [4, 32, 8]
"""Seen at first."""
Body = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """A layer, and what it does with its sequence."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.layer, self.body = nn.Linear(4, 4), body

    def forward(self, value: Tensor) -> Tensor:
        return self.body(self.layer(value).tanh())


def mean_of(output: Tensor, target: Tensor) -> Tensor:
    return (output.mean(1) - target).square().mean()


def blocks(body: Body) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Block(body), Block(body)).double()


def steps(model: nn.Module, pipe: Pipeline, lengths: list[int]) -> Iterator[int]:
    """Steps of batches of these lengths, each the same as in a plain loop."""
    for length in lengths:
        batch, target = torch.randn(2, length, 4).double(), torch.randn(2, 4).double()
        loss = mean_of(model(batch), target)
        expected = torch.autograd.grad(loss, list(model.parameters()))
        pipe.zero_grad()
        assert pipe.step(batch, target=target).loss == pytest.approx(loss.item(), rel=1e-12)
        for weight, gradient in zip(model.parameters(), expected, strict=True):
            assert weight.grad is not None
            torch.testing.assert_close(weight.grad, gradient, rtol=1e-10, atol=1e-12)
        yield length


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
    list(steps(model, pipe, LENGTHS))
    # Two blocks, in a plain loop and in each of two microbatches.
    for length, expected in [(33, kinds), (33, 0)]:
        calls = calls_of(Block.forward, partial(list, steps(model, pipe, [length])))
        assert calls == 6 + expected


class Numbered(nn.Module):
    """A layer that knows its number, and shortens its sequence if that is 2."""

    def __init__(self, number: int, *, hides: bool) -> None:
        super().__init__()
        self.layer, self.number, self.hides = nn.Linear(4, 4), number, hides

    def forward(self, value: Tensor) -> Tensor:
        number = vars(self)["number"] if self.hides else self.number
        value = self.layer(value).tanh()
        return value[:, 1:] if number == 2 else value


def numbered(*, hides: bool) -> tuple[nn.Module, Pipeline]:
    torch.manual_seed(0)
    model = nn.Sequential(*[Numbered(number, hides=hides) for number in range(4)]).double()
    return model, Pipeline(model, ranks=4, microbatches=2, loss_fn=mean_of)


def test_lengths_off_the_grid_and_exceptions_are_planned_as_they_are() -> None:
    model = blocks(padded)
    list(steps(model, pipeline(model), [4, 8, 12, 16, 32, 40, 36, 10, 13]))
    model = blocks(lambda v: v[:, :3] if v.shape[1] == 16 else v)
    list(steps(model, pipeline(model), [*LENGTHS, 16, 18]))


def test_a_layer_that_uses_its_number_is_not_like_the_others() -> None:
    list(steps(*numbered(hides=False), [8, 8, 6]))


class Shortens(nn.Module):
    """A layer that shortens its sequence, but not in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, value: Tensor) -> Tensor:
        value = self.layer(value).tanh()
        return value if self.training else value[:, 1:]


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "in evaluation mode": lambda layer: layer.eval(),
    "with a hook": lambda layer: layer.register_forward_hook(lambda *call: call[-1][:, 1:]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_of_another_mode_or_with_a_hook_is_not_like_the_others(change: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[Shortens() for _ in range(4)]).double()
    CHANGES[change](model[2])
    list(steps(model, Pipeline(model, ranks=4, microbatches=2, loss_fn=mean_of), [8, 8, 6]))


def test_a_layer_that_differs_where_python_does_not_show_it_is_named_and_runs_itself() -> None:
    model, pipe = numbered(hides=True)
    with pytest.raises(PlanError, match=r"2 in stage 2 gave a tensor of shape .* planned anew"):
        list(steps(model, pipe, [8]))
    list(steps(model, pipe, [8, 8, 6]))


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


class Notes(nn.Module):
    """Hands its blocks a dictionary, as transformers' models do; one may write into it."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.start = nn.Linear(4, 4)
        self.first, self.second = Noting(writes=False), Noting(writes=writes)

    def forward(self, value: Tensor) -> Tensor:
        notes: dict[str, int] = {}
        value = self.second(self.first(self.start(value), notes), notes)
        return value * notes.get("length", 1)


class Noting(nn.Module):
    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.layer, self.writes = nn.Linear(4, 4), writes

    def forward(self, value: Tensor, notes: dict[str, int]) -> Tensor:
        if self.writes:
            notes["length"] = value.shape[1]
        output: Tensor = self.layer(value).tanh()
        return output


@pytest.mark.parametrize("writes", [False, True])
def test_a_unit_that_writes_into_a_dictionary_is_not_like_one_that_does_not(writes: bool) -> None:
    torch.manual_seed(0)
    model = Notes(writes=writes).double()
    stages = [["start", "first"], ["second"]]
    pipe = Pipeline(model, ranks=2, stages=stages, microbatches=2, loss_fn=mean_of)
    list(steps(model, pipe, LENGTHS))
    calls = calls_of(Noting.forward, partial(list, steps(model, pipe, [18])))
    assert calls == 6 + 1 + writes


class More(nn.Module):
    """Adds levels to a list that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, levels: list[Tensor]) -> list[Tensor]:
        levels += [self.layer(levels[-1]), torch.tanh(self.layer(levels[-1]))]
        return levels


class Joins(nn.Module):
    """Uses all levels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, levels: list[Tensor]) -> Tensor:
        return sum((self.layer(level).cos() for level in levels), torch.zeros(()).double())


class Pyramid(nn.Module):
    """Levels as a detector makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.more, self.join = nn.Linear(4, 4), More(), Joins()
        self.last = nn.Linear(4, 4)

    def forward(self, value: Tensor) -> Tensor:
        levels = self.more([self.first(value)])
        output: Tensor = self.last(self.join(levels))
        return output


def test_a_unit_that_is_given_what_another_has_added_to_a_list_gets_all_of_it() -> None:
    torch.manual_seed(0)
    model = Pyramid().double()
    stages = [["first", "more"], ["join", "last"]]
    pipe = Pipeline(model, ranks=2, stages=stages, microbatches=2, loss_fn=mean_of)
    list(steps(model, pipe, [*LENGTHS, 18, 33]))
