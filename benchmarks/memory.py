"""The most memory of a step on two processes: Penstock, torch's package and the simulator.

Counted are the bytes that tensors take at any moment of a step on each rank, without weights and their
gradients: also buffers that stay from step to step. All run the same stages in one run; the simulator knows
what they take from a profile in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.pairs import bytes_to_json
from benchmarks.work import RANKS, SCHEDULES, Peer, Work, ours, placement
from penstock import plan as planning
from penstock.plan import Profile
from penstock.plan.meter import Meter
from penstock.schedule import build
from penstock.testing import WorkerPool
from penstock.train.model import GPT, even_stages, next_byte_loss

LAYERS, MICROBATCHES, SAMPLES = 8, 8, 4
STAGES = {"GPipe": RANKS, **SCHEDULES}


def model() -> nn.Module:
    """A GPT of eight blocks, the same in every process."""
    torch.manual_seed(0)
    return GPT(layers=LAYERS, width=256, heads=4, sequence=128)


def work(schedule: str) -> Work:
    """It in the stages of a schedule, with a batch."""
    gpt, cut = model(), even_stages(LAYERS, STAGES[schedule])
    parts = [nn.Sequential(*(gpt.get_submodule(path) for path in paths)) for paths in cut]
    tokens = torch.randint(0, 256, (SAMPLES * MICROBATCHES, 129))
    return Work(parts, tokens[:, :-1], tokens[:, 1:], next_byte_loss, MICROBATCHES)


class MemoryMeter(Meter):
    """A meter that leaves out tensors without data, such as the weights of other ranks."""

    def _count(self, tensor: Tensor) -> None:
        if not tensor.is_meta:
            super()._count(tensor)


def peaks(group: Any, schedule: str) -> dict[str, int]:
    """A worker's task: the most bytes of a step above weights and gradients, of either kind."""
    task = work(schedule)
    weights = [p for stage in task.stages for p in stage.parameters()]
    found = {}
    for name in ("ours", "peer"):
        with MemoryMeter() as meter:
            step: Callable[[], object]
            if name == "ours":
                pipe = ours(task, schedule, group)
                step = partial(pipe.step, task.batch, target=task.target)
            else:
                step = Peer(task, schedule, group).step
            # What the first steps leave behind, such as buffers for messages, is there in the third.
            for _ in range(2):
                step()
            meter.reset_peak()
            step()
            found[name] = meter.peak - sum(p.nbytes for p in weights if p.grad is not None)
        task.zero_grad()
    pipe.close()
    return found


def profile() -> Profile:
    """What the units take."""
    tokens = torch.randint(0, 256, (SAMPLES * MICROBATCHES, 129))
    return planning.measure(
        model(), tokens[:, :-1], target=tokens[:, 1:], loss_fn=next_byte_loss,
        stages=2 * RANKS, repeats=1,
    )  # fmt: skip


def predicted(measured: Profile, schedule: str) -> list[int]:
    """What the simulator says of each rank, above weights, gradients and buffers."""
    task, home = work(schedule), placement(schedule)
    plan = planning.plan_for(
        measured,
        build(schedule, ranks=RANKS, microbatches=MICROBATCHES),
        even_stages(LAYERS, STAGES[schedule]),
        batch=SAMPLES * MICROBATCHES,
        states=0,
    )
    between = [0] * RANKS
    for stage, rank in zip(task.stages, home, strict=True):
        between[rank] += sum(2 * weight.nbytes for weight in stage.parameters())
        between[rank] += sum(buffer.nbytes for buffer in stage.buffers())
    return [int(most) - less for most, less in zip(plan.memory, between, strict=True)]


def compare(rounds: int) -> dict[str, Any]:
    """All schedules, printed, and as JSON data."""
    figures: dict[str, Any] = {}
    measured = profile()
    with WorkerPool(RANKS) as workers:
        for schedule in STAGES:
            found = workers.run("benchmarks.memory:peaks", RANKS, timeout=600, schedule=schedule)
            told = [f"memory, {schedule}, MiB on each rank:"]
            for rank, expected in enumerate(predicted(measured, schedule)):
                here, beside = found[rank]["ours"], found[rank]["peer"]
                name = f"{schedule}, rank {rank}, against"
                figures[f"{name} torch's package"] = bytes_to_json(here, beside)
                figures[f"{name} the simulator"] = bytes_to_json(here, expected)
                mib = [f"{size / 2**20:.1f}" for size in (here, beside, expected)]
                told.append("{} (torch's package {}, the simulator {})".format(*mib))
            print(" ".join(told))
    return figures
