"""Schedules under torch's names: what they are made of, what they refuse, files and custom functions."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from penstock.pipelining import PipelineStage, schedules
from penstock.pipelining.schedules import get_schedule_class
from penstock.pipelining.stage import StageBase
from tests.pipelining.bodies import MULTI, SINGLE, Block, X, Y, loss_fn

theirs: Any = import_module("torch.distributed.pipelining.schedules")


class Stage(StageBase):
    """A stage that is never run, as tests of schedules make them."""

    def __init__(self, ranks: int, count: int, index: int = 0) -> None:
        self.num_stages, self.group_size, self.stage_index = count, ranks, index


class TheirStage(theirs._PipelineStageBase):  # type: ignore[misc] # a class of torch's
    def __init__(self, ranks: int, count: int, index: int = 0) -> None:
        self.num_stages, self.group_size, self.group_rank = count, ranks, 0
        self.stage_index, self.submod, self.group = index, None, None


TheirStage.__abstractmethods__ = frozenset()


def make(module: Any, stage: Any, name: str, ranks: int, microbatches: int) -> Any:
    chosen = module.get_schedule_class(name)
    if name in SINGLE:
        return chosen(stage(ranks, ranks), microbatches)
    return chosen([stage(ranks, 2 * ranks) for _ in range(2)], microbatches)


@pytest.mark.parametrize("microbatches", [4, 8])
@pytest.mark.parametrize("name", MULTI)
def test_every_rank_has_the_same_work_as_in_torch(name: str, microbatches: int) -> None:
    ours = make(schedules, Stage, name, 2, microbatches).pipeline_order
    peer = make(theirs, TheirStage, name, 2, microbatches).pipeline_order
    assert {rank: work(row) for rank, row in ours.items()} == {
        rank: work(row) for rank, row in peer.items()
    }


def work(row: list[Any]) -> list[str]:
    """All forwards and backwards of a rank in any order; a full backward is its halves."""
    parts = [part for entry in row if entry for part in entry.sub_actions or (entry,)]
    texts = []
    for part in parts:
        text = str(part)
        texts += [text.replace("B", "I"), text.replace("B", "W")] if "B" in text else [text]
    return sorted(texts)


@pytest.mark.parametrize("name", [*SINGLE, *MULTI, "PipelineScheduleSingle"])
def test_names_in_upper_or_lower_case(name: str) -> None:
    for text in (name, name.lower(), name.upper()):
        assert get_schedule_class(text).__name__ == theirs.get_schedule_class(text).__name__


WRONG: dict[str, tuple[Callable[[Any, Any], Any], type[Exception]]] = {
    "name": (lambda m, s: m.get_schedule_class("ScheduleThatDoesNotExist"), ValueError),
    "1F1B with few": (lambda m, s: m.Schedule1F1B(s(4, 4), 2), ValueError),
    "uneven rounds": (lambda m, s: m.ScheduleInterleaved1F1B([s(4, 8)] * 2, 11), ValueError),
    "uneven rounds, zero bubble": (
        lambda m, s: m.ScheduleInterleavedZeroBubble([s(4, 8)] * 2, 11),
        ValueError,
    ),
    "one stage in a V": (lambda m, s: m.ScheduleZBVZeroBubble([s(2, 2)], 4), ValueError),
    "three stages in a V": (lambda m, s: m.ScheduleDualPipeV([s(2, 6)] * 3, 8), ValueError),
    "DualPipeV with few": (lambda m, s: m.ScheduleDualPipeV([s(2, 4)] * 2, 3), ValueError),
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_the_same_kinds_of_error(name: str) -> None:
    call, kind = WRONG[name]
    with pytest.raises(kind):
        call(theirs, TheirStage)
    with pytest.raises(kind):
        call(schedules, Stage)


# ---- in one process, where there is no process group


def stages(count: int = 2) -> list[PipelineStage]:
    torch.manual_seed(0)
    return [PipelineStage(Block(), i, count, "cpu") for i in range(count)]


def made(microbatches: int = 4, **options: Any) -> Any:
    return schedules.ScheduleInterleaved1F1B(stages(), microbatches, loss_fn=loss_fn, **options)


def plain() -> tuple[Any, list[Any]]:
    model = nn.Sequential(*(stage.submod for stage in stages()))
    loss = loss_fn(model(X), Y)
    loss.backward()
    return float(loss.detach()), [p.grad for p in model.parameters()]


def gradients(schedule: Any) -> list[Any]:
    return [p.grad for stage in schedule.stages for p in stage.submod.parameters()]


def test_one_process_needs_no_process_group() -> None:
    schedule = made()
    losses: list[Tensor] = []
    output = schedule.step(X, target=Y, losses=losses)
    expected, grads = plain()
    assert float(torch.stack(losses).mean()) == pytest.approx(expected)
    assert output.shape == X.shape
    torch.testing.assert_close(gradients(schedule), grads)


def test_two_steps_add_up() -> None:
    schedule = made()
    for _ in range(2):
        schedule.step(X, target=Y)
    torch.testing.assert_close(gradients(schedule), [2 * grad for grad in plain()[1]])


def test_a_short_batch_gives_the_gradient_of_the_whole() -> None:
    schedule = made()
    schedule.step(X[:7], target=Y[:7])
    model = nn.Sequential(*(stage.submod for stage in stages()))
    loss_fn(model(X[:7]), Y[:7]).backward()
    torch.testing.assert_close(gradients(schedule), [p.grad for p in model.parameters()])


def test_shapes_may_change() -> None:
    schedule = made()
    for samples in (8, 4, 12):
        batch = torch.ones(samples, X.shape[1])
        assert schedule.step(batch, target=batch).shape == batch.shape


def test_keyword_arguments_may_come_and_go() -> None:
    schedule, scale = made(), torch.full((8, 1), 0.5)
    first, plainly, again = (
        schedule.eval(X, **more) for more in ({"scale": scale}, {}, {"scale": scale})
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, plainly)


def test_a_module_may_be_replaced_before_the_first_step() -> None:
    schedule = made()
    schedule.stages[0].submod = Block().requires_grad_(False)
    schedule.step(X, target=Y)
    found = [p.grad is None for stage in schedule.stages for p in stage.submod.parameters()]
    assert found == [True, True, False, False]


REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "no gradients": (lambda s: s.step(X, target=Y), RuntimeError, "call eval"),
    "few samples": (lambda s: s.eval(X[:3]), ValueError, "expected 4 microbatches"),
    "losses": (lambda s: s.eval(X, target=Y, losses=()), TypeError, "must be a list"),
    "messages": (
        lambda s: s.register_custom_function(schedules.SEND_F, print),
        ValueError,
        "SEND_F cannot be replaced",
    ),
    "format": (lambda s: s._dump_csv("x.csv", "other"), NotImplementedError, "compute_only"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refusals(name: str) -> None:
    call, kind, says = REFUSED[name]
    with torch.no_grad(), pytest.raises(kind, match=says):
        call(made())


def test_stages_that_belong_elsewhere_are_refused() -> None:
    wrong = [Stage(2, 4, 0), Stage(2, 4, 1)]
    for stage in wrong:
        stage.submod = Block()
    with pytest.raises(RuntimeError, match=r"rank 0 holds stages \[0, 1\]; Interleaved1F1B places"):
        schedules.ScheduleInterleaved1F1B(wrong, 4)


# ---- custom functions


def test_a_custom_function_does_an_ops_work() -> None:
    schedule, seen = made(), []

    def forward(action: Any, context: Any) -> None:
        stage = context.stages[action.stage_index]
        assert context.schedule_ref is schedule
        assert len(context.arg_mbs) == len(context.target_mbs) == 4
        output = stage.forward_one_chunk(action.microbatch_index, ())
        seen.append((str(action), tuple(output.shape)))

    schedule.register_custom_function(schedules.FORWARD, forward)
    schedule.step(X, target=Y)
    assert sorted(seen) == sorted((f"{s}F{m}", (2, 4)) for s in range(2) for m in range(4))
    torch.testing.assert_close(gradients(schedule), plain()[1])


def test_a_custom_function_does_an_overlapped_pair() -> None:
    chosen = schedules.ScheduleDualPipeV(stages(), 4, loss_fn=loss_fn)
    seen = []

    def pair(action: Any, context: Any) -> None:
        forward, backward = action.sub_actions
        ahead = context.stages[forward.stage_index]
        behind = context.stages[backward.stage_index]
        ahead.forward_one_chunk(forward.microbatch_index)
        full = backward.computation_type == schedules.FULL_BACKWARD
        behind.backward_one_chunk(backward.microbatch_index, full_backward=full)
        seen.append(str(action))

    chosen.register_custom_function(schedules.OVERLAP_F_B, pair)
    chosen.step(X, target=Y)
    assert seen
    assert all(text.endswith("OVERLAP_F_B") for text in seen)
    torch.testing.assert_close(gradients(chosen), plain()[1])


def test_examples_that_differ_from_the_step_are_named() -> None:
    torch.manual_seed(0)
    stage = PipelineStage(Block(), 0, 1, "cpu", torch.ones(2, 5), torch.ones(2, 4))
    schedule = schedules.ScheduleGPipe(stage, 4, loss_fn=loss_fn)
    with pytest.warns(UserWarning, match=r"input_args\[0\]: Metadata mismatch .*\[2, 5\]"):
        schedule.step(X, target=Y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step(X, target=Y)


def test_a_stage_by_hand() -> None:
    stage = stages()[1]
    torch.testing.assert_close(stage.forward_one_chunk(0, (X,)), stage.submod(X))
    assert stage.backward_one_chunk(0) is None
    stage._has_backward = True
    assert stage.has_backward
    with pytest.raises(RuntimeError, match="no chunks yet"):
        stage.backward_one_chunk(0)
    with pytest.raises(AssertionError, match="backward_one_chunk"):
        stage.backward_weight_one_chunk(0)


# ---- files


def test_torchs_file_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    make(theirs, TheirStage, "Interleaved1F1B", 1, 4)._dump_csv(str(file))
    chosen = schedules._PipelineScheduleRuntime(stages(), 4, loss_fn=loss_fn)
    with pytest.raises(RuntimeError, match="load them with _load_csv"):
        chosen.step(X, target=Y)
    chosen._load_csv(str(file), format="compute_comms")
    chosen.step(X, target=Y)
    torch.testing.assert_close(gradients(chosen), plain()[1])


BAD_FILES = {
    "a missing backward": ("0F0,1F0,1B0,0F1,1F1,1B1,0B1", "cannot run"),
    "other stages": ("0F0,1F0,2F0,2B0,1B0,0B0,0F1,1F1,2F1,2B1,1B1,0B1", "has 3 stages on 1 ranks"),
    "nonsense": ("0F0,=cmd", "row 1"),
}


@pytest.mark.parametrize("name", sorted(BAD_FILES))
def test_a_wrong_file_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text(BAD_FILES[name][0])
    chosen = schedules._PipelineScheduleRuntime(stages(), 2, loss_fn=loss_fn)
    with pytest.raises(ValueError, match=BAD_FILES[name][1]):
        chosen._load_csv(file)


# ---- block masks


class Attends(nn.Module):
    def forward(self, q: Tensor, *, mask: BlockMask) -> Any:
        return flex_attention(q, q, q, block_mask=mask)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_block_masks_are_given_to_the_stages() -> None:
    def causal_from(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (kv >= b)

    mask = create_block_mask(causal_from, 4, None, 8, 8, device="cpu", BLOCK_SIZE=4)
    q = torch.linspace(-1, 1, 4 * 2 * 8 * 4).reshape(4, 2, 8, 4)
    made = [PipelineStage(Attends(), i, 2, "cpu") for i in range(2)]
    schedule = schedules.ScheduleInterleaved1F1B(made, 2)
    with torch.no_grad():
        found = schedule.step(q, mask=mask)
        torch.testing.assert_close(found, Attends()(Attends()(q, mask=mask), mask=mask))
