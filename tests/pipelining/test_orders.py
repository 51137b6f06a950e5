"""Actions in a dict of lists, as tests and schedules written for torch hold them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.pipelining import _IR, _backward, _utils, schedules
from penstock.pipelining.schedules import B, F, _Action
from penstock.pipelining.stage import PipelineStage, build_stage
from tests.pipelining.bodies import X, Y, loss_fn
from tests.pipelining.test_schedules import Stage, gradients, plain, stages

theirs: Any = import_module("torch.distributed.pipelining.schedules")
their_utils: Any = import_module("torch.distributed.pipelining._utils")

ONE_F_ONE_B = {0: "0F0 0F1 0B0 0B1", 1: "1F0 1B0 1F1 1B1"}


def row(module: Any, text: str) -> list[Any]:
    return [module._Action.from_str(action) for action in text.split()]


def order(module: Any) -> dict[int, list[Any]]:
    return {rank: row(module, text) for rank, text in ONE_F_ONE_B.items()}


def test_an_order_is_proven_and_gives_the_ranks_of_stages() -> None:
    assert schedules._validate_schedule(order(schedules), 2, 2, 2) == {0: 0, 1: 1}


WRONG = {
    "no backward": ({0: "0F0 0F1", 1: "1F0 1F1"}, "forwards and no backward"),
    "ranks": ({0: ONE_F_ONE_B[0]}, "actions for 1 ranks"),
    "missing": ({**ONE_F_ONE_B, 1: "1F0 1B0 1F1"}, "1B1"),
    "circle": ({**ONE_F_ONE_B, 0: "0F0 0B1 0F1 0B0"}, "deadlock"),
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_a_wrong_order_is_refused(name: str) -> None:
    texts, says = WRONG[name]
    found = {rank: row(schedules, text) for rank, text in texts.items()}
    with pytest.raises(AssertionError, match=says):
        schedules._validate_schedule(found, 2, 2, 2)


def test_an_order_as_a_table() -> None:
    shown = schedules._format_pipeline_order(
        {0: [None, *row(schedules, "0F0")], 1: row(schedules, "1F0")}, error_step_number=1
    )
    assert [line.split() for line in shown.splitlines()] == [
        ["Rank", "0", "Rank", "1"],
        ["Step", "0:", "1F0"],
        ["Step", "1:", "0F0", "<--", "ERROR", "HERE"],
    ]


@pytest.mark.parametrize("style", ["loop", "v"])
@pytest.mark.parametrize(("ranks", "count"), [(2, 2), (2, 4), (3, 6), (2, 6)])
def test_where_stages_are(style: str, ranks: int, count: int) -> None:
    for name in ("generate_stage_to_rank_mapping", "generate_rank_to_stage_mapping"):
        ours = getattr(_utils, name)(ranks, count, style)
        assert ours == getattr(their_utils, name)(ranks, count, style)


@pytest.mark.parametrize(("style", "count"), [("v", 5), ("w", 4)])
def test_where_stages_cannot_be(style: str, count: int) -> None:
    with pytest.raises(ValueError, match=style.upper() if style == "v" else style):
        schedules.generate_stage_to_rank_mapping(2, count, style)


# ---- schedules of one's own


class Written(schedules.PipelineScheduleMulti):
    """One microbatch after the other, as a user writes it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pipeline_order = {}
        self.pipeline_order[0] = [
            action
            for microbatch in range(self._n_microbatches)
            for action in (
                _Action(0, F, microbatch),
                None,
                _Action(1, F, microbatch),
                _Action(1, B, microbatch),
                _Action(0, B, microbatch),
            )
        ]
        self._validate_and_set_stage_mapping(self.pipeline_order)


class WrittenLater(schedules._PipelineScheduleRuntime):
    """The actions, with their messages, are set when all else is there."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        assert self.pipeline_order == {}
        self.pipeline_order_with_comms = {0: row(schedules, "0F0 1F0 1I0 0F1 1F1 1W0 0B0 1B1 0B1")}
        self.stage_index_to_group_rank = {0: 0, 1: 0}


@pytest.mark.parametrize(("chosen", "count"), [(Written, 4), (WrittenLater, 2)])
def test_a_schedule_of_ones_own(chosen: Any, count: int) -> None:
    schedule = chosen(stages(), count, loss_fn=loss_fn)
    schedule.step(X, target=Y)
    torch.testing.assert_close(gradients(schedule), plain()[1])


class NoBackward(schedules.PipelineScheduleMulti):
    """Of a user who forgot them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.pipeline_order = {0: row(schedules, "0F0 1F0 0F1 1F1")}


TAKEN: dict[str, Callable[[Any, Path, str], Any]] = {
    "made by hand": lambda made, _, text: made._prepare_schedule_with_comms(
        {0: row(schedules, text)}
    ),
    "from a file": lambda made, path, text: (
        path.write_text(text.replace(" ", ",")),
        made._load_csv(path),
    ),
    "with messages": lambda made, _, text: made._prepare_schedule_with_comms(
        {0: row(schedules, text)}, "compute_comms"
    ),
    "set": lambda made, _, text: setattr(
        made, "pipeline_order_with_comms", {0: row(schedules, text)}
    ),
}
LACKING = {
    "all": ("0F0 1F0 0F1 1F1", "forwards and no backward"),
    "a microbatch's": ("0F0 1F0 1B0 0B0 0F1 1F1", "1B1: missing"),
    "a stage's": ("0F0 1F0 0F1 1F1 1B0 1B1", "0B0: missing"),
    "a half": ("0F0 1F0 1I0 1W0 0B0 0F1 1F1 1I1 0B1", "1W1: missing"),
}


@pytest.mark.parametrize("lacks", sorted(LACKING))
@pytest.mark.parametrize("how", sorted(TAKEN))
def test_a_loss_without_all_backwards_is_refused(how: str, lacks: str, tmp_path: Path) -> None:
    made = schedules._PipelineScheduleRuntime(stages(), 2, loss_fn=loss_fn)
    text, says = LACKING[lacks]
    with pytest.raises(AssertionError, match=says):
        TAKEN[how](made, tmp_path / "order.csv", text)
    TAKEN[how](made, tmp_path / "order.csv", "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1")
    made.step(X, target=Y)
    torch.testing.assert_close(gradients(made), plain()[1])


def test_a_subclass_without_backwards_is_refused() -> None:
    with pytest.raises(
        AssertionError, match="forwards and no backward, so that the loss would train"
    ):
        NoBackward(stages(), 2, loss_fn=loss_fn).step(X, target=Y)
    torch.testing.assert_close(NoBackward(stages(), 2).step(X), NoBackward(stages(), 2).eval(X))


def test_actions_that_are_filled_in_are_used() -> None:
    schedule = schedules.PipelineScheduleMulti(stages(), 2, loss_fn=loss_fn)
    schedule.pipeline_order[0] = row(schedules, "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1")
    schedule.step(X, target=Y)
    torch.testing.assert_close(gradients(schedule), plain()[1])
    with pytest.raises(RuntimeError, match="the actions have them on"):
        schedule.stage_index_to_group_rank = {0: 1, 1: 0}


def test_forward_only() -> None:
    stage = PipelineStage(stages()[0].submod, 0, 1, "cpu")
    schedule = schedules._ScheduleForwardOnly(stage, 4)
    with torch.no_grad():
        torch.testing.assert_close(schedule.step(X), stage.submod(X))
        with pytest.raises(RuntimeError, match="has no loss"):
            schedule.step(X, target=Y)
    with pytest.raises(RuntimeError, match="the loss would train nothing"):
        schedules._ScheduleForwardOnly(stage, 4, loss_fn=loss_fn)


def test_messages_of_one_direction_are_started_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[str, Any]] = []

    def isend(tensor: Tensor, *, group: Any, tag: int, group_dst: int) -> str:
        started.append(("send", group_dst))
        return "work"

    def irecv(tensor: Tensor, *, group: Any, tag: int, group_src: int) -> str:
        started.append(("receive", group_src))
        return "work"

    def batch(operations: Sequence[Any]) -> list[str]:
        started.append(("batch", len(operations)))
        return ["work"]

    monkeypatch.setattr(dist, "isend", isend)
    monkeypatch.setattr(dist, "irecv", irecv)
    monkeypatch.setattr(dist, "batch_isend_irecv", batch)

    def of(op: Any) -> list[Any]:
        return [SimpleNamespace(op=op, tensor=X, group=None, tag=0, group_peer=p) for p in (1, 2)]

    sends, receives = of(isend), of(irecv)
    for module in (schedules, theirs):
        assert module._batch_p2p(sends) == ["work", "work"]
        assert module._batch_p2p(receives) == ["work", "work"]
        assert module._batch_p2p([sends[0], receives[0]]) == ["work"]
        assert module._batch_p2p([]) == []
        expected = [("send", 1), ("send", 2), ("receive", 1), ("receive", 2), ("batch", 2)]
        assert started == expected
        started.clear()


def test_names_are_where_torch_has_them() -> None:
    assert _IR.Pipe is import_module("penstock.pipelining").Pipe
    assert set(_backward.__all__) <= set(dir(import_module("penstock.backward")))
    assert build_stage is import_module("penstock.pipelining").build_stage
    assert isinstance(Stage(1, 1), schedules._PipelineStageBase)
    schedules._wait_batch_p2p([])
