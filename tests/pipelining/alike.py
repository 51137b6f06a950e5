"""What is written for torch's package and needs one process: run with either import, with equal results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.attention.flex_attention import create_block_mask

from tests.pipelining.either import (
    IN_A_V,
    MULTI,
    SINGLE,
    WIDTH,
    Layer,
    Names,
    Seat,
    X,
    alone,
    refused,
    texts,
)

# ---- rows of actions, as tests of torch's passes are written


def joined(rows: Any) -> list[str]:
    """Rows as texts, without idle steps at their ends."""
    return [",".join(texts(row)).rstrip(",") for row in rows]


def body_classes(p: Names) -> list[str]:
    s = p.schedules
    known = [*SINGLE, *MULTI, "PipelineScheduleSingle"]
    classes = [s.get_schedule_class(f(name)) for name in known for f in (str, str.upper, str.lower)]
    for chosen in (p.ScheduleGPipe, p.Schedule1F1B, s._ScheduleForwardOnly):
        assert issubclass(chosen, s.PipelineScheduleSingle)
    for chosen in (p.ScheduleInterleaved1F1B, p.ScheduleDualPipeV, p.ScheduleLoopedBFS):
        assert issubclass(chosen, s._PipelineScheduleRuntime)
        assert issubclass(chosen, s.PipelineScheduleMulti)
    assert all(issubclass(one, s._PipelineSchedule) for one in classes)
    return [one.__name__ for one in classes]


WRONG: list[Callable[[Names], Any]] = [
    lambda p: p.get_schedule_class("ScheduleThatDoesNotExist"),
    lambda p: p.Schedule1F1B(p.mock(4, 4), 2),
    lambda p: p.ScheduleInterleaved1F1B([p.mock(4, 8)] * 2, 11),
    lambda p: p.ScheduleInterleavedZeroBubble([p.mock(4, 8)] * 2, 11),
    lambda p: p.ScheduleZBVZeroBubble([p.mock(2, 2)], 4),
    lambda p: p.ScheduleDualPipeV([p.mock(2, 6)] * 3, 8),
    lambda p: p.ScheduleDualPipeV([p.mock(2, 4)] * 2, 3),
    lambda p: p.generate_stage_to_rank_mapping(2, 4, "w"),
    lambda p: p.generate_stage_to_rank_mapping(2, 5, "v"),
]
"""An unknown name, too few microbatches, uneven rounds, other counts of stages than a V has."""


def body_what_is_a_value_error(p: Names) -> None:
    for wrong in WRONG:
        refused(ValueError, lambda wrong=wrong: wrong(p))


def body_where_stages_are(p: Names) -> list[Any]:
    sizes = [(2, 2), (2, 4), (3, 6)]
    places = (p._utils.generate_stage_to_rank_mapping, p._utils.generate_rank_to_stage_mapping)
    return [f(*size, style) for f in places for size in sizes for style in ("loop", "v")]


SIZES = [(2, 2, 2), (2, 8, 4), (3, 12, 4), (4, 10, 5), (2, 3, 4)]
"""Stages a rank, microbatches, ranks."""


def body_work_and_messages(p: Names) -> list[list[str]]:
    """What each rank does, in any order; a full backward counts as its halves."""
    work: list[list[str]] = []
    for name in MULTI:
        for each, microbatches, ranks in SIZES if name not in IN_A_V else [(2, 8, 2), (2, 10, 4)]:
            one = p.scheduled(name, ranks, each, microbatches)
            if name in ("Interleaved1F1B", "InterleavedZeroBubble"):
                rounds = one.number_of_rounds * one.microbatches_per_round
                assert (one.n_local_stages, rounds) == (each, microbatches)
            style = "v" if name in IN_A_V else "loop"
            place = p.generate_stage_to_rank_mapping(ranks, each * ranks, style).__getitem__
            order = one.pipeline_order
            if name != "DualPipeV":
                # torch 2.13 adds no messages to overlapped pairs.
                order = p._add_send_recv(order, stage_to_rank=place, num_stages=each * ranks)
            for row in order.values():
                parts = [part for a in row if a for part in a.sub_actions or (a,)]
                halves = {"B": ("I", "W")}
                work.append(
                    sorted(
                        f"{a.stage_index}{op}{a.microbatch_index}"
                        for a in parts
                        for op in halves.get(a.computation_type.value, (a.computation_type.value,))
                    )
                )
    return work


def body_schedules_in_a_v(p: Names) -> list[str]:
    s = p.schedules
    for name in ("ZBVZeroBubble", "DualPipeV"):
        for microbatches, ranks in [(10, 4), (8, 2), (15, 4)]:
            order = p.scheduled(name, ranks, 2, microbatches).pipeline_order
            placed = s._validate_schedule(order, ranks, 2 * ranks, microbatches)
            assert placed == p._utils.generate_stage_to_rank_mapping(ranks, 2 * ranks, style="v")
    order = p.scheduled("DualPipeV", 4, 2, 10).pipeline_order
    shown = {rank: [action for action in row if action] for rank, row in order.items()}
    tables = [s._format_pipeline_order(shown, error_step_number=step) for step in (None, 3)]
    return [*joined(shown.values()), *tables]


ACTIONS = "1F0 2I1 0W3 0B3 1UNSHARD 3RESHARD 0REDUCE_GRAD 2SEND_B2 1RECV_F1 (2F1;3B0)OVERLAP_F_B"


def body_actions_from_text(p: Names) -> list[Any]:
    s = p.schedules
    read = [s._Action.from_str(text) for text in ACTIONS.split()]
    assert [repr(action) for action in read] == texts(read) == ACTIONS.split()
    assert read[0] == s._Action(1, s.F, 0)
    assert (read[4], read[-1].computation_type) == (s._Action(1, s.UNSHARD), s.OVERLAP_F_B)
    assert s._Action.from_str("  ") is None
    refused(RuntimeError, lambda: s._Action.from_str("zz"))
    return [(a.stage_index, a.microbatch_index, a.is_compute_op) for a in read]


ROWS = {
    "0F0,0F1,   ,0B0,0B1": 2,
    "0F0,0F1,1F0,1F1,1B0,1B1,0B0,0B1": 2,
    "0F0,0F1,0F2,0I0,0I1,0W0,0I2,0W2,0W1": 3,
    "0F0,2F0,4F0,6F0,6I0,6W0,4I0,4W0,2B0,0I0,0W0": 1,
}
"""Actions, and the number of microbatches."""


def body_passes(p: Names) -> list[str]:
    s, rows = p.schedules, []
    for text, microbatches in ROWS.items():
        rows += [s._merge_bw(p.row(text)), s._add_reduce_grad(p.row(text), microbatches)]
        rows += [s._add_unshard_reshard(p.row(text)), s._add_unshard_reshard(p.row(text), 2)]
    return joined(rows)


def body_what_a_schedule_is_checked_for(p: Names) -> list[Any]:
    check = p.schedules._validate_schedule
    good = {0: p.row("0F0,0I0,0W0"), 1: p.row("1F0,1B0")}
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
    first, last = p.row("1F1,0B0")
    both = [p._Action(-1, p.OVERLAP_F_B, None, pair) for pair in ((first, last), (last, first))]
    orders = [[*p.row("0F0,1F0,1B0,0F1"), pair, *p.row("1B1,0B1")] for pair in both]
    return [check(good, 2, 2, 1), *(check({0: order}, 1, 2, 2) for order in orders)]


def body_steps_with_messages(p: Names) -> None:
    """Every action in a step in which it can run; a weight backward after a full one too."""
    s = p.schedules
    for name, ranks, microbatches in [("Interleaved1F1B", 2, 4), ("InterleavedZeroBubble", 3, 6)]:
        place, count = (lambda stage, ranks=ranks: stage % ranks), 2 * ranks
        order = p.scheduled(name, ranks, 2, microbatches).pipeline_order
        whole = s._add_send_recv(order, stage_to_rank=place, num_stages=count)
        steps = s._simulate_comms_compute(whole, stage_to_rank=place, num_stages=count)
        assert {rank: [a for a in row if a] for rank, row in steps.items()} == whole
    rows = {0: p.row("0F0,0SEND_F0,0RECV_B0,0B0,0W0"), 1: p.row("1RECV_F0,1F0,1B0,1SEND_B0,1W0")}
    steps = s._simulate_comms_compute(rows, stage_to_rank=lambda stage: stage, num_stages=2)
    assert {rank: [a for a in row if a] for rank, row in steps.items()} == rows
    at = {str(action): step for row in steps.values() for step, action in enumerate(row)}
    assert at["0SEND_F0"] <= at["1F0"] < at["1SEND_B0"] <= at["0B0"] < at["0W0"]
    stuck = {0: p.row("0F0,0SEND_F0"), 1: p.row("1F0")}
    refused(ValueError, lambda: s._simulate_comms_compute(stuck, lambda stage: stage, 2))


def body_files(p: Names, folder: Path) -> None:
    """Messages come back from files, and a file without a schedule is refused."""

    def fresh(stages: int = 4) -> Any:
        return p.schedules._PipelineScheduleRuntime([p.mock(2, stages)] * 2, 4)

    for name in MULTI:
        first, second, third = fresh(), fresh(), fresh()
        first._prepare_schedule_with_comms(p.scheduled(name, 2, 2, 4).pipeline_order)
        first._dump_csv(str(folder / name))
        second._load_csv(str(folder / name), format="compute_comms")
        third._prepare_schedule_with_comms(second.pipeline_order_with_comms, format="compute_comms")
        orders = [one.pipeline_order_with_comms for one in (first, second, third)]
        assert orders[0] == orders[1] == orders[2]
    file = folder / "rows.csv"
    file.write_text("0F0,zz,0B0")
    assert "zz" in refused(RuntimeError, lambda: fresh()._load_csv(str(file)))


def body_single_schedules_have_an_order(p: Names) -> list[str]:
    # Not 1F1B: what torch 2.13 gives for its last rank begins at microbatch 1.
    order = p.ScheduleGPipe(p.mock(4, 4), 4)._get_pipeline_order()
    return joined([[a for a in order[r] if a is not None and a.is_compute_op] for r in range(4)])


def body_rows_of_schedules(p: Names) -> list[str]:
    shown: list[str] = []
    for name in ("Interleaved1F1B", "InterleavedZeroBubble", "DualPipeV"):
        rows = [[a for a in row if a] for row in p.get_schedule_ops(name, 2, 8)]
        full = [
            p.get_schedule_ops(name, 2, 8, with_comms=True, defer_pp_recv=late)
            for late in (False, True)
        ]
        for one in full:
            assert [[a for a in row if a and a.is_compute_op] for row in one] == rows
        # torch 2.13 defers nothing around overlapped pairs.
        assert name == "DualPipeV" or full[0] != full[1]
        # torch 2.13 finds no such rows for GPipe and 1F1B, and loses count of ranks that end first in a V.
        shown += [*joined(rows), *joined(p.get_schedule_ops(name, 4, 8, add_spacing=True))]
    rows = p.get_schedule_ops(p.ScheduleGPipe, 2, 4)
    assert [str(a) for a in rows[1] if a][:4] == ["1F0", "1F1", "1F2", "1F3"]
    refused(ValueError, lambda: p.get_schedule_ops("GPipe", 2, 4, None, True, True))
    refused(AssertionError, lambda: p.get_schedule_ops("GPipe", 2, 4, 2))
    refused(AssertionError, lambda: p.get_schedule_ops("LoopedBFS", 2, 4, 1))
    for pair in ("0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"), ("0F0,0I0,0W0", "1F0,1I0,1W0"):
        shown += joined(p.add_schedule_op_spacing(list(map(p.row, pair))))
    return shown


# ---- steps on one rank, in a group of one


def body_one_stage(p: Names) -> None:
    """Schedules of several stages take one, too."""
    for name in ("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS"):
        seat = Seat(p.package, None, {0: [0]})
        seat.check_steps(seat.schedule(name))


def body_a_schedule_of_ones_own(p: Names) -> list[str]:
    """A class that writes its rows as torch's classes do, with custom functions."""
    s = p.schedules

    class Own(s._PipelineScheduleRuntime):  # type: ignore[name-defined,misc]
        def __init__(self, stages: Any, n_microbatches: int, **options: Any) -> None:
            self.pp_group_size = stages[0].group_size
            super().__init__(stages=stages, n_microbatches=n_microbatches, **options)
            self.n_local_stages, self.rank = len(stages), stages[0].group_rank
            self.pipeline_order: dict[int, list[Any]] = {0: self._calculate_operations()}
            self._prepare_schedule_with_comms(self.pipeline_order)

        def _calculate_operations(self) -> list[Any]:
            count = self._n_microbatches
            ahead = [s._Action(i, s.F, m) for i in range(2) for m in range(count)]
            behind = [s._Action(i, s.B, m) for i in (1, 0) for m in range(count)]
            return [*ahead, None, *behind]

    seat = Seat(p.package, None, {0: [0, 1]})
    schedule = seat.schedule(Own)
    seen: list[str] = []
    for kind in (s.UNSHARD, s.RESHARD):
        schedule.register_custom_function(kind, lambda action, _: seen.append(str(action)))
    seat.check_steps(schedule, 1)
    assert schedule.pipeline_order[0][8] is None
    return seen


def body_parts_of_a_step(p: Names) -> list[Any]:
    """A subclass that replaces what a step does besides running stages."""

    class Own(p.ScheduleGPipe):  # type: ignore[name-defined,misc]
        def _split_inputs(self, args: Any, kwargs: Any = None) -> Any:
            return super()._split_inputs((args[0] * 2,), kwargs)

        def _compute_loss(self, output: Any, target: Any, *rest: Any, **more: Any) -> Any:
            return 3 * super()._compute_loss(output, target, *rest, **more)

        def _merge_outputs(self, output_chunks: Any) -> Any:
            return [len(output_chunks), super()._merge_outputs(output_chunks)]

    seat = Seat(p.package, None, {0: [0]})
    one = seat.schedule(Own, 2, loss_fn=nn.MSELoss(), scale_grads=True)
    assert one._check_inputs() == ([(), ()], [{}, {}])
    refused(TypeError, lambda: one._check_inputs(arg_mbs=()))
    refused(ValueError, lambda: one._check_inputs(target_mbs=[X]))
    (count, output), losses = seat.step(one)
    torch.testing.assert_close(output, seat.expected(2 * X))
    numbers: list[Tensor] = [*losses, *(g for g in seat.gradients() if g is not None)]
    return [count, *(round(float(number.detach().sum()), 4) for number in numbers)]


# ---- models that are traced and cut


class Split(nn.Module):
    """Parameters of its own, a buffer, and cuts in its code."""

    shift: Tensor

    def __init__(self, split: Any) -> None:
        super().__init__()
        self.split = [split]
        self.first = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.lin0, self.lin1 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        x = torch.mm(x, self.first)
        skip = x
        x = torch.relu(x if y is None else x + y)
        self.split[0]()
        x = self.lin0(torch.mm(x, self.first) + self.shift)
        self.split[0]()
        return torch.relu(self.lin1(x) + skip)


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def body_a_pipe(p: Names) -> None:
    torch.manual_seed(0)
    model, x, y = Split(p.pipe_split), torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    pipe = p.pipeline(model, mb_args=(x, y))
    assert isinstance(pipe, p.Pipe)
    assert pipe.num_stages == p.Pipe.from_tracing(model, (x, y)).num_stages == 3
    torch.testing.assert_close(pipe(x, y)[0], model(x, y))
    names = [set(pipe.get_stage_module(i).state_dict()) for i in range(3)]
    assert set.union(*names) == set(model.state_dict())
    assert pipe.replicated_params == [{"submod_pp_0": "first", "submod_pp_1": "first"}]
    info = pipe.info()
    assert (info.num_stages, info.has_loss_and_backward) == (3, False)
    assert {n.op for n in info.graph.nodes} >= {"placeholder", "output"}
    stages = [f"submod_pp_{i}" for i in range(3)]
    assert [name for name, _ in pipe.split_gm.named_children()] == stages
    refused(ValueError, lambda: pipe.get_stage_module(3))
    layer = Layer()
    for kind, module, options in (
        (AttributeError, layer, {"split_spec": {"blocks.1": p.SplitPoint.END}}),
        (RuntimeError, Branches(), {}),
        (ValueError, layer, {"split_spec": {}, "split_policy": lambda module: module}),
    ):
        refused(kind, lambda m=module, o=options: p.pipeline(m, (torch.ones(2, WIDTH),), **o))


# ---- parts of a batch, examples of arguments, and what tensors look like

NESTED = ((X, [X + 1, {"a": X + 2}]), {"flag": True, "mask": X > 0, "none": None})


def body_splitting(p: Names) -> list[Any]:
    m = p.microbatch
    split = [m.split_args_kwargs_into_chunks(*NESTED, count) for count in (1, 2, 3, 8, 9)]
    specs = m.TensorChunkSpec.from_tuple((0, 1)), m.TensorChunkSpec.from_dict({"b": 1})
    named = {**specs[1], "c": m._Replicate}
    split.append(m.split_args_kwargs_into_chunks((X, X), {"b": X, "c": X}, 2, specs[0], named))
    refused(AssertionError, lambda: m._split_tensor(X, m.TensorChunkSpec(0), 9))
    refused(AssertionError, lambda: m.split_args_kwargs_into_chunks((X, X), {}, 2, (0,)))
    assert str(m.TensorChunkSpec(2)) == "TensorChunkSpec(2)"
    x = torch.ones(4, 2, requires_grad=True)
    parts = m._split_tensor(x, m.TensorChunkSpec(0), 2)
    (parts[0] * 3).sum().backward()
    assert torch.equal(parts[0].grad, torch.full((2, 2), 3.0))
    return split


def body_merging(p: Names) -> list[Any]:
    m = p.microbatch
    chunks = [(X[:2], {"s": torch.tensor(1.0)}, 3), (X[2:], {"s": torch.tensor(2.0)}, 3)]
    largest = m._CustomReducer(torch.tensor(0.0), torch.maximum)
    assert isinstance(m.sum_reducer, m._LossReducer)
    refused(ValueError, lambda: m.merge_chunks([(X, X)], (m.TensorChunkSpec(0),)))
    refused(AssertionError, lambda: m.merge_chunks([(1,), (2,)], (3,)))
    mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=0)
    cut, copied = (
        DTensor.from_local(X, mesh, [at], run_check=False) for at in (Shard(0), Replicate())
    )
    assert "placement mismatch" in refused(
        AssertionError, lambda: m.merge_chunks([cut, copied], None)
    )
    assert "mix" in refused(AssertionError, lambda: m.merge_chunks([cut, X], None))
    return [
        m.merge_chunks(chunks, (m.TensorChunkSpec(0), {"s": m.sum_reducer}, None)),
        m.merge_chunks([X[:1], X[1:]], None),
        m.merge_chunks([torch.tensor(2.0), torch.tensor(5.0)], largest),
    ]


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


def body_examples_are_tensors(p: Names) -> None:
    u, x, y = p._utils, torch.ones(2), torch.ones(2, requires_grad=True)
    tuples = u.validate_and_normalize_to_tuple
    assert tuples(None) is None
    assert tuples(x)[0] is x
    assert [type(value) for value in tuples([x, y])] == [Tensor, Tensor]
    assert tuples((x, None), allow_none=True)[1] is None
    for wrong in ((x, None), (x, 3), "x"):
        refused(u.PipeliningMetadataError, lambda wrong=wrong: tuples(wrong))
    for options in ({"input_args": ("a",)}, {"input_args": x, "output_args": 3}):
        make = functools.partial(p.PipelineStage, nn.Linear(2, 2), 0, 1, torch.device("cpu"))
        refused(u.PipeliningMetadataError, lambda make=make, o=options: make(**o))


def body_flat_arguments(p: Names) -> None:
    nested = (torch.ones(2, requires_grad=True) * 2, {"k": [3, torch.ones(1)]})
    assert [type(value) for value in p._utils.flatten_args(nested)] == [Tensor, int, Tensor]
    again, values = p._utils.flatten_args(nested, detach=True)
    assert again[0] is values[0]
    assert again[1]["k"][1] is values[2]
    assert values[0].is_leaf
    assert [values[0].requires_grad, values[2].requires_grad] == [True, False]
    info = p._utils.PipeInfo(graph=torch.fx.Graph(), num_stages=2, has_loss_and_backward=False)
    assert info.num_stages == 2


def body_what_tensors_look_like(p: Names) -> list[Any]:
    u = p._utils
    x = torch.ones(2, 4, requires_grad=True)
    mesh = DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("tp",), _init_backend=False, _rank=0)
    spread = DTensor.from_local(x.detach(), mesh, [Shard(0)], run_check=False)
    plain, sharded = u.extract_tensor_meta(x), u.extract_tensor_meta(spread)
    refused(u.PipeliningMetadataError, lambda: u._TensorMeta.from_tensor(spread))
    again = sharded.to_dtensor("cpu", mesh)
    same = [again.shape, again.placements, again.to_local().shape]
    assert same == [spread.shape, spread.placements, x.shape]
    names, layout = sharded.mesh_cache_key
    assert plain.to_tensor("cpu").requires_grad
    wider = u.extract_tensor_meta(torch.ones(2, 5))
    check = functools.partial(u.validate_metadata, "the input", plain)
    refused(u.PipeliningMetadataError, lambda: check(wider, raise_on_mismatch=True))
    with pytest.warns(UserWarning, match="Metadata mismatch"):
        check(wider, warn_on_mismatch=True)
    kinds = [len(check(other)) > 0 for other in (sharded, x.double(), x.t(), x.detach())]
    unlike = [check(wider), sharded.get_diff(u.extract_tensor_meta(spread))]
    return [*kinds, *unlike, names, str(layout)]


def body_several_tensors_at_once(p: Names) -> list[Any]:
    u = p._utils
    x = torch.ones(2, 4, requires_grad=True)
    meta = u.extract_tensor_meta(x)
    check = functools.partial(u.validate_tensors_metadata, "grads")
    assert check((meta, None), (x, None)) == []
    for wrong in ((x,), (None, None), (x, x), (x.double(), None)):
        says = refused(u.PipeliningMetadataError, lambda w=wrong: check((meta, None), w))
        assert says.startswith("grads")
        with pytest.warns(UserWarning, match="grads"):
            check((meta, None), wrong, raise_on_mismatch=False, warn_on_mismatch=True)
    return [len(check((meta, None), w, raise_on_mismatch=False)) for w in ((x,), (x.double(), x))]


def body_local_parts_and_what_examples_leave_open(p: Names) -> list[Any]:
    u = p._utils
    x = torch.ones(2, 4, requires_grad=True)
    mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=0)
    spread = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
    assert u.to_local_if_dtensor(x) is x
    local = [u.to_local_if_dtensor(one, detach) for one in (x, spread) for detach in (False, True)]
    plain, sharded = ((u.extract_tensor_meta(one),) for one in (x, spread.detach()))
    names = ("inputs", "outputs", "input_grads", "output_grads")
    known = [(None, plain), (plain, plain), (sharded, plain), (plain, sharded, plain, plain)]
    metas = [SimpleNamespace(**dict.fromkeys(names)) for _ in known]
    asked = []
    for meta, of in zip(metas, known, strict=True):
        vars(meta).update(zip(names, of, strict=False))
        meta.is_complete_for_forward = lambda m=meta: None not in (m.inputs, m.outputs)
        meta.has_dtensors = lambda m=meta: sharded in (m.inputs, m.outputs)
        asked += [u.InferenceMode.needs_dynamic(meta, learns) for learns in (False, True)]
    modes = [u.InferenceMode(value).name for value in ("static", "dynamic")]
    return [*asked, *modes, *((type(one) is Tensor, one.requires_grad) for one in local)]


BODIES = {name: body for name, body in vars().items() if name.startswith("body_")}


def perform(name: str, package: str, folder: Path) -> Any:
    with alone():
        more = (folder,) if name == "body_files" else ()
        return BODIES[name](Names(package), *more)
