"""What ranks agree on before data moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Pipeline
from penstock.errors import AgreementError, PenstockError, StageError
from penstock.runtime import Rank, agree_plan, drive
from penstock.schedule import Schedule, add_communication, build
from penstock.testing import WorkerPool
from penstock.transport import in_process
from tests.runtime.fakes import CountingTransport
from tests.runtime.graphs import make_ranks, order_of

X = torch.ones(4, 3, dtype=torch.float64)


def schedule(name: str = "1F1B", microbatches: int = 2) -> Schedule:
    return add_communication(build(name, ranks=2, microbatches=microbatches))


# ---- the plan


def agree(*schedules: Schedule) -> None:
    ends = in_process(len(schedules))
    drive([agree_plan(end, made) for end, made in zip(ends, schedules, strict=True)])


def test_ranks_with_one_plan_agree() -> None:
    agree(schedule(), schedule())


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (schedule("GPipe"), r"differ in schedule: 1F1B \w+ on rank 0, GPipe \w+ on rank 1; give"),
        (schedule("1F1B", 3), "microbatches: 2 on rank 0, 3 on rank 1"),
    ],
)
def test_ranks_with_other_plans_do_not(other: Schedule, says: str) -> None:
    with pytest.raises(AgreementError, match=says):
        agree(schedule(), other)


def test_one_name_for_two_orders_is_found_out() -> None:
    other = schedule()
    swapped = [*other.programs[0][:2][::-1], *other.programs[0][2:]]
    with pytest.raises(AgreementError, match="schedule"):
        agree(schedule(), other.with_programs([swapped, other.programs[1]]))


# ---- over processes: every rank hears of it


def model(width: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(width, 3)).double()


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def told(run: Callable[[], Any]) -> list[Any]:
    """The type and text of an error, for a worker to give."""
    try:
        run()
    except PenstockError as error:
        return [type(error).__name__, str(error), type(error.__cause__).__name__]
    return []


def make(group: Any, name: str = "1F1B", width: int = 3) -> Pipeline:
    return Pipeline(model(width), schedule=name, ranks=2, microbatches=2, loss_fn=loss, group=group)


def build_another_plan(group: Any) -> list[Any]:
    name = "GPipe" if torch.distributed.get_rank() else "1F1B"
    return told(lambda: make(group, name))


def step_with_another_shape(group: Any) -> list[Any]:
    pipe, rank = make(group), torch.distributed.get_rank()
    batch = torch.ones(4, 3 + 1 - rank, 3, dtype=torch.float64)
    first = told(lambda: pipe.step(batch, target=batch))
    return [first, told(lambda: pipe.step(X, target=X))]


def step_with_a_stage_that_refuses(group: Any) -> list[Any]:
    pipe = make(group, width=5)
    return told(lambda: pipe.step(X, target=X))


def step_with_shapes_that_change(group: Any) -> list[float]:
    pipe = make(group)
    batches = [X, torch.ones(3, 2, 3, dtype=torch.float64), X, torch.ones(7, 3).double()]
    return [pipe.step(batch, target=batch).loss for batch in batches]


def test_every_rank_hears_that_plans_differ(workers: WorkerPool) -> None:
    answers = workers.run(f"{__name__}:build_another_plan", 2, 30.0)
    assert {answer[0] for answer in answers} == {"AgreementError"}
    assert answers[0] == answers[1]


def test_every_rank_hears_that_shapes_differ(workers: WorkerPool) -> None:
    answers = workers.run(f"{__name__}:step_with_another_shape", 2, 30.0)
    for first, second in answers:
        assert first[:1] == ["AgreementError"]
        assert "pass every rank the same batch" in first[1]
        assert second == []


def test_every_rank_hears_that_a_stage_refuses(workers: WorkerPool) -> None:
    answers = workers.run(f"{__name__}:step_with_a_stage_that_refuses", 2, 30.0)
    assert [cause for *_, cause in answers] == ["NoneType", "RuntimeError"]
    for kind, text, _ in answers:
        assert kind == "StageError"
        assert text.startswith(
            "rank 1, stage 1, module '1' (Linear), before the first microbatch: "
        )


def test_shapes_may_change_from_step_to_step(workers: WorkerPool) -> None:
    answers = workers.run(f"{__name__}:step_with_shapes_that_change", 2, 30.0)
    assert answers == [step_with_shapes_that_change(None)] * 2


def test_in_one_process_too() -> None:
    with pytest.raises(StageError, match=r"rank 1, stage 1, .*: RuntimeError: mat1") as told:
        make(None, width=5).step(X, target=X)
    assert isinstance(told.value.__cause__, RuntimeError)
    assert told.value.__cause__.__traceback__ is None, "none of its frames is the user's"


# ---- how often


class Counted:
    """Two ranks over transports that count."""

    def __init__(self) -> None:
        self.schedule = schedule()
        self.evaluation = add_communication(build("forward-only", ranks=2, microbatches=2))
        self.modules = [nn.Linear(3, 3).double() for _ in range(2)]
        self.ends = [CountingTransport(end) for end in in_process(2)]
        self.ranks: list[Rank] = make_ranks(self.schedule, self.modules, self.ends)

    def step(self, batch: Tensor = X) -> tuple[int, int]:
        """How many agreements a step took on each rank, and how many control words and losses."""
        return self._run(self.schedule, batch)

    def evaluate(self) -> tuple[int, int]:
        with torch.no_grad():
            return self._run(self.evaluation, X)

    def _run(self, made: Schedule, batch: Tensor) -> tuple[int, int]:
        for end in self.ends:
            end.calls.clear()
        drive([rank.run(order_of(made, batch)) for rank in self.ranks])
        assert self.ends[0].calls == self.ends[1].calls
        calls = self.ends[0].calls
        return calls["agree"], calls["gather"] + calls["sum"]


CONTROL_WORD_AND_LOSS = 2
CALL = 1
EACH_STAGE = 2
INTRODUCTION = 1


def test_specs_are_agreed_on_once() -> None:
    counted = Counted()
    assert counted.step() == (INTRODUCTION + CALL + EACH_STAGE, CONTROL_WORD_AND_LOSS)
    assert counted.step() == (0, CONTROL_WORD_AND_LOSS)


def test_new_shapes_are_agreed_on_and_old_ones_known() -> None:
    counted = Counted()
    counted.step()
    assert counted.step(torch.ones(2, 5, 3).double())[0] == CALL + EACH_STAGE
    assert counted.step()[0] == 0


def test_microbatches_of_two_sizes_are_agreed_on_together() -> None:
    counted = Counted()
    assert counted.step(torch.ones(3, 3).double())[0] == INTRODUCTION + CALL + EACH_STAGE
    assert counted.step(torch.ones(2, 3).double())[0] == CALL, "one of the two sizes"


def test_evaluation_has_specs_of_its_own() -> None:
    counted = Counted()
    counted.step()
    assert counted.evaluate()[0] == CALL + EACH_STAGE
    assert counted.step()[0] == counted.evaluate()[0] == 0


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "frozen": lambda module: module.requires_grad_(False),
    "cast": lambda module: module.register_forward_pre_hook(double) and module.float(),
}


def double(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0].float(),)


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_a_changed_model_is_agreed_on_anew(name: str) -> None:
    counted = Counted()
    counted.step()
    CHANGES[name](counted.modules[0])
    if name == "cast":
        CHANGES[name](counted.modules[1])
    assert counted.step()[0] == CALL + EACH_STAGE
    assert counted.step()[0] == 0


# ---- autocast


def stepped(pipe: Pipeline, dtype: torch.dtype | None) -> list[Tensor | None]:
    pipe.zero_grad()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        pipe.step(X.float(), target=X.float())
    return [parameter.grad for parameter in pipe.parameters()]


def plain(dtype: torch.dtype | None) -> list[Tensor | None]:
    whole = model().float()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        for half in (slice(0, 2), slice(2, 4)):
            (loss(whole(X[half].float()), X[half].float()) / 2).backward()
    return [parameter.grad for parameter in whole.parameters()]


@pytest.mark.parametrize("schedule_name", ["1F1B", "ZB-H1"])
def test_autocast_may_be_turned_on_and_off_between_steps(schedule_name: str) -> None:
    pipe = Pipeline(model().float(), schedule=schedule_name, ranks=2, microbatches=2, loss_fn=loss)
    for dtype in (None, torch.bfloat16, None):
        torch.testing.assert_close(stepped(pipe, dtype), plain(dtype))
