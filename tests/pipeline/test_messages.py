"""What travels between processes: what the edges need, descriptions once, and few bytes at a time."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock import Pipeline, PipelineStage
from penstock.schedule import Edge, from_csv, validate
from penstock.testing import WorkerPool
from tests.pipeline.models import X, Y, assert_same, chain, gradients, make, mean_loss
from tests.processes import in_processes
from tests.transport.recording import record_messages

ROWS, WIDTH, DOUBLE = 3, 4, 8
ACTIVATION = ROWS * WIDTH * DOUBLE
MASK = ROWS * 1
"""Bytes of one microbatch's values."""
VALUES, GRADIENTS, WEIGHTS = 0, 1, 2
BATCH = torch.linspace(-1, 1, 12 * WIDTH, dtype=torch.float64).reshape(12, WIDTH)


class Part(nn.Module):
    """Adds up its arguments and gives values by the names asked for: ``m`` a mask, others a hidden tensor."""

    def __init__(self, *gives: str) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.gives = gives

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        total = sum(t.double() for t in (*args, *kwargs.values()))
        hidden = torch.tanh(self.layer(total))
        values = {name: hidden[:, :1] > 0 if name == "m" else hidden * 1 for name in self.gives}
        return values if len(values) > 1 else hidden


EDGES: dict[str, tuple[Edge, ...]] = {
    "shared": (Edge("a", 0, (1, 2)), Edge("b", 1, (2,)), Edge("c", 2, (3,))),
    "branched": (Edge("a", 0, (1, 3)), Edge("b", 1, (2,)), Edge("c", 2, (3,))),
    "masked": (
        Edge("a", 0, (1,)),
        Edge("b", 1, (2,)),
        Edge("m", 1, (2, 3), gradient=False),
        Edge("c", 2, (3,)),
    ),
}


def by_hand(group: Any, schedule: str, edges: tuple[Edge, ...]) -> Pipeline:
    """Four stages with an edge table of their own."""
    torch.manual_seed(0)
    gives = [[edge.value for edge in edges if edge.source == stage] for stage in range(4)]
    rank, ranks = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    here = (0, 3) if (schedule, ranks, rank) == ("ZB-V", 2, 0) else (rank,)
    here = (1, 2) if (schedule, ranks, rank) == ("ZB-V", 2, 1) else here
    stages = [PipelineStage(Part(*gives[stage]), stage, 4) for stage in here]
    return Pipeline.from_stages(
        stages, schedule=schedule, microbatches=4, loss_fn=mean_loss, edges=edges, mesh=group
    )


def count(group: Any, what: str, schedule: str) -> list[list[int]]:
    """A worker's task: of each channel that this rank sends on, its ends, direction, messages and bytes."""
    if what in EDGES:
        pipe, batch, target = by_hand(group, schedule, EDGES[what]), BATCH, BATCH
    else:
        model = chain()
        if what == "frozen":
            model[0].requires_grad_(requires_grad=False)
        pipe, batch, target = make(model, schedule=schedule, ranks=3, mesh=group), X, Y
    with pipe:
        counter = record_messages(pipe)
        pipe.predict(batch) if what == "predict" else pipe.step(batch, target=target)
        return [[*c, counter.messages[c], counter.bytes[c]] for c in counter.messages]


def channels(*pairs: tuple[int, int], size: int, back: bool = True) -> dict[Any, tuple[int, int]]:
    """One message for each of four microbatches from rank to rank, and perhaps one of gradients back."""
    gradients = [(b, a, GRADIENTS) for a, b in pairs if back]
    return dict.fromkeys([*((*pair, VALUES) for pair in pairs), *gradients], (4, 4 * size))


PART = X[:2].nbytes
TRAFFIC: dict[tuple[str, str], tuple[int, dict[Any, tuple[int, int]]]] = {
    ("chain", "ZB-H1"): (3, channels((0, 1), (1, 2), size=PART)),
    # Nothing comes back to a stage that trains nothing.
    ("frozen", "1F1B"): (
        3, channels((0, 1), size=PART, back=False) | channels((1, 2), size=PART)
    ),
    ("predict", "1F1B"): (3, channels((0, 1), (1, 2), size=PART, back=False)),
    # A value for two stages of a rank travels once, and their gradients come back in one message.
    ("shared", "ZB-V"): (
        2, channels((0, 1), (1, 0), size=ACTIVATION) | {(1, 0, GRADIENTS): (4, 4 * 2 * ACTIVATION)}
    ),
    ("branched", "1F1B"): (4, channels((0, 1), (0, 3), (1, 2), (2, 3), size=ACTIVATION)),
    # The mask goes to rank 2 with another value, and alone to rank 3; it has no gradient.
    ("masked", "1F1B"): (
        4, channels((0, 1), (1, 2), (2, 3), size=ACTIVATION) | {
            (1, 2, VALUES): (4, 4 * (ACTIVATION + MASK)), (1, 3, VALUES): (4, 4 * MASK)
        }
    ),
}  # fmt: skip
"""On how many ranks, and what each channel carries: messages and bytes."""


@pytest.mark.parametrize(("what", "schedule"), TRAFFIC)
def test_what_a_rank_needs_travels_to_it_once(
    workers: WorkerPool, what: str, schedule: str
) -> None:
    ranks, expected = TRAFFIC[what, schedule]
    answers = workers.run(f"{__name__}:count", ranks, 100.0, what=what, schedule=schedule)
    assert {tuple(row[:3]): (row[3], row[4]) for of in answers for row in of} == expected


# ---- nothing grows


@in_processes(2)
def test_a_word_before_and_a_sum_after_a_step_are_all(group: Any) -> None:
    """In each of four rounds of a step and an evaluation."""
    rounds = list[tuple[int, tuple[int, ...], int]]()
    with make(chain(4), schedule="ZB-V", ranks=2, microbatches=4, mesh=group) as pipe:
        counter = record_messages(pipe)
        for _ in range(4):
            counter.reset()
            pipe.step(X, target=Y)
            gathers = counter.gathers
            pipe.evaluate(X[:3], target=Y[:3])
            bytes_, messages = sum(counter.bytes.values()), sum(counter.messages.values())
            rounds.append((counter.words, (gathers, bytes_, messages), counter.pending))
    first, *later = rounds
    assert first[0] > 0, "the first describes what it sends"
    for words, sent, pending in later:
        assert (words, pending) == (0, 0)
        assert sent == later[0][1]
        assert sent[0] == 2
        assert sent[1] == first[1][1]


class PeakBytes(TorchDispatchMode):
    """The most bytes of tensors that operations made and that were alive at a time."""

    def __init__(self, without: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most: int = 0
        self._now: int = 0
        self._known = {without.untyped_storage()._cdata}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._watch(leaf.untyped_storage())
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self._now += size
            self.most = max(self.most, self._now)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._now -= size


def held(group: Any, schedule: str, microbatches: int, rows: int) -> tuple[int, int]:
    """A worker's task: in a step, the peak of its tensors, and of receives that were posted, in bytes."""
    options: dict[str, Any] = {"ranks": 2, "microbatches": microbatches, "mesh": group}
    with make(chain(4), schedule=schedule, **options) as pipe:
        batch = torch.ones(rows * microbatches, X.shape[1], dtype=X.dtype)
        pipe.step(batch, target=batch)
        counter = record_messages(pipe)
        with PeakBytes(batch) as probe:
            pipe.step(batch, target=batch)
    return int(probe.most), counter.most


@pytest.mark.parametrize(
    ("schedule", "rows", "more"), [("1F1B", 16, 128), ("ZB-H1", 2100, 40)], ids=["sockets", "gloo"]
)
def test_what_is_held_does_not_grow_with_the_microbatches(
    workers: WorkerPool, schedule: str, rows: int, more: int
) -> None:
    few, many = (
        workers.run(f"{__name__}:held", 2, 100.0, schedule=schedule, microbatches=m, rows=rows)
        for m in (8, more)
    )
    message, scalar = rows * X.shape[1] * X.element_size(), 128
    for (small, posted), (large, posted_too) in zip(few, many, strict=True):
        # A microbatch leaves its loss and the weight of it. What is sent may be let go of a little later.
        assert large - small <= (more - 8) * scalar + 4 * message
        assert posted == posted_too


# ---- a WAIT_SEND waits for its own message


ROWS_OF_RANK = (
    "0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0WAIT_SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 3RECV_F1 3F1 3B1 "
    "3SEND_B1 0RECV_B1 0B1 0REDUCE_GRAD 0WAIT_REDUCE_GRAD",
    "1RECV_F0 1F0 2F0 2SEND_F0 1RECV_F1 1F1 2F1 2SEND_F1 2RECV_B0 2B0 1B0 1SEND_B0 2RECV_B1 2B1 1B1 1SEND_B1",
)
"""Rank 1 takes the gradient that rank 0 has sent before 0WAIT_SEND_F0 only when it has 0SEND_F1's value."""


@in_processes(2)
def test_a_wait_for_one_message_waits_for_no_other(group: Any) -> None:
    """With messages beyond what sockets carry."""
    text = "\n".join(",".join(row.split()) for row in ROWS_OF_RANK)
    schedule = from_csv(text, name="waits")
    assert validate(schedule).ok
    plain, batch = chain(4), torch.randn(2 * 4096, 4, dtype=torch.float64)
    here = schedule.placement.stages_on(group.rank())
    stages = [PipelineStage(chain(4)[index], index, 4) for index in here]
    pipe = Pipeline.from_stages(
        stages, schedule=schedule, microbatches=2, loss_fn=mean_loss, mesh=group, timeout=20.0
    )
    with pipe:
        for _ in range(2):
            pipe.step(batch, target=batch)
            mean_loss(plain(batch), batch).backward()
    for index, stage in zip(here, stages, strict=True):
        assert_same(gradients(stage.module), gradients(plain.get_submodule(str(index))))


@pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="counts threads as Linux shows them"
)
@in_processes(4)
def test_a_closed_pipeline_leaves_no_threads(group: Any) -> None:
    """Of three, each on a new group; on all workers, as torch names groups by their count in a process."""
    counts, before = [], set(threading.enumerate())
    for _ in range(3):
        part = dist.new_group(dist.get_process_group_ranks(group))
        with make(chain(4), ranks=4, microbatches=2, loss_fn=mean_loss, mesh=part) as pipe:
            pipe.step(X, target=Y)
        dist.destroy_process_group(part)
        del part, pipe
        for thread in set(threading.enumerate()) - before:
            thread.join(20.0)
        gc.collect()
        counts.append(len(os.listdir("/proc/self/task")))
    assert counts[2] <= counts[1], counts


# ---- what stages share


def run_shared(group: Any, uses: list[int], frozen: bool) -> list[list[int]]:
    """A worker's task: source, target, messages and bytes of weights."""
    torch.manual_seed(0)
    one = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64).requires_grad_(not frozen)
    layers = [one if i in uses else nn.Linear(WIDTH, WIDTH).double() for i in range(3)]
    with make(nn.Sequential(*layers), ranks=3, mesh=group) as pipe:
        counter = record_messages(pipe)
        pipe.step(X, target=Y)
        weights = [channel for channel in counter.messages if channel.direction == WEIGHTS]
        return [[*c[:2], counter.messages[c], counter.bytes[c]] for c in weights]


@pytest.mark.parametrize(
    ("uses", "frozen", "pairs"),
    [([0, 2], False, [(0, 2), (2, 0)]), ([0, 1, 2], False, None), ([0, 2], True, [])],
)
def test_each_pair_that_shares_exchanges_one_gradient(
    workers: WorkerPool, uses: list[int], frozen: bool, pairs: list[tuple[int, int]] | None
) -> None:
    expected = [(a, b) for a in range(3) for b in range(3) if a != b] if pairs is None else pairs
    answers = workers.run(f"{__name__}:run_shared", 3, 100.0, uses=uses, frozen=frozen)
    rows = sorted(row for answer in answers for row in answer)
    assert [tuple(row[:2]) for row in rows if row[3] >= WIDTH * WIDTH * DOUBLE] == expected
