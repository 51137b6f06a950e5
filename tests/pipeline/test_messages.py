"""What travels: exactly what the edges need, never more after the first step, and few bytes at a time."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock import Pipeline, PipelineStage
from penstock.schedule import Edge
from penstock.testing import CountingTransport, WorkerPool, count_messages
from penstock.transport import BACKWARD, FORWARD, SHARED, Channel
from tests.pipeline.models import X, Y, chain, make, mean_loss

ROWS, WIDTH, DOUBLE = 3, 4, 8
ACTIVATION = ROWS * WIDTH * DOUBLE
MASK = ROWS * 1
"""Bytes of one microbatch's values."""
STEP = {"gather": 1, "sum": 1}
"""One control word, and what the loss costs."""


class Part(nn.Module):
    """Adds up what it is given and gives it by the names asked for: ``m`` a mask, others a layer's output."""

    def __init__(self, *gives: str) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.gives = gives

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        given = [*args, *kwargs.values()]
        hidden = torch.tanh(self.layer(sum(t.double() for t in given)))
        made = {name: hidden[:, :1] > 0 if name == "m" else hidden * 1 for name in self.gives}
        return made if len(made) > 1 else hidden


BATCH = torch.linspace(-1, 1, 12 * WIDTH, dtype=torch.float64).reshape(12, WIDTH)


def branched(schedule: str, edges: tuple[Edge, ...], microbatches: int = 4) -> Pipeline:
    """Four stages with an edge table of their own."""
    torch.manual_seed(0)
    gives = [[edge.value for edge in edges if edge.source == stage] for stage in range(4)]
    stages = [PipelineStage(Part(*names), stage, 4) for stage, names in enumerate(gives)]
    return Pipeline.from_stages(
        stages, schedule=schedule, microbatches=microbatches, loss_fn=mean_loss, edges=edges
    )


def sent(counters: list[CountingTransport]) -> dict[Channel, tuple[int, int]]:
    """By channel, messages and bytes; the receivers must have counted the same."""
    messages = {c: n for counter in counters for c, n in counter.sent.messages.items()}
    sizes = {c: n for counter in counters for c, n in counter.sent.bytes.items()}
    assert messages == {c: n for at in counters for c, n in at.received.messages.items()}
    assert sizes == {c: n for at in counters for c, n in at.received.bytes.items()}
    return {channel: (count, sizes[channel]) for channel, count in messages.items()}


# ---- exactly what the edges need


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZB-H1"])
def test_a_chain_sends_each_value_and_each_gradient_once(schedule: str) -> None:
    pipe = make(schedule=schedule, ranks=3, microbatches=4)
    counters = count_messages(pipe)
    pipe.step(X, target=Y)
    width = X[0].numel() * X.element_size()
    channels = [Channel(0, 1, FORWARD), Channel(1, 2, FORWARD)]
    channels += [Channel(1, 0, BACKWARD), Channel(2, 1, BACKWARD)]
    assert sent(counters) == dict.fromkeys(channels, (4, len(X) * width))


def test_a_value_of_several_stages_of_a_rank_is_sent_once() -> None:
    """``a`` goes to stages 1 and 2 on rank 1; their gradients come back as one."""
    edges = (Edge("a", 0, (1, 2)), Edge("b", 1, (2,)), Edge("c", 2, (3,)))
    pipe = branched("ZB-V", edges)
    counters = count_messages(pipe)
    pipe.step(BATCH, target=BATCH)
    assert pipe.schedule.placement.rank_of == (0, 1, 1, 0)
    kinds = [(0, 1, FORWARD), (1, 0, FORWARD), (1, 0, BACKWARD), (0, 1, BACKWARD)]
    assert sent(counters) == {Channel(*kind): (4, 4 * ACTIVATION) for kind in kinds}


def test_a_value_goes_to_each_rank_that_needs_it() -> None:
    edges = (Edge("a", 0, (1, 3)), Edge("b", 1, (2,)), Edge("c", 2, (3,)))
    pipe = branched("1F1B", edges)
    counters = count_messages(pipe)
    pipe.step(BATCH, target=BATCH)
    pairs = [(0, 1), (0, 3), (1, 2), (2, 3)]
    there = [Channel(*pair, FORWARD) for pair in pairs]
    back = [Channel(target, source, BACKWARD) for source, target in pairs]
    assert sent(counters) == dict.fromkeys([*there, *back], (4, 4 * ACTIVATION))


def test_no_gradient_comes_back_for_masks() -> None:
    """``m`` travels with ``b`` to rank 2, and alone to rank 3."""
    edges = (
        Edge("a", 0, (1,)),
        Edge("b", 1, (2,)),
        Edge("m", 1, (2, 3), gradient=False),
        Edge("c", 2, (3,)),
    )
    pipe = branched("1F1B", edges)
    counters = count_messages(pipe)
    pipe.step(BATCH, target=BATCH)
    found = sent(counters)
    assert found[Channel(1, 2, FORWARD)] == (4, 4 * (ACTIVATION + MASK))
    assert found[Channel(1, 3, FORWARD)] == (4, 4 * MASK)
    assert found[Channel(2, 1, BACKWARD)] == (4, 4 * ACTIVATION)
    assert Channel(3, 1, BACKWARD) not in found


def test_nothing_comes_back_to_stages_that_train_nothing() -> None:
    model = chain()
    model[0].requires_grad_(requires_grad=False)
    pipe = make(model, ranks=3)
    counters = count_messages(pipe)
    pipe.step(X, target=Y)
    found = sent(counters)
    assert Channel(1, 0, BACKWARD) not in found
    assert Channel(2, 1, BACKWARD) in found


def test_without_gradients_nothing_comes_back() -> None:
    pipe = make(ranks=3)
    counters = count_messages(pipe)
    pipe.predict(X)
    assert {channel.kind for channel in sent(counters)} == {FORWARD}


# ---- nothing grows


def calls(pipe: Pipeline) -> list[list[dict[str, Any]]]:
    """Of four rounds of steps and evaluations, what each rank here counted in each."""
    counters = count_messages(pipe)
    rounds = []
    for _ in range(4):
        for counter in counters:
            counter.reset()
        pipe.step(X, target=Y)
        trained = [dict(counter.control) for counter in counters]
        pipe.eval(X[:3], target=Y[:3])
        rounds.append(
            [
                {
                    "train": before,
                    "all": dict(counter.control),
                    "bytes": sum(counter.sent.bytes.values()),
                    "messages": sum(counter.sent.messages.values()),
                    "most": [counter.sent.most, counter.received.most],
                    "pending": counter.received.pending,
                }
                for before, counter in zip(trained, counters, strict=True)
            ]
        )
    return rounds


def assert_steady(rounds: list[list[dict[str, Any]]]) -> None:
    first, *later = rounds
    assert all(found == later[0] for found in later)
    assert [rank["bytes"] for rank in first] == [rank["bytes"] for rank in later[0]]
    for rank in later[0]:
        assert rank["train"] == STEP
        assert rank["all"] == {name: 2 * count for name, count in STEP.items()}
        assert rank["pending"] == 0


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZB-V", "DualPipeV", "GPipe"])
def test_nothing_grows_after_the_first_step(schedule: str) -> None:
    assert_steady(calls(make(chain(4), schedule=schedule, ranks=2, microbatches=4)))


def count_calls(group: Any, schedule: str) -> list[dict[str, Any]]:
    """A worker's task."""
    pipe = make(chain(4), schedule=schedule, ranks=2, microbatches=4, group=group)
    return [found[0] for found in calls(pipe)]


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-V"])
def test_nothing_grows_between_processes(workers: WorkerPool, schedule: str) -> None:
    answers = workers.run(f"{__name__}:count_calls", 2, 30.0, schedule=schedule)
    assert_steady([list(found) for found in zip(*answers, strict=True)])


# ---- few bytes at a time


def most_pending(group: Any, schedule: str, microbatches: int) -> list[list[int]]:
    """Of each rank here the most bytes that were posted at a time, sent and received, in both modes."""
    pipe = make(chain(4), schedule=schedule, ranks=2, microbatches=microbatches, group=group)
    batch = torch.ones(microbatches, X.shape[1], dtype=X.dtype)
    counters = count_messages(pipe)
    found = []
    for call in (pipe.step, pipe.eval):
        call(batch, target=batch)
        for counter in counters:
            counter.reset()
        call(batch, target=batch)
        found += [[counter.sent.most, counter.received.most] for counter in counters]
    return found


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZB-H1", "ZB-V"])
def test_few_bytes_are_under_way_however_many_microbatches(schedule: str) -> None:
    few, many = (most_pending(None, schedule, m) for m in (8, 64))
    assert few == many


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1"])
def test_few_bytes_are_under_way_between_processes(workers: WorkerPool, schedule: str) -> None:
    few, many, most = (
        workers.run(f"{__name__}:most_pending", 2, 60.0, schedule=schedule, microbatches=m)
        for m in (8, 64, 256)
    )
    assert few == many == most


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


def peak(group: Any, schedule: str, microbatches: int) -> int:
    """A worker's task: the peak of a training step's tensors."""
    pipe = make(chain(4), schedule=schedule, ranks=2, microbatches=microbatches, group=group)
    batch = torch.ones(4 * microbatches, X.shape[1], dtype=X.dtype)
    pipe.step(batch, target=batch)
    with PeakBytes(batch) as probe:
        pipe.step(batch, target=batch)
    return int(probe.most)


SCALAR = 128
"""Bytes that a microbatch may leave on a rank: its loss and the weight of it."""


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-H1"])
def test_the_peak_does_not_grow_with_the_microbatches(workers: WorkerPool, schedule: str) -> None:
    few, many = (
        workers.run(f"{__name__}:peak", 2, 60.0, schedule=schedule, microbatches=m)
        for m in (8, 256)
    )
    for small, large in zip(few, many, strict=True):
        assert large - small <= 248 * SCALAR


# ---- what stages share


def tied(stages: int, uses: tuple[int, ...]) -> Pipeline:
    """A chain of linear layers, some of which are one."""
    torch.manual_seed(0)
    one = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
    layers = [one if i in uses else nn.Linear(WIDTH, WIDTH).double() for i in range(stages)]
    return make(nn.Sequential(*layers), ranks=stages)


def shared_traffic(pipe: Pipeline) -> dict[tuple[int, int], tuple[int, int]]:
    counters = count_messages(pipe)
    pipe.step(X, target=Y)
    return {
        (c.source, c.target): (counter.sent.messages[c], counter.sent.bytes[c])
        for counter in counters
        for c in counter.sent.messages
        if c.kind == SHARED
    }


def test_ranks_of_one_process_share_without_messages() -> None:
    assert shared_traffic(tied(3, (0, 2))) == {}


def run_shared(group: Any, uses: list[int], frozen: bool) -> list[list[int]]:
    """A worker's task: source, target, messages and bytes."""
    torch.manual_seed(0)
    one = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64).requires_grad_(not frozen)
    layers = [one if i in uses else nn.Linear(WIDTH, WIDTH).double() for i in range(3)]
    with make(nn.Sequential(*layers), ranks=3, group=group) as pipe:
        return [[*ends, *found] for ends, found in shared_traffic(pipe).items()]


@pytest.mark.parametrize(
    ("uses", "frozen", "pairs"),
    [([0, 2], False, [(0, 2), (2, 0)]), ([0, 1, 2], False, None), ([0, 2], True, [(0, 2), (2, 0)])],
)
def test_each_pair_that_shares_exchanges_one_gradient(
    workers: WorkerPool, uses: list[int], frozen: bool, pairs: list[tuple[int, int]] | None
) -> None:
    expected = pairs or [(a, b) for a in range(3) for b in range(3) if a != b]
    answers = workers.run(f"{__name__}:run_shared", 3, 30.0, uses=uses, frozen=frozen)
    cost = [1, 1] if frozen else [2, 1 + WIDTH * WIDTH * DOUBLE]
    assert sorted(row for answer in answers for row in answer) == [[*p, *cost] for p in expected]
