"""On GPUs: a step, its memory, the two halves of backward, and what the host does for each action.

``make bench ARGS=gpu`` is the one command to run where there is a GPU: on one, all ranks share it, beside a
plain loop; on several, each rank has its own over NCCL, against torch's package. It runs on a CPU too, to try
the bench itself, with narrow models.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from functools import partial
from itertools import product
from time import perf_counter, thread_time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import backward
from benchmarks.backward import Stage
from benchmarks.inside import plain
from benchmarks.pairs import Ratios, bytes_to_json, take_turns
from benchmarks.work import RANKS, SCHEDULES, WORKS, Peer, Work, ours
from penstock.schedule import build, simulate
from penstock.testing import WorkerPool

WIDTHS = {1024: (4, 1024), 2048: (2, 1024), 4096: (1, 1024), 8192: (1, 512)}
"""Widths of a GPU's stages, each with the samples of a microbatch and their length."""
NARROW = {64: (1, 32), 128: (1, 32)}
"""Likewise for a CPU."""
TIMES = {"gpt": 1, "tiny": 3}
"""How many steps make one time."""


def device() -> torch.device:
    """The machine's first GPU, or the CPU where there is none."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if found is None else torch.device(found.type, 0)


def settled(where: torch.device) -> float:
    """The clock, once the device has done all that it was told to."""
    if where.type != "cpu":
        torch.accelerator.synchronize(where)
    return perf_counter()


# ---- the two halves of backward


def stage_of(width: int) -> Stage:
    """A stage in bfloat16 on the device."""
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device():
            return backward.stage_of(width, (WIDTHS | NARROW)[width])
    finally:
        torch.set_default_dtype(kept)


def halves(width: int, rounds: int) -> dict[str, Any]:
    """Times of the halves beside one backward and the peer's, and the memory between them."""
    stage = stage_of(width)
    parts = backward.times(stage, rounds, partial(settled, device()))
    both = {name: [each["I+W"] for each in found] for name, found in parts.items()}
    figures = {
        f"I + W against {told}": Ratios(both["split"], both[base])
        for base, told in (("plain", "a plain backward"), ("peer", "torch's package"))
    }
    for name, ratios in figures.items():
        print(f"width {width}: {name}: {ratios.told('of its time')}")
    ours, peers = (backward.live_bytes(name, stage)["I"] for name in ("split", "peer"))
    print(f"width {width}: between the halves {ours / peers:.2f} of the peer's memory")
    return {
        **{name: ratios.to_json() for name, ratios in figures.items()},
        "memory between the halves, against torch's package": bytes_to_json(ours, peers),
    }


# ---- steps


def _settled_after(step: Callable[[], object], where: torch.device) -> None:
    step()
    settled(where)


def _peak(step: Callable[[], object], where: torch.device) -> int:
    """The most bytes that a step holds, where the device counts them."""
    if where.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.reset_peak_memory_stats(where)
    step()
    return torch.cuda.max_memory_allocated(where)


def _steps(work: Work, schedule: str, group: Any, rounds: int, case: str) -> dict[str, Any]:
    """Times and peak memory of a step, and of what stands beside it; also the step's idle share."""
    where = work.batch.device
    pipe = ours(work, schedule, group)
    beside = partial(plain, work) if group is None else Peer(work, schedule, group).step
    ours_step = partial(pipe.step, work.batch, target=work.target)
    ways: dict[str, Callable[[], None]] = {}
    for name, step in (("ours", ours_step), ("beside", beside)):
        cleared = work.cleared(step)
        cleared()
        cleared()
        ways[name] = partial(_settled_after, cleared, where)
    times = take_turns(ways, rounds, TIMES[case])
    peaks = {name: _peak(way, where) for name, way in ways.items()}
    recorded = ours_step(record=True)
    started = thread_time()
    for _ in range(3):
        ours_step()
    host = (thread_time() - started) / 3
    settled(where)
    pipe.close()
    return {
        "seconds": {name: each.elapsed for name, each in times.items()},
        "peaks": peaks,
        "idle": recorded.bubble,
        "host": host,
    }


def on_its_own(group: Any, case: str, schedule: str, rounds: int) -> dict[str, Any]:
    """A worker's task: a step with a GPU for each rank, over NCCL."""
    where = torch.device("cuda", dist.get_rank(group))
    torch.cuda.set_device(where)
    own = dist.new_group(list(range(RANKS)), backend="nccl")
    found = _steps(WORKS[case](SCHEDULES[schedule]).to(where), schedule, own, rounds, case)
    dist.destroy_process_group(own)
    return found


def steps(case: str, schedule: str, rounds: int, workers: WorkerPool | None) -> dict[str, Any]:
    """A step on one GPU, or with one for each rank if there are workers; printed, and as JSON data."""
    made = WORKS[case](SCHEDULES[schedule])
    if workers is None:
        replies = [_steps(made.to(device()), schedule, None, rounds, case)]
    else:
        task = {"case": case, "schedule": schedule, "rounds": rounds}
        replies = workers.run("benchmarks.gpu:on_its_own", RANKS, timeout=1200, **task)
    base = "a plain loop" if workers is None else "torch's package"
    seconds = replies[0]["seconds"]
    ratios = Ratios(seconds["ours"], seconds["beside"])
    shape = build(schedule, ranks=RANKS, microbatches=made.microbatches)
    host = sum(reply["host"] for reply in replies) / sum(
        1 for rank in range(RANKS) for _ in shape.actions(rank)
    )
    simulated = simulate(shape).bubble
    where = "one device" if workers is None else f"{RANKS} GPUs"
    print(f"step on {where}, {schedule}, {case}: {ratios.told(base)}")
    print(
        f"  idle {replies[0]['idle']:.1%}, simulated {simulated:.1%}; "
        f"the host works {1e6 * host:.0f} us for each action"
    )
    peaks = {name: max(reply["peaks"][name] for reply in replies) for name in ("ours", "beside")}
    memory = {}
    if peaks["beside"]:
        print(f"  peak memory {peaks['ours'] / peaks['beside']:.2f} of that of {base}")
        memory["peak memory"] = bytes_to_json(peaks["ours"], peaks["beside"])
    return {
        f"time, against {base}": ratios.to_json(),
        **memory,
        "idle": replies[0]["idle"],
        "simulated idle": simulated,
        "host seconds per action": host,
    }


def compare(rounds: int) -> dict[str, Any]:
    """All figures that this machine can give, printed, and as JSON data."""
    widths = NARROW if device().type == "cpu" else WIDTHS
    figures: dict[str, Any] = {f"width {width}": halves(width, rounds) for width in widths}
    with WorkerPool(RANKS) as workers:
        pools = {"one device": None, f"{RANKS} GPUs": workers}
        if torch.cuda.device_count() < RANKS:
            del pools[f"{RANKS} GPUs"]
        for (name, pool), case, schedule in product(pools.items(), WORKS, SCHEDULES):
            figures[f"{case}, {schedule}, {name}"] = steps(case, schedule, rounds, pool)
    medians = [one["host seconds per action"] for one in figures.values() if "idle" in one]
    print(f"the host works {1e6 * statistics.median(medians):.0f} us for an action, in the median")
    return figures
