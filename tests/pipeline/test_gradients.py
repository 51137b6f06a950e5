"""A pipeline trains as a plain loop does: any model, any schedule, in one process and in several."""

from __future__ import annotations

import copy
import random
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from penstock import PipelineStage
from penstock import schedule as ps
from penstock.errors import ScheduleError
from penstock.pipeline import Pipeline
from penstock.testing import Verdict, WorkerPool, compare, plain_loop
from tests.catalogue.cases import CASES, EDGES, LANGUAGE, USES, translator
from tests.pipeline.models import X, Y, chain, mean_loss

RANKS = {"ZB-H1": 2, "1F1B": 4, "Interleaved1F1B": 2, "ZB-V": 2, "DualPipeV": 2}
"""A schedule of each family: on how many ranks there are four stages, and of ZB-H1 two."""
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


def run(name: str, schedule: str, group: Any = None) -> Verdict:
    """Two steps, with an optimizer's between them where one can train the model; what draws has all bits."""
    make, stages, trains = CASES[name]
    stages = 2 if schedule == "ZB-H1" else stages
    torch.manual_seed(0)
    adam = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    verdict = compare(
        make(), schedule=schedule, ranks=RANKS[schedule], stages=stages, microbatches=4, steps=2, mesh=group,
        optimizer=adam if trains else None, evaluate=False,
    )  # fmt: skip
    verdict.check(1e-12)
    if name.startswith("draws"):
        gaps = verdict.differences()
        assert {key: gap for key, gap in gaps.items() if gap and key.startswith("grad")} == {}
    return verdict


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        # By day each model with ZB-V, and every other one also with one more: what makes the bits equal knows
        # neither models nor schedules by name. `make test-all` has all.
        pytest.param(
            name,
            schedule,
            marks=() if k == (4 if i % 2 else i // 2 % 4) else pytest.mark.nightly,
        )
        for (i, name), (k, schedule) in product(
            enumerate(CASES), enumerate(("1F1B", "Interleaved1F1B", "DualPipeV", "ZB-H1", "ZB-V"))
        )
        if (name, schedule) != ("looped", "ZB-H1")
    ],
)
def test_in_one_process_with_the_bits_of_every_schedule(name: str, schedule: str) -> None:
    verdict = run(name, "ZB-V")
    other = verdict if schedule == "ZB-V" else run(name, schedule)
    assert schedule == "ZB-H1" or other.digest() == verdict.digest()
    if name in {f"gradient: {use}" for use in USES}:
        without = {name.split(".")[1] for name, grad in verdict.gradients.items() if grad is None}
        assert without == USES[name.partition(": ")[2]][2]


ON_WIRES = [
    [name for name in CASES if name.startswith("gradient: ")],
    ["skip edges", "tied", "looped", "ragged, some count", "added losses"],
    ["encoder-decoder", "a result that nobody uses", "draws: chain", "draws: between, all"],
    [name for name in CASES if name.startswith("model: ")],
    pytest.param(["half frozen", "sparse", "dropout"], marks=pytest.mark.nightly),
]  # fmt: skip
"""What the wires have to carry is of many kinds here."""


def digests(group: Any, schedule: str, names: list[str]) -> list[dict[str, str]]:
    """A worker's task: the bits that live here, of some models."""
    return [run(name, schedule, group).digest() for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("names", ON_WIRES, ids=["missing", "language", "others", "odd", "more"])
@pytest.mark.parametrize(
    "schedule", ["ZB-V", pytest.param("1F1B", marks=pytest.mark.nightly), "Interleaved1F1B"]
)
def test_between_processes_with_the_same_bits(
    workers: WorkerPool, schedule: str, names: list[str]
) -> None:
    task = f"{__name__}:digests"
    answers = workers.run(task, RANKS[schedule], 100.0, schedule=schedule, names=names)
    for name, *parts in zip(names, *answers, strict=True):
        # All ranks have one loss; where stages add to it, its last digit may differ from one process's.
        assert len({part.pop("loss") for part in parts}) == 1
        expected = run(name, schedule).digest()
        del expected["loss"]
        assert {key: bits for part in parts for key, bits in part.items()} == expected, name


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-V"])
def test_with_edges_by_hand(schedule: str) -> None:
    case = translator()
    loss, expected = plain_loop(case)
    stages = [PipelineStage(module, i, 4) for i, module in enumerate(case.model.children())]
    pipe = Pipeline.from_stages(stages, schedule=schedule, loss_fn=case.loss_fn, edges=EDGES)
    assert pipe.step(*case.args, target=case.target).loss == pytest.approx(loss, abs=1e-12)
    for key, parameter in case.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[key], rtol=0, atol=1e-12)


class Doubles(nn.Linear):
    """Changes its argument in place."""

    def forward(self, a: Tensor) -> Tensor:
        return super().forward(a.mul_(2))


class Sums(nn.Linear):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:  # type: ignore[override] # it takes two
        return super().forward(a) + b


def test_a_stage_may_change_in_place_what_another_one_reads() -> None:
    torch.manual_seed(0)
    first, doubles, sums = (kind(4, 4).double() for kind in (nn.Linear, Doubles, Sums))
    modules = nn.ModuleList([first, doubles, sums])
    a = first(X)
    expected = torch.autograd.grad(
        mean_loss(sums(a, doubles(a.clone())), Y), list(modules.parameters())
    )
    stages = [PipelineStage(module, i, 3) for i, module in enumerate(modules)]
    edges = (ps.Edge("a", 0, (1, 2)), ps.Edge("b", 1, (2,)))
    pipe = Pipeline.from_stages(stages, schedule="1F1B", loss_fn=mean_loss, edges=edges)
    pipe.step(X, target=Y)
    torch.testing.assert_close([p.grad for p in modules.parameters()], list(expected))


# ---- every schedule of the library

TRAINING = [name for name in ps.names() if name != "forward-only"]


def of_size(name: Any, ranks: int, microbatches: int, group: Any = None, **options: Any) -> Verdict:
    """A step of a language model."""
    case = LANGUAGE["tied"]()
    options = {
        "schedule": name,
        "ranks": ranks,
        "microbatches": microbatches,
        "mesh": group,
    } | options
    return compare(case, **options)


@cache
def bits_of_gpipe(stages: int, microbatches: int) -> dict[str, str]:
    return of_size("GPipe", stages, microbatches).digest()


@pytest.mark.parametrize("name", TRAINING)
def test_every_schedule_has_the_bits_of_gpipe(name: str) -> None:
    for ranks, microbatches in ((2, 1), (3, 3)):
        try:
            stages = ps.build(name, ranks=ranks, microbatches=microbatches).stages
        except ScheduleError:
            continue
        verdict = of_size(name, ranks, microbatches, stages=stages)
        verdict.check(1e-12)
        assert verdict.digest() == bits_of_gpipe(stages, microbatches)


def by_schedule(group: Any, names: list[str]) -> list[dict[str, str]]:
    """A worker's task: the bits that live here, for each schedule."""
    ranks = group.size()
    return [of_size(name, ranks, 2 * ranks, group).digest() for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_every_schedule_has_the_same_bits_between_processes(
    workers: WorkerPool, ranks: int
) -> None:
    answers = workers.run(f"{__name__}:by_schedule", ranks, 100.0, names=TRAINING)
    for name, *parts in zip(TRAINING, *answers, strict=True):
        bits = {key: text for part in parts for key, text in part.items()}
        assert bits == of_size(name, ranks, 2 * ranks).digest(), name


def run_file(group: Any, path: str) -> float:
    """A worker's task: the largest difference from the plain loop."""
    return max(of_size(path, 2, 3, group).differences().values())


def test_values_may_be_used_in_another_order_than_they_were_sent(
    workers: WorkerPool, tmp_path: Path
) -> None:
    path = tmp_path / "own.csv"
    path.write_text("0F1,0F0,0F2,0B2,0B0,0B1\n1F0,1F2,1F1,1B1,1B0,1B2\n")
    assert max(workers.run(f"{__name__}:run_file", 2, path=str(path))) < 1e-12


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


class First(nn.Module):
    """Learns from the first of two values only."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.lin(x) + y.detach()


class TwoUses(nn.Module):
    """Three values of one stage go to two others; one needs no gradient, and one has none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.e = First()

    def forward(self, x: Tensor) -> Any:
        first = self.c(self.b(self.a(x)))
        second = first * 2
        with torch.no_grad():
            third = first * 3
        fourth = self.d(third)
        return self.e(first, second) + fourth


def train_with_two_uses(group: Any) -> float:
    """A worker's task: how far a rank's gradients are from those of a plain loop."""
    rows = ("0F0 3F0 4F0 4B0 3B0 0B0", "1F0 2F0 2B0 1B0")
    programs = tuple(tuple(map(ps.parse_action, row.split())) for row in rows)
    schedule = ps.Schedule("own", ps.Placement((0, 1, 1, 0, 0)), 1, programs)
    torch.manual_seed(0)
    model, x = TwoUses(), torch.randn(2, 4)
    plain = copy.deepcopy(model)

    def loss_fn(output: Any, _: Any = None) -> Tensor:
        return output.square().mean()  # type: ignore[no-any-return]

    with Pipeline(
        model, stages=["b", "c", "d", "e"], schedule=schedule, microbatches=1, loss_fn=loss_fn,
        mesh=group,
    ) as pipe:  # fmt: skip
        pipe.step(x)
        loss_fn(plain(x)).backward()
        pairs = [
            (p.grad, plain.get_parameter(n).grad) for n, p in pipe.weights.here.named_parameters()
        ]
    return max(float((a - b).abs().max()) for a, b in pairs if a is not None and b is not None)


@pytest.mark.timeout(60)
def test_a_value_for_two_stages_of_a_rank_may_have_a_gradient_from_one(workers: WorkerPool) -> None:
    assert max(workers.run(f"{__name__}:train_with_two_uses", 2)) < 1e-6


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
