"""Plans for ranks of one machine that the doctor has examined, beside the steps that they predict.

Predictions: models that Penstock does not measure otherwise (BERT, Llama, ViT, an MLP), on two processes.
What the units cost is measured in one process; what messages and the other process cost is the doctor's, or
that of a recorded step. Five plans of each model take turns.

Uneven: the second of two ranks shares its core with a busy process, so that it is half as fast. The plan for
what the doctor has found, beside even stages.

Named: a recorded step says which rank is slow, and none where none is.
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.pairs import Ratios
from benchmarks.work import RANKS
from penstock import Pipeline, doctor
from penstock import plan as planning
from penstock.plan import Cluster, Plan, Profile
from penstock.schedule import Timeline
from penstock.testing import WorkerPool

BATCH = 16
MICROBATCHES = 8
SCHEDULES = ("GPipe", "1F1B", "ZB-H1", "Interleaved1F1B", "ZB-V")
RECORDED = 4
"""The recorded steps of the first plan, by which the others are corrected and slow ranks are named."""
Task = tuple[nn.Module, Tensor, Tensor, Callable[..., Tensor]]


# ---- models


def _tokens(length: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 1000, (BATCH, length + 1))
    return tokens[:, :-1], tokens[:, 1:]


def _words_loss(output: Any, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def bert() -> Task:
    """An encoder of transformers."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=1000, hidden_size=192, num_hidden_layers=6, num_attention_heads=4,
        intermediate_size=768, max_position_embeddings=128, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config), *_tokens(96), _words_loss


def llama() -> Task:
    """A decoder of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1000, hidden_size=192, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=512, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config), *_tokens(96), _words_loss


def vit() -> Task:
    """A transformer of images."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192, num_hidden_layers=6, num_attention_heads=4, intermediate_size=768,
        image_size=64, patch_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    config.num_labels = 10

    def loss(output: Any, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.logits, target)

    images, labels = torch.rand(BATCH, 3, 64, 64), torch.randint(0, 10, (BATCH,))
    return ViTForImageClassification(config), images, labels, loss


def mlp(blocks: int = 6, width: int = 512, rows: int = 96) -> Task:
    """Blocks of linear layers."""
    layers = [
        nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        for _ in range(blocks)
    ]  # fmt: skip
    x = torch.rand(BATCH, rows, width)
    return nn.Sequential(*layers), x, x, nn.functional.mse_loss


def twelve() -> Task:
    """Twelve blocks that are alike."""
    return mlp(blocks=12, width=384)


MODELS: dict[str, Callable[[], Task]] = {"bert": bert, "llama": llama, "vit": vit, "mlp": mlp}


def task(name: str) -> Task:
    """A model and its batch, the same in every process."""
    torch.manual_seed(0)
    return {**MODELS, "twelve": twelve}[name]()


# ---- tasks of workers


def examine(group: Any, share: int | None) -> str:
    """What the doctor finds, as JSON."""
    with _core(group, share=share):
        return doctor.examine(group=group, dtypes=["float32"]).to_json()


@contextmanager
def _core(group: Any, *, share: int | None) -> Iterator[None]:
    """Run on a core for each rank; one rank may share its own with a busy process."""
    rank, before = dist.get_rank(group), os.sched_getaffinity(0)
    core = sorted(before)[rank % len(before)]
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), {core})
    busy = None
    if rank == share:
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        if busy is not None:
            busy.kill()
            busy.wait()
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), before)


def costs(group: Any, name: str) -> str:
    """What the units cost in one process, while the other one waits."""
    if dist.get_rank(group):
        dist.barrier(group)
        return ""
    model, batch, target, loss = task(name)
    with _core(group, share=None):
        profile = planning.measure(
            model, batch, target=target, loss_fn=loss, stages=2 * RANKS, repeats=10
        )
        profile.at(BATCH // MICROBATCHES)
    dist.barrier(group)
    return profile.to_json()


def steps(group: Any, name: str, plans: list[str], rounds: int, share: int | None = None) -> Any:
    """The seconds of steps of each plan, in turn, and a recorded step of the first."""
    runs = []
    with _core(group, share=share):
        for text in plans:
            model, batch, target, loss = task(name)
            pipe = Pipeline(model, schedule=Plan.from_json(text), loss_fn=loss, mesh=group)
            runs.append((pipe, batch, target))
        seconds: list[list[float]] = [[] for _ in runs]
        for _ in range(rounds + 2):
            for (pipe, batch, target), each in zip(runs, seconds, strict=True):
                dist.barrier(group)
                start = perf_counter()
                pipe.step(batch, target=target)
                each.append(perf_counter() - start)
        pipe, batch, target = runs[0]
        recorded = [pipe.step(batch, target=target, record=True) for _ in range(RECORDED)]
        for pipe, _, _ in runs:
            pipe.close()
    traces = [step.timeline.to_chrome_trace() for step in recorded if step.timeline is not None]
    return {
        "seconds": [each[2:] for each in seconds],
        "traces": traces,
        "slow": [str(s) for s in recorded[-1].slow],
    }


# ---- predictions


def predictions(workers: WorkerPool, rounds: int) -> dict[str, Any]:
    """Each model's plans, with what the doctor and a recorded step predict, and what they took."""
    cluster = _examined(workers, share=None)
    figures: dict[str, Any] = {}
    for name in MODELS:
        profile = _profile(workers, name)
        plans = [_search(profile, cluster, schedules=each) for each in SCHEDULES]
        ran = _ran(workers, name, plans, rounds)
        again = planning.plan_again(
            profile, plans[0], Timeline.from_chrome_trace(ran[0]["traces"][-1]), cluster,
            schedules="1F1B", seconds=0,
        )  # fmt: skip
        corrected = [_priced(again.plans.profile, plan, again.cluster) for plan in plans]
        times = [_wall(ran, number) for number in range(len(plans))]
        rows: list[dict[str, Any]] = [
            {"schedule": plan.shape.schedule, "doctor": plan.seconds, "recorded": other.seconds,
             "measured": statistics.median(each)}
            for plan, other, each in zip(plans, corrected, times, strict=True)
        ]  # fmt: skip
        figures[name] = rows
        print(name)
        for row in rows:
            print(
                f"  {row['schedule']:16} {1e3 * row['measured']:7.1f} ms; by the doctor "
                f"{1e3 * row['doctor']:7.1f} ({_off(row, 'doctor'):+.1%}), by a recorded step "
                f"{1e3 * row['recorded']:7.1f} ({_off(row, 'recorded'):+.1%})"
            )
    for by in ("doctor", "recorded"):
        off = [abs(_off(row, by)) for rows in figures.values() for row in rows]
        lost = [_lost(rows, by) for rows in figures.values()]
        print(
            f"by the {by}: off by {statistics.median(off):.1%} in the median, {max(off):.1%} at worst; "
            f"the chosen plans take {', '.join(f'{one:.1%}' for one in lost)} longer than the best"
        )
    return figures


def _off(row: dict[str, Any], by: str) -> float:
    return float(row[by] / row["measured"] - 1)


def _lost(rows: list[dict[str, Any]], by: str) -> float:
    chosen = min(rows, key=lambda row: row[by])
    return float(chosen["measured"] / min(row["measured"] for row in rows) - 1)


def _examined(workers: WorkerPool, *, share: int | None) -> Cluster:
    text = workers.run("benchmarks.clusters:examine", RANKS, timeout=300, share=share)[0]
    cluster = Cluster.from_json(text)
    print(
        f"doctor: {[f'{1e3 * d.pace:.1f} ms, alone {1e3 * d.alone:.1f}' for d in cluster.devices]}, "
        f"{cluster.links}, {1e6 * cluster.handling:.0f} us and {1e9 * cluster.copying:.2f} ns/B a message"
    )
    return cluster


def _profile(workers: WorkerPool, name: str) -> Profile:
    text = workers.run("benchmarks.clusters:costs", RANKS, timeout=600, name=name)[0]
    return Profile.from_json(text)


def _search(profile: Profile, cluster: Cluster, **asked: Any) -> Plan:
    return planning.search(
        profile, cluster=cluster, pipeline=RANKS, batch=BATCH, microbatches=MICROBATCHES,
        stages_per_rank=(1, 2), memory=0.0, keep=1, seconds=0, **asked,
    )[0]  # fmt: skip


def _priced(profile: Profile, plan: Plan, cluster: Cluster) -> Plan:
    return planning.plan_for(profile, plan.schedule, plan.stages, batch=BATCH, cluster=cluster)


def _ran(
    workers: WorkerPool, name: str, plans: list[Plan], rounds: int, *, share: int | None = None
) -> Any:
    texts = [plan.to_json() for plan in plans]
    return workers.run(
        "benchmarks.clusters:steps", RANKS, timeout=1200, name=name, plans=texts, rounds=rounds, share=share
    )  # fmt: skip


def _wall(ran: Any, number: int) -> list[float]:
    """The seconds of each step: it is over when its last rank is."""
    return [max(times) for times in zip(*(one["seconds"][number] for one in ran), strict=True)]


# ---- uneven


def uneven(workers: WorkerPool, rounds: int) -> dict[str, Any]:
    """A plan for a rank that is half as fast, beside even stages."""
    cluster = _examined(workers, share=RANKS - 1)
    profile = _profile(workers, "twelve")
    best = _search(profile, cluster, schedules="1F1B")
    even = _search(profile, cluster, schedules="1F1B", even=True)
    ran = _ran(workers, "twelve", [best, even], rounds, share=RANKS - 1)
    ours, peer = _wall(ran, 0), _wall(ran, 1)
    for plan, times in ((best, ours), (even, peer)):
        measured = statistics.median(times)
        print(
            f"stages of {[len(paths) for paths in plan.stages]} blocks: {1e3 * measured:.1f} ms, "
            f"{1e3 * plan.seconds:.1f} predicted ({plan.seconds / measured - 1:+.1%})"
        )
    ratios = Ratios(ours, peer)
    print(ratios.told("even stages"))
    return ratios.to_json()


# ---- who is slow


def named(workers: WorkerPool, rounds: int) -> dict[str, int]:
    """How often a recorded step names the slow rank, drawn anew each time, and nobody where none is slow."""
    profile = _profile(workers, "twelve")
    plan = _search(profile, _examined(workers, share=None), schedules="1F1B")
    draw, right = random.Random(0), Counter[str]()
    for _ in range(rounds):
        rank = draw.randrange(RANKS)
        slow = _ran(workers, "twelve", [plan], 1, share=rank)[0]["slow"]
        right["with a slow rank"] += len(slow) == 1 and slow[0].startswith(f"rank {rank} ")
        if len(slow) != 1 or not slow[0].startswith(f"rank {rank} "):
            print(f"  rank {rank} is slow, named: {slow}")
        slow = _ran(workers, "twelve", [plan], 1)[0]["slow"]
        right["without one"] += not slow
        if slow:
            print(f"  none is slow, named: {slow}")
    print(f"named as they are: {', '.join(f'{n} of {rounds} {what}' for what, n in right.items())}")
    return dict(right)


def compare(rounds: int) -> dict[str, Any]:
    """All, printed, and as JSON data."""
    with WorkerPool(RANKS) as workers:
        return {
            "uneven stages for a rank that is half as fast": uneven(workers, rounds),
            "predictions": predictions(workers, rounds),
            "steps whose slow rank is named": named(workers, rounds),
        }
