"""Sequences cut into slices: the numbers of whole sequences, and states that flow back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import Loss, Pipeline, PipelineStage
from penstock import schedule as ps
from penstock.errors import MicrobatchError, ScheduleError, StageError, UsageError
from tests.pipeline.models import chain, mean_loss
from tests.processes import in_processes

WIDTH, LENGTH = 4, 12
State = tuple[Tensor, Tensor] | None
X = torch.linspace(-1, 1, 6 * LENGTH * WIDTH, dtype=torch.float64).sin()
X = X.reshape(6, LENGTH, WIDTH)
Y = X.flip(0)


class Attention(nn.Module):
    """Causal attention, whose keys and values later slices of the sequence use."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.project = nn.Linear(WIDTH, 3 * WIDTH, dtype=torch.float64)
        self.out = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor, state: State = None) -> tuple[Tensor, State]:
        query, *fresh = self.project(x).chunk(3, dim=-1)
        key, value = fresh
        if state is not None:
            key, value = (torch.cat(pair, dim=1) for pair in zip(state, fresh, strict=True))
        mask = torch.ones(x.shape[1], key.shape[1]).tril(key.shape[1] - x.shape[1]).bool()
        scores = query @ key.transpose(1, 2) / math.sqrt(WIDTH)
        weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
        return x + self.out(weights @ value), (key, value)


class Whole(nn.Module):
    """The plain model."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Attention(index) for index in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x, _ = part(x)
        return x


def stages(indices: Sequence[int] = range(2)) -> list[PipelineStage]:
    return [PipelineStage(Attention(index), index, 2) for index in indices]


def sliced(slices: int, *, ranks: int = 2, microbatches: int = 3, halves: bool = False) -> Any:
    """Seq1F1B; with ``halves``, each W is at the end."""
    made = ps.build("Seq1F1B", ranks=ranks, microbatches=microbatches, slices=slices)
    if not halves:
        return made
    split = {ps.Op.F: ps.Op.F, ps.Op.B: ps.Op.I}
    programs: Any = made.programs
    return made.with_programs(
        [entry._replace(op=split[entry.op]) for entry in program]
        + [entry._replace(op=ps.Op.W) for entry in program if entry.op is ps.Op.B]
        for program in programs
    )


def check(made: Sequence[PipelineStage], schedule: Any, **options: Any) -> None:
    """Two steps and an evaluation are those of the plain model."""
    pipe = Pipeline.from_stages(made, schedule=schedule, loss_fn=functional.mse_loss, **options)
    model = Whole()
    for _ in range(2):
        loss = functional.mse_loss(model(X), Y)
        loss.backward()
        assert pipe.step(X, target=Y).loss == pytest.approx(loss.item(), abs=1e-12)
    assert pipe.evaluate(X, target=Y).loss == pytest.approx(loss.item(), abs=1e-12)
    torch.testing.assert_close(pipe.predict(X), model(X))
    for stage in made:
        plain = dict(model.parts[stage.index].named_parameters())
        for name, weight in stage.module.named_parameters():
            torch.testing.assert_close(weight.grad, plain[name].grad, atol=1e-12, rtol=0)
    if "mesh" in options:
        pipe.close()


@pytest.mark.parametrize("slices", [2, 4])
@pytest.mark.parametrize("halves", [False, True])
def test_slices_have_the_numbers_of_whole_sequences(slices: int, halves: bool) -> None:
    check(stages(), sliced(slices, halves=halves))


def found() -> ps.Schedule:
    """A schedule that is searched, with halves of backwards and slices of unequal times."""
    costs = ps.Costs(slice_times=[0.2, 0.3, 0.5], stash=0.5)
    schedule = ps.search(costs, ranks=2, microbatches=3, slices=3, memory=2, effort=0.01)
    assert schedule.name == "searched"
    return schedule


def test_a_searched_schedule_of_slices_trains() -> None:
    check(stages(), found())


@in_processes(2)
def test_they_do_between_processes(group: Any) -> None:
    for schedule in (sliced(3), sliced(3, halves=True), found()):
        check(stages([group.rank()]), schedule, mesh=group)


def test_activations_of_slices_may_wait_on_the_host() -> None:
    check(stages(), ps.offload(sliced(4), keep=3))


def test_a_mean_over_tokens_weighs_slices_by_their_labels() -> None:
    class Head(Attention):
        def forward(self, x: Tensor, state: State = None) -> tuple[Tensor, State]:
            output, state = super().forward(x, state)
            return output.transpose(1, 2), state

    labels = torch.arange(6 * LENGTH).reshape(6, LENGTH) % WIDTH
    labels[:, 7:] = -100
    made = PipelineStage(Head(), 0, 1)
    pipe = Pipeline.from_stages(
        [made], schedule=sliced(3, ranks=1), loss_fn=Loss(functional.cross_entropy, over="tokens")
    )
    plain = Head()
    loss = functional.cross_entropy(plain(X)[0], labels)
    assert pipe.step(X, target=labels).loss == pytest.approx(loss.item(), abs=1e-12)


def test_a_state_is_that_of_the_slice_before() -> None:
    seen: list[tuple[int, Any]] = []

    class Notes(Attention):
        def forward(self, x: Tensor, state: State = None) -> tuple[Tensor, State]:
            seen.append((x.shape[1], None if state is None else state[0].shape[1]))
            return super().forward(x, state)

    made = PipelineStage(Notes(), 0, 1)
    pipe = Pipeline.from_stages(
        [made], schedule=sliced(3, ranks=1, microbatches=2), loss_fn=mean_loss
    )
    outputs = pipe.step(X, target=Y, outputs=True).outputs
    assert seen == [(4, None), (4, 4), (4, 8)] * 2
    assert [output.shape[1] for output in outputs] == [4] * 6


class Forgets(Attention):
    def forward(self, x: Tensor, state: State = None) -> Any:
        return super().forward(x, state)[0]


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (
            lambda: Forgets(),
            StageError,
            "returned a Tensor; .* its output, and the state for the next slice",
        ),
        (lambda: nn.Linear(WIDTH, WIDTH).double(), UsageError, r"write forward\(self, x, state\)"),
    ],
)
def test_stages_without_a_state_are_refused(make: Any, error: type[Exception], says: str) -> None:
    def run() -> None:
        made = [PipelineStage(make(), 0, 1)]
        pipe = Pipeline.from_stages(
            made, schedule=sliced(3, ranks=1, microbatches=2), loss_fn=mean_loss
        )
        pipe.step(X, target=Y)

    with pytest.raises(error, match=says):
        run()


def test_a_model_that_is_cut_is_refused() -> None:
    with pytest.raises(
        ScheduleError, match=r"give Pipeline.from_stages modules whose forward\(x, state\)"
    ):
        Pipeline(chain(4), schedule="Seq1F1B", ranks=2, loss_fn=mean_loss)


def test_sequences_that_cannot_be_cut_are_refused() -> None:
    pipe = Pipeline.from_stages(stages(), schedule=sliced(5), loss_fn=mean_loss)
    step = partial(pipe.step, X, target=Y)
    with pytest.raises(
        MicrobatchError, match=r"5 slices of equal length: .* has 12 elements; pad it"
    ):
        step()
