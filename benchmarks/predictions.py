"""What the simulator says of a step, fed with measured costs, beside the step itself: time and memory.

The costs of F, I, W and B of each stage are the middle ones of recorded steps, the latency that of a message
there and back. Memory is what a stage alone is seen to hold after F, and after I, of one microbatch.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmarks.live import LiveBytes
from benchmarks.work import RANKS, Work, gpt, ours, placement
from penstock import Pipeline, PipelineStage
from penstock.runtime import engine_for
from penstock.schedule import Costs, Schedule, add_communication, build, simulate
from penstock.testing import WorkerPool
from penstock.transport import FORWARD, Channel, connect
from penstock.values import TensorSpec

NAMES = ("GPipe", "1F1B", "ZB-H1", "Interleaved1F1B", "InterleavedZeroBubble", "ZB-V", "DualPipeV")
OPS = {"F": "forward", "I": "input", "W": "weight", "B": "backward"}
CPU = torch.device("cpu")


def schedule_of(name: str, work: Work) -> Schedule:
    """What a pipeline of this work runs."""
    made = build(name, ranks=RANKS, microbatches=work.microbatches)
    return add_communication(made)


# ---- time: tasks of workers


def measure(group: Any, name: str, rounds: int) -> dict[str, Any]:
    """Seconds of steps, the middle ones of their actions by op and stage, and of a message."""
    work = gpt(len(placement(name)))
    pipe = ours(work, name, group)
    seconds: list[float] = []
    durations: dict[str, list[float]] = defaultdict(list)
    for index in range(rounds + 1):
        start = perf_counter()
        pipe.step(work.batch, target=work.target)
        seconds.append(perf_counter() - start)
        for key, found in recorded(pipe, work).items():
            durations[key] += found if index else []
        work.zero_grad()
    pipe.close()
    return {
        "seconds": seconds[1:],
        "costs": {key: statistics.median(found) for key, found in durations.items() if found},
        "latency": latency(group),
    }


def recorded(pipe: Pipeline, work: Work) -> dict[str, list[float]]:
    """The durations of all actions of a step, by op and stage."""
    timeline = pipe.step(work.batch, target=work.target, record=True).timeline
    found: dict[str, list[float]] = defaultdict(list)
    for span in timeline.spans if timeline else ():
        found[f"{span.action.op.value}{span.action.stage}"].append(span.duration)
    return found


def latency(group: Any, times: int = 50) -> float:
    """Half of the time that an activation takes there and back."""
    end = connect(CPU, group)
    there, back = Channel(0, 1, FORWARD), Channel(1, 0, FORWARD)
    mine, theirs = (there, back) if end.rank == 0 else (back, there)
    end.open([there, back])
    tensor = torch.zeros(2, 128, 256)
    taken = []
    for _ in range(times):
        ticket = end.post_receive(theirs, [TensorSpec.of(tensor)], CPU)
        start = perf_counter()
        if end.rank == 1:
            ticket.take()
        end.post_send(mine, [tensor])
        if end.rank == 0:
            ticket.take()
        taken.append(perf_counter() - start)
        end.finish()
    return statistics.median(taken) / 2


# ---- memory


class Probe:
    """The bytes that stages hold, but for weights, their gradients and the batch."""

    def __init__(self, work: Work) -> None:
        self.live = LiveBytes()
        self.most = 0
        self._work = work

    def held(self) -> int:
        """So many bytes are held now."""
        return self.live.count(self._known())

    def look(self) -> None:
        """Note what is held now."""
        self.most = max(self.most, self.held())

    def _known(self) -> Iterable[Tensor | None]:
        weights = [weight for stage in self._work.stages for weight in stage.parameters()]
        return [self._work.batch, self._work.target, *weights, *(w.grad for w in weights)]


def watched(look: Callable[[], None]) -> type[PipelineStage]:
    """Stages that let look after whatever they have done."""

    class Watched(PipelineStage):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            found = super().forward(*args, **kwargs)
            look()
            return found

        def backward(self, *args: Any) -> Any:
            found = super().backward(*args)
            look()
            return found

        def backward_input(self, *args: Any) -> Any:
            found = super().backward_input(*args)
            look()
            return found

    return Watched


def peak(group: Any, name: str) -> int:
    """A worker's task: the most bytes that are held after an action of a step."""
    work = gpt(len(placement(name)))
    probe = Probe(work)
    pipe = ours(work, name, group, watched(probe.look))
    pipe.step(work.batch, target=work.target)
    probe.most = 0
    with probe.live:
        pipe.step(work.batch, target=work.target)
    pipe.close()
    return probe.most


def holdings(schedule: Schedule, work: Work) -> dict[str, list[float]]:
    """Bytes that each stage holds of a microbatch: after F, and after I where there is one."""
    found: dict[str, list[float]] = {"activation": [], "stash": []}
    value = work.batch.chunk(work.microbatches)[0]
    target = work.target.chunk(work.microbatches)[0]
    for index in range(schedule.stages):
        stage = PipelineStage(work.stages[index], index, schedule.stages)
        stage.prefer_engine(engine_for(schedule, index))
        for _ in range(2):
            held, made = _held_by(stage, schedule, work, value, target)
        found["activation"].append(held[0])
        found["stash"].append(held[1])
        value = made
    work.zero_grad()
    return found


def _held_by(
    stage: PipelineStage, schedule: Schedule, work: Work, value: Tensor, target: Tensor
) -> tuple[list[float], Tensor]:
    """What a stage holds after F and after I of one microbatch, and what it gives."""
    probe, rank_of = Probe(work), schedule.placement.rank_of
    loss = (lambda output: work.loss(output, target)) if stage.is_last else None
    with probe.live:
        if stage.index and rank_of[stage.index] != rank_of[stage.index - 1]:
            value = value.clone()  # what arrives from another rank is held here
        value = value.requires_grad_(bool(stage.index))
        made = stage.forward(0, (value,), {}, loss)
        given = made.detach().clone()
        gradient = None if stage.is_last else [torch.ones_like(given)]
        del value, made
        held = [float(probe.held() - _bytes(given, gradient))]
        returned = stage.backward_input(0, gradient)
        del returned
        held.append(float(probe.held() - _bytes(given, gradient)))
        stage.backward_weight(0)
    return held, given


def _bytes(given: Tensor, gradient: list[Tensor] | None) -> int:
    return given.nbytes + sum(tensor.nbytes for tensor in gradient or ())


# ---- both


def predict(name: str, measured: dict[str, Any]) -> dict[str, Any]:
    """What the simulator says, given what was measured."""
    work = gpt(len(placement(name)))
    schedule = schedule_of(name, work)
    times: dict[str, Any] = {
        word: [measured["costs"].get(f"{op}{stage}", 0.0) for stage in range(schedule.stages)]
        for op, word in OPS.items()
    }
    costs: dict[str, Any] = {**times, **holdings(schedule, work)}
    ran = simulate(schedule, Costs(**costs, latency=measured["latency"], unit="s"))
    bound = simulate(schedule, Costs(**costs, unit="s")).makespan
    return {"seconds": ran.makespan, "bound": bound, "bytes": list(ran.peak_memory)}


def compare(rounds: int) -> dict[str, Any]:
    """Each schedule, printed, and as JSON data."""
    found: dict[str, Any] = {}
    with WorkerPool(RANKS) as workers:
        for name in NAMES:
            measured = workers.run(
                "benchmarks.predictions:measure", RANKS, timeout=1200, name=name, rounds=rounds
            )[0]
            measured["bytes"] = workers.run("benchmarks.predictions:peak", RANKS, 300, name=name)
            found[name] = {"measured": measured, "predicted": predict(name, measured)}
            print(_line(name, **found[name]))
    return found


def _line(name: str, measured: dict[str, Any], predicted: dict[str, Any]) -> str:
    seconds = statistics.median(measured["seconds"])
    low, _, high = statistics.quantiles(measured["seconds"], n=4)
    held = ", ".join(
        f"{found / 2**20:.1f} MiB ({found / said:.3f} x {said / 2**20:.1f})"
        for found, said in zip(measured["bytes"], predicted["bytes"], strict=True)
    )
    return (
        f"{name:21}: {1e3 * seconds:.1f} ms ({1e3 * low:.1f} to {1e3 * high:.1f}) is "
        f"{seconds / predicted['seconds']:.3f} x the {1e3 * predicted['seconds']:.1f} ms predicted, "
        f"{seconds / predicted['bound']:.3f} x the bound without messages; held by rank: {held}"
    )
