"""Bodies for one process, as tests of torch's package are written: run with either import."""

from __future__ import annotations

import copy
import csv
import functools
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.pipelining.bodies import PACKAGES


class Names:
    """A package's modules."""

    def __init__(self, package: str) -> None:
        self.top: Any = import_module(PACKAGES[package])
        for name in (
            "schedules",
            "microbatch",
            "stage",
            "_utils",
            "_IR",
            "_backward",
            "_debug",
            "_schedule_visualizer",
        ):
            setattr(self, name, import_module(f"{PACKAGES[package]}.{name}"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.top, name)

    def row(self, text: str) -> list[Any]:
        return [self.schedules._Action.from_str(action) for action in text.split(",")]

    def mock(self, ranks: int, stages: int) -> Any:
        """A stage that says where it is and no more, as tests of schedules make them."""

        class MockStage(self.schedules._PipelineStageBase):  # type: ignore[name-defined,misc]
            def __init__(self, **options: Any) -> None:
                self.submod = None
                self.num_stages = options.get("num_stages", 1)
                self.group_size = options.get("group_size", 1)
                self.group_rank = options.get("group_rank", 0)
                self.group = options.get("group")

            def _create_grad_recv_info(self, *args: Any, **kwargs: Any) -> None:
                return None

            def _prepare_forward_infra(self, *args: Any) -> None:
                pass

            def _prepare_backward_infra(self, *args: Any) -> None:
                pass

        MockStage.__abstractmethods__ = frozenset()
        return MockStage(num_stages=stages, group_size=ranks)

    def scheduled(self, name: str, ranks: int, each: int, microbatches: int) -> Any:
        stages = [self.mock(ranks, ranks * each) for _ in range(each)]
        return self.schedules.get_schedule_class(name)(stages, microbatches)


def texts(row: list[Any]) -> list[str]:
    return ["" if action is None else str(action) for action in row]


def line(row: list[Any]) -> str:
    return " ".join(texts(row))


# ---- schedules as data


def body_classes(p: Names) -> None:
    s = p.schedules
    for name in ("1f1b", "INTERLEAVED1F1B", "gpipe", "LoopedBFS", "PipelineScheduleSingle"):
        assert issubclass(s.get_schedule_class(name), s._PipelineSchedule)
    for chosen in (p.ScheduleGPipe, p.Schedule1F1B, s._ScheduleForwardOnly):
        assert issubclass(chosen, s.PipelineScheduleSingle)
    for chosen in (p.ScheduleInterleaved1F1B, p.ScheduleDualPipeV, p.ScheduleLoopedBFS):
        assert issubclass(chosen, s._PipelineScheduleRuntime)
        assert issubclass(chosen, s.PipelineScheduleMulti)


SIZES = [(2, 2, 2), (2, 8, 4), (4, 8, 4), (4, 4, 4), (3, 12, 4), (4, 6, 3), (4, 10, 5), (2, 3, 4)]
"""Stages a rank, microbatches, ranks."""


def body_messages_of_every_size(p: Names) -> None:
    s = p.schedules
    for name in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"):
        for each, microbatches, ranks in SIZES:
            made = p.scheduled(name, ranks, each, microbatches)
            s._format_pipeline_order(made.pipeline_order)
            place, count = (lambda stage, ranks=ranks: stage % ranks), each * ranks
            found = s._add_send_recv(made.pipeline_order, stage_to_rank=place, num_stages=count)
            steps = s._simulate_comms_compute(found, stage_to_rank=place, num_stages=count)
            assert sorted(steps) == list(range(ranks))
            done = [a for row in steps.values() for a in row if a is not None]
            assert len(done) == len(set(done)) == sum(map(len, found.values()))


def body_schedules_in_a_v(p: Names) -> None:
    s = p.schedules
    for name in ("ZBVZeroBubble", "DualPipeV"):
        for each, microbatches, ranks in [(2, 8, 4), (2, 10, 4), (2, 8, 2), (2, 15, 4)]:
            made = p.scheduled(name, ranks, each, microbatches)
            found = s._validate_schedule(made.pipeline_order, ranks, each * ranks, microbatches)
            assert found == p._utils.generate_stage_to_rank_mapping(ranks, each * ranks, style="v")


def body_the_order_of_dualpipe(p: Names) -> list[list[str]]:
    order = p.scheduled("DualPipeV", 4, 2, 10).pipeline_order
    return [[text for text in texts(order[rank]) if text] for rank in range(4)]


def body_actions_from_text(p: Names) -> None:
    s = p.schedules
    known = {
        "1F0": (1, s.F, 0),
        "2I1": (2, s.I, 1),
        "0W3": (0, s.W, 3),
        "0B3": (0, s.B, 3),
        "1UNSHARD": (1, s.UNSHARD, None),
        "3RESHARD": (3, s.RESHARD, None),
        "0REDUCE_GRAD": (0, s.REDUCE_GRAD, None),
        "2SEND_B2": (2, s.SEND_B, 2),
        "1RECV_F1": (1, s.RECV_F, 1),
    }
    for text, parts in known.items():
        found = s._Action.from_str(text)
        assert found == s._Action(*parts)
        assert repr(found) == str(found) == text
        assert s._get_profiler_function_name(found) == f"PP:{text}"
    pair = s._Action.from_str("(2F1;3B0)OVERLAP_F_B")
    assert pair.computation_type == s.OVERLAP_F_B
    assert list(map(str, pair.sub_actions)) == ["2F1", "3B0"]
    assert str(pair) == "(2F1;3B0)OVERLAP_F_B"
    assert pair.is_compute_op
    assert not s._Action.from_str("2SEND_B2").is_compute_op
    assert s._Action.from_str("  ") is None
    kinds = (s.F, s.I, s.W, s.B, s.SEND_F)
    assert list(map(s._requires_reduce_grad, kinds)) == [False, False, True, True, False]


def body_sharding_is_put_in(p: Names) -> None:
    add = p.schedules._add_unshard_reshard
    assert line(add(p.row("0F0,0F1,   ,0B0,0B1"))) == "0UNSHARD 0F0 0F1 0B0 0B1 0RESHARD"
    assert line(add(p.row("0F0,0F1,1F0,1F1,1B0,1B1,0B0,0B1"))) == (
        "0UNSHARD 1UNSHARD 0F0 0F1 1F0 1F1 1B0 1B1 1RESHARD 0B0 0B1 0RESHARD"
    )


def body_reductions_are_put_in(p: Names) -> None:
    add = p.schedules._add_reduce_grad
    found = add(p.row("0F0,0F1,1F0,1F1,1B0,1B1,0B0,0B1"), 2)
    assert line(found) == "0F0 0F1 1F0 1F1 1B0 1B1 1REDUCE_GRAD 0B0 0B1 0REDUCE_GRAD"


def body_halves_are_merged(p: Names) -> None:
    found = p.schedules._merge_bw(p.row("0F0,0F1,0F2,0I0,0I1,0W0,0I2,0W2,0W1"))
    assert line(found) == "0F0 0F1 0F2 0I0 0I1 0W0 0B2 0W1"


LOWERED: dict[str, Any] = {
    "a chain": {
        "ranks": [0, 1],
        "work": ["0F0,0F1,   ,0B0,   ,0B1", "   ,1F0,1B0,1F1,1B1,   "],
        "messages": [
            "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1",
            "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1",
        ],
        "steps": 11,
    },
    "a V": {
        "ranks": [0, 1, 1, 0],
        "work": [
            "0F0,0F1,   ,3F0,3I0,3F1,3I1,0I0,3W0,0I1,3W1,0W0,0W1",
            "   ,1F0,2F0,1F1,2F1,2I0,1I0,2I1,1I1,2W0,2W1,1W0,1W1",
        ],
        "messages": [
            "0F0,0SEND_F0,0F1,0SEND_F1,3RECV_F0,3F0,3I0,3SEND_B0,3RECV_F1,3F1,3I1,3SEND_B1,"
            "0RECV_B0,0I0,3W0,0RECV_B1,0I1,3W1,0W0,0W1",
            "1RECV_F0,1RECV_F1,1F0,2F0,2SEND_F0,1F1,2RECV_B0,2F1,2SEND_F1,2RECV_B1,2I0,1I0,"
            "1SEND_B0,2I1,1I1,1SEND_B1,2W0,2W1,1W0,1W1",
        ],
        "steps": 24,
    },
}


def body_messages_and_steps(p: Names) -> list[list[str]]:
    s, shown = p.schedules, []
    for case in LOWERED.values():
        work = {rank: p.row(text) for rank, text in enumerate(case["work"])}
        count = len(case["ranks"])
        found = s._add_send_recv(work, case["ranks"].__getitem__, count)
        shown += [texts(found[rank]) for rank in sorted(found)]
        steps = s._simulate_comms_compute(found, case["ranks"].__getitem__, count)
        assert max(map(len, steps.values())) == case["steps"]
        shown += [texts(steps[rank]) for rank in sorted(steps)]
        late = s._defer_recv_ops(found, case["ranks"].__getitem__)
        shown += [texts(late[rank]) for rank in sorted(late)]
    return shown


def body_a_schedule_without_end(p: Names) -> None:
    stuck = {0: p.row("0F0,0RECV_B0,0B0,0SEND_F0"), 1: p.row("1RECV_F0,1F0,1B0,1SEND_B0")}
    refused(ValueError, lambda: p.schedules._simulate_comms_compute(stuck, lambda s: s, 2))
    wrong = {0: p.row("0B0,0F0"), 1: p.row("1F0,1B0")}
    refused(AssertionError, lambda: p.schedules._add_send_recv(wrong, lambda s: s, 2))
    left = {0: p.row("0F0,0SEND_F0,0RECV_B0")}
    refused(AssertionError, lambda: p.schedules._defer_recv_ops(left, lambda s: s))


def refused(kind: type[Exception], call: Any) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def body_traces(p: Names, folder: Path) -> None:
    steps = {0: p.row("0F0,0SEND_F0,,0B0"), 1: p.row(",1RECV_F0,1F0,1B0")}
    file = folder / "trace.json"
    p.schedules._dump_chrometrace(steps, str(file))
    events = json.loads(file.read_text())["traceEvents"]
    assert len(events) == 6
    assert {e["name"]: (e["ph"], e["pid"], e["ts"], e["dur"], e["cat"]) for e in events} == {
        "0F0": ("X", 0, 0, 1, "computation"),
        "0SEND_F0": ("X", 0, 1, 1, "communication"),
        "0B0": ("X", 0, 3, 1, "computation"),
        "1RECV_F0": ("X", 1, 1, 1, "communication"),
        "1F0": ("X", 1, 2, 1, "computation"),
        "1B0": ("X", 1, 3, 1, "computation"),
    }


def body_what_a_schedule_is_checked_for(p: Names) -> None:
    check = p.schedules._validate_schedule
    good = {0: p.row("0F0,0I0,0W0"), 1: p.row("1F0,1B0")}
    assert check(good, 2, 2, 1) == {0: 0, 1: 1}
    wrong = [
        {0: good[0]},
        {**good, 1: p.row("1F0")},
        {**good, 0: p.row("0I0,0F0,0W0")},
        {**good, 0: p.row("0F0,0W0,0I0")},
        {**good, 0: p.row("0F0,0I0")},
        {0: good[0], 1: p.row("1F0,1B0,0F0")},
    ]
    for order in wrong:
        refused(AssertionError, lambda order=order: check(order, 2, 2, 1))
    said = refused(AssertionError, lambda: check(wrong[2], 2, 2, 1))
    assert "0I0" in said or "stage 0" in said


def body_files(p: Names, folder: Path) -> list[str]:
    """What one schedule writes, the runtime reads."""
    made = p.scheduled("Interleaved1F1B", 2, 2, 4)
    shown = []
    for format in ("compute_only", "compute_comms"):
        file = folder / f"{format}.csv"
        if format == "compute_comms":
            made._prepare_schedule_with_comms(made.pipeline_order)
        made._dump_csv(str(file), format)
        runtime = p.schedules._PipelineScheduleRuntime([p.mock(2, 4), p.mock(2, 4)], 4)
        runtime._load_csv(str(file), format)
        assert runtime.stage_index_to_group_rank == {0: 0, 1: 1, 2: 0, 3: 1}
        order = runtime.pipeline_order_with_comms
        work = [[a for a in order[r] if a is not None and a.is_compute_op] for r in range(2)]
        shown += [" ".join(texts(row)) for row in work]
    with (folder / "compute_only.csv").open(newline="") as read:
        for rank, row in enumerate(csv.reader(read)):
            actions = [p.schedules._Action.from_str(text) for text in row]
            assert [a for a in actions if a] == [a for a in made.pipeline_order[rank] if a]
    return shown


def body_messages_come_back_from_files(p: Names, folder: Path) -> None:
    def fresh() -> Any:
        return p.schedules._PipelineScheduleRuntime([p.mock(2, 4), p.mock(2, 4)], 4)

    for name in (
        "Interleaved1F1B",
        "LoopedBFS",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
    ):
        first, second, third = fresh(), fresh(), fresh()
        first._prepare_schedule_with_comms(p.scheduled(name, 2, 2, 4).pipeline_order)
        first._dump_csv(str(folder / name))
        second._load_csv(str(folder / name), format="compute_comms")
        third._prepare_schedule_with_comms(second.pipeline_order_with_comms, format="compute_comms")
        assert first.pipeline_order_with_comms == second.pipeline_order_with_comms
        assert second.pipeline_order_with_comms == third.pipeline_order_with_comms


def body_written_rows_come_back(p: Names, folder: Path) -> None:
    """The base of schedules with several stages writes what it reads: rows without messages."""
    for chosen in (p.schedules.PipelineScheduleMulti, p.schedules._PipelineScheduleRuntime):
        made = chosen([p.mock(2, 2)], 2)
        made.pipeline_order = {0: p.row("0F0,0F1,,0B0,0B1"), 1: p.row(",1F0,1B0,1F1,1B1")}
        made._validate_and_set_stage_mapping(actions=made.pipeline_order)
        file = str(folder / chosen.__name__)
        made._dump_csv(file) if chosen is p.schedules.PipelineScheduleMulti else made._dump_csv(
            file, "compute_only"
        )
        again = chosen([p.mock(2, 2)], 2)
        again._load_csv(file)
        rows = [[str(a) for a in again.pipeline_order[rank] if a] for rank in range(2)]
        assert rows == [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]


def body_formats(p: Names) -> None:
    runtime = p.schedules._PipelineScheduleRuntime([p.mock(1, 1)], 1)
    prepare = runtime._prepare_schedule_with_comms
    refused(ValueError, lambda: prepare({0: p.row("0F0,0UNSHARD,0B0")}))
    refused(NotImplementedError, lambda: prepare({0: p.row("0F0,0B0")}, format="other"))
    prepare({0: p.row("0F0,,0B0")})
    assert [str(a) for a in runtime.pipeline_order_with_comms[0] if a.is_compute_op] == [
        "0F0",
        "0B0",
    ]


def body_single_schedules_have_an_order(p: Names) -> list[list[str]]:
    # Not 1F1B: what torch 2.13 gives for its last rank begins at microbatch 1.
    order = p.ScheduleGPipe(p.mock(4, 4), 4)._get_pipeline_order()
    rows = [[a for a in order[rank] if a is not None and a.is_compute_op] for rank in range(4)]
    return [texts(row) for row in rows]


def body_rows_of_schedules(p: Names) -> list[list[str]]:
    v, shown = p._schedule_visualizer, []
    for name in ("Interleaved1F1B", "InterleavedZeroBubble", "DualPipeV"):
        for options in ({}, {"with_comms": True}, {"with_comms": True, "defer_pp_recv": True}):
            rows = v.get_schedule_ops(name, 2, 8, **options)
            shown += [[text for text in texts(row) if text] for row in rows]
    rows = v.get_schedule_ops(p.ScheduleGPipe, 2, 4)
    assert [str(a) for a in rows[1] if a][:4] == ["1F0", "1F1", "1F2", "1F3"]
    refused(ValueError, lambda: v.get_schedule_ops("GPipe", 2, 4, None, True, True))
    refused(AssertionError, lambda: v.get_schedule_ops("GPipe", 2, 4, 2))
    refused(AssertionError, lambda: v.get_schedule_ops("LoopedBFS", 2, 4, 1))
    assert v.OpKey(1, p.schedules.F, 2).stage_index == 1
    return shown


def body_idle_steps_are_put_in(p: Names) -> None:
    spaced = p._schedule_visualizer.add_schedule_op_spacing
    rows = spaced([p.row("0F0,0F1,0B0,0B1"), p.row("1F0,1B0,1F1,1B1")])
    wanted = ["0F0,0F1,,,0B0,,0B1", ",1F0,1B0,1F1,1B1"]
    assert [",".join(texts(row)).rstrip(",") for row in rows] == wanted
    halves = spaced([p.row("0F0,0I0,0W0"), p.row("1F0,1I0,1W0")])
    assert [",".join(texts(row)).rstrip(",") for row in halves] == ["0F0,,,0I0,0W0", ",1F0,1I0,1W0"]


def body_interleaved_rows_by_hand(p: Names) -> list[list[str]]:
    """As a schedule of one's own would call it: 2 ranks, 2 stages each, 4 microbatches."""
    s, shown = p.schedules, []
    for rank in range(2):
        for halves in (False, True):
            warm = s._get_warmup_ops(rank, 2, 2, 2, 4, 1 if halves else 2)
            both = 8 - warm
            row = s._get_1f1b_rank_ops(
                2,
                2,
                warm,
                both,
                warm,
                rank,
                lambda step, rank=rank: step // 2 % 2 * 2 + rank,
                lambda step, rank=rank, warm=warm: (1 - (step - warm) // 2 % 2) * 2 + rank,
                num_1f1b_microbatches=rank,
                enable_zero_bubble=halves,
            )
            shown.append(texts(row))
    return shown


# ---- microbatches


def body_split_and_merge(p: Names) -> None:
    m = p.microbatch
    args = tuple(torch.randn(size, 8) for size in (16, 32, 64))
    kwargs = {f"x{i}": value for i, value in enumerate(args)}
    parts, named = m.split_args_kwargs_into_chunks(args, kwargs, 2)
    assert len(parts) == len(named) == 2
    assert [value.shape for value in parts[0]] == [torch.Size([s, 8]) for s in (8, 16, 32)]
    specs = tuple(m.TensorChunkSpec(0) for _ in args)
    torch.testing.assert_close(m.merge_chunks(parts, specs), args)
    merged = m.merge_chunks(named, {name: m.TensorChunkSpec(0) for name in kwargs})
    torch.testing.assert_close(merged, kwargs)


def body_split_by_hand(p: Names) -> None:
    m = p.microbatch
    x = torch.arange(24.0).reshape(6, 4)
    found = m._shard_dict_of_args(
        {"a": x, "b": 3}, {"a": m.TensorChunkSpec(1), "b": m._Replicate}, 2
    )
    assert [part["a"].shape for part in found] == [torch.Size([6, 2])] * 2
    assert [part["b"] for part in found] == [3, 3]
    assert m._shard_dict_of_args({}, {}, 3) == [{}, {}, {}]
    assert isinstance(m.sum_reducer, m._LossReducer)
    assert issubclass(m._LossReducer, m._CustomReducer)
    largest = m._CustomReducer(torch.tensor(0.0), torch.maximum)
    assert m.merge_chunks([torch.tensor(2.0), torch.tensor(5.0)], largest) == 5
    assert m.merge_chunks([(torch.tensor(2.0),), (torch.tensor(5.0),)], (m.sum_reducer,)) == (7,)
    refused(AssertionError, lambda: m._shard_dict_of_args({"a": x, "b": x}, {"a": 0}, 2))
    assert str(m.TensorChunkSpec(2)) == "TensorChunkSpec(2)"


def body_block_masks(p: Names) -> None:
    m = p.microbatch

    def after(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (kv >= b)

    mask = create_block_mask(after, 5, None, 8, 8, device="cpu", BLOCK_SIZE=4)
    parts = m._split_block_mask(mask, 2)
    assert [part.kv_num_blocks.size(0) for part in parts] == [3, 2]
    assert torch.equal(torch.cat([part.to_dense() for part in parts]), mask.to_dense())
    one = create_block_mask(after, None, None, 8, 8, device="cpu", BLOCK_SIZE=4)
    assert len(m._split_block_mask(one, 3)) == 3
    refused(AssertionError, lambda: m._split_block_mask(mask, 6))


# ---- backward


class Mlp(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.net1, self.relu, self.net2 = (
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net2(self.relu(self.net1(x)))  # type: ignore[no-any-return]


class Compared:
    """A module and its plain twin, after its forward and backward."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module, self.loss_fn = Mlp(), nn.MSELoss(reduction="sum")
        self.plain = copy.deepcopy(self.module)
        self.x, self.target = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
        self.loss = self.loss_fn(self.module(self.x), self.target)
        self.plain_x = self.x.detach().clone().requires_grad_()
        self.loss_fn(self.plain(self.plain_x), self.target).backward()

    def check(self) -> None:
        found = [parameter.grad for parameter in self.module.parameters()]
        torch.testing.assert_close(found, [parameter.grad for parameter in self.plain.parameters()])


def body_full_backward(p: Names) -> None:
    made = Compared()
    found = p._backward.stage_backward(
        stage_output=made.loss, output_grads=None, input_values=(made.x,)
    )
    torch.testing.assert_close(found[0], made.plain_x.grad)
    made.check()


def body_backward_in_halves(p: Names) -> None:
    made = Compared()
    inputs, groups = p._backward.stage_backward_input(
        stage_outputs_or_loss=[made.loss],
        output_grads=None,
        input_values=[made.x],
        weights=made.module.parameters(),
    )
    torch.testing.assert_close(inputs[0], made.plain_x.grad)
    assert all(parameter.grad is None for parameter in made.module.parameters())
    p._backward.stage_backward_weight(made.module.parameters(), groups, retain_graph=True)
    made.check()


def body_groups_of_weights(p: Names) -> None:
    b, made = p._backward, Compared()
    nodes = [b._get_grad_fn_or_grad_acc(w) for w in made.module.parameters()]
    start = b._get_grad_fn_or_grad_acc(made.x)
    reverse = b.construct_reverse_graph([made.loss.grad_fn])
    assert set(nodes) <= set(reverse)
    above, met = b.reverse_closure([start], set(), reverse)
    assert made.loss.grad_fn in above
    assert not met
    groups = b.get_param_groups([start], nodes, reverse)
    assert {node for group in groups for node in group["params"]} == set(nodes)
    assert all(group["intermediates"] for group in groups)


# ---- traced models


class Split(nn.Module):
    """Parameters of its own, a buffer, and cuts in its code."""

    shift: Tensor

    def __init__(self, split: Any) -> None:
        super().__init__()
        self.split = [split]
        self.first = nn.Parameter(torch.randn(8, 8) / 8)
        self.second = nn.Parameter(torch.randn(8, 8) / 8)
        self.lin0, self.lin1 = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("shift", torch.randn(8))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        x = torch.mm(x, self.first)
        skip = x
        x = torch.relu(x if y is None else x + y)
        self.split[0]()
        x = torch.mm(x, self.first) + self.shift
        x = self.lin0(x)
        self.split[0]()
        return torch.relu(self.lin1(torch.mm(x, self.second)) + skip)


class Layers(nn.Module):
    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Mlp() for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def body_a_pipe(p: Names) -> None:
    torch.manual_seed(0)
    model, x, y = Split(p.pipe_split), torch.randn(4, 8), torch.randn(4, 8)
    pipe = p.pipeline(model, mb_args=(x, y))
    assert isinstance(pipe, p.Pipe)
    assert pipe.num_stages == 3
    torch.testing.assert_close(pipe(x, y)[0], model(x, y))
    names = [set(pipe.get_stage_module(i).state_dict()) for i in range(3)]
    assert set.union(*names) == set(model.state_dict())
    assert pipe.replicated_params == [{"submod_pp_0": "first", "submod_pp_1": "first"}]
    info = pipe.info()
    assert (info.num_stages, info.has_loss_and_backward) == (3, False)
    assert {n.op for n in info.graph.nodes} >= {"placeholder", "output"}
    stages = [p._IR.get_submod_name(i) for i in range(3)]
    assert [name for name, _ in pipe.split_gm.named_children()] == stages
    refused(ValueError, lambda: pipe.get_stage_module(3))


def body_a_pipe_with_names(p: Names) -> None:
    model, x, y = Split(p.pipe_split), torch.randn(4, 8), torch.randn(4, 8)
    args, kwargs = p.microbatch.split_args_kwargs_into_chunks(
        (x,),
        {"y": y},
        4,
        p.microbatch.TensorChunkSpec.from_tuple((0,)),
        p.microbatch.TensorChunkSpec.from_dict({"y": 0}),
    )
    pipe = p.pipeline(model, mb_args=args[0], mb_kwargs=kwargs[0])
    torch.testing.assert_close(pipe(args[1][0], y=kwargs[1]["y"])[0], model(x[1:2], y[1:2]))


def body_layers_stay_where_they_are(p: Names) -> None:
    model = Layers()
    pipe = p.pipeline(model, (torch.randn(2, 8),), split_spec={"layers.3": p.SplitPoint.BEGINNING})
    found = [[n for n, _ in pipe.get_stage_module(i).layers.named_children()] for i in range(2)]
    assert found == [["0", "1", "2"], ["3", "4", "5"]]


def body_annotated_models(p: Names) -> None:
    model, x = Layers(), torch.randn(2, 8)
    wanted = model(x)
    points = p._IR.PipeSplitWrapper.SplitPoint
    p._IR.annotate_split_points(model, {"layers.2": points.BEGINNING, "layers.3.net1": points.END})
    torch.testing.assert_close(model(x), wanted)
    pipe = p.Pipe.from_tracing(model, (x,))
    assert pipe.num_stages == 3
    torch.testing.assert_close(pipe(x)[0], wanted)
    annotate = p._IR.annotate_split_points
    refused(AttributeError, lambda: annotate(model, {"blocks.1": points.END}))
    spec = {"blocks.1": points.END}
    refused(AttributeError, lambda: p.pipeline(Layers(), (x,), split_spec=spec))


def body_a_policy(p: Names) -> None:
    mark = p._IR.aten_pipe_split_alias

    def halve(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
        calls = [n for n in graph.graph.nodes if "linear" in n.name]
        with graph.graph.inserting_before(calls[len(calls) // 2]):
            graph.graph.call_function(mark, (), {})
        graph.recompile()
        return graph

    model, x = Layers(), torch.randn(2, 8)
    pipe = p.pipeline(model, (x,), split_policy=halve)
    assert pipe.num_stages == 2
    torch.testing.assert_close(pipe(x)[0], model(x))


def body_sequences_and_losses(p: Names) -> None:
    ir, x = p._IR, torch.randn(2, 8)
    chain = nn.Sequential(Mlp(), Mlp(), Mlp())
    pipe = ir.Pipe.from_tracing(ir.PipeSequential.from_sequential(chain), (x,))
    assert pipe.num_stages == 3
    torch.testing.assert_close(pipe(x)[0], chain(x))
    wrapped = ir.TrivialLossWrapper(chain, nn.MSELoss())
    assert isinstance(wrapped, ir.LossWrapper)
    torch.testing.assert_close(wrapped(x, x), nn.functional.mse_loss(chain(x), x))
    refused(NotImplementedError, lambda: ir.LossWrapper(chain, nn.MSELoss())(x))


def body_models_that_cannot_be_traced(p: Names) -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            p.pipe_split()
            return x if x.sum() > 0 else -x

    refused(RuntimeError, lambda: p.pipeline(Branches(), (torch.ones(2),)))
    both = {"split_spec": {}, "split_policy": lambda module: module}
    refused(ValueError, lambda: p.pipeline(Mlp(), (torch.ones(2, 8),), **both))


# ---- one rank in a group of one


@contextmanager
def alone() -> Iterator[None]:
    dist.init_process_group(backend="fake", rank=0, world_size=1, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_alone(p: Names, name: str) -> None:
    """Steps of one stage on one rank, against the plain module."""
    with alone():
        torch.manual_seed(0)
        model, x, target = Mlp(), torch.randn(8, 8), torch.randn(8, 8)
        plain = copy.deepcopy(model)
        stages: Any = [p.PipelineStage(model, 0, 1, torch.device("cpu"))]
        chosen = p.schedules.get_schedule_class(name)
        if issubclass(chosen, p.schedules.PipelineScheduleSingle):
            stages = stages[0]
        schedule = chosen(stages, 2, loss_fn=nn.functional.cross_entropy)
        for _ in range(2):
            model.zero_grad()
            plain.zero_grad()
            losses: list[Tensor] = []
            output = schedule.step(x, target=target, losses=losses)
            loss = nn.functional.cross_entropy(plain(x), target)
            loss.backward()
        torch.testing.assert_close(output, plain(x))
        torch.testing.assert_close(torch.stack(losses).mean(), loss)
        check_gradients(model, plain)


def check_gradients(model: nn.Module, plain: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)


BY_HAND = {
    "full": "0F0,0F1,1F0,1F1,1B0,1B1,0B0,0B1",
    "halves": "0F0,0F1,1F0,1F1,1I0,1I1,0I0,0I1,1W0,1W1,0W0,0W1",
}


def run_by_hand(p: Names, text: str) -> None:
    """A row of actions over two stages of one rank."""
    with alone():
        torch.manual_seed(0)
        model, x, target = Layers(2), torch.randn(8, 8), torch.randn(8, 8)
        plain, loss_fn = copy.deepcopy(model), nn.MSELoss(reduction="sum")
        stages = [p.PipelineStage(model.layers[i], i, 2, torch.device("cpu")) for i in range(2)]
        schedule = p.schedules._PipelineScheduleRuntime(
            stages, 2, loss_fn=loss_fn, scale_grads=False
        )
        schedule._prepare_schedule_with_comms({0: p.row(text)}, format="compute_comms")
        for _ in range(2):
            model.zero_grad()
            plain.zero_grad()
            losses: list[Tensor] = []
            output = schedule.step(x, target=target, losses=losses)
            loss = loss_fn(plain(x), target)
            loss.backward()
        torch.testing.assert_close(output, plain(x))
        torch.testing.assert_close(sum(losses), loss)
        check_gradients(model, plain)


def body_tensors_are_described(p: Names) -> None:
    u, x = p._utils, torch.ones(2, 3, requires_grad=True)
    meta = u.extract_tensor_meta(x)
    assert (meta.shape, meta.stride, meta.dtype, meta.requires_grad) == (
        torch.Size([2, 3]),
        (3, 1),
        torch.float32,
        True,
    )
    again = meta.to_tensor("cpu")
    assert u.extract_tensor_meta(again) == meta
    assert u.extract_tensor_metas(None) is None
    assert u.extract_tensor_metas((x, None), allow_none=True) == (meta, None)
    refused(u.PipeliningMetadataError, lambda: u.extract_tensor_metas((x, None)))
    assert u.validate_metadata("x", meta, x.detach()) == []
    assert len(u.validate_metadata("x", meta, torch.ones(2, 4))) == 2
    wrong = torch.ones(2, 3, dtype=torch.float64)
    assert u.validate_metadata("x", meta, wrong) == [
        "dtype mismatch: torch.float32 vs torch.float64"
    ]
    call = functools.partial(u.validate_metadata, "the input", meta, wrong)
    said = refused(u.PipeliningMetadataError, lambda: call(raise_on_mismatch=True))
    assert said == "the input: dtype mismatch: torch.float32 vs torch.float64"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call(warn_on_mismatch=True)
    assert len(seen) == 1
    check = u.validate_tensors_metadata
    assert check("all", (meta, None), (x, None)) == []
    refused(u.PipeliningMetadataError, lambda: check("all", (meta,), (x, x)))
    refused(u.PipeliningMetadataError, lambda: check("all", (meta, None), (x, x)))
    assert len(check("all", (meta, meta), (x, None), raise_on_mismatch=False)) == 1
    assert u.to_local_if_dtensor(x) is x
    assert not u.to_local_if_dtensor(x, detach=True).requires_grad


def body_examples_are_tensors(p: Names) -> None:
    u, x, y = p._utils, torch.ones(2), torch.ones(2, requires_grad=True)
    tuples = u.validate_and_normalize_to_tuple
    assert tuples(None) is None
    assert tuples(x)[0] is x
    assert [type(value) for value in tuples([x, y])] == [Tensor, Tensor]
    assert tuples((x, None), allow_none=True)[1] is None
    for wrong in ((x, None), (x, 3), "x"):
        refused(u.PipeliningMetadataError, lambda wrong=wrong: tuples(wrong))
    pairs = u.validate_static_arg_grad_correspondence
    pairs(0, (x, y), (None, x), True)
    refused(u.PipeliningMetadataError, lambda: pairs(0, (x,), (x,), True))
    said = refused(u.PipeliningMetadataError, lambda: pairs(1, (x, y), (None,), False))
    assert "Stage 1" in said
    with alone():
        for options in ({"input_args": ("a",)}, {"input_args": x, "output_args": 3}):
            make = functools.partial(p.PipelineStage, nn.Linear(2, 2), 0, 1, torch.device("cpu"))
            refused(u.PipeliningMetadataError, lambda make=make, o=options: make(**o))


def body_sharded_tensors_are_described(p: Names) -> None:
    with alone():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        made = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
        meta = p._utils.extract_tensor_meta(made)
        assert (meta.global_shape, meta.shape) == (torch.Size([4, 2]), torch.Size([4, 2]))
        assert (meta.placements, meta.mesh_dim_names) == ((Shard(0),), ("tp",))
        assert p._utils.validate_metadata("x", meta, made) == []
        other = made.redistribute(mesh, [Replicate()])
        assert any("placements" in text for text in p._utils.validate_metadata("x", meta, other))
        assert len(p._utils.validate_metadata("x", meta, torch.ones(4, 2))) >= 1
        assert type(p._utils.to_local_if_dtensor(made)) is Tensor
        refused(RuntimeError, lambda: p._utils._TensorMeta.from_tensor(made))


def run_own_schedule(p: Names) -> list[Any]:
    """A class of one's own that writes its rows as torch's classes do."""
    s = p.schedules

    class Own(s._PipelineScheduleRuntime):  # type: ignore[name-defined,misc]
        def __init__(self, stages: Any, n_microbatches: int, loss_fn: Any = None) -> None:
            self.pp_group_size = stages[0].group_size
            super().__init__(stages=stages, n_microbatches=n_microbatches, loss_fn=loss_fn)
            self.n_local_stages, self.rank = len(stages), stages[0].group_rank
            self.pipeline_order: dict[int, list[Any]] = {}
            for rank in range(self.pp_group_size):
                self.pipeline_order[rank] = self._calculate_single_rank_operations(rank)
            self._prepare_schedule_with_comms(self.pipeline_order)

        def _calculate_single_rank_operations(self, rank: int) -> list[Any]:
            count = self._n_microbatches
            ahead = [s._Action(i, s.F, m) for i in range(2) for m in range(count)]
            behind = [s._Action(i, s.B, m) for i in (1, 0) for m in range(count)]
            return [*ahead, None, *behind]

    with alone(), torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = Layers(2), torch.randn(8, 8)
        stages = [p.PipelineStage(model.layers[i], i, 2, torch.device("cpu")) for i in range(2)]
        schedule = Own(stages, 4, loss_fn=nn.MSELoss())
        seen: list[str] = []
        for kind in (s.UNSHARD, s.RESHARD):
            schedule.register_custom_function(kind, lambda action, _: seen.append(str(action)))
        found = schedule.step(x, target=x)
        total = [p.grad.sum().item() for p in model.parameters() if p.grad is not None]
        assert schedule.pipeline_order[0][8] is None
        assert len(schedule.pipeline_order[0]) == 17
        return [*seen, found.sum().item(), *total]


def run_parts(p: Names) -> list[Any]:
    """A subclass that replaces what a step does besides running stages."""
    with alone():
        torch.manual_seed(0)

        class Own(p.ScheduleGPipe):  # type: ignore[name-defined,misc]
            def _split_inputs(self, args: Any, kwargs: Any = None) -> Any:
                return super()._split_inputs((args[0] * 2,), kwargs)

            def _compute_loss(self, output: Any, target: Any, *rest: Any, **more: Any) -> Any:
                return 3 * super()._compute_loss(output, target, *rest, **more)

            def _merge_outputs(self, output_chunks: Any) -> Any:
                return [len(output_chunks), super()._merge_outputs(output_chunks)]

        model, x = Mlp(), torch.randn(4, 8)
        stage = p.PipelineStage(model, 0, 1, torch.device("cpu"))
        made = Own(stage, 2, loss_fn=nn.MSELoss())
        assert made._check_inputs() == ([(), ()], [{}, {}])
        refused(TypeError, lambda: made._check_inputs(arg_mbs=()))
        refused(ValueError, lambda: made._check_inputs(target_mbs=[x]))
        losses: list[Tensor] = []
        found = made.step(x, target=x, losses=losses)
        gradients = [p.grad.sum().item() for p in model.parameters() if p.grad is not None]
        return [found[0], found[1].sum().item(), *[loss.item() for loss in losses], *gradients]


# ---- small things


def body_values_as_texts(p: Names) -> None:
    shown = p._debug.map_debug_info(([torch.ones(2, requires_grad=True)], {"k": 3}))
    assert shown == (["Tensor(torch.Size([2]), grad=True, dtype=torch.float32)"], {"k": "3"})


def body_flat_arguments(p: Names) -> None:
    x = torch.ones(2, requires_grad=True)
    given = (x * 2, {"k": [3, torch.ones(1)]})
    flat = p._utils.flatten_args(given)
    assert [type(value) for value in flat] == [Tensor, int, Tensor]
    for call in (p._utils.flatten_args_detach, lambda a: p._utils.flatten_args(a, detach=True)):
        again, values = call(given)
        assert again[0] is values[0]
        assert again[1]["k"][1] is values[2]
        assert values[0].is_leaf
        assert [values[0].requires_grad, values[2].requires_grad] == [True, False]
    info = p._utils.PipeInfo(graph=torch.fx.Graph(), num_stages=2, has_loss_and_backward=False)
    assert info.num_stages == 2
