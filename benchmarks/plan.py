"""A step beside what its plan predicts: time and memory on two ranks that the doctor has examined.

What the units cost is measured in one process; what messages and the other process cost is the doctor's. The
plans of a model take turns. Times are by the clock, so they need a machine that does nothing else. Memory is
the most that a rank's tensors take at any moment of a step, with weights and gradients. At last, one rank
shares its core with a busy process: the plan for what the doctor finds then stands beside even stages.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.cut import UNet
from benchmarks.memory import MemoryMeter
from benchmarks.pairs import Ratios, bytes_to_json
from benchmarks.work import RANKS
from penstock import Pipeline, doctor
from penstock import plan as planning
from penstock.plan import Cluster, Plan, Profile
from penstock.testing import WorkerPool
from penstock.train.model import GPT, next_byte_loss

BATCH, MICROBATCHES = 16, 8
SCHEDULES = ("GPipe", "1F1B", "ZB-H1", "Interleaved1F1B", "ZB-V")
Task = tuple[nn.Module, Tensor, Tensor, Callable[..., Tensor]]


# ---- models


def gpt() -> Task:
    """Blocks that are alike."""
    tokens = torch.randint(0, 256, (BATCH, 129))
    model = GPT(layers=6, width=192, heads=4, sequence=128)
    return model, tokens[:, :-1], tokens[:, 1:], next_byte_loss


def heavy_head() -> Task:
    """Three blocks, and a head that weighs more than all of them."""
    tokens = torch.randint(0, 256, (BATCH, 129))
    model = GPT(layers=3, width=192, heads=4, sequence=128)
    model.head = nn.Linear(192, 6000, bias=False)
    return model, tokens[:, :-1], tokens[:, 1:], next_byte_loss


def unet() -> Task:
    """Values that skip stages."""
    images = torch.rand(BATCH, 3, 32, 32)
    return UNet(), images, images, functional.mse_loss


def twelve(width: int = 384) -> Task:
    """Twelve blocks that are alike."""
    layers = [
        nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        for _ in range(12)
    ]  # fmt: skip
    x = torch.rand(BATCH, 96, width)
    return nn.Sequential(*layers), x, x, functional.mse_loss


MODELS: dict[str, Callable[[], Task]] = {"gpt": gpt, "heavy head": heavy_head, "unet": unet}


def task(name: str) -> Task:
    """A model and its batch, the same in every process."""
    torch.manual_seed(0)
    return {**MODELS, "twelve": twelve}[name]()


# ---- tasks of workers


@contextmanager
def on_a_core(group: Any, share: int | None) -> Iterator[None]:
    """Run on a core for each rank; one rank may share its own with a busy process."""
    rank, before = dist.get_rank(group), os.sched_getaffinity(0)

    def move(cores: set[int]) -> None:
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), cores)

    move({sorted(before)[rank % len(before)]})
    busy = None
    if rank == share:
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        if busy is not None:
            busy.kill()
            busy.wait()
        move(before)


def examine(group: Any, share: int | None) -> str:
    """What the doctor finds, as JSON."""
    with on_a_core(group, share):
        return doctor.examine(group=group, dtypes=["float32"]).to_json()


def costs(group: Any, name: str) -> str:
    """What the units cost in one process, while the other one waits, as JSON."""
    if dist.get_rank(group):
        dist.barrier(group)
        return ""
    model, batch, target, loss = task(name)
    with on_a_core(group, None):
        profile = planning.measure(
            model, batch, target=target, loss_fn=loss, stages=2 * RANKS, repeats=10
        )
        profile.at(BATCH // MICROBATCHES)
    dist.barrier(group)
    return profile.to_json()


def steps(group: Any, name: str, plans: list[str], rounds: int, share: int | None) -> Any:
    """For each plan the seconds of its steps, in turn, and the most bytes that a step holds here."""
    runs: list[tuple[Pipeline, Tensor, Tensor]] = []
    seconds: list[list[float]] = [[] for _ in plans]
    with on_a_core(group, share):
        for text in plans:
            model, batch, target, loss = task(name)
            pipe = Pipeline(model, schedule=Plan.from_json(text), loss_fn=loss, mesh=group)
            runs.append((pipe, batch, target))
        for _ in range(rounds + 2):
            for (pipe, batch, target), each in zip(runs, seconds, strict=True):
                dist.barrier(group)
                start = perf_counter()
                pipe.step(batch, target=target)
                each.append(perf_counter() - start)
        for pipe, _, _ in runs:
            pipe.close()
        peaks = [peak(group, name, text) for text in plans]
    return {"seconds": [each[2:] for each in seconds], "bytes": peaks}


def peak(group: Any, name: str, plan: str) -> int:
    """The most bytes that a step holds in this process, with weights, their gradients and buffers."""
    model, batch, target, loss = task(name)
    with MemoryMeter() as meter:
        pipe = Pipeline(model, schedule=Plan.from_json(plan), loss_fn=loss, mesh=group)
        # What the first steps leave behind, such as buffers for messages, is there in the third.
        for _ in range(2):
            pipe.step(batch, target=target)
        meter.reset_peak()
        pipe.step(batch, target=target)
    modules = [stage.module for stage in pipe.stages]
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    held = sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())
    pipe.close()
    return int(meter.peak + held)


# ---- predictions beside steps


def examined(workers: WorkerPool, share: int | None) -> Cluster:
    """The two ranks as the doctor finds them."""
    text = workers.run("benchmarks.plan:examine", RANKS, timeout=300, share=share)[0]
    return Cluster.from_json(text)


def plan_of(profile: Profile, cluster: Cluster, **asked: Any) -> Plan:
    """The best plan of what is asked for."""
    return planning.search(
        profile, cluster=cluster, pipeline=RANKS, batch=BATCH, microbatches=MICROBATCHES,
        stages_per_rank=(1, 2), memory=0.0, states=0.0, keep=1, seconds=0, **asked,
    )[0]  # fmt: skip


def measured(
    workers: WorkerPool, name: str, plans: list[Plan], rounds: int, share: int | None = None
) -> list[tuple[list[float], list[int]]]:
    """For each plan the seconds of its steps, each over when its last rank is, and the bytes of each rank."""
    texts = [plan.to_json() for plan in plans]
    call: dict[str, Any] = {"name": name, "plans": texts, "rounds": rounds, "share": share}
    ran = workers.run("benchmarks.plan:steps", RANKS, timeout=3600, **call)
    return [
        (
            [max(both) for both in zip(*(one["seconds"][at] for one in ran), strict=True)],
            [one["bytes"][at] for one in ran],
        )
        for at in range(len(plans))
    ]


def profiled(workers: WorkerPool, name: str) -> Profile:
    """What a model's units cost."""
    return Profile.from_json(workers.run("benchmarks.plan:costs", RANKS, timeout=900, name=name)[0])


def compare(rounds: int) -> dict[str, Any]:
    """All figures, printed, and as JSON data."""
    figures: dict[str, Any] = {}
    with WorkerPool(RANKS) as workers:
        cluster = examined(workers, share=None)
        for name in MODELS:
            profile = profiled(workers, name)
            plans = [plan_of(profile, cluster, schedules=each) for each in SCHEDULES]
            for plan, (times, sizes) in zip(
                plans, measured(workers, name, plans, rounds), strict=True
            ):
                figures[f"{name}, {plan.shape.schedule}"] = told(name, plan, times, sizes)
        figures["even stages"] = uneven(workers, rounds)
    return figures


def told(name: str, plan: Plan, times: list[float], sizes: list[int]) -> dict[str, Any]:
    """A step beside its prediction, which stands where a peer's figures would."""
    ratios = Ratios(times, [plan.seconds] * len(times))
    found = {"time": ratios.to_json()}
    for rank, (size, predicted) in enumerate(zip(sizes, plan.memory, strict=True)):
        found[f"memory of rank {rank}"] = bytes_to_json(size, int(predicted))
    memory = [
        f"{size / predicted:.3f} x" for size, predicted in zip(sizes, plan.memory, strict=True)
    ]
    print(f"{name}, {plan.shape.schedule}: {ratios.told('the prediction')}; memory {memory}")
    return found


def uneven(workers: WorkerPool, rounds: int) -> dict[str, Any]:
    """The plan for a rank that shares its core, beside even stages."""
    slow = RANKS - 1
    cluster, profile = examined(workers, share=slow), profiled(workers, "twelve")
    best = plan_of(profile, cluster, schedules="1F1B")
    stages = profile.at(BATCH // MICROBATCHES).cut(RANKS)
    plans = [best, planning.plan_for(profile, best.schedule, stages, batch=BATCH, cluster=cluster)]
    (ours, _), (even, _) = measured(workers, "twelve", plans, rounds, slow)
    ratios = Ratios(ours, even)
    sizes = [[len(paths) for paths in plan.stages] for plan in plans]
    print(f"{sizes[0]} blocks, for a rank that is half as fast: {ratios.told(f'{sizes[1]}')}")
    return {"stages for a rank that is half as fast": ratios.to_json()}
