"""A pipeline trains as a plain loop does, with the bits of every schedule, in one process and in several.

``tests/test_catalogue.py`` compares all kinds of models with the plain loop, by one schedule.
"""

from __future__ import annotations

import random
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from penstock import PipelineStage
from penstock import schedule as ps
from penstock.errors import ScheduleError, StageError
from penstock.pipeline import Pipeline
from penstock.testing import Case, Verdict, WorkerPool, compare, plain_loop
from tests.catalogue.cases import CASES, EDGES, LANGUAGE, LOOPED, translator
from tests.catalogue.making import Does
from tests.pipeline.models import X, Y, chain, mean_loss
from tests.processes import in_processes

TRAINING = [name for name in ps.names() if name != "forward-only"]


# ---- every schedule of the library, with one model


def of_size(name: Any, ranks: int, microbatches: int, group: Any = None, **options: Any) -> Verdict:
    """A step of a language model."""
    sizes: dict[str, Any] = {"ranks": ranks, "microbatches": microbatches, "mesh": group}
    return compare(LANGUAGE["tied"](), schedule=name, **sizes, **options)


@cache
def of_gpipe(stages: int, microbatches: int) -> dict[str, str]:
    """The bits of a step that has all forwards first."""
    return of_size("GPipe", stages, microbatches, evaluate=False).digest()


@pytest.mark.parametrize("name", TRAINING)
def test_every_schedule_has_the_bits_of_gpipe(name: str) -> None:
    for ranks, microbatches in ((2, 1), (3, 3)):
        try:
            stages = ps.build(name, ranks=ranks, microbatches=microbatches).stages
        except ScheduleError:
            continue
        verdict = of_size(name, ranks, microbatches, stages=stages)
        verdict.check(1e-12)
        assert verdict.digest() == of_gpipe(stages, microbatches)


def by_schedule(group: Any, names: list[str]) -> list[dict[str, str]]:
    """A worker's task: the bits that live here, for each schedule."""
    ranks = group.size()
    return [of_size(name, ranks, 2 * ranks, group, evaluate=False).digest() for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_every_schedule_has_the_same_bits_between_processes(
    workers: WorkerPool, tmp_path: Path, ranks: int
) -> None:
    """Also one of a file, by which values are used in another order than they were sent."""
    own = tmp_path / "own.csv"
    own.write_text("0F1,0F0,0F2,0F3,0B2,0B0,0B1,0B3\n1F0,1F2,1F1,1B1,1B0,1B2,1F3,1B3\n")
    names = TRAINING + [str(own)] * (ranks == 2)
    answers = workers.run(f"{__name__}:by_schedule", ranks, 100.0, names=names)
    for name, *parts in zip(names, *answers, strict=True):
        bits = {key: text for part in parts for key, text in part.items()}
        if name in TRAINING:
            stages = ps.build(name, ranks=ranks, microbatches=2 * ranks).stages
            assert bits == of_gpipe(stages, 2 * ranks), name
        else:
            assert bits == of_size(name, ranks, 2 * ranks).digest(), name


TRAINED = ("tied", "looped", "ragged, some count", "added losses", "dropout", "frozen")
ADAM = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)


@pytest.mark.parametrize("name", TRAINED)
def test_three_steps_of_an_optimizer_have_the_bits_of_another_schedule(name: str) -> None:
    """With clipped gradients."""
    options: dict[str, Any] = {"microbatches": 4, "steps": 3, "optimizer": ADAM, "evaluate": False}
    options["stages"] = LOOPED if name == "looped" else 4
    verdict, other = (
        compare(LANGUAGE[name](), schedule=schedule, ranks=2, **options)
        for schedule in ("ZB-V", "Interleaved1F1B")
    )
    verdict.check(1e-12)
    assert other.digest() == verdict.digest()


def test_gradients_of_several_steps_add_up() -> None:
    for name in ("sparse", "frozen", "model: hooks", "gradient: a branch of microbatch 2"):
        compare(CASES[name](), schedule="ZB-V", ranks=2, microbatches=4, steps=2).check(1e-12)


# ---- what a schedule of one's own needs


def two_uses() -> nn.Module:
    """Three values of one stage go to two others; one needs no gradient, and one has none."""

    def run(m: Any, x: Tensor) -> Any:
        first = m.c(m.b(m.a(x)))
        with torch.no_grad():
            third = first * 3
        return m.e(first, first * 2) + m.d(third)

    torch.manual_seed(0)
    learns_from_one = Does(lambda m, x, y: m.lin(x) + y.detach(), lin=nn.Linear(4, 4))
    return Does(run, **{name: nn.Linear(4, 4) for name in "abcd"}, e=learns_from_one).double()


@in_processes(2)
def test_a_value_for_two_stages_of_a_rank_may_have_a_gradient_from_one(group: Any) -> None:
    """A rank has the stages 0, 3 and 4."""
    rows = ("0F0 3F0 4F0 4B0 3B0 0B0", "1F0 2F0 2B0 1B0")
    programs = tuple(tuple(map(ps.parse_action, row.split())) for row in rows)
    schedule = ps.Schedule("own", ps.Placement((0, 1, 1, 0, 0)), 1, programs)
    case = Case(two_uses(), (X,), Y, mean_loss)
    stages = ["b", "c", "d", "e"]
    compare(case, schedule=schedule, stages=stages, microbatches=1, mesh=group).check(1e-12)


def shuffled(ranks: int, microbatches: int, seed: int) -> ps.Schedule:
    """A valid order of F, I, W and B: each rank picks at random what may run."""
    pick = random.Random(seed)
    halves = [["I", "W"] if pick.random() < 0.5 else ["B"] for _ in range(microbatches)]
    parsed = [
        ps.parse_action(f"{stage}{op}{m}")
        for stage in range(ranks) for m in range(microbatches) for op in ["F", *halves[m]]
    ]  # fmt: skip
    todo = [action for action in parsed if isinstance(action, ps.Action)]
    rows = tuple(tuple(a for a in todo if a.stage == stage) for stage in range(ranks))
    unordered = ps.Schedule("shuffled", ps.looped(ranks), microbatches, rows)
    rule, programs = ps.Dependencies(unordered), [list[ps.Action]() for _ in range(ranks)]
    while todo:
        action = pick.choice([a for a in todo if not set(rule.before(a)) & set(todo)])
        todo.remove(action)
        programs[action.stage].append(action)
    return unordered.with_programs(programs)


@pytest.mark.parametrize("seed", range(4))
def test_any_valid_order_trains(seed: int) -> None:
    """Weights may get their gradients in another order, so the last digits may differ."""
    of_size(shuffled(3, 5, seed), 3, 5).check(1e-12)


# ---- stages by hand


def test_with_edges_by_hand() -> None:
    case = translator()
    loss, expected = plain_loop(case)
    stages = [PipelineStage(module, i, 4) for i, module in enumerate(case.model.children())]
    pipe = Pipeline.from_stages(stages, schedule="ZB-V", loss_fn=case.loss_fn, edges=EDGES)
    assert pipe.step(*case.args, target=case.target).loss == pytest.approx(loss, abs=1e-12)
    for key, parameter in case.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[key], rtol=0, atol=1e-12)


def test_a_stage_may_change_in_place_what_another_one_reads() -> None:
    torch.manual_seed(0)
    first = nn.Linear(4, 4).double()
    doubles = Does(lambda m, a: m.lin(a.mul_(2)), lin=nn.Linear(4, 4)).double()
    sums = Does(lambda m, a, b: m.lin(a) + b, lin=nn.Linear(4, 4)).double()
    modules = nn.ModuleList([first, doubles, sums])
    a = first(X)
    expected = torch.autograd.grad(
        mean_loss(sums(a, doubles(a.clone())), Y), list(modules.parameters())
    )
    stages = [PipelineStage(module, i, 3) for i, module in enumerate(modules)]
    edges = (ps.Edge("a", 0, (1, 2)), ps.Edge("b", 1, (2,)))
    pipe = Pipeline.from_stages(stages, schedule="1F1B", loss_fn=mean_loss, edges=edges)
    for _ in range(2):
        pipe.zero_grad()
        pipe.step(X, target=Y)
        torch.testing.assert_close([p.grad for p in modules.parameters()], list(expected))


class Notes(nn.Linear):
    """Notes where its arguments lie, and may change them."""

    changes = False

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.memory = list[int]()

    def forward(self, input: Tensor) -> Tensor:
        self.memory.append(input.untyped_storage().data_ptr())
        return super().forward(input.mul_(2) if self.changes else input)


def test_stages_by_hand_say_for_how_many_ranks_a_function_makes_a_schedule() -> None:
    stages = [PipelineStage(Notes().double(), index, 4) for index in range(4)]
    laps = lambda ranks, microbatches: ps.build(  # noqa: E731 - as a user gives it
        "Interleaved1F1B", ranks=ranks, microbatches=microbatches
    )
    pipe = Pipeline.from_stages(stages, schedule=laps, loss_fn=mean_loss, microbatches=2)
    assert pipe.schedule.ranks == 2


def test_arguments_are_copied_only_where_a_stage_changes_them() -> None:
    modules, batch = [Notes().double(), Notes().double()], X.clone()
    stages = [PipelineStage(module, i, 2) for i, module in enumerate(modules)]
    pipe = Pipeline.from_stages(stages, schedule="GPipe", loss_fn=mean_loss, microbatches=2)
    pipe.step(batch, target=Y)
    mine = batch.untyped_storage().data_ptr()
    assert mine not in modules[0].memory[:1]
    assert modules[0].memory[1:] == [mine]
    # What shows itself in the first call is copied from then on; what comes later is refused.
    modules[1].changes = True
    with pytest.raises(StageError, match=r"stage 1.*changed a tensor in place.*clone"):
        pipe.step(batch, target=Y)
    assert torch.equal(batch, X)


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1"])
def test_frozen_weights_cost_no_weight_backward(schedule: str) -> None:
    """As in LoRA, where what is large is frozen."""

    def operations(*, frozen: bool) -> int:
        model = chain(4)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not frozen or name.endswith("bias"))
        pipe = Pipeline(model, schedule=schedule, ranks=2, microbatches=4, loss_fn=mean_loss)
        pipe.step(X, target=Y)
        with FlopCounterMode(display=False) as counter:
            pipe.step(X, target=Y)
        return int(counter.get_total_flops())

    # One product in F of each of four layers, in I of three, and in W of four.
    once = 2 * X.numel() * X.shape[1]
    assert operations(frozen=False) == 11 * once
    assert operations(frozen=True) == 7 * once
