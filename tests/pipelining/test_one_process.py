"""What is written for torch's package and runs in one process: the same programs with either import."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils import _pytree as pytree

from tests.pipelining.stages import (
    EITHER,
    IN_A_V,
    MODULES,
    MULTI,
    OURS,
    SINGLE,
    THEIRS,
    WIDTH,
    Held,
    Names,
    X,
    Y,
    alone,
    mean_loss,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning")
"""torch's own tracing."""


def refuse(kind: type[Exception], *calls: Callable[[], Any]) -> None:
    for call in calls:
        with pytest.raises(kind):
            call()


# ---- rows of actions, as tests of torch's passes are written


def joined(rows: Any) -> list[str]:
    """Rows as texts, without idle steps at their ends."""
    return [",".join("" if a is None else str(a) for a in row).rstrip(",") for row in rows]


def classes(p: Names, _: Path) -> list[str]:
    s = p.schedules
    known = [*SINGLE, *MULTI, "PipelineScheduleSingle"]
    found = [s.get_schedule_class(f(name)) for name in known for f in (str, str.upper, str.lower)]
    assert issubclass(p.ScheduleGPipe, s.PipelineScheduleSingle)
    assert issubclass(s._ScheduleForwardOnly, s.PipelineScheduleSingle)
    assert issubclass(s._PipelineScheduleRuntime, s.PipelineScheduleMulti)
    assert issubclass(p.ScheduleInterleaved1F1B, s._PipelineScheduleRuntime)
    assert all(issubclass(one, s._PipelineSchedule) for one in found)
    return [one.__name__ for one in found]


def errors_and_places(p: Names, _: Path) -> list[Any]:
    """An unknown name, too few microbatches, uneven rounds, other counts of stages than a V has."""
    refuse(
        ValueError,
        lambda: p.get_schedule_class("ScheduleThatDoesNotExist"),
        lambda: p.Schedule1F1B(p.mock(4, 4), 2),
        lambda: p.ScheduleInterleaved1F1B([p.mock(4, 8)] * 2, 11),
        lambda: p.ScheduleInterleavedZeroBubble([p.mock(4, 8)] * 2, 11),
        lambda: p.ScheduleZBVZeroBubble([p.mock(2, 2)], 4),
        lambda: p.ScheduleDualPipeV([p.mock(2, 6)] * 3, 8),
        lambda: p.ScheduleDualPipeV([p.mock(2, 4)] * 2, 3),
        lambda: p.generate_stage_to_rank_mapping(2, 4, "w"),
        lambda: p.generate_stage_to_rank_mapping(2, 5, "v"),
    )
    places = (p._utils.generate_stage_to_rank_mapping, p._utils.generate_rank_to_stage_mapping)
    return [f(*of, style) for f in places for of in [(2, 4), (3, 6)] for style in ("loop", "v")]


SIZES = [(2, 2, 2), (3, 12, 4), (4, 10, 5), (2, 3, 4)]
"""Stages a rank, microbatches, ranks."""


def work_of_schedules(p: Names, _: Path) -> list[list[str]]:
    """What each rank does, in any order; a full backward counts as its halves."""
    work: list[list[str]] = []
    for name in MULTI:
        for each, microbatches, ranks in SIZES if name not in IN_A_V else [(2, 8, 2), (2, 10, 4)]:
            one = p.scheduled(name, ranks, each, microbatches)
            if name in ("Interleaved1F1B", "InterleavedZeroBubble"):
                rounds = one.number_of_rounds * one.microbatches_per_round
                assert (one.n_local_stages, rounds) == (each, microbatches)
            for row in one.pipeline_order.values():
                parts = [part for a in row if a for part in a.sub_actions or (a,)]
                ops = [(a, a.computation_type.value) for a in parts]
                work.append(
                    sorted(
                        f"{a.stage_index}{half}{a.microbatch_index}"
                        for a, op in ops
                        for half in (("I", "W") if op == "B" else (op,))
                    )
                )
    return work


ACTIONS = "1F0 2I1 0W3 0B3 1UNSHARD 3RESHARD 0REDUCE_GRAD 2SEND_B2 1RECV_F1 (2F1;3B0)OVERLAP_F_B"


def actions_from_text(p: Names, _: Path) -> list[Any]:
    s = p.schedules
    read = [s._Action.from_str(text) for text in ACTIONS.split()]
    assert [repr(action) for action in read] == [*map(str, read)] == ACTIONS.split()
    assert read[0] == s._Action(1, s.F, 0)
    assert (read[4], read[-1].computation_type) == (s._Action(1, s.UNSHARD), s.OVERLAP_F_B)
    assert s._Action.from_str("  ") is None
    refuse(RuntimeError, lambda: s._Action.from_str("zz"))
    return [(a.stage_index, a.microbatch_index, a.is_compute_op) for a in read]


def orders_that_are_shown(p: Names, _: Path) -> list[str]:
    order = p.scheduled("DualPipeV", 4, 2, 10).pipeline_order
    # Not 1F1B: what torch 2.13 gives for its last rank begins at microbatch 1.
    gpipe = p.ScheduleGPipe(p.mock(4, 4), 4)._get_pipeline_order()
    return joined(
        [action for action in row if action and action.is_compute_op]
        for rows in (order, gpipe)
        for _, row in sorted(rows.items())
    )


def files(p: Names, folder: Path) -> None:
    """Messages come back from files, and a file without a schedule is refused."""

    def fresh() -> Any:
        return p.schedules._PipelineScheduleRuntime([p.mock(2, 4)] * 2, 4)

    for name in MULTI:
        first, second, third = fresh(), fresh(), fresh()
        first._prepare_schedule_with_comms(p.scheduled(name, 2, 2, 4).pipeline_order)
        first._dump_csv(str(folder / name))
        second._load_csv(str(folder / name), format="compute_comms")
        third._prepare_schedule_with_comms(second.pipeline_order_with_comms, format="compute_comms")
        orders = [one.pipeline_order_with_comms for one in (first, second, third)]
        assert orders[0] == orders[1] == orders[2]
    (folder / "rows.csv").write_text("0F0,zz,0B0")
    with pytest.raises(RuntimeError, match="zz"):
        fresh()._load_csv(str(folder / "rows.csv"))


def rows_of_schedules(p: Names, _: Path) -> list[str]:
    kinds = "Interleaved1F1B", "InterleavedZeroBubble", "DualPipeV"
    orders = [p.scheduled(kind, ranks, 2, 8).pipeline_order for kind in kinds for ranks in (2, 4)]
    return joined([a for a in row if a] for order in orders for _, row in sorted(order.items()))


# ---- steps on one rank


def one_stage(p: Names, _: Path) -> None:
    """Schedules of several stages take one, too."""
    for name in ("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS"):
        held = Held(p, at={0: [0]})
        held.check_steps(held.schedule(name))


def a_schedule_of_ones_own(p: Names, _: Path) -> list[str]:
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

    held = Held(p)
    schedule = held.schedule(Own)
    seen: list[str] = []
    for kind in (s.UNSHARD, s.RESHARD):
        schedule.register_custom_function(kind, lambda action, _: seen.append(str(action)))
    held.check_steps(schedule, 1)
    assert schedule.pipeline_order[0][8] is None
    return seen


def parts_of_a_step(p: Names, _: Path) -> list[Any]:
    """A subclass that replaces what a step does besides running stages."""

    class Own(p.ScheduleGPipe):  # type: ignore[name-defined,misc]
        def _split_inputs(self, args: Any, kwargs: Any = None) -> Any:
            return super()._split_inputs((args[0] * 2,), kwargs)

        def _compute_loss(self, output: Any, target: Any, *rest: Any, **more: Any) -> Any:
            return 3 * super()._compute_loss(output, target, *rest, **more)

        def _merge_outputs(self, output_chunks: Any) -> Any:
            return [len(output_chunks), super()._merge_outputs(output_chunks)]

    held = Held(p, at={0: [0]})
    one = held.schedule(Own, 2, loss_fn=nn.MSELoss(), scale_grads=True)
    assert one._check_inputs() == ([(), ()], [{}, {}])
    refuse(TypeError, lambda: one._check_inputs(arg_mbs=()))
    refuse(ValueError, lambda: one._check_inputs(target_mbs=[X]))
    (count, output), losses = held.step(one)
    torch.testing.assert_close(output, held.plain(2 * X))
    numbers: list[Tensor] = [*losses, *held.gradients().values()]
    return [count, *(round(float(number.detach().sum()), 4) for number in numbers)]


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def a_pipe(p: Names, _: Path) -> None:
    """What it offers; `test_pipe.py` shows what its stages compute."""
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), X[:2]
    model[1].weight = model[0].weight
    pipe = p.pipeline(model, (x,), split_spec={"1": p.SplitPoint.BEGINNING})
    assert isinstance(pipe, p.Pipe)
    assert pipe.num_stages == 2
    torch.testing.assert_close(pipe(x)[0], model(x))
    names = {name for i in range(2) for name in pipe.get_stage_module(i).state_dict()}
    assert names == set(model.state_dict())
    assert pipe.replicated_params == [{"submod_pp_0": "0.weight", "submod_pp_1": "1.weight"}]
    info = pipe.info()
    assert (info.num_stages, info.has_loss_and_backward) == (2, False)
    assert {n.op for n in info.graph.nodes} >= {"placeholder", "output"}
    stages = [name for name, _ in pipe.split_gm.named_children()]
    assert stages == ["submod_pp_0", "submod_pp_1"]
    refuse(ValueError, lambda: pipe.get_stage_module(2))
    for kind, module, options in (
        (AttributeError, model, {"split_spec": {"blocks.1": p.SplitPoint.END}}),
        (RuntimeError, Branches(), {}),
        (ValueError, model, {"split_spec": {}, "split_policy": lambda module: module}),
    ):
        refuse(kind, functools.partial(p.pipeline, module, (x,), **options))


# ---- parts of a batch, and examples of arguments

NESTED = ((X, [X + 1, {"a": X + 2}]), {"flag": True, "mask": X > 0, "none": None})
MESH: dict[str, Any] = {"_init_backend": False, "_rank": 0}


def splitting(p: Names, _: Path) -> list[Any]:
    m = p.microbatch
    split = [m.split_args_kwargs_into_chunks(*NESTED, count) for count in (1, 2, 3, 8, 9)]
    specs = m.TensorChunkSpec.from_tuple((0, 1)), m.TensorChunkSpec.from_dict({"b": 1})
    named = {**specs[1], "c": m._Replicate}
    split.append(m.split_args_kwargs_into_chunks((X, X), {"b": X, "c": X}, 2, specs[0], named))
    refuse(
        AssertionError,
        lambda: m._split_tensor(X, m.TensorChunkSpec(0), 9),
        lambda: m.split_args_kwargs_into_chunks((X, X), {}, 2, (0,)),
    )
    assert str(m.TensorChunkSpec(2)) == "TensorChunkSpec(2)"
    x = torch.ones(4, 2, requires_grad=True)
    parts = m._split_tensor(x, m.TensorChunkSpec(0), 2)
    (parts[0] * 3).sum().backward()
    assert torch.equal(parts[0].grad, torch.full((2, 2), 3.0))
    return split


def merging(p: Names, _: Path) -> list[Any]:
    m = p.microbatch
    chunks = [(X[:2], {"s": torch.tensor(1.0)}, 3), (X[2:], {"s": torch.tensor(2.0)}, 3)]
    largest = m._CustomReducer(torch.tensor(0.0), torch.maximum)
    assert isinstance(m.sum_reducer, m._LossReducer)
    refuse(ValueError, lambda: m.merge_chunks([(X, X)], (m.TensorChunkSpec(0),)))
    refuse(AssertionError, lambda: m.merge_chunks([(1,), (2,)], (3,)))
    mesh = DeviceMesh("cpu", torch.arange(2), **MESH)
    cut, copied = (
        DTensor.from_local(X, mesh, [at], run_check=False) for at in (Shard(0), Replicate())
    )
    for other, says in ((copied, "placement mismatch"), (X, "mix")):
        with pytest.raises(AssertionError, match=says):
            m.merge_chunks([cut, other], None)
    return [
        m.merge_chunks(chunks, (m.TensorChunkSpec(0), {"s": m.sum_reducer}, None)),
        m.merge_chunks([X[:1], X[1:]], None),
        m.merge_chunks([torch.tensor(2.0), torch.tensor(5.0)], largest),
    ]


def block_masks(p: Names, _: Path) -> None:
    m = p.microbatch

    def after(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (kv >= b)

    mask = create_block_mask(after, 5, None, 8, 8, device="cpu", BLOCK_SIZE=4)
    parts = m._split_block_mask(mask, 2)
    assert [part.kv_num_blocks.size(0) for part in parts] == [3, 2]
    assert torch.equal(torch.cat([part.to_dense() for part in parts]), mask.to_dense())
    one = create_block_mask(after, None, None, 8, 8, device="cpu", BLOCK_SIZE=4)
    assert len(m._split_block_mask(one, 3)) == 3
    refuse(AssertionError, lambda: m._split_block_mask(mask, 6))


def examples_are_tensors(p: Names, _: Path) -> None:
    x = torch.ones(2)
    make = functools.partial(p.PipelineStage, nn.Linear(2, 2), 0, 1, torch.device("cpu"))
    wrong: list[dict[str, Any]] = [{"input_args": of} for of in (("a",), (x, None), (x, 3), "x")]
    wrong += [{"input_args": x, "output_args": 3}]
    refuse(p._utils.PipeliningMetadataError, *(functools.partial(make, **named) for named in wrong))
    assert len(p.stage.extract_tensor_metas([x, x])) == 2
    assert p.stage.extract_tensor_metas((x, None), allow_none=True)[1] is None


BODIES = [
    *(classes, errors_and_places, work_of_schedules, actions_from_text, orders_that_are_shown),
    *(files, rows_of_schedules),
    *(one_stage, a_schedule_of_ones_own, parts_of_a_step, a_pipe, splitting, merging, block_masks),
    examples_are_tensors,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_either_import_does_the_same(body: Callable[[Names, Path], Any], tmp_path: Path) -> None:
    with alone():
        theirs, their_form = pytree.tree_flatten(body(THEIRS, tmp_path))
        ours, form = pytree.tree_flatten(body(OURS, tmp_path))
    assert form == their_form
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other) if isinstance(mine, Tensor) else mine == other


# ---- what docs/torch-pipelining.md says to differ: torch 2.13's answer, and ours


def two_steps(p: Names, samples: int = 8, times: int = 2) -> bool:
    """Whether gradients that add up are those of a plain loop."""
    held = Held(p, loss=mean_loss)
    schedule = held.schedule("Interleaved1F1B", 2)
    for _ in range(times):
        schedule.step(X[:samples], target=Y[:samples])
        mean_loss(held.plain(X[:samples]), Y[:samples]).backward()
    expected = held.plain.get_parameter("0.first.weight").grad
    return torch.allclose(held.gradients()["0.first.weight"], expected, atol=1e-6)  # type: ignore[arg-type]


def a_batch_with_a_gradient(p: Names) -> float:
    held, (x, z) = Held(p, loss=mean_loss), (X.clone().requires_grad_() for _ in range(2))
    held.schedule("Interleaved1F1B", 2).step(x, target=Y)
    mean_loss(held.plain(z), Y).backward()
    return round(float(x.grad.norm() / z.grad.norm()), 3)  # type: ignore[union-attr]


def losses_hold_graphs(p: Names) -> bool:
    held = Held(p)
    return any(loss.requires_grad for loss in held.step(held.schedule("Interleaved1F1B"))[1])


def specs_by_name(p: Names) -> list[tuple[int, ...]]:
    spec = {"b": p.microbatch.TensorChunkSpec(0), "a": p.microbatch.TensorChunkSpec(1)}
    named = {"a": torch.ones(2, 4), "b": torch.ones(4, 2)}
    _, kwargs = p.microbatch.split_args_kwargs_into_chunks((), named, 2, None, spec)
    return [tuple(kwargs[0][name].shape) for name in "ab"]


def backwards_of_looped_bfs(p: Names) -> list[str]:
    order = p.scheduled("LoopedBFS", 1, 1, 2).pipeline_order
    return [str(action) for action in order[0] if "B" in str(action)]


def order_of_1f1b(p: Names) -> str:
    return str(p.Schedule1F1B(p.mock(1, 1), 2)._get_pipeline_order()[0][0])


def nowhere_to_cut(p: Names) -> list[int]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe = p.pipeline(nn.Sequential(nn.Linear(4, 4)), (torch.ones(3, 4),))
    return [pipe.num_stages, sum("no split point" in str(one.message) for one in caught)]


DIFFERENCES: list[tuple[Callable[[Names], Any], Any, Any]] = [
    (two_steps, False, True),
    (lambda p: two_steps(p, samples=7, times=1), False, True),
    (a_batch_with_a_gradient, 2.0, 1.0),
    (losses_hold_graphs, True, False),
    (specs_by_name, [(1, 4), (4, 1)], [(2, 2), (2, 2)]),
    (backwards_of_looped_bfs, ["0B1", "0B0"], ["0B0", "0B1"]),
    (order_of_1f1b, "0F1", "0F0"),
    (nowhere_to_cut, [1, 0], [1, 1]),
]


@pytest.mark.parametrize(
    ("row", "theirs", "ours"), DIFFERENCES, ids=lambda of: getattr(of, "__name__", "")
)
def test_what_differs_is_as_the_page_says(
    row: Callable[[Names], Any], theirs: Any, ours: Any
) -> None:
    with alone():
        assert (row(THEIRS), row(OURS)) == (theirs, ours)


# ---- names

OTHERS = {
    "PipelineActivationLiveness",
    "_CustomFunctionProtocol",
    "_PipelineSchedule",
    "_PipelineScheduleRuntime",
    "_PipelineStageBase",
    "PipeliningMetadataError",
    "Pipe",
}
"""Classes that users do not call, and those of which torch says nothing."""


@pytest.mark.parametrize("module", MODULES)
def test_parameters_have_torchs_names_and_places(module: str) -> None:
    ours, theirs = (vars(getattr(names, module)) for names in (OURS, THEIRS))
    for name in ours.keys() & theirs.keys() - OTHERS:
        home = getattr(theirs[name], "__module__", "")
        if callable(theirs[name]) and home.startswith("torch.distributed.pipelining"):
            wanted = list(signature(theirs[name]).parameters.values())
            parameters = list(signature(ours[name]).parameters.values())
            first, more = parameters[: len(wanted)], parameters[len(wanted) :]
            assert [(p.name, p.kind) for p in first] == [(p.name, p.kind) for p in wanted], name
            assert all(p.default is not Parameter.empty for p in more), name


LIBRARIES = {
    # torchtitan 0.3.0
    "top": "PipelineStage",
    "schedules": "_PipelineSchedule _PipelineScheduleRuntime PipelineScheduleMulti PipelineScheduleSingle "
    "ScheduleDualPipeV ScheduleZBVZeroBubble get_schedule_class _Action _PipelineContext _wait_batch_p2p "
    "FORWARD BACKWARD_INPUT BACKWARD_WEIGHT FULL_BACKWARD OVERLAP_F_B REDUCE_GRAD RESHARD UNSHARD",
    # besides these, NeMo AutoModel 0.7
    "microbatch": "_split_block_mask BlockMask TensorChunkSpec _Replicate",
    "stage": "PipelineStage _normalize_model_output_as_tuple _PipelineStageBase extract_tensor_metas",
    "_backward": "stage_backward stage_backward_input stage_backward_weight",
}


@pytest.mark.parametrize("package", EITHER)
def test_names_that_libraries_import(package: str) -> None:
    homes = [(getattr(EITHER[package], module), names) for module, names in LIBRARIES.items()]
    assert [n for home, names in homes for n in names.split() if not hasattr(home, n)] == []
