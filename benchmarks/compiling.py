"""Compiled stages: their halves beside a compiled full backward, their memory, and steps with them.

All ways take turns, and ratios are those of the rounds: their median and quartiles. On a CPU times are those
of the CPU, so that they mean something on a machine that others use too; the times of a step's actions are
laid out on a timeline for each rank, as where each has a core for itself. On a machine with a GPU the halves
and the memory are measured there, in bfloat16, by the clock, with the peak memory too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter, process_time, thread_time
from typing import Any, cast

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.backward import Ours, Plain, Stage, stage_of, time_once
from benchmarks.pairs import Ratios
from benchmarks.work import RANKS, gpt, placement
from penstock import ActionEvent, Pipeline, PipelineStage
from penstock.compiled import CompiledModule, graphs_kept, has_compiler
from penstock.plan import with_messages
from penstock.schedule import build, parse_action, replay
from penstock.schedule.action import COMPUTE_OPS
from penstock.testing import WorkerPool

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTHS = {64: 32, 256: 2, 512: 1}
"""With the microbatches that one time is of."""
AIM = 1.05
MICROBATCHES = 4
TIMEOUT = 1800
BACKENDS = ("plain", "inductor") if has_compiler(DEVICE.type) else ("plain",)


class Compiled(Ours):
    """A compiled stage, whose backward is cut."""

    def __init__(self, stage: Stage, backend: str) -> None:
        super().__init__(stage)
        self.called = CompiledModule(stage.model, {"backend": backend}, "the stage")
        with graphs_kept():
            self.weight_half(self.input_half(self.forward()))

    def forward(self) -> Any:
        """Runs forward; returns what the inputs' half needs."""
        return self.called(self.stage.value)


class CompiledWhole(Plain, Compiled):
    """A compiled stage, whose backward is not cut."""


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
        "split": Ours(stage),
        "plain": Plain(stage),
        "halves": Compiled(stage, backend),
        "whole": CompiledWhole(stage, backend),
    }


# ---- time


def moment() -> float:
    """Now, when all that was asked for is done."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return perf_counter()


def now() -> float:
    """What times are differences of: of this process's CPU, or the clock of a GPU."""
    return moment() if DEVICE.type == "cuda" else process_time()


def time_some(way: Ours, microbatches: int) -> dict[str, float]:
    """Seconds of the parts of some microbatches, as of a step."""
    found = [time_once(way, now) for _ in range(microbatches)]
    return {part: sum(one[part] for one in found) for part in found[0]}


def compare_times(ways: dict[str, Ours], width: int, rounds: int, title: str) -> dict[str, Any]:
    """Times and ratios of one width, in turn."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    names = list(ways)
    for index in range(rounds + 2):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            found[name].append(time_some(ways[name], WIDTHS[width]))

    def ratios(part: str, base: str) -> Ratios:
        return Ratios(*([one[part] for one in found[name][2:]] for name in ("halves", base)))

    of_whole, of_split = (ratios("I+W", base) for base in ("whole", "split"))
    print(f"{title}: I+W {of_whole.told('a compiled full backward')} (aim {AIM})")
    print(f"{title}: I+W {of_split.told('the halves without compilation')}")
    forward = {base: ratios("F", base) for base in ("whole", "split")}
    print(
        f"{title}: F {forward['whole'].median:.3f} x that of a compiled full backward, "
        f"{forward['split'].median:.3f} x that without compilation"
    )
    return {
        "I+W of whole": of_whole.to_json(),
        "I+W of split": of_split.to_json(),
        "F": {base: one.to_json() for base, one in forward.items()},
    }


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
    for name in ("split", "halves"):
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
    against = found["halves"]["I"] / found["split"]["I"]
    told = ", ".join(f"{name} {value:.3f}" for name, value in ratios.items())
    print(f"{title}, MiB after F, I, W: {mib}; I of F: {told}; I without compilation {against:.3f}")
    return {"bytes": found, "I of F": ratios, "I of split": against}


def _forwards(way: Ours) -> list[Any]:
    return [way.forward() for _ in range(MICROBATCHES)]


def _input_halves(way: Ours, made: list[Any]) -> list[Any]:
    return [way.input_half(made.pop(0)) for _ in range(MICROBATCHES)]


def _weight_halves(way: Ours, states: list[Any]) -> None:
    while states:
        way.weight_half(states.pop(0))


# ---- steps

STEPS = {
    "ZB-H1, compiled": ("ZB-H1", BACKENDS[-1]),
    "1F1B, compiled": ("1F1B", BACKENDS[-1]),
    "ZB-H1": ("ZB-H1", None),
    "1F1B": ("1F1B", None),
}

Seconds = dict[str, float]


def measure(group: Any, rounds: int) -> dict[str, list[Seconds]]:
    """A worker's task: for each way, in turn, what each action of a step takes of the CPU, round by round."""
    runs = {name: _pipeline(group, *way) for name, way in STEPS.items()}
    found: dict[str, list[Seconds]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(rounds + 2):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            found[name].append(runs[name]())
    return {name: steps[2:] for name, steps in found.items()}


def _pipeline(group: Any, schedule: str, backend: str | None) -> Callable[[], Seconds]:
    work, home = gpt(RANKS), placement(schedule)
    compiled = None if backend is None else {"backend": backend}
    pipe = Pipeline.from_stages(
        [
            PipelineStage(work.stages[index], index, len(home), compile=compiled)
            for index in work.held(home, group.rank())
        ],
        schedule=schedule,
        microbatches=work.microbatches,
        loss_fn=work.loss,
        group=group,
        # One waits while the other compiles.
        timeout=TIMEOUT,
    )

    def run() -> Seconds:
        found: Seconds = {}
        since = 0.0

        def before(event: ActionEvent) -> None:
            nonlocal since
            since = thread_time()

        def after(event: ActionEvent) -> None:
            found[str(event.action)] = thread_time() - since

        started = thread_time()
        with pipe.on(lambda action: action.op in COMPUTE_OPS, before=before, after=after):
            pipe.step(work.batch, target=work.target)
        # What a rank does between its actions is theirs in equal parts.
        around = (thread_time() - started - sum(found.values())) / len(found)
        work.zero_grad()
        return {action: seconds + around for action, seconds in found.items()}

    return run


def step_of(schedule: str, ranks: tuple[Seconds, ...]) -> float:
    """Seconds of a step in which each action takes its CPU time."""
    durations: dict[Any, float] = {
        parse_action(a): seconds for one in ranks for a, seconds in one.items()
    }
    built = build(schedule, ranks=RANKS, microbatches=gpt(RANKS).microbatches)
    return replay(with_messages(built), durations).makespan


def compare_steps(rounds: int) -> dict[str, Any]:
    """Steps of compiled ZB-H1 on two processes, beside others."""
    with WorkerPool(RANKS) as workers:
        answers = workers.run("benchmarks.compiling:measure", RANKS, timeout=TIMEOUT, rounds=rounds)
    laid_out: dict[str, list[float]] = {}
    spent: dict[str, list[float]] = {}
    for name, (schedule, _) in STEPS.items():
        steps = list(zip(*(answer[name] for answer in answers), strict=True))
        laid_out[name] = [step_of(schedule, ranks) for ranks in steps]
        spent[name] = [sum(sum(one.values()) for one in ranks) for ranks in steps]
    ours, *others = STEPS
    found: dict[str, Any] = {}
    for name in others:
        step, cpu = (Ratios(times[ours], times[name]) for times in (laid_out, spent))
        print(f"step, {ours} by {BACKENDS[-1]}: {step.told(name)}; CPU {cpu.median:.3f} x")
        found[name] = {"step": step.to_json(), "cpu": cpu.to_json()}
    return found


def compare(rounds: int) -> dict[str, Any]:
    """All figures, printed, and as JSON data."""
    found: dict[str, Any] = {"times": {}, "bytes": {}}
    for backend in BACKENDS:
        for width in WIDTHS:
            title = f"compiled by {backend}, width {width}"
            ways = ways_of(placed(width), backend)
            found["times"][title] = compare_times(ways, width, rounds, title)
            found["bytes"][title] = compare_bytes(ways, title)
    found["steps"] = compare_steps(rounds)
    return found
