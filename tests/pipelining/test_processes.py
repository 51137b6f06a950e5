"""Programs for several processes, as people write them for torch's package.

Each compares itself with the plain model, and most run with torch's package as well.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from penstock import Pipeline
from penstock.schedule import add_communication, prefetch, reduce_gradients, to_csv
from penstock.testing import WorkerPool
from tests.pipelining.stages import (
    CHUNKS,
    EITHER,
    IN_A_V,
    MULTI,
    OURS,
    SINGLE,
    WIDTH,
    Held,
    Layer,
    X,
    Y,
    mean_loss,
    sum_loss,
)
from tests.processes import in_processes


def run(workers: WorkerPool, program: str, processes: int = 2, **options: Any) -> list[Any]:
    """What a program of this module returns on each rank."""
    answers: list[Any] = workers.run(f"{__name__}:{program}", processes, 60.0, **options)
    return answers


# ---- what a schedule may be asked for


class Pair(Layer):
    """Gives two values on the last stage."""

    def forward(self, hidden: Tensor, scale: Tensor | None = None) -> Any:
        out = super().forward(hidden, scale)
        return out, out.mean()


def scaled_loss(output: Any, target: Tensor, factor: float = 1.0) -> Tensor:
    loss: Tensor = mean_loss(output[0] if isinstance(output, tuple) else output, target)
    return loss * factor


BY_DAY = ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")
"""Whole backwards and halves, one stage on a rank and several."""
NIGHTLY = [name for name in (*SINGLE, *MULTI) if name not in BY_DAY]


@pytest.mark.whole
@pytest.mark.parametrize(
    ("package", "schedule"),
    [
        *(("penstock", name) for name in BY_DAY),
        *(("torch", name) for name in ("1F1B", "ZBVZeroBubble")),
        *(pytest.param("penstock", name, marks=pytest.mark.nightly) for name in NIGHTLY),
    ],
)
@in_processes(2)
def test_a_schedule_does_what_is_asked(group: Any, package: str, schedule: str) -> None:
    """Arguments by name, summed gradients, options of the loss, merged outputs, and no loss."""
    names, scale = EITHER[package], torch.linspace(0.5, 1.5, 2 * CHUNKS).reshape(-1, 1)
    held = Held(names, group, schedule, loss=mean_loss)
    held.check(*held.step(held.schedule(schedule), scale=scale), scale=scale)

    held = Held(names, group, schedule)
    summed = held.schedule(schedule, loss_fn=scaled_loss)
    result = held.step(summed, return_outputs=False, loss_kwargs={"factor": 0.5})
    assert result[0] is None
    held.check(*result, loss=lambda output, y: mean_loss(output, y) * 0.5 * CHUNKS)

    held = Held(names, group, schedule, loss=mean_loss)
    for stage in held.stages:
        stage.submod.__class__ = Pair if stage.is_last else Layer
    merges = names.TensorChunkSpec(0), names.sum_reducer
    merged = held.schedule(schedule, loss_fn=scaled_loss, output_merge_spec=merges)
    output, losses = held.step(merged)
    held.check(output and output[0], losses)
    if held.is_last:
        torch.testing.assert_close(output[1], held.plain(X).mean() * CHUNKS)

    # torch 2.13 runs the backwards of schedules in a V all the same.
    for call in ("step", "eval") if package == "penstock" or schedule not in IN_A_V else ():
        held = Held(names, group, schedule, loss=mean_loss)
        options: dict[str, Any] = {"loss_fn": None} if call == "step" else {}
        with torch.no_grad():
            output, losses = held.step(held.schedule(schedule, **options), call)
        if held.is_last:
            torch.testing.assert_close(output, held.plain(X).detach())
            assert len(losses) == (CHUNKS if call == "eval" else 0)
        assert not any(gradient is not None for gradient in held.gradients().values())


# ---- what stages show, and what happens between steps


def after_a_step(group: Any, package: str) -> dict[str, Any]:
    held = Held(EITHER[package], group, "GPipe")
    stage = held.stages[0]
    output, _ = held.step(held.schedule("GPipe"))
    shown = {
        "graph": output is not None and output.requires_grad,
        "outputs": len(stage.output_chunks),
        "ranks": {str(index): rank for index, rank in stage.stage_index_to_group_rank.items()},
        "stage": (stage.chunks, stage.log_prefix, stage.has_backward, stage.group is group),
        "place": (stage.group_rank, stage.group_size, stage.is_first, stage.is_last),
    }
    stage.clear_runtime_states()
    return {**shown, "cleared": len(stage.output_chunks)}


def test_stages_show_the_same_after_a_step(workers: WorkerPool) -> None:
    ours, theirs = (run(workers, "after_a_step", package=package) for package in EITHER)
    assert ours == theirs


@pytest.mark.parametrize("package", EITHER)
@in_processes(2)
def test_what_happens_between_steps(group: Any, package: str) -> None:
    """Inference whose output goes back by the same group; then other numbers of microbatches."""
    held = Held(EITHER[package], group, "GPipe")
    forwards = held.schedule(held.names._ScheduleForwardOnly, loss_fn=None)
    x, expected = X.clone(), X
    with torch.no_grad():
        for _ in range(3):
            expected = held.plain(expected)
            output = forwards.step(*([x] if held.rank == 0 else []))
            if held.rank == 0:
                back = dist.P2POp(dist.irecv, x, group=group, group_peer=1)
            else:
                back = dist.P2POp(dist.isend, output, group=group, group_peer=0)
            held.names._wait_batch_p2p(held.names._batch_p2p([back]))
    if held.rank == 0:
        torch.testing.assert_close(x, expected)
    held = Held(EITHER[package], group, "1F1B")
    one = held.schedule("1F1B")
    for count in (CHUNKS, 2, 8):
        one._n_microbatches = count
        # One of the packages finds shapes once.
        one._stage_forward_initialized = one._stage_backward_initialized = False
        held.modules[0].zero_grad()
        output, losses = held.step(one)
        held.check(output, losses)
        assert len(losses) == (count if held.is_last else 0)


def refused(group: Any) -> list[str]:
    """One rank alone gets something wrong; every rank hears of it, and the next step works."""
    held = Held(OURS, group, "1F1B")
    one = held.schedule("1F1B")
    forwards = Held(OURS, group, "1F1B").schedule(OURS._ScheduleForwardOnly, loss_fn=None)
    errors = []
    wrong: list[tuple[Any, Tensor, dict[str, Any]]] = [
        (one, X[:3], {}),
        (one, X, {"losses": ()}),
        (forwards, X, {"target": Y}),
    ]
    for schedule, x, more in wrong:
        try:
            schedule.step(x) if held.rank == 0 else schedule.step(**{"target": Y, **more})
        except (ValueError, TypeError, RuntimeError) as error:
            errors.append(f"{type(error).__name__}: {error}")
        held.check_steps(one, 1)
    return errors


def test_every_rank_hears_what_is_wrong_on_one(workers: WorkerPool) -> None:
    first, second = run(workers, "refused")
    assert second[0] == first[0].replace(": ", ": rank 0: ", 1)
    assert first[0].startswith("MicrobatchError: expected 4 microbatches")
    assert second[1] == "TypeError: losses must be a list, not a tuple"
    assert first[1] == f"StageError: rank 1: before the first microbatch: {second[1]}"
    assert "rank 1: a forward-only schedule has no loss" in first[2]


def unmade(group: Any) -> list[str]:
    """Rank 0 alone makes something wrong, and goes on; the other one makes all, and steps."""
    texts = []
    for wrong in (
        lambda: OURS.PipelineStage(Layer(), 0, 2, "cpu", input_args=("a",), group=group),
        lambda: Held(OURS, group, "GPipe").schedule("1F1B", 1),
        lambda: Pipeline.from_stages([], schedule="1F1B", microbatches=0, mesh=group),
    ):
        try:
            if dist.get_rank(group) == 0:
                wrong()
            held = Held(OURS, group, "GPipe")
            held.step(held.schedule("GPipe"))
        except (ValueError, RuntimeError) as error:
            texts.append(f"{type(error).__name__}: {error}")
        held = Held(OURS, group, "GPipe")
        held.check_steps(held.schedule("GPipe"), 1)
    return texts


def test_an_error_in_making_stages_is_raised_on_every_rank_at_once(workers: WorkerPool) -> None:
    """Also if the rank that finds it catches it: the others do not wait for the rendezvous to time out."""
    first, second = workers.run(f"{__name__}:unmade", 2, 30.0)
    assert [text.partition(":")[0] for text in first] == [
        *("PipeliningMetadataError", "UsageError", "UsageError"),
    ]
    assert second == [f"AgreementError: rank 0: {text}" for text in first]


# ---- orders that people write down


ORDERS: dict[str, tuple[list[str], list[list[int]]]] = {
    "loop": (
        ["0F0 0F1 2F0 2F1 - 2B0 - 2B1 0B0 - 0B1", "- 1F0 1F1 3F0 3B0 3F1 3B1 1B0 - 1B1 -"],
        [[0, 2], [1, 3]],
    ),
    "unbalanced": (
        [
            "0F0 0F1 1F0 1F1 - 4F0 4B0 4F1 4B1 1B0 1B1 0B0 0B1",
            "- 2F0 3F0 2F1 3F1 3B0 2B0 3B1 2B1",
        ],
        [[0, 1, 4], [2, 3]],
    ),
    "messages": (
        [
            "0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1",
            "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1B1 1SEND_B0 1SEND_B1",
        ],
        [[0], [1]],
    ),
}
"""The rows, and the stages of each rank."""


def by_hand(group: Any, package: str, rows: str, way: str) -> None:
    texts, places = ORDERS[rows]
    names = EITHER[package]
    if hasattr(names.schedules, "WAIT_SEND_F"):  # where torch has them, it demands them
        sends = [[action for action in text.split() if "SEND" in action] for text in texts]
        waits = [[action.replace("SEND", "WAIT_SEND") for action in row] for row in sends]
        texts = [" ".join([text, *row]) for text, row in zip(texts, waits, strict=True)]
    order = {rank: names.row(text) for rank, text in enumerate(texts)}
    held = Held(names, group, dict(enumerate(places)))
    runtime = names._PipelineScheduleRuntime
    one = held.schedule(names.PipelineScheduleMulti if way == "subclass" else runtime, 2)
    if way == "prepared":
        one._prepare_schedule_with_comms(order, format="compute_comms")
    elif way == "attribute":
        one.pipeline_order_with_comms = order
        ranks = {stage: rank for rank, here in enumerate(places) for stage in here}
        one.stage_index_to_group_rank = ranks
    else:
        one.pipeline_order = order
        one._validate_and_set_stage_mapping(order)
        if way == "runtime":
            one._prepare_schedule_with_comms(order)
    held.check_steps(one)


# ---- functions that do the runtime's work


def called_back(group: Any, package: str, schedule: str, threads: bool) -> dict[str, int]:
    """A function for every kind of work; a pair in two threads where asked."""
    held = Held(EITHER[package], group, schedule)
    one = held.schedule(schedule)
    back = Callbacks(held.names, threads)
    work = {"FORWARD": back.forward, "FULL_BACKWARD": back.backward, "OVERLAP_F_B": back.overlap}
    work |= {"BACKWARD_INPUT": back.backward, "BACKWARD_WEIGHT": back.weight}
    for kind, function in work.items():
        one.register_custom_function(getattr(held.names, kind), function)
    held.check_steps(one)
    return dict(back.counts)


class Callbacks:
    def __init__(self, names: Any, threads: bool) -> None:
        self.names, self.threads = names, threads
        self.counts: Counter[str] = Counter()

    def find(self, action: Any, context: Any) -> tuple[Any, Any, dict[int, Any]]:
        self.counts[action.computation_type.value] += 1
        here = {stage.stage_index: stage for stage in context.schedule_ref._stages}
        return context.schedule_ref, here[action.stage_index], here

    def wait(self, receives: Any, stage: Any, index: int) -> None:
        key = (stage.stage_index, index)
        assert key in receives
        self.names._wait_batch_p2p(receives.pop(key))

    def forward(self, action: Any, context: Any) -> None:
        index = action.microbatch_index
        schedule, stage, here = self.find(action, context)
        if not stage.is_first and stage.stage_index - 1 not in here:
            self.wait(schedule.fwd_recv_ops, stage, index)
        output = stage.forward_one_chunk(index, context.arg_mbs[index], context.kwarg_mbs[index])
        schedule._maybe_compute_loss(stage, output, context.target_mbs, index)
        if stage.stage_index + 1 in here:
            here[stage.stage_index + 1].set_local_fwd_input(output, index)

    def backward(self, action: Any, context: Any) -> None:
        index = action.microbatch_index
        schedule, stage, here = self.find(action, context)
        full = action.computation_type == self.names.FULL_BACKWARD
        if not stage.is_last and stage.stage_index + 1 not in here:
            self.wait(schedule.bwd_recv_ops, stage, index)
        loss = schedule._maybe_get_loss(stage, index)
        schedule.backward_counter[stage.stage_index] += full
        last = schedule.backward_counter[stage.stage_index] == schedule._n_microbatches
        stage.backward_one_chunk(index, loss=loss, full_backward=full, last_backward=last)
        if stage.stage_index - 1 in here:
            passed = stage.get_local_bwd_output(index)
            here[stage.stage_index - 1].set_local_bwd_input(passed, index)

    def weight(self, action: Any, context: Any) -> None:
        schedule, stage, _ = self.find(action, context)
        schedule.backward_counter[stage.stage_index] += 1
        stage.backward_weight_one_chunk(action.microbatch_index)

    def overlap(self, action: Any, context: Any) -> None:
        self.counts["pairs"] += 1
        forward, backward = action.sub_actions
        thread = threading.Thread(target=self.backward, args=(backward, context), daemon=True)
        thread.start() if self.threads else self.backward(backward, context)
        self.forward(forward, context)
        if self.threads:
            thread.join()


# ---- a weights' half that is the user's own


class InputsOnly(torch.autograd.Function):
    """A linear map that notes what its weight's gradient is made of, and makes none."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, notes: list[Any]) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.notes = notes
        return hidden @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        hidden, weight = ctx.saved_tensors
        ctx.notes.append((grad.detach().clone(), hidden.detach().clone()))
        return grad @ weight, None, None


inputs_only: Any = InputsOnly.apply


class Deferring(nn.Module):
    """A layer whose weight's gradient its user makes, if there are notes; a plain one without."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        self.notes: list[Any] | None = None
        self.weighed = 0

    def forward(self, hidden: Tensor) -> Tensor:
        if self.notes is None:
            return torch.tanh(hidden @ self.weight.t())
        return torch.tanh(inputs_only(hidden, self.weight, self.notes))

    def weigh(self) -> None:
        assert self.notes is not None
        grad, hidden = self.notes.pop(0)
        grad = grad.t() @ hidden
        self.weight.grad = grad if self.weight.grad is None else self.weight.grad + grad
        self.weighed += 1


def deferred(group: Any, package: str, schedule: str) -> list[int]:
    """The gradients are those that the user's function makes, when the weights' half is due."""
    part = torch.zeros(2, WIDTH, requires_grad=True)

    def each(index: int, module: Any) -> dict[str, Any]:
        module.notes = []
        examples = {"input_args": part if index else part.detach(), "output_args": part}
        return {**examples, "dw_builder": lambda: module.weigh}

    count = 2 if schedule == "1F1B" else 4
    make = lambda: [Deferring() for _ in range(count)]  # noqa: E731
    held = Held(EITHER[package], group, schedule, make, each=each)
    held.check_steps(held.schedule(schedule))
    with pytest.raises(AssertionError, match="backward_one_chunk"):
        held.stages[0].backward_weight_one_chunk(bwd_chunk_id=0)
    return [module.weighed for module in held.modules]


# ---- a loop that says itself what happens, stage call by stage call


def loop_of_turns(names: Any) -> Any:
    """One forward, one backward in halves; what is sent and what is received go together."""

    class Turns(names.PipelineScheduleSingle):  # type: ignore[misc] # of either package
        def _step_microbatches(self, *batch: Any, **more: Any) -> None:
            args, kwargs, targets, losses = [*batch, None, None, None, None][:4]
            args, kwargs = self._check_inputs(args, kwargs, targets, losses)
            stage, count = self._stage, self._n_microbatches
            self._initialize_stage(
                args[0], kwargs[0], targets and targets[0], more.get("loss_kwargs")
            )
            warm = min(count, stage.num_stages - stage.stage_index)
            sends: list[Any] = []
            done = 0
            for i in range(count + warm):
                if i < count:
                    ops = sends + stage.get_fwd_recv_ops(i)
                    names._wait_batch_p2p(names._batch_p2p(ops, desc="fwd_recv"))
                    output = stage.forward_one_chunk(i, args[i], kwargs[i])
                    self._maybe_compute_loss(stage, output, targets, i)
                    sends = stage.get_fwd_send_ops(i)
                if i >= warm - 1 and done < count:
                    ops = sends + stage.get_bwd_recv_ops(done)
                    names._wait_batch_p2p(names._batch_p2p(ops, desc="bwd_recv"))
                    loss = self._maybe_get_loss(stage, done)
                    stage.backward_one_chunk(done, loss=loss, full_backward=False)
                    sends = stage.get_bwd_send_ops(done)
                    stage.backward_weight_one_chunk(done, last_backward=done == count - 1)
                    done += 1
            for work in names._sorted_batch_p2p(sends, desc="bwd_send").values():
                names._wait_batch_p2p(work)
            self._update_losses(stage, losses)
            stage.perform_reduce_grad(count if self.scale_grads else 1)

    return Turns


def own_loop(group: Any, package: str) -> list[int]:
    """Evaluation and training in turn."""
    held = Held(EITHER[package], group, "GPipe")
    loop = held.schedule(loop_of_turns(held.names))
    for _ in range(2):
        _, losses = held.step(loop, "eval")
        held.check_steps(loop, 1)
    stage = held.stages[0]
    return [len(losses), len(getattr(stage, "fwd_cache", ()))]  # gone in torch 2.15


SAME: list[tuple[str, dict[str, Any]]] = [
    *(("by_hand", {"rows": name, "way": "runtime"}) for name in ("loop", "unbalanced")),
    ("by_hand", {"rows": "loop", "way": "subclass"}),
    *(("by_hand", {"rows": "messages", "way": way}) for way in ("prepared", "attribute")),
    *(("called_back", {"schedule": "DualPipeV", "threads": of}) for of in (False, True)),
    ("called_back", {"schedule": "InterleavedZeroBubble", "threads": False}),
    *(("deferred", {"schedule": name}) for name in ("1F1B", "InterleavedZeroBubble")),
    ("own_loop", {}),
]


@pytest.mark.parametrize(
    ("program", "options"), SAME, ids=[" ".join([p, *map(str, o.values())]) for p, o in SAME]
)
def test_either_import_does_the_same(
    workers: WorkerPool, program: str, options: dict[str, Any]
) -> None:
    theirs = run(workers, program, package="torch", **options)
    assert run(workers, program, package="penstock", **options) == theirs


# ---- what stages hand to each other


class Between(nn.Module):
    """A stage: what it hands on is made by ``give`` of its product, which is of what ``take`` finds."""

    def __init__(self, give: Callable[[Tensor], Any], take: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear, self.give, self.take = nn.Linear(WIDTH, WIDTH), give, take

    def forward(self, *args: Any) -> Any:
        return self.give(torch.tanh(self.linear(self.take(*args))))


def first_of(hidden: Tensor, *_: Tensor) -> Tensor:
    return hidden


KINDS: dict[str, tuple[Callable[[Tensor], Any], Callable[..., Tensor]]] = {
    "a mask and an unused value": (
        lambda out: [out, out.detach() > 0, out.sum()],
        lambda hidden, mask, _: torch.where(mask, hidden, hidden * 0.5),
    ),
    "a turned view of another type": (
        lambda out: out.double().repeat(1, 2)[:, ::2].t(),
        lambda hidden: hidden.float().t(),
    ),
    "an expanded view": (
        lambda out: out.unsqueeze(1).expand(-1, 3, -1),
        lambda hidden: hidden.mean(1),
    ),
    "no parameters, and a dict": (first_of, first_of),
    "a frozen stage": (first_of, first_of),
}


def modules_of(kind: str) -> Sequence[nn.Module]:
    give, take = KINDS[kind]
    first, middle, last = Between(give, first_of), Between(give, take), Between(first_of, take)
    first.requires_grad_(kind != "a frozen stage")
    if "dict" not in kind:
        return [first, middle, last]
    last.give = lambda out: {"logits": out, "rest": (out * 3, out + 1)}
    return [first, nn.Identity(), last]


def loss_of(output: Any, target: Tensor) -> Any:
    return sum_loss(output["logits"] if isinstance(output, dict) else output, target)


@pytest.mark.parametrize("schedule", ["1F1B", "turns"])
@in_processes(3)
def test_values_between_stages(group: Any, schedule: str) -> None:
    """Three ranks, under a schedule or a loop of one's own."""
    chosen = loop_of_turns(OURS) if schedule == "turns" else schedule
    for kind in KINDS:
        held = Held(OURS, group, "1F1B", partial(modules_of, kind), loss_of)
        try:
            held.check_steps(held.schedule(chosen, scale_grads=False))
        except Exception as error:
            raise AssertionError(f"{kind}: {error}") from error


# ---- replicated and sharded stages; tests/parallel/test_stages.py has the named schedules


class Replicas(Held):
    """The same for two replicas or shards of two ranks, which share the batch; the loss is a mean.

    Shards are made without data, and filled once they are sharded, as torchtitan does.

    Args:
        schedule: the name of the schedule that places the stages.
        how: ``"ddp"`` or ``"fsdp"``.
    """

    def __init__(self, schedule: str, how: str) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        super().__init__(OURS, mesh["pp"].get_group(), schedule, loss=mean_loss)
        start = 4 * mesh["dp"].get_local_rank()
        self.half = slice(start, start + 4)
        for place, stage in enumerate(self.stages):
            module, values = self.modules[place], self.plain[self.here[place]].state_dict()
            if how == "ddp":
                replicas = mesh["dp"].get_group()
                stage.submod = DistributedDataParallel(module, process_group=replicas)
            else:
                stage.submod = fully_shard(module.to("meta"), mesh=mesh["dp"])
                module.to_empty(device="cpu")
                options = StateDictOptions(full_state_dict=True)
                set_model_state_dict(module, values, options=options)


@pytest.mark.parametrize(("schedule", "how"), [("turns", "ddp"), ("whole order", "fsdp")])
@in_processes(4)
def test_replicated_and_sharded_stages(group: Any, schedule: str, how: str, tmp_path: Path) -> None:
    """Three steps of two replicas of two ranks, under a loop or an order that has the collectives."""
    held = Replicas("GPipe" if schedule == "turns" else "Interleaved1F1B", how)
    if schedule == "turns":
        one = held.schedule(loop_of_turns(OURS))
    else:
        # It says when sharded stages are gathered, freed and reduced.
        whole = reduce_gradients(prefetch(held.schedule("Interleaved1F1B").schedule))
        file = Path(tmp_path, f"{dist.get_rank()}.csv")
        file.write_text(to_csv(add_communication(whole)))
        one = held.schedule(OURS._PipelineScheduleRuntime)
        one._load_csv(file, format="compute_comms")
    models = [*held.modules, held.plain]
    optimizers = [torch.optim.AdamW(model.parameters(), 0.01) for model in models]
    for _ in range(3):
        held.check(*held.step(one))
        mean_loss(held.plain(X), Y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier(group=group)


@in_processes(4)
def test_gradients_over_shards_may_wait_for_a_later_step(group: Any) -> None:
    """Two steps whose gradients over shards are reduced once, at the end of the second."""
    held = Replicas("Interleaved1F1B", "fsdp")
    one = held.schedule("Interleaved1F1B")
    for finalizes in (False, True):
        held.step(one, finalize_gradients=finalizes)
        mean_loss(held.plain(X), Y).backward()
        if not finalizes:
            here = [parameter.grad for module in held.modules for parameter in module.parameters()]
            assert here == [None] * len(here)
    for place, module in enumerate(held.modules):
        plain = held.plain[held.here[place]]
        for mine, wanted in zip(module.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None
            torch.testing.assert_close(mine.grad.full_tensor(), wanted.grad)
    dist.barrier(group=group)
