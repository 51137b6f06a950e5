"""What a plan says beside what its step does: time and memory on two gloo ranks, of three models.

The costs are measured in both processes at once, as the ranks compute at once in a step. The plans of a model
and its costs then take turns, since a machine is not always as fast; what is predicted is made from the
median costs of all turns, with what a rank does around its actions, known from another model. Two
times of each are told: its fastest step by the wall clock, and the step as it would be
on a machine that does nothing else: the median CPU times of its actions, with what its ranks spend around
them, laid out on a timeline for each rank. On a machine that others use too, only the second means anything.
Memory is the most that a rank's tensors take at any moment of a step, weights and gradients included.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter, thread_time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.work import RANKS
from penstock import ActionEvent, Pipeline
from penstock import plan as planning
from penstock.plan import Plan, Profile, UnitCosts, with_messages
from penstock.plan.meter import Meter
from penstock.schedule import parse_action, replay, simulate
from penstock.schedule.action import COMPUTE_OPS
from penstock.testing import WorkerPool
from penstock.train.model import GPT, next_byte_loss

BATCH = 16
SCHEDULES = ("GPipe", "1F1B", "ZB-H1", "Interleaved1F1B", "ZB-V")
SPACE = 8
"""The microbatches of each plan, and of the small space the other number."""
OTHER = 4
CALIBRATION = 5
"""Steps by which it is known what a message costs."""
TIMES = ("forward", "input", "weight", "backward")
Task = tuple[nn.Module, Tensor, Tensor, Callable[..., Tensor]]


# ---- three models


def gpt() -> Task:
    """Blocks that are alike."""
    model = GPT(layers=6, width=192, heads=4, sequence=128)
    tokens = torch.randint(0, 256, (BATCH, 129))
    return model, tokens[:, :-1], tokens[:, 1:], next_byte_loss


def heavy_head() -> Task:
    """Three blocks, and a head that weighs more than all of them."""
    model = GPT(layers=3, width=192, heads=4, sequence=128)
    model.head = nn.Linear(192, 6000, bias=False)
    tokens = torch.randint(0, 256, (BATCH, 129))
    return model, tokens[:, :-1], tokens[:, 1:], next_byte_loss


class UNet(nn.Module):
    """Each level of the way down is used on the way up."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.enter = _block(3, width)
        self.down = _block(width, 2 * width)
        self.lower = _block(2 * width, 4 * width)
        self.middle = _block(4 * width, 4 * width)
        self.up = _block(8 * width, 2 * width)
        self.upper = _block(4 * width, width)
        self.leave = nn.Conv2d(2 * width, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        """An image to one of its size."""
        first = self.enter(image)
        second = self.down(nn.functional.max_pool2d(first, 2))
        third = self.lower(nn.functional.max_pool2d(second, 2))
        hidden = self.up(torch.cat([self.middle(third), third], 1))
        hidden = self.upper(torch.cat([_grown(hidden), second], 1))
        output: Tensor = self.leave(torch.cat([_grown(hidden), first], 1))
        return output


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU()
    )


def _grown(image: Tensor) -> Tensor:
    return nn.functional.interpolate(image, scale_factor=2.0)


def unet() -> Task:
    """Values that skip stages."""
    image = torch.rand(BATCH, 3, 48, 48)
    return UNet(), image, image, nn.functional.mse_loss


MODELS: dict[str, Callable[[], Task]] = {"gpt": gpt, "heavy head": heavy_head, "unet": unet}


def task(name: str) -> Task:
    """A model and its batch, the same in every process."""
    torch.manual_seed(0)
    return MODELS[name]()


# ---- tasks of workers


def costs(group: Any, name: str) -> str:
    """Costs that are measured while the other rank computes too, as JSON."""
    profile = _costs(name, repeats=1)
    profile.latency, profile.handling = _latency(group), _handling(group)
    return profile.to_json()


def _costs(name: str, repeats: int) -> Profile:
    model, batch, target, loss = task(name)
    call: dict[str, Any] = {"target": target, "loss_fn": loss, "stages": 2 * RANKS}
    profile = planning.measure(model, batch, **call, repeats=repeats)
    for count in (SPACE, OTHER):
        profile.at(BATCH // count)
    return profile


def _latency(group: Any, times: int = 50) -> float:
    """Half of the time that an activation takes there and back."""
    tensor, rank, seconds = torch.zeros(2, 128, 256), dist.get_rank(group), []
    for _ in range(times):
        start = perf_counter()
        for sender in (0, 1):
            (dist.send if rank == sender else dist.recv)(tensor, 1 - rank, group)
        seconds.append(perf_counter() - start)
    return statistics.median(seconds) / 2


def _handling(group: Any) -> float:
    """How long a rank is busy around an action: what steps of another model spend there."""
    torch.manual_seed(0)
    model, tokens = GPT(layers=2, width=192, heads=4, sequence=128), torch.zeros(BATCH, 129)
    batch, target = tokens[:, :-1].long(), tokens[:, 1:].long()
    pipe = Pipeline(model, microbatches=SPACE, loss_fn=next_byte_loss, mesh=group)
    times = _no_times()
    for number in range(CALIBRATION + 1):
        _step(pipe, batch, target, times if number else _no_times())
    pipe.close()
    return float(statistics.median(times["around"])) / (2 * SPACE)


def _no_times() -> dict[str, Any]:
    return {"seconds": [], "around": [], "actions": {}}


def measure(group: Any, name: str, plans: list[str], rounds: int) -> dict[str, Any]:
    """Steps of each plan and the costs, in turn, and the most bytes that are held in a step."""
    runs = []
    for text in plans:
        model, batch, target, loss = task(name)
        pipe = Pipeline(model, schedule=Plan.from_json(text), loss_fn=loss, mesh=group)
        runs.append((pipe, batch, target))
    times = [_no_times() for _ in runs]
    profiles = []
    for number in range(rounds + 1):
        for run, one in zip(runs, times, strict=True):
            _step(*run, one if number else _no_times())
        if number:
            profiles.append(_costs(name, repeats=3).to_json())
    for (pipe, batch, target), one in zip(runs, times, strict=True):
        weights = {id(p): p for stage in pipe.stages for p in stage.module.parameters()}.values()
        buffers = {id(b): b for stage in pipe.stages for b in stage.module.buffers()}.values()
        with Meter() as meter:
            pipe.step(batch, target=target)
        one["bytes"] = (
            meter.peak + sum(2 * p.nbytes for p in weights) + sum(b.nbytes for b in buffers)
        )
        pipe.close()
    return {"plans": times, "profiles": profiles}


def _step(pipe: Pipeline, batch: Tensor, target: Tensor, times: dict[str, Any]) -> None:
    """Make a step, and note how long it took on the wall, and each of its actions on the CPU."""
    since, spent = 0.0, 0.0

    def before(event: ActionEvent) -> None:
        nonlocal since
        since = thread_time()

    def after(event: ActionEvent) -> None:
        nonlocal spent
        seconds = thread_time() - since
        spent += seconds
        times["actions"].setdefault(str(event.action), []).append(seconds)

    handle = pipe.on(lambda action: action.op in COMPUTE_OPS, before=before, after=after)
    start, cpu = perf_counter(), thread_time()
    pipe.step(batch, target=target)
    times["seconds"].append(perf_counter() - start)
    times["around"].append(thread_time() - cpu - spent)
    handle.remove()


# ---- both


def plans_of(profile: Profile) -> list[Plan]:
    """A plan of each schedule, some with the other number of microbatches; one computes all again."""
    asked: dict[str, Any] = {"ranks": RANKS, "pipeline": RANKS, "batch": BATCH, "keep": 1}
    asked |= {"memory": 0.0, "seconds": 0.0, "states": 0.0, "stages_per_rank": (1, 2)}
    wanted = [(name, SPACE, "none") for name in SCHEDULES]
    wanted += [(name, OTHER, "none") for name in SCHEDULES[1:4]] + [("1F1B", SPACE, "all")]
    return [
        planning.search(profile, **asked, schedules=name, microbatches=count, recompute=again)[0]
        for name, count, again in wanted
    ]


def compare(rounds: int) -> dict[str, Any]:
    """Each plan of each model, printed, and as JSON data."""
    figures: dict[str, Any] = {}
    with WorkerPool(RANKS) as workers:
        for name in MODELS:
            profiles = workers.run("benchmarks.plan:costs", RANKS, timeout=900, name=name)
            first = Profile.from_json(profiles[0])
            plans = plans_of(first)
            texts = [plan.to_json() for plan in plans]
            ran = workers.run(
                "benchmarks.plan:measure",
                RANKS,
                timeout=3600,
                name=name,
                plans=texts,
                rounds=rounds,
            )
            profile = _pooled(first, [Profile.from_json(t) for r in ran for t in r["profiles"]])
            timed = [_timed(plan, profile) for plan in plans]
            figures[name] = [
                _figures(plan, [r["plans"][i] for r in ran]) for i, plan in enumerate(timed)
            ]
            print(name)
            for one in figures[name]:
                print(_line(one))
            _choice(figures[name])
    _summary([one for of in figures.values() for one in of])
    return figures


def _pooled(first: Profile, several: list[Profile]) -> Profile:
    """The median times of several measurements."""

    def middle(samples: int) -> UnitCosts:
        each = [profile.at(samples) for profile in several]
        units = tuple(
            replace(alike[0], **{k: statistics.median(getattr(u, k) for u in alike) for k in TIMES})
            for alike in zip(*(costs.units for costs in each), strict=True)
        )
        return replace(each[0], units=units)

    return replace(first, known={samples: middle(samples) for samples in first.known})


def _timed(plan: Plan, profile: Profile) -> Plan:
    """The same plan by other costs."""
    units = profile.at(plan.shape.samples)
    paths = [unit.path for unit in units.units]
    costs = units.stages(
        planning.cut_of(paths, plan.stages),
        plan.schedule.placement,
        recompute=[paths.index(path) for path in plan.recompute],
        states=0.0,
        latency=profile.latency,
        handling=profile.handling,
    )
    seconds = simulate(with_messages(plan.schedule), costs.costs).makespan
    return replace(plan, seconds=seconds, stage_costs=costs)


def _figures(plan: Plan, ran: list[dict[str, Any]]) -> dict[str, Any]:
    # A step is over when its last rank is.
    seconds = [max(times) for times in zip(*(one["seconds"] for one in ran), strict=True)]
    quiet = _quiet(plan, ran)
    return {
        "schedule": plan.shape.schedule,
        "microbatches": plan.microbatches,
        "recompute": plan.shape.recompute,
        "predicted": plan.seconds,
        "measured": quiet,
        "wall": min(seconds),
        "predicted bytes": plan.memory,
        "measured bytes": [one["bytes"] for one in ran],
    }


def _quiet(plan: Plan, ran: list[dict[str, Any]]) -> float:
    """The step on an idle machine: each action takes its CPU time, and a share of the rest."""
    durations: dict[Any, float] = {}
    for one in ran:
        around = statistics.median(one["around"]) / len(one["actions"])
        for text, seconds in one["actions"].items():
            durations[parse_action(text)] = statistics.median(seconds) + max(around, 0.0)
    schedule = with_messages(plan.schedule)
    return replay(schedule, durations, latency=plan.stage_costs.costs.latency).makespan


def _line(one: dict[str, Any]) -> str:
    held = ", ".join(
        f"{seen / 2**20:.1f} MiB ({seen / said:.3f} x)"
        for seen, said in zip(one["measured bytes"], one["predicted bytes"], strict=True)
    )
    return (
        f"  {one['schedule']:16} {one['microbatches']} microbatches, again {one['recompute']:4}: "
        f"{1e3 * one['measured']:.1f} ms is {one['measured'] / one['predicted']:.3f} x the "
        f"{1e3 * one['predicted']:.1f} predicted (wall {1e3 * one['wall']:.1f}); {held}"
    )


def _choice(figures: list[dict[str, Any]]) -> None:
    chosen = min(figures, key=lambda one: one["predicted"])
    best = min(figures, key=lambda one: one["measured"])
    print(
        f"  chosen: {chosen['schedule']}, {chosen['measured'] / best['measured'] - 1:+.1%} beside the best "
        f"measured, {best['schedule']}"
    )


def _summary(figures: list[dict[str, Any]]) -> None:
    times = [abs(one["measured"] / one["predicted"] - 1) for one in figures]
    sizes = [
        abs(seen / said - 1)
        for one in figures
        for seen, said in zip(one["measured bytes"], one["predicted bytes"], strict=True)
    ]
    print(
        f"{len(figures)} plans: time off by {statistics.median(times):.1%} in the median, {max(times):.1%} "
        f"at worst; memory by {statistics.median(sizes):.1%}, {max(sizes):.1%}"
    )
