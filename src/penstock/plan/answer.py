"""Plans: what they decide and what they cost, as a table for people and as JSON for files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, overload

import numpy as np

from penstock.errors import InputFileError
from penstock.plan.costs import (
    AHEAD,
    Profile,
    StageCosts,
    UnitCosts,
    bandwidth_from_json,
    bandwidth_to_json,
)
from penstock.schedule import (
    Costs,
    Edge,
    Op,
    Placement,
    Schedule,
    Simulation,
    Timeline,
    add_communication,
    build,
    from_json,
    simulate,
    to_json,
)

FORMAT, VERSION = "penstock-plan", 1


@dataclass(frozen=True)
class Shape:
    """What a plan decides, apart from the cut.

    Args:
        schedule: the name of the schedule.
        ranks: how many ranks a pipeline has.
        replicas: how many pipelines share the batch.
        stages_per_rank: how many stages each rank has.
        microbatches: into how many parts a pipeline's share of the batch is split.
        samples: the samples of a microbatch.
        checkpoint: ``"none"``, ``"needed"`` or ``"all"``: which units keep only their inputs.
    """

    schedule: str
    ranks: int
    replicas: int
    stages_per_rank: int
    microbatches: int
    samples: int
    checkpoint: str


@dataclass(frozen=True)
class Plan:
    """A way to run a model: schedule, cut, microbatches and checkpointing; and what it costs.

    ``Pipeline(model, plan=plan)`` runs it.

    Args:
        shape: what was decided.
        stages: for each stage the paths of its modules.
        checkpoint: the paths of the modules that are computed again in backward.
        own: the schedule itself, if it is not one of the library.
        seconds: the time of a step, with its messages and the sum of gradients over the replicas.
        reduce: how much of this time that sum takes.
        recompute: how much of this time the busiest rank spends on computing things again.
        bubble: the share of the ranks' time in which they do not compute.
        memory: the most that each rank holds, in bytes.
        limit: the most that a rank may hold; 0 if there is no limit.
        tokens: the tokens of a step, or its samples if the profile does not say how long a sample is.
        stage_costs: the costs that were simulated.
    """

    shape: Shape
    stages: tuple[tuple[str, ...], ...]
    checkpoint: tuple[str, ...]
    own: Schedule | None = field(repr=False)
    seconds: float
    reduce: float
    recompute: float
    bubble: float
    memory: tuple[float, ...]
    limit: float
    tokens: int
    stage_costs: StageCosts = field(repr=False, compare=False)

    @property
    def ranks(self) -> int:
        """The ranks of one pipeline."""
        return self.shape.ranks

    @property
    def replicas(self) -> int:
        """How many pipelines share the batch."""
        return self.shape.replicas

    @property
    def microbatches(self) -> int:
        """Into how many parts each pipeline splits its batch."""
        return self.shape.microbatches

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule without messages, with the edges of this cut."""
        if self.own is not None:
            return self.own
        return scheduled(self.shape).with_edges(self.stage_costs.edges)

    @property
    def source(self) -> str | Schedule:
        """What to give to a Pipeline: a name, which works for any number of microbatches, or a schedule."""
        return self.shape.schedule if self.own is None else self.own

    @cached_property
    def simulation(self) -> Simulation:
        """The step, simulated with its messages."""
        return simulate(with_messages(self.schedule), self.stage_costs.costs)

    @property
    def timeline(self) -> Timeline:
        """The simulated step."""
        return self.simulation.timeline

    @property
    def busiest(self) -> float:
        """The seconds that the busiest rank computes."""
        return max(self.simulation.busy)

    @property
    def rate(self) -> float:
        """Tokens per second, or samples if the profile does not say how long a sample is."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        shape = self.shape
        again = {"none": "", "all": ", all units computed again"}.get(
            shape.checkpoint, f", {len(self.checkpoint)} units computed again"
        )
        copies = f" x {shape.replicas} replicas" if shape.replicas > 1 else ""
        return (
            f"{shape.schedule} on {shape.ranks} ranks{copies}, {len(self.stages)} stages, "
            f"{shape.microbatches} microbatches of {shape.samples}{again}: {seconds_as_text(self.seconds)} "
            f"a step, bubble {self.bubble:.1%}, {bytes_as_text(max(self.memory))} on the fullest rank"
        )

    def to_json(self) -> str:
        """The plan as JSON."""
        costs = self.stage_costs
        of = costs.costs
        stages = len(self.stages)
        times = {kind: of.per_stage(kind, stages) for kind in _KINDS}
        data = {
            "format": FORMAT,
            "version": VERSION,
            **{name: getattr(self.shape, name) for name in _SHAPE},
            "stages": self.stages,
            "checkpointed": self.checkpoint,
            "own": None if self.own is None else json.loads(to_json(self.own)),
            **{name: getattr(self, name) for name in _NUMBERS},
            "memory": self.memory,
            "tokens": self.tokens,
            "costs": {
                **times,
                "latency": of.latency,
                "bandwidth": bandwidth_to_json(of.bandwidth),
                "message": of.message,
                "edges": [[e.value, e.source, list(e.targets), e.gradient] for e in costs.edges],
                "kinds": [dict(kind) for kind in costs.kinds],
                "extra": dict(costs.extra),
                **{name: getattr(costs, name) for name in _OF_MESSAGES},
            },
        }
        return json.dumps(data, indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read what :meth:`to_json` wrote.

        Raises:
            InputFileError: the text is not that.
        """
        try:
            data = json.loads(text)
            if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (
                FORMAT,
                VERSION,
            ):
                raise ValueError(f"expected format {FORMAT!r}, version {VERSION}")
            own = None if data["own"] is None else from_json(json.dumps(data["own"]))
            return Plan(
                Shape(**{name: kind(data[name]) for name, kind in _SHAPE.items()}),
                tuple(tuple(map(str, paths)) for paths in data["stages"]),
                tuple(map(str, data["checkpointed"])),
                own,
                **{name: float(data[name]) for name in _NUMBERS},
                memory=tuple(map(float, data["memory"])),
                tokens=int(data["tokens"]),
                stage_costs=_costs_of(data["costs"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputFileError(
                f"not a plan as penstock.plan writes it: {error}; write it with Plan.to_json"
            ) from error


_SHAPE: dict[str, Callable[[Any], Any]] = {
    "schedule": str,
    "ranks": int,
    "replicas": int,
    "stages_per_rank": int,
    "microbatches": int,
    "samples": int,
    "checkpoint": str,
}
_NUMBERS = ("seconds", "reduce", "recompute", "bubble", "limit")
_OF_MESSAGES = ("taken", "returned", "sent", "left")
_KINDS = ("forward", "input", "weight", "backward", "activation", "stash")


def _costs_of(data: Mapping[str, Any]) -> StageCosts:
    times: dict[str, Any] = {kind: [float(number) for number in data[kind]] for kind in _KINDS}
    message = {str(name): float(size) for name, size in data["message"].items()}
    kinds = tuple({str(k): float(v) for k, v in kind.items()} for kind in data["kinds"])
    costs = Costs(
        **times,
        latency=float(data["latency"]),
        bandwidth=bandwidth_from_json(data["bandwidth"]),
        message=message,
        unit="s",
    )
    return StageCosts(
        costs,
        tuple(Edge(v, int(s), tuple(map(int, t)), bool(g)) for v, s, t, g in data["edges"]),
        {op: [float(size) for size in data["extra"][op]] for op in "FIWB"},
        tuple(sum(kind.values()) for kind in kinds),
        kinds,
        *(tuple(map(float, data[name])) for name in _OF_MESSAGES),
    )


def scheduled(shape: Shape) -> Schedule:
    """The schedule of the library that a shape names."""
    return build(
        shape.schedule,
        ranks=shape.ranks,
        microbatches=shape.microbatches,
        stages_per_rank=shape.stages_per_rank,
    )


def with_messages(schedule: Schedule) -> Schedule:
    """A schedule as the runtime runs it."""
    return add_communication(schedule, ahead=AHEAD)


# ---- memory


def held(schedule: Schedule, stage_costs: StageCosts) -> list[np.ndarray[Any, Any]]:
    """For each rank the most bytes that it holds during each of its actions, in their order."""
    of, stages = stage_costs.costs, schedule.stages
    activation, stash = of.per_stage("activation", stages), of.per_stage("stash", stages)
    zero = [0.0] * stages
    grows = {
        Op.F: activation,
        Op.I: list(np.subtract(stash, activation) + stage_costs.left),
        Op.B: list(np.subtract(stage_costs.left, activation)),
        Op.W: list(np.negative(stash)),
    }
    most = []
    for rank in range(schedule.ranks):
        actions = list(schedule.actions(rank))
        grown = np.array([grows.get(a.op, zero)[a.stage] for a in actions])
        extra = [stage_costs.extra[a.op.value][a.stage] if a.op in grows else 0 for a in actions]
        after = np.cumsum(grown)
        most.append(
            static_of(schedule.placement, stage_costs, rank)
            + np.maximum(after, after - grown)
            + np.array(extra)
            + _under_way(schedule, rank, stage_costs)
        )
    return most


def _under_way(schedule: Schedule, rank: int, stage_costs: StageCosts) -> Any:
    """The bytes of messages on a rank during each of its actions.

    There is memory for the next messages of a kind from when the first is used. A rank knows that a message
    of its own has left only when later ones have arrived, and frees it before its next backward.
    """
    actions, count = list(schedule.actions(rank)), schedule.microbatches
    on = np.array([action.stage for action in actions])
    forward = np.array([action.op is Op.F for action in actions])
    backward = np.array([action.op in (Op.I, Op.B) for action in actions])
    found = np.zeros(len(actions))
    for stage in schedule.placement.stages_on(rank):
        own = on == stage
        now = own & backward
        backwards = now.cumsum()
        found += _next_ones((own & forward).cumsum(), count) * stage_costs.taken[stage]
        found += _next_ones(backwards, count) * stage_costs.returned[stage]
        found += np.minimum(backwards - now, AHEAD - now) * stage_costs.sent[stage]
    return found


def _next_ones(used: Any, count: int) -> Any:
    """For how many messages there is memory once so many of them were used."""
    return np.where(used > 0, np.minimum(count - used, AHEAD), 0)


def static_of(placement: Placement, stage_costs: StageCosts, rank: int) -> float:
    """What a rank always holds: weights, gradients and optimizer states."""
    return sum(stage_costs.static[stage] for stage in placement.stages_on(rank))


def peak_memory(schedule: Schedule, stage_costs: StageCosts) -> tuple[float, ...]:
    """The most that each rank holds in a step."""
    return tuple(float(rank.max(initial=0.0)) for rank in held(schedule, stage_costs))


# ---- several plans, and how they compare


@dataclass(frozen=True)
class Plans(Sequence[Plan]):
    """Plans, the fastest first; as text a table.

    Args:
        plans: the plans.
        profile: the costs that they were made from.
        looked_at: how many candidates there were.
        simulated: how many of these were simulated; the others were proven to be slower, or too large.
    """

    plans: tuple[Plan, ...]
    profile: Profile = field(repr=False)
    looked_at: int = 0
    simulated: int = 0

    @overload
    def __getitem__(self, index: int) -> Plan: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Plan]: ...
    def __getitem__(self, index: int | slice) -> Plan | Sequence[Plan]:
        return self.plans[index]

    def __len__(self) -> int:
        return len(self.plans)

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def costs(self, plan: Plan) -> UnitCosts:
        """The costs of units that a plan was made from."""
        return self.profile.at(plan.shape.samples)

    def __str__(self) -> str:
        rows = [_HEAD, *(self.row(number) for number in range(len(self)))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if _LEFT[column] else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        kind = "measured on" if self.profile.measured else "predicted for"
        return "\n".join(
            (
                *lines,
                f"costs {kind} {self.profile.device}; "
                f"{self.looked_at} candidates, {self.simulated} simulated",
            )
        )

    def row(self, number: int) -> list[str]:
        """A plan as the cells of a table."""
        plan = self[number]
        shape = plan.shape
        again = (
            shape.checkpoint if shape.checkpoint != "needed" else f"{len(plan.checkpoint)} units"
        )
        return [
            str(number + 1),
            shape.schedule,
            str(shape.ranks),
            str(shape.replicas),
            str(len(plan.stages)),
            f"{shape.microbatches} x {shape.samples}",
            again,
            seconds_as_text(plan.seconds),
            f"{plan.rate:,.4g}" if plan.rate < 1e4 else f"{plan.rate:,.0f}",
            f"{plan.bubble:.1%}",
            _memories(plan.memory),
            self.why(number),
        ]

    def why(self, number: int) -> str:
        """Why a plan is slower than the best one."""
        plan, best = self[number], self[0]
        more = plan.seconds - best.seconds
        if not number:
            return "the fastest"
        if more <= 1e-9 * best.seconds:
            return "as fast"
        return f"+{more / best.seconds:.1%}: " + _largest(plan, best)

    def to_json(self) -> str:
        """All plans as JSON, each as :meth:`Plan.to_json` writes it."""
        return json.dumps([json.loads(plan.to_json()) for plan in self], indent=1)

    def report(self, path: str | Path, *, title: str = "") -> None:
        """Write the report: one HTML file that needs no other."""
        made = import_module("penstock.plan.report").report_of(self, title=title)
        Path(path).write_text(made, encoding="utf-8")


_HEAD = [
    "", "schedule", "ranks", "replicas", "stages", "microbatches", "computed again", "step", "per second",
    "bubble", "memory by rank", "why not",
]  # fmt: skip
_LEFT = [False, True, *[False] * 8, True, True]


def _largest(plan: Plan, best: Plan) -> str:
    """What makes a plan slower than another, most of all."""
    work, best_work = plan.busiest - plan.recompute, best.busiest - best.recompute
    waits = plan.seconds - plan.reduce - plan.busiest
    best_waits = best.seconds - best.reduce - best.busiest
    causes = {
        "its busiest rank waits {} longer": waits - best_waits,
        "its busiest rank computes {} more": work - best_work,
        "it computes {} more again": plan.recompute - best.recompute,
        "its replicas sum gradients {} longer": plan.reduce - best.reduce,
    }
    text = max(causes, key=lambda cause: causes[cause])
    return text.format(seconds_as_text(causes[text]))


def _memories(memory: Sequence[float]) -> str:
    """The memory of each rank; if there are many, the least and the most."""
    scale, unit = (2**30, "GiB") if max(memory) >= 2**30 else (2**20, "MiB")
    shown = [f"{held / scale:.1f}" for held in memory]
    if len(shown) > 4:
        shown = [f"{min(memory) / scale:.1f} to {max(memory) / scale:.1f}"]
    return f"{' '.join(shown)} {unit}"


def seconds_as_text(seconds: float) -> str:
    """A time in a suitable unit."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def bytes_as_text(number: float) -> str:
    """A size in a suitable unit."""
    for scale, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number:.0f} B"
