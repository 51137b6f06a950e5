"""What people write for several processes does the same with torch's package and with ours."""

from __future__ import annotations

import re
from typing import Any

import pytest

from penstock.testing import WorkerPool
from tests.pipelining.either import IN_A_V, MULTI, SINGLE
from tests.pipelining.programs import KINDS, ORDERS, WAYS, stops_stepping
from tests.processes import Job, free_port, variables


def run(
    workers: WorkerPool, package: str, program: str, processes: int = 2, **options: Any
) -> list[Any]:
    task = f"tests.pipelining.programs:{program}"
    answers: list[Any] = workers.run(task, processes, 60.0, package=package, **options)
    return answers


def flat(value: Any) -> list[float]:
    """The numbers in nested lists; nothing is a number of its own."""
    if isinstance(value, list):
        return [len(value), *(number for item in value for number in flat(item))]
    return [1234.5 if value is None else float(value)]


CRASH_IN_TORCH = {"no loss", "evaluated"}
"""torch 2.13 runs the backwards of schedules in a V all the same."""


BY_NIGHT = {"GPipe", "LoopedBFS", "InterleavedZeroBubble", "DualPipeV"}


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param(name, marks=pytest.mark.nightly if name in BY_NIGHT else ())
        for name in (*SINGLE, *MULTI)
    ],
)
def test_either_import_gives_the_same_numbers(workers: WorkerPool, schedule: str) -> None:
    ways = [way for way in WAYS if schedule not in IN_A_V or way not in CRASH_IN_TORCH]
    both = [run(workers, p, "asked", schedule=schedule, ways=ways) for p in ("penstock", "torch")]
    for way in ways:
        ours, theirs = ([of_rank[way] for of_rank in answers] for answers in both)
        assert flat(ours) == pytest.approx(flat(theirs), abs=1e-6, rel=1e-5), way
        # With the loss added up no gradient is scaled after it was made; LoopedBFS adds in another order.
        assert way != "summed" or schedule == "LoopedBFS" or ours == theirs


@pytest.mark.parametrize("schedule", IN_A_V)
def test_forwards_of_a_v(workers: WorkerPool, schedule: str) -> None:
    """Stages elsewhere give what those of another schedule give."""
    ways = ["evaluated"]
    ours = run(workers, "penstock", "asked", schedule=schedule, ways=ways)[0]["evaluated"]
    other = run(workers, "penstock", "asked", schedule="LoopedBFS", ways=ways)[1]["evaluated"]
    assert flat(ours[:5]) == pytest.approx(flat(other[:5]), abs=1e-6)


SAME: list[tuple[str, dict[str, Any]]] = [
    ("after_a_step", {}),
    ("round_and_round", {}),
    *(("recounted", {"schedule": name}) for name in SINGLE),
    *(("by_hand", {"which": name, "how": "runtime"}) for name in ("loop", "unbalanced")),
    ("by_hand", {"which": "loop", "how": "subclass"}),
    *(("by_hand", {"which": "messages", "how": how}) for how in ("prepared", "attribute")),
    *(("called_back", {"schedule": "DualPipeV", "threads": of}) for of in (False, True)),
    ("called_back", {"schedule": "InterleavedZeroBubble", "threads": False}),
    *(("deferred", {"schedule": name}) for name in ("1F1B", "InterleavedZeroBubble")),
    *(("own_loop", {"kind": kind}) for kind in ("fills", "turns")),
]


@pytest.mark.parametrize(
    ("program", "options"), SAME, ids=[" ".join([p, *map(str, o.values())]) for p, o in SAME]
)
def test_either_import_does_the_same(
    workers: WorkerPool, program: str, options: dict[str, Any]
) -> None:
    theirs = run(workers, "torch", program, **options)
    assert run(workers, "penstock", program, **options) == theirs


def test_all_orders_are_run() -> None:
    assert {options.get("which") for _, options in SAME} - {None} == set(ORDERS)


SPREAD = [
    *(("1F1B", "fsdp"), ("1F1B", "ddp"), ("Interleaved1F1B", "mixed")),
    *(("ZBVZeroBubble", "replicate"), ("DualPipeV", "fsdp")),
    *(("fills", "fsdp"), ("fills", "ddp"), ("turns", "fsdp"), ("turns", "ddp")),
    *(("whole order", "fsdp"), ("bare order", "fsdp")),
]
BY_DAY = [
    *(("Interleaved1F1B", "mixed"), ("ZBVZeroBubble", "replicate")),
    *(("turns", "ddp"), ("whole order", "fsdp")),
]
"""Each way of spreading, and each kind of schedule; tests/parallel/test_stages.py has 1F1B by day."""


@pytest.mark.whole
@pytest.mark.parametrize(
    ("schedule", "how"),
    [pytest.param(*case, marks=() if case in BY_DAY else pytest.mark.nightly) for case in SPREAD],
)
def test_replicated_and_sharded_stages(workers: WorkerPool, schedule: str, how: str) -> None:
    ours = run(workers, "penstock", "spread", 4, schedule=schedule, how=how)
    # torch's DDP does not reduce what the weights' half of a backward makes.
    if (schedule, how) != ("turns", "ddp"):
        theirs = run(workers, "torch", "spread", 4, schedule=schedule, how=how)
        assert flat(ours) == pytest.approx(flat(theirs), rel=1e-4)


REFUSED_BY_TORCH = {"a turned view", "an expanded view", "a dict"}


@pytest.mark.parametrize("package", ["torch", "penstock"])
@pytest.mark.parametrize("schedule", ["1F1B", "fills", "turns"])
def test_values_between_stages(workers: WorkerPool, schedule: str, package: str) -> None:
    """Outputs, losses and gradients are those of one process; the program asserts it."""
    out = REFUSED_BY_TORCH if package == "torch" else set()
    if (schedule, package) == ("turns", "torch"):
        # Its split backward leaves out the weights' gradients where the input needs none.
        out = {*out, "a frozen stage"}
    kinds = [kind for kind in KINDS if kind not in out]
    run(workers, package, "handed", 3, schedule=schedule, kinds=kinds)


@pytest.mark.slow
def test_a_rank_that_stops_stepping_is_named_with_its_last_call() -> None:
    """Also where no step trains, which would be counted."""
    port = free_port()
    with Job(stops_stepping, [(0,), (1,)], [variables(rank, 2, port) for rank in (0, 1)]) as job:
        heard = job.wait()[1].out
    assert re.search("rank 0: .*between steps, after call 2, in its own code", heard)


def test_every_rank_hears_what_is_wrong_on_one(workers: WorkerPool) -> None:
    first, second = run(workers, "penstock", "refused")
    assert first[0] == second[0]
    assert "rank 0: " in first[0]
    assert second[1] == "TypeError: losses must be a list, not a tuple"
    assert first[1] == f"StageError: rank 1: before the first microbatch: {second[1]}"
    assert "rank 1: a forward-only schedule has no loss" in first[2]
