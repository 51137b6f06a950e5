"""From what the user asks for to a proven schedule and a cut model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from penstock.errors import PartitionError, ScheduleError, UsageError
from penstock.partition import partition
from penstock.pipeline.plan import ProvenSchedules, Stages, cut, make_plan, prove
from penstock.schedule import Schedule, build
from penstock.schedule.files import save


def model(layers: int = 4) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))


VALUE = build("1F1B", ranks=3, microbatches=5)

FILLED: dict[str, tuple[tuple[Any, Any, Stages, Any], tuple[int, int, int]]] = {
    "ranks": (("1F1B", 2, None, None), (2, 2, 4)),
    "microbatches": (("1F1B", 2, None, 3), (2, 2, 3)),
    "a count of stages": (("1F1B", None, 3, None), (3, 3, 6)),
    "paths": (("1F1B", None, [["a"], ["b"]], None), (2, 2, 4)),
    "a partition": (("1F1B", None, partition(model(), 4), 8), (4, 4, 8)),
    "a value": ((VALUE, None, None, None), (3, 3, 5)),
    "a value and the same": ((VALUE, 3, 3, 5), (3, 3, 5)),
}


@pytest.mark.parametrize("name", sorted(FILLED))
def test_what_was_left_open_is_filled_in(name: str) -> None:
    asked, expected = FILLED[name]
    plan = make_plan(*asked)
    assert (plan.ranks, plan.stages, plan.microbatches) == expected


def test_a_schedule_is_proven_once() -> None:
    plan = make_plan("1F1B", 2, None, 4)
    assert plan.training is plan.training
    assert plan.training == prove(build("1F1B", ranks=2, microbatches=4))


@pytest.mark.parametrize("suffix", [".json", ".csv"])
@pytest.mark.parametrize("kind", [str, Path])
def test_a_schedule_may_come_from_a_file(tmp_path: Path, suffix: str, kind: type[Any]) -> None:
    path = tmp_path / f"schedule{suffix}"
    save(prove(VALUE), path)
    plan = make_plan(kind(path), None, None, None)
    assert (plan.ranks, plan.stages, plan.microbatches) == (3, 3, 5)
    assert plan.training.programs == prove(VALUE).programs


def test_a_named_schedule_is_built_for_any_number() -> None:
    plan = make_plan("1F1B", 2, None, 4)
    assert plan.proven(3, trains=True).microbatches == 3


def test_a_value_is_for_its_own_number() -> None:
    plan = make_plan(VALUE, None, None, None)
    with pytest.raises(ScheduleError, match="is for 5 microbatches, not 3; to have one for each"):
        plan.proven(3, trains=True)


@pytest.mark.parametrize("schedule", ["1F1B", VALUE])
def test_evaluation_runs_forwards_alone_on_the_same_placement(schedule: str | Schedule) -> None:
    plan = make_plan(schedule, 3, None, 5)
    found = plan.proven(2, trains=False)
    assert not found.trains
    assert found.microbatches == 2
    assert found.placement == plan.training.placement
    assert found.edges == plan.training.edges


def test_plans_are_compared_by_what_they_say() -> None:
    plan = ProvenSchedules("1F1B", 2, 2, 4)
    assert plan.training.ranks == 2
    assert plan == ProvenSchedules("1F1B", 2, 2, 4) != ProvenSchedules("1F1B", 2, 2, 5)


def test_messages_that_are_spelled_out_are_kept() -> None:
    spelled = prove(VALUE)
    assert prove(spelled) == spelled


def test_a_schedule_that_hangs_is_refused_with_the_report() -> None:
    spelled = prove(build("GPipe", ranks=2, microbatches=1))
    backwards = spelled.with_programs(program[::-1] for program in spelled.programs)
    with pytest.raises(ScheduleError, match="the schedule 'GPipe' cannot run:\n"):
        prove(backwards)


# ---- cutting


def test_a_partition_is_used_as_it_is() -> None:
    whole = model()
    made = partition(whole, 2)
    assert cut(whole, made, 2) is made


def test_a_count_cuts_a_sequential() -> None:
    assert len(cut(model(), 3, 3).modules) == len(cut(model(), None, 3).modules) == 3


def test_paths_cut_any_model() -> None:
    found = cut(nn.ModuleDict({"a": model(1), "b": model(1)}), [["a"], ["b"]], 2)
    assert [list(dict(m.named_parameters())) for m in found.modules] == [
        ["a.0.weight", "a.0.bias"],
        ["b.0.weight", "b.0.bias"],
    ]


def test_one_stage_is_the_model() -> None:
    whole = nn.ModuleDict({"a": model(1)})
    (stage,) = cut(whole, None, 1).modules
    assert stage.state_dict().keys() == whole.state_dict().keys()


def test_other_models_need_paths() -> None:
    with pytest.raises(PartitionError, match=r"a ModuleDict has no forward; .*stages="):
        cut(nn.ModuleDict({"a": model(1)}), 2, 2)


def test_no_ranks_are_refused() -> None:
    with pytest.raises(UsageError, match="ranks=-1"):
        make_plan("1F1B", -1, None, None)
