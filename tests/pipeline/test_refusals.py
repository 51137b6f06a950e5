"""Every refusal of Pipeline names the value and the remedy, before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from penstock import REPLICATE, Pipeline, PipelineStage
from penstock.errors import (
    MicrobatchError,
    PartitionError,
    PenstockError,
    ScheduleError,
    SpecError,
    UsageError,
)
from penstock.partition import cut_sequential
from penstock.schedule import Action, Op, Placement, Schedule, build
from penstock.testing import WorkerPool
from tests.pipeline.models import STAGES, X, Y, chain, make, mean_loss, named

Refusal = tuple[Callable[[], Any], type[PenstockError], str]


def stages(*indices: int, count: int = 2) -> list[PipelineStage]:
    return [PipelineStage(nn.Linear(2, 2), index, count) for index in indices]


def by_hand(*given: PipelineStage, schedule: Any = "1F1B") -> Pipeline:
    return Pipeline.from_stages(given, schedule=schedule, loss_fn=mean_loss)


class OfOthers(nn.Sequential):
    def forward(self, x: Any) -> Any:
        return -super().__getitem__(0)(x)


def incomplete() -> Schedule:
    """Microbatch 0 has a forward and no backward on rank 0."""
    rows = ((Action(0, Op.F, 0),), (Action(1, Op.F, 0), Action(1, Op.B, 0)))
    return Schedule("half", Placement((0, 1)), 1, rows)


MAKING: dict[str, Refusal] = {
    "unknown schedule": (lambda: make(schedule="1F1"), ScheduleError, "did you mean '1F1B'"),
    "no ranks": (lambda: make(ranks=0, stages=2), UsageError, "ranks=0: must be at least 1"),
    "ranks unsaid": (lambda: make(ranks=None), UsageError, "over how many ranks"),
    "microbatches": (lambda: make(microbatches=0), ScheduleError, "microbatches=0"),
    "uneven stages": (
        lambda: make(stages=3),
        PartitionError,
        "3 stages cannot be shared evenly by 2 ranks; use a multiple of 2",
    ),
    "too many stages": (lambda: make(ranks=4), PartitionError, "3 modules cannot be cut into 4"),
    "another reduction": (lambda: make(reduction="max"), UsageError, "must be 'mean' or 'sum'"),
    "too few modules": (
        lambda: make(OfOthers(*chain()), ranks=8),
        PartitionError,
        "a OfOthers has 3 modules that can be placed, too few for 8 stages; use from 1 to 3",
    ),
    "nothing to call": (
        lambda: make(nn.ModuleDict({"a": chain()})),
        PartitionError,
        "a ModuleDict is cut at module paths: stages=",
    ),
    "an unknown path": (
        lambda: make(named(), stages=[["embed"], ["tail"]]),
        PartitionError,
        "no module 'tail' in the model; did you mean embed",
    ),
    "a partition of another model": (
        lambda: make(stages=cut_sequential(chain(), 2)),
        PartitionError,
        "in no stage: 0.0.weight",
    ),
    "schedule and ranks": (
        lambda: make(schedule=build("1F1B", ranks=3, microbatches=4)),
        UsageError,
        r"'1F1B' has \{'ranks': 3\}, but \{'ranks': 2\} was asked for",
    ),
    "schedule and microbatches": (
        lambda: make(schedule=build("1F1B", ranks=2, microbatches=3)),
        UsageError,
        r"has \{'microbatches': 3\}, but \{'microbatches': 4\}",
    ),
    "schedule and stages": (
        lambda: make(named(), stages=[["embed"]], schedule=build("1F1B", ranks=2, microbatches=4)),
        UsageError,
        r"has \{'stages': 2\}, but \{'stages': 1\}",
    ),
    "an incomplete schedule": (
        lambda: make(schedule=incomplete(), microbatches=None),
        ScheduleError,
        "'half' cannot run:\n",
    ),
    "no stages": (lambda: by_hand(), UsageError, "no stages were given"),
    "a missing stage": (
        lambda: by_hand(*stages(0)),
        UsageError,
        r"rank 1 holds stages \[\]; 1F1B places \[1\] there",
    ),
    "a stage twice": (lambda: by_hand(*stages(0, 1, 1)), UsageError, r"holds stages \[1, 1\]"),
    "stages of others": (
        lambda: by_hand(*stages(0), *stages(1, count=3)),
        UsageError,
        r"the stages of rank 1 belong to pipelines of \[3\] stages; 1F1B has 2",
    ),
}


CALLING: dict[str, Refusal] = {
    "step without a loss": (
        lambda: make(loss_fn=None).step(X, target=Y),
        UsageError,
        "step needs a loss; give the Pipeline a loss_fn",
    ),
    "eval without a loss": (
        lambda: make(loss_fn=None).eval(X, target=Y),
        UsageError,
        "eval needs a loss; .* or use predict",
    ),
    "step without backward": (
        lambda: make(schedule="forward-only").step(X, target=Y),
        UsageError,
        "the schedule 'forward-only' has no backward",
    ),
    "too few samples": (
        lambda: make(schedule="DualPipeV", stages=4, model=chain(4)).step(X[:3], target=Y[:3]),
        ScheduleError,
        "this step has 3 microbatches instead of 4: DualPipeV on ranks=2 needs microbatches=4",
    ),
    "no samples": (lambda: make().predict(X[:0]), MicrobatchError, "the batch is empty"),
    "another target": (
        lambda: make().step(X, target=Y[:7]),
        MicrobatchError,
        r"8 samples \(argument 0 of .* but the target of shape \[7, 4\] has 7 in dimension 0",
    ),
    "a rule for nothing": (
        lambda: make(rules={"mask": REPLICATE}).step(X, target=Y),
        MicrobatchError,
        r"rules for \['mask'\], but the arguments are \[0\]",
    ),
    "an argument that cannot travel": (
        lambda: make(named(), stages=STAGES).predict(X, mask={1, 2}),
        SpecError,
        r"a value of type set stands at \[1\]\['mask'\]",
    ),
    "an output that cannot travel": (
        lambda: make(nn.Sequential(chain(), Odd())).predict(X),
        SpecError,
        "the model's output cannot travel to other ranks",
    ),
}


class Odd(nn.Module):
    def forward(self, x: Any) -> Any:
        return {x}


REFUSALS = MAKING | CALLING


@pytest.mark.parametrize("name", sorted(REFUSALS))
def test_refusals(name: str) -> None:
    call, kind, says = REFUSALS[name]
    with pytest.raises(kind, match=says):
        call()


@pytest.mark.parametrize("name", sorted(REFUSALS))
def test_a_refusal_is_a_value_error(name: str) -> None:
    """Code that catches the built-in errors keeps working."""
    with pytest.raises(ValueError, match=REFUSALS[name][2]):
        REFUSALS[name][0]()


def test_an_output_that_cannot_travel_may_be_trained_on() -> None:
    def loss(output: set[Any], target: Any) -> Any:
        (tensor,) = output
        return mean_loss(tensor, target)

    pipe = make(nn.Sequential(chain(), Odd()), loss_fn=loss)
    assert pipe.step(X, target=Y).loss > 0


# ---- over processes


def refuse(group: Any) -> list[str]:
    """What this process is told: too many ranks, and another process's stages."""
    rank = torch.distributed.get_rank()
    calls: list[Callable[[], Any]] = [
        lambda: make(ranks=3, group=group),
        lambda: Pipeline.from_stages(stages(1 - rank), schedule="1F1B", group=group),
    ]
    return [told(call) for call in calls]


def told(call: Callable[[], Any]) -> str:
    try:
        call()
    except UsageError as error:
        return str(error)
    return ""


def test_every_process_is_told(workers: WorkerPool) -> None:
    for rank, (ranks, others) in enumerate(workers.run(f"{__name__}:refuse", 2, 30.0)):
        assert ranks.startswith("2 processes run a pipeline of 3 ranks; start one process per rank")
        assert others == f"rank {rank} holds stages [{1 - rank}]; 1F1B places [{rank}] there"


def move(group: Any) -> list[bool]:
    """Which stages came from the meta device; none has data to move, so a move is an error."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1 - torch.distributed.get_rank()].to("meta")
    make(model, device="cpu", group=group)
    return [parameter.is_meta for parameter in model.parameters()][::2]


def test_a_process_moves_its_own_stages_alone(workers: WorkerPool) -> None:
    assert workers.run(f"{__name__}:move", 2, 30.0) == [[False, True], [True, False]]
