"""Schedules under torch's names in one process: what they are made of and refuse, and what users write."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from penstock.pipelining import PipelineStage, schedules
from tests.pipelining.stages import CHUNKS, OURS, THEIRS, Held, Layer, X, Y, sum_loss


@pytest.fixture
def held() -> Held:
    return Held(OURS)


def test_stages_that_belong_elsewhere_are_refused() -> None:
    wrong = [OURS.mock(2, 4) for _ in range(2)]
    for index, stage in enumerate(wrong):
        stage.stage_index, stage.submod = index, Layer()
    with pytest.raises(RuntimeError, match=r"rank 0 holds stages \[0, 1\]; Interleaved1F1B places"):
        schedules.ScheduleInterleaved1F1B(wrong, 4)
    with pytest.raises(AssertionError, match="3 stages cannot be divided evenly among 2 ranks"):
        schedules.ScheduleInterleaved1F1B([OURS.mock(2, 3)] * 2, 4)


def test_too_few_stages_for_a_v() -> None:
    """A ValueError, and for compiled stages torch raises a RuntimeError: both catch it."""
    compiled: Any = torch.compile(Layer(), backend="eager")
    stage = PipelineStage(compiled, 0, 1, "cpu")
    for name in ("ZBVZeroBubble", "DualPipeV"):
        for kind in (RuntimeError, ValueError):
            with pytest.raises(kind, match=r"exactly 2 stages per rank|stages_per_rank=1"):
                schedules.get_schedule_class(name)([stage], 2)


# ---- steps


def test_one_process_needs_no_process_group_and_shapes_may_change(held: Held) -> None:
    schedule = held.schedule("Interleaved1F1B")
    held.check_steps(schedule, 1)
    for samples in (7, 4, 12):
        batch = torch.ones(samples, X.shape[1])
        assert schedule.step(batch, target=batch).shape == batch.shape


def test_keyword_arguments_may_come_and_go(held: Held) -> None:
    schedule = held.schedule("Interleaved1F1B")
    for more in ({"scale": torch.full((8, 1), 0.5)}, {}, {"scale": torch.full((8, 1), 0.25)}):
        torch.testing.assert_close(schedule.eval(X, **more), held.plain(X, **more))


def test_a_module_may_be_replaced_before_the_first_step(held: Held) -> None:
    schedule = held.schedule("Interleaved1F1B")
    held.stages[0].submod = Layer().requires_grad_(False)
    schedule.step(X, target=Y)
    learned = [[p.grad is None for p in stage.submod.parameters()] for stage in held.stages]
    assert learned == [[True] * 4, [False] * 4]


def test_examples_that_differ_from_the_step_are_named() -> None:
    stage = PipelineStage(Layer(), 0, 1, "cpu", torch.ones(2, 5), torch.ones(2, 4))
    schedule = schedules.ScheduleGPipe(stage, 4, loss_fn=sum_loss)
    with pytest.warns(UserWarning, match=r"input_args are .*\[2, 5\], and .*\[2, 4\]"):
        schedule.step(X, target=Y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        schedule.step(X, target=Y)


REFUSED: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "no gradients": (lambda s: s.step(X, target=Y), RuntimeError, "call eval"),
    "few samples": (lambda s: s.eval(X[:3]), ValueError, "expected 4 microbatches"),
    "no tensor": (
        lambda s: s.eval(X, target=[1, 2]),
        ValueError,
        "does not fit a value of type int",
    ),
    "few targets": (lambda s: s.eval(X, target=Y[:3]), ValueError, "target_mbs has 3"),
    "losses": (lambda s: s.eval(X, target=Y, losses=()), TypeError, "must be a list"),
    "messages": (
        lambda s: s.register_custom_function(schedules.SEND_F, print),
        ValueError,
        "SEND_F cannot be replaced",
    ),
    "format": (lambda s: s._dump_csv("x.csv", "other"), NotImplementedError, "compute_only"),
    "no microbatches": (
        lambda s: schedules.ScheduleGPipe(s.stages[0], 0),
        ValueError,
        "n_microbatches=0",
    ),
    "messages in compute_only": (
        lambda s: s._prepare_schedule_with_comms({0: OURS.row("0F0 0SEND_F0")}),
        AssertionError,
        "position 1: a 'compute_only' schedule has no messages",
    ),
    "a placement": (
        lambda s: setattr(s, "stage_index_to_group_rank", {0: 1, 1: 0}),
        RuntimeError,
        "the actions have them on",
    ),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refusals(name: str, held: Held) -> None:
    call, kind, says = REFUSED[name]
    with torch.no_grad(), pytest.raises(kind, match=says):
        call(held.schedule("Interleaved1F1B"))


def test_forward_only() -> None:
    """Also `test_processes.py`, whose ranks hear of a target."""
    held = Held(OURS, at={0: [0]})
    with torch.no_grad():
        schedule = held.schedule(schedules._ScheduleForwardOnly, loss_fn=None)
        torch.testing.assert_close(schedule.step(X), held.plain(X))
    with pytest.raises(RuntimeError, match="the loss would train nothing"):
        held.schedule(schedules._ScheduleForwardOnly)


# ---- orders of one's own

COMPLETE = "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"


def written(text: str, checked: bool = False) -> Any:
    """A class whose actions are put into the dict that is there, or are set and checked."""

    class Written(schedules.PipelineScheduleMulti):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            if checked:
                self.pipeline_order = {0: OURS.row(text)}
                self._validate_and_set_stage_mapping(self.pipeline_order)
            self.pipeline_order[0] = OURS.row(text)

    return Written


@pytest.mark.parametrize("checked", [False, True])
def test_a_class_may_write_its_order(checked: bool, held: Held) -> None:
    held.check_steps(held.schedule(written(COMPLETE, checked), 2))


def test_a_class_without_backwards_has_no_loss(held: Held) -> None:
    forwards = written("0F0 1F0 0F1 1F1")
    with pytest.raises(AssertionError, match="so that the loss would train nothing"):
        held.step(held.schedule(forwards, 2))
    output = held.schedule(forwards, 2, loss_fn=None).step(X)
    torch.testing.assert_close(output, held.plain(X))


TAKEN: dict[str, Callable[[Any, Path, str], Any]] = {
    "made by hand": lambda one, _, text: one._prepare_schedule_with_comms({0: OURS.row(text)}),
    "from a file": lambda one, path, text: (
        path.write_text(text.replace(" ", ",")),
        one._load_csv(path),
    ),
    "set": lambda one, _, text: setattr(one, "pipeline_order_with_comms", {0: OURS.row(text)}),
}
LACKING = [
    ("0F0 1F0 0F1 1F1", "forwards and no backward"),
    ("0F0 1F0 1B0 0B0 0F1 1F1", "1B1: missing"),
    ("0F0 1F0 0F1 1F1 1B0 1B1", "0B0: missing"),
    ("0F0 1F0 1I0 1W0 0B0 0F1 1F1 1I1 0B1", "1W1: missing"),
]


@pytest.mark.parametrize("how", sorted(TAKEN))
def test_a_loss_without_all_backwards_is_refused(how: str, tmp_path: Path, held: Held) -> None:
    one = held.schedule(schedules._PipelineScheduleRuntime, 2)
    assert one.pipeline_order == {}
    for text, says in LACKING:
        with pytest.raises(AssertionError, match=says):
            TAKEN[how](one, tmp_path / "order.csv", text)
    TAKEN[how](one, tmp_path / "order.csv", COMPLETE)
    held.check_steps(one, 1)


BAD_FILES = [
    ("0F0,0B1,0F1,0B0,1F0,1B0,1F1,1B1", "cannot run"),
    ("0F0,1F0,2F0,2B0,1B0,0B0,0F1,1F1,2F1,2B1,1B1,0B1", "has 3 stages on 1 ranks"),
    ("0F0,1F0,1B0,0B0", "is for 1 microbatches, not 2"),
    ("0F0,=cmd", "row 1"),
]


def test_a_wrong_file_is_refused(tmp_path: Path, held: Held) -> None:
    file = tmp_path / "schedule.csv"
    for text, says in BAD_FILES:
        file.write_text(text)
        with pytest.raises(ValueError, match=says):
            held.schedule(schedules._PipelineScheduleRuntime, 2)._load_csv(file)
    with pytest.raises(FileNotFoundError):
        held.schedule(schedules._PipelineScheduleRuntime, 2)._load_csv(tmp_path / "none.csv")


def test_torchs_file_is_loaded(tmp_path: Path, held: Held) -> None:
    file = tmp_path / "schedule.csv"
    THEIRS.scheduled("Interleaved1F1B", 1, 2, 4)._dump_csv(str(file))
    chosen = held.schedule(schedules._PipelineScheduleRuntime)
    with pytest.raises(RuntimeError, match="load them with _load_csv"):
        held.step(chosen)
    chosen._load_csv(str(file), format="compute_comms")
    held.check_steps(chosen, 1)


# ---- custom functions, messages, masks


def test_a_custom_function_sees_stages_and_microbatches(held: Held) -> None:
    schedule, seen = held.schedule("Interleaved1F1B"), []

    def forward(action: Any, context: Any) -> None:
        assert context.schedule_ref is schedule
        assert len(context.arg_mbs) == len(context.target_mbs) == CHUNKS
        stage = context.stages[action.stage_index]
        output = stage.forward_one_chunk(action.microbatch_index, ())
        seen.append((str(action), tuple(output.shape)))

    schedule.register_custom_function(schedules.FORWARD, forward)
    held.check_steps(schedule, 1)
    assert sorted(seen) == sorted((f"{s}F{m}", (2, 4)) for s in range(2) for m in range(CHUNKS))


class Attends(nn.Module):
    def forward(self, q: Tensor, *, mask: BlockMask) -> Any:
        return flex_attention(q, q, q, block_mask=mask)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_block_masks_go_to_the_stages() -> None:
    def causal_from(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (kv >= b)

    mask = create_block_mask(causal_from, 4, None, 8, 8, device="cpu", BLOCK_SIZE=4)
    q = torch.linspace(-1, 1, 4 * 2 * 8 * 4).reshape(4, 2, 8, 4)
    held = [PipelineStage(Attends(), i, 2, "cpu") for i in range(2)]
    with torch.no_grad():
        output = schedules.ScheduleInterleaved1F1B(held, 2).step(q, mask=mask)
        torch.testing.assert_close(output, Attends()(Attends()(q, mask=mask), mask=mask))


# ---- what torchtitan does


def tokens_loss(output: Tensor, target: Tensor, tokens: int = 1) -> Any:
    return sum_loss(output, target) / tokens


@pytest.mark.parametrize("name", ["GPipe", "Interleaved1F1B", "ZBVZeroBubble"])
def test_a_batch_that_is_split_already(name: str) -> None:
    """As torchtitan passes it, with loss_kwargs and without outputs."""
    held = Held(OURS, at={0: [0] if name == "GPipe" else [0, 1]})
    schedule, losses = held.schedule(name, loss_fn=tokens_loss), list[Tensor]()
    batch: dict[str, Any] = {
        "arg_mbs": [(part,) for part in X.chunk(4)],
        "kwarg_mbs": [{"scale": torch.full((2, 1), 0.5)} for _ in range(4)],
        "target_mbs": list(Y.chunk(4)),
        "losses": losses,
        "loss_kwargs": {"tokens": 7},
        "return_outputs": False,
    }
    assert schedule.step(**batch) is None
    loss = tokens_loss(held.plain(X, scale=torch.tensor(0.5)), Y, 7)
    expected = torch.autograd.grad(loss, list(held.plain.parameters()))
    torch.testing.assert_close([*held.gradients().values()], [*expected])
    torch.testing.assert_close(torch.stack(losses).sum(), loss.detach())
    with torch.no_grad():
        schedule.eval(**batch)
    torch.testing.assert_close(torch.stack(losses).sum(), loss.detach())
    with pytest.raises(RuntimeError, match="a whole batch and one that is split already"):
        schedule.step(X, **batch)


# ---- what torch has since 2.15


@pytest.mark.parametrize("granularity", ["microbatch", "stage_microbatch"])
@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
def test_activations_that_live_together_have_slots_of_their_own(
    name: str, granularity: Any
) -> None:
    one = OURS.scheduled(name, 2, 2, 8)
    stages = list(one.schedule.placement.stages_on(1))
    analysed = schedules.analyze_pipeline_activation_liveness(
        one, pp_rank=1, stage_indices=stages, granularity=granularity
    )
    alive: dict[int, list[tuple[int, int]]] = {}
    for (stage, microbatch), slot in analysed.slot_by_stage_and_microbatch.items():
        assert analysed.slot_for(stage, microbatch) == slot
        lives = analysed.get_activation_lifetime(stage, microbatch)
        alive.setdefault(slot, []).append(lives)
    assert len(alive) == analysed.num_slots
    for lifetimes in alive.values():
        rows = sorted(set(lifetimes))
        assert all(end < start for (_, end), (start, _) in pairwise(rows))
    starts = [start for lifetimes in alive.values() for start, _ in lifetimes]
    all_of = {life for lifetimes in alive.values() for life in lifetimes}
    assert analysed.num_slots == max(sum(a <= at <= b for a, b in all_of) for at in starts)
    with pytest.raises(ValueError, match="stage 99, microbatch 0 was not analysed"):
        analysed.slot_for(99, 0)


@pytest.mark.skipif(
    not hasattr(THEIRS.schedules, "analyze_pipeline_activation_liveness"), reason="since torch 2.15"
)
@pytest.mark.parametrize("granularity", ["microbatch", "stage_microbatch"])
def test_slots_are_as_many_as_torchs(granularity: Any) -> None:
    counts = []
    for names in (OURS, THEIRS):
        one = names.scheduled("Interleaved1F1B", 4, 2, 8)
        found = names.schedules.analyze_pipeline_activation_liveness(
            one, pp_rank=1, stage_indices=[1, 5], granularity=granularity
        )
        counts.append(found.num_slots)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", ["Interleaved1F1B", "LoopedBFS"])
def test_each_forward_runs_in_a_context_of_its_stage_and_microbatch(name: str) -> None:
    held = Held(OURS)
    schedule, seen = held.schedule(name), list[Any]()

    @contextmanager
    def context(info: Any) -> Iterator[None]:
        seen.append((info.stage_index, info.microbatch_index, info.is_metadata_inference))
        yield
        seen.append("end")

    stage = schedule.stages[0]
    handle = stage.register_forward_context(context)
    with pytest.raises(RuntimeError, match="has a forward context already"):
        stage.register_forward_context(context)
    schedule.step(X, target=Y)
    count = schedule._n_microbatches
    rows = [(stage.stage_index, microbatch, False) for microbatch in range(count)]
    assert sorted(seen[::2]) == rows
    assert seen[1::2] == ["end"] * count
    handle.remove()
    schedule.step(X, target=Y)
    assert len(seen) == 2 * count


def test_a_budget_of_sends_is_a_whole_number() -> None:
    with pytest.raises(ValueError, match="max_outstanding_sends=-1: must be a whole number"):
        schedules.ScheduleInterleaved1F1B(
            [OURS.mock(2, 4) for _ in range(2)], 4, max_outstanding_sends=-1
        )
