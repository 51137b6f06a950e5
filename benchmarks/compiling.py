"""Compiled stages: their halves beside a compiled full backward, their memory, and steps with them.

On a machine with a GPU all is measured there, in bfloat16, with the peak memory too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, cast

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.backward import Ours, Stage, ratio, stage_of, time_once
from benchmarks.pairs import Ratios, alternate
from benchmarks.work import RANKS, gpt, placement
from penstock import Pipeline, PipelineStage
from penstock.backward import ENGINES
from penstock.compiled import CompiledModule, has_compiler
from penstock.testing import WorkerPool

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTHS = (64, 256, 512)
AIM = 1.05
MICROBATCHES = 4
TIMEOUT = 1800
BACKENDS = ("plain", "inductor") if has_compiler(DEVICE.type) else ("plain",)


class Compiled(Ours):
    """A compiled stage, whose backward is cut or not."""

    def __init__(self, stage: Stage, backend: str, *, split: bool) -> None:
        self.stage = stage
        self.called = CompiledModule(stage.model, {"backend": backend}, "the stage")
        self.engine = ENGINES["deferred" if split else "none"](stage.model)

    def forward(self) -> Any:
        """Runs forward; returns what the inputs' half needs."""
        return self.called(self.stage.value)


def placed(width: int) -> Stage:
    """A stage of four blocks, where and as it is measured."""
    stage = stage_of(width)
    if DEVICE.type == "cpu":
        return stage
    kind = torch.bfloat16
    value = stage.value.detach().to(DEVICE, kind).requires_grad_()
    return Stage(stage.model.to(DEVICE, kind), value, stage.grad.to(DEVICE, kind))


def ways_of(stage: Stage, backend: str) -> dict[str, Ours]:
    """What is compared."""
    return {
        "deferred": Ours(stage, "deferred"),
        "plain": Ours(stage, "none"),
        "halves": Compiled(stage, backend, split=True),
        "whole": Compiled(stage, backend, split=False),
    }


# ---- time


def moment() -> float:
    """Now, when all that was asked for is done."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return perf_counter()


def compare_times(ways: dict[str, Ours], rounds: int, title: str) -> dict[str, Any]:
    """Times and ratios of one width, in turn."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for index in range(rounds + 3):
        for name in list(ways) if index % 2 else list(reversed(ways)):
            found[name].append(time_once(ways[name], moment))
    found = {name: measured[3:] for name, measured in found.items()}
    figures: dict[str, Any] = {
        "milliseconds": {
            name: {part: 1e3 * statistics.median(m[part] for m in measured) for part in measured[0]}
            for name, measured in found.items()
        },
        "I+W of whole": ratio(found, "halves", "I+W", "whole"),
        "F of whole": ratio(found, "halves", "F", "whole"),
        "I+W of deferred": ratio(found, "halves", "I+W", "deferred"),
        "F of deferred": ratio(found, "halves", "F", "deferred"),
    }
    print(
        f"{title}: I+W {figures['I+W of whole']:.3f} of a compiled full backward (aim {AIM}), "
        f"{figures['I+W of deferred']:.3f} of the deferred engine; "
        f"F {figures['F of whole']:.3f} and {figures['F of deferred']:.3f}"
    )
    return figures


# ---- memory


def bytes_left(run: Callable[[], Any]) -> tuple[Any, int]:
    """The result, and by how many bytes there are more."""
    if DEVICE.type == "cuda":
        before = torch.cuda.memory_allocated()
        result = run()
        torch.cuda.synchronize()
        return result, torch.cuda.memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        result = run()
    events = cast("Any", seen).profiler.kineto_results.events()
    return result, sum(event.nbytes() for event in events if event.name() == "[memory]")


def compare_bytes(ways: dict[str, Ours], title: str) -> dict[str, Any]:
    """Bytes that microbatches leave after F, after I and after W, and the peak on a GPU."""
    found: dict[str, dict[str, int]] = {}
    for name in ("deferred", "halves"):
        way = ways[name]
        if DEVICE.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        made, after_f = bytes_left(partial(_forwards, way))
        states, more = bytes_left(partial(_input_halves, way, made))
        _, rest = bytes_left(partial(_weight_halves, way, states))
        found[name] = {"F": after_f, "I": after_f + more, "W": after_f + more + rest}
        if DEVICE.type == "cuda":
            found[name]["peak"] = torch.cuda.max_memory_allocated()
    mib = {
        name: {op: round(n / 2**20, 1) for op, n in each.items()} for name, each in found.items()
    }
    ratios = {name: each["I"] / each["F"] for name, each in found.items()}
    against = found["halves"]["I"] / found["deferred"]["I"]
    told = ", ".join(f"{name} {value:.3f}" for name, value in ratios.items())
    print(
        f"{title}, MiB after F, I, W: {mib}; I of F: {told}; I of the deferred engine's {against:.3f}"
    )
    return {"bytes": found, "I of F": ratios, "I of deferred": against}


def _forwards(way: Ours) -> list[Any]:
    return [way.forward() for _ in range(MICROBATCHES)]


def _input_halves(way: Ours, made: list[Any]) -> list[Any]:
    return [way.input_half(made.pop(0)) for _ in range(MICROBATCHES)]


def _weight_halves(way: Ours, states: list[Any]) -> None:
    while states:
        way.weight_half(states.pop(0))


# ---- steps


def measure(group: Any, schedule: str, backend: str | None, rounds: int) -> dict[str, Any]:
    """A worker's task: paired times of compiled steps of a schedule and of others, in seconds."""
    options = {"compile": None if backend is None else {"backend": backend}}
    mine = _pipeline(group, "ZB-H1", {"compile": {"backend": BACKENDS[-1]}})
    other = _pipeline(group, schedule, options)
    mine()
    other()
    first, second = alternate(mine, other, rounds, 1)
    return {"ours": first, "other": second}


def _pipeline(group: Any, schedule: str, options: dict[str, Any]) -> Callable[[], None]:
    work, home = gpt(RANKS), placement(schedule)
    held = work.held(home, group.rank())
    pipe = Pipeline.from_stages(
        [PipelineStage(work.stages[index], index, len(home), **options) for index in held],
        schedule=schedule,
        microbatches=work.microbatches,
        loss_fn=work.loss,
        group=group,
        # One waits while the other compiles.
        timeout=TIMEOUT,
    )

    def run() -> None:
        pipe.step(work.batch, target=work.target)
        work.zero_grad()

    return run


def compare_steps(rounds: int) -> dict[str, Any]:
    """Steps of compiled ZB-H1 on two processes, beside others."""
    found: dict[str, Any] = {}
    others = {
        "1F1B, compiled": ("1F1B", BACKENDS[-1]),
        "ZB-H1": ("ZB-H1", None),
        "1F1B": ("1F1B", None),
    }
    with WorkerPool(RANKS) as workers:
        for name, (schedule, backend) in others.items():
            told = {"schedule": schedule, "backend": backend, "rounds": rounds}
            answers = workers.run("benchmarks.compiling:measure", RANKS, timeout=TIMEOUT, **told)
            ratios = Ratios(answers[0]["ours"], answers[0]["other"])
            print(f"step, ZB-H1, compiled by {BACKENDS[-1]}: {ratios.told(name)}")
            found[name] = ratios.to_json()
    return found


def compare(rounds: int) -> dict[str, Any]:
    """All figures, printed, and as JSON data."""
    found: dict[str, Any] = {"times": {}, "bytes": {}}
    for backend in BACKENDS:
        for width in WIDTHS:
            title = f"compiled by {backend}, width {width}"
            ways = ways_of(placed(width), backend)
            few = max(3, rounds * 3 if width == 64 else rounds)
            found["times"][title] = compare_times(ways, few, title)
            found["bytes"][title] = compare_bytes(ways, title)
    found["steps"] = compare_steps(rounds)
    return found
