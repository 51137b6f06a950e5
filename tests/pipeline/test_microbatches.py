"""Batches that are split in ways of their own, beside the plain loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock import REPLICATE, Microbatches, Pipeline, Split
from penstock.errors import MicrobatchError
from penstock.testing import Case, WorkerPool, compare
from penstock.values import MISSING, Rules
from tests.pipeline.models import assert_same, gradients

SCHEDULES = {"1F1B": 2, "Interleaved1F1B": 4, "ZB-V": 4, "DualPipeV": 4, "GPipe": 2}
"""Their names, and how many stages they have on two ranks."""
WIDTH, WORDS, LENGTH = 4, 11, 5


class Embed(nn.Module):
    """Tokens with three kinds of positions, as of images in a text."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)

    def forward(
        self, tokens: Tensor, position_ids: Tensor | None = None, scale: Tensor | None = None
    ) -> Tensor:
        found: Tensor = self.words(tokens)
        if position_ids is not None:
            found = found + self.places(position_ids).sum(0)
        return found if scale is None else found * scale


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed: Tensor = self.lin(hidden + hidden.cumsum(1))
        return hidden + mixed.tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = Embed()
        self.blocks = nn.ModuleList([Mix() for _ in range(4)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, **kwargs: Any) -> Tensor:
        hidden = self.embed(tokens, **kwargs)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


STAGES = {
    2: [["embed", "blocks.0", "blocks.1"], ["blocks.2", "blocks.3", "head"]],
    4: [["embed", "blocks.0"], ["blocks.1"], ["blocks.2"], ["blocks.3", "head"]],
}


def model() -> nn.Module:
    torch.manual_seed(3)
    return Model().double()


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten())


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, WORDS, shape, generator=torch.Generator().manual_seed(seed))


def pipeline(schedule: str = "1F1B", **options: Any) -> Pipeline:
    made: dict[str, Any] = {"ranks": 2, "stages": STAGES[SCHEDULES[schedule]], "microbatches": 4}
    return Pipeline(model(), schedule=schedule, loss_fn=token_loss, **(made | options))


# ---- rules

TOKENS = tokens(7, LENGTH)
POSITIONS = tokens(3, 7, LENGTH, seed=1) % LENGTH
KWARGS = {"position_ids": POSITIONS, "scale": torch.tensor(2.0)}


def positions_case(rule: Any) -> Case:
    rules: Rules | None = None if rule is None else {"position_ids": rule}
    return Case(model(), (TOKENS,), TOKENS.roll(1, 1), token_loss, kwargs=KWARGS, rules=rules)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_position_ids_with_a_rule(schedule: str) -> None:
    stages = STAGES[SCHEDULES[schedule]]
    found = compare(positions_case(Split(1)), schedule=schedule, stages=stages, microbatches=4)
    found.check(1e-12)


def test_position_ids_without_a_rule_are_refused() -> None:
    with pytest.raises(MicrobatchError, match="but argument 'position_ids' of shape"):
        compare(positions_case(None), schedule="1F1B", stages=STAGES[2], microbatches=4)


def test_position_ids_by_a_function() -> None:
    def columns(value: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        return list(value.split(list(sizes), 1))

    compare(positions_case(columns), schedule="1F1B", stages=STAGES[2]).check(1e-12)


def test_a_table_for_all_samples() -> None:
    table = tokens(3, 1, LENGTH, seed=1) % LENGTH
    rules: Rules = {"position_ids": REPLICATE}
    case = Case(model(), (TOKENS,), TOKENS, token_loss, kwargs={"position_ids": table}, rules=rules)
    compare(case, schedule="1F1B", stages=STAGES[2], microbatches=3).check(1e-12)


# ---- microbatches that are split already

RAGGED = [tokens(2, 5), tokens(1, 9, seed=1), tokens(3, 2, seed=2), tokens(2, 7, seed=3)]


def plain(parts: Sequence[Tensor]) -> nn.Module:
    """The model after a plain loop over microbatches, each weighed by its samples."""
    whole, samples = model(), sum(len(part) for part in parts)
    for part in parts:
        (token_loss(whole(part), part) * (len(part) / samples)).backward()
    return whole


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_ragged_microbatches(schedule: str) -> None:
    pipe = pipeline(schedule)
    for _ in range(2):
        pipe.zero_grad()
        pipe.step(Microbatches(RAGGED), target=RAGGED)
        assert_same(gradients(pipe), gradients(plain(RAGGED)))


def test_a_function_for_the_whole_call() -> None:
    def cut(args: Any, kwargs: Any, target: Any, count: int) -> Microbatches:
        sizes = [4, 2, 1]
        return Microbatches(args[0].split(sizes), targets=target.split(sizes))

    case = Case(model(), (TOKENS,), TOKENS.roll(1, 1), token_loss, rules=cut)
    compare(case, schedule="1F1B", stages=STAGES[2], microbatches=4).check(1e-12)


def test_their_outputs_come_one_by_one() -> None:
    outputs = pipeline().predict(Microbatches(RAGGED))
    expected = [model()(part).detach() for part in RAGGED]
    torch.testing.assert_close(outputs, expected)


def test_another_number_in_each_step() -> None:
    pipe = pipeline()
    for count in (4, 1, 7, 3):
        pipe.zero_grad()
        pipe.step(TOKENS, target=TOKENS, microbatches=count)
        assert_same(gradients(pipe), gradients(plain([TOKENS])))


def ragged_step(group: Any, everywhere: bool) -> dict[str, Any]:
    """A worker's task: who needs no batch gives none."""
    pipe = pipeline(group=group)
    rank = group.rank()
    args = [Microbatches(RAGGED)] if everywhere or rank == 0 else []
    own = RAGGED if args else Microbatches(RAGGED)
    result = pipe.step(*args, target=own if everywhere or rank else MISSING)
    outputs = pipe.predict(*args)
    expected = gradients(plain(RAGGED))
    found = gradients(pipe)
    return {
        "loss": result.loss,
        "gap": max(float((found[name] - expected[name]).abs().max()) for name in found),
        "shapes": [list(output.shape) for output in outputs],
    }


@pytest.mark.parametrize("everywhere", [True, False])
def test_over_processes(workers: WorkerPool, everywhere: bool) -> None:
    answers = workers.run(f"{__name__}:ragged_step", 2, 60.0, everywhere=everywhere)
    samples = sum(map(len, RAGGED))
    loss = sum(float(token_loss(model()(part), part).detach()) * len(part) for part in RAGGED)
    for answer in answers:
        assert answer["gap"] < 1e-12
        assert answer["loss"] == pytest.approx(loss / samples)
        assert answer["shapes"] == [[*part.shape, WORDS] for part in RAGGED]
