"""Plans: what they decide and cost, their memory, their files, and how they compare."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, PlainSerializer, PlainValidator

from penstock._engine.values import bytes_as_text
from penstock.errors import UsageError
from penstock.plan.costs import FILE, Number, Numbers, StageCosts, read_json, write_json
from penstock.schedule import (
    Action,
    Op,
    Schedule,
    Simulation,
    Timeline,
    add_communication,
    build,
    from_json,
    simulate,
    to_json,
)
from penstock.schedule.passes import AHEAD

POLICIES = ("none", "needed", "all")
OFFLOAD = "offload"
"""The policy by which activations wait for their backward on the host, as few as the memory needs."""
LARGEST = 2**20
"""The most ranks, microbatches and forwards of a plan: with more, simulating a single step takes minutes."""
Count = Annotated[int, Field(ge=1)]
CustomSchedule = Annotated[
    Schedule | None,
    PlainSerializer(lambda order: None if order is None else json.loads(to_json(order))),
    PlainValidator(lambda data: None if data is None else from_json(json.dumps(data))),
]


@dataclass(frozen=True)
class PlanShape:
    """The decisions of a plan, apart from the cut.

    Args:
        schedule: the name of the schedule.
        ranks: the number of ranks of a pipeline.
        replicas: the number of pipelines that share the batch.
        stages_per_rank: the number of stages on each rank.
        microbatches: the number of parts of a pipeline's share of the batch.
        samples: the number of samples in a microbatch.
        recompute: which units keep only their inputs: ``"none"``, ``"needed"`` or ``"all"``; or
            ``"offload"``: none, and activations leave the device.
    """

    schedule: str
    ranks: Count
    replicas: Count
    stages_per_rank: Count
    microbatches: Count
    samples: Count
    recompute: Literal["none", "needed", "all", "offload"]

    __pydantic_config__ = FILE

    @property
    def forwards(self) -> int:
        """The number of forwards in a step of one pipeline, over all its stages."""
        return self.ranks * self.stages_per_rank * self.microbatches


@dataclass(frozen=True)
class Plan:
    """A way to run a model (schedule, cut, microbatches and recomputation), and what it costs.

    ``Pipeline(model, schedule=plan)`` runs it.

    Args:
        shape: what was decided, apart from the cut.
        stages: the paths of each stage's modules.
        recompute: the paths of the modules that backward recomputes.
        seconds: the time of a step, with its messages and the sum of gradients over the replicas.
        reduce: the part of this time in which gradients are summed.
        memory: the most that each rank holds, in bytes.
        limit: the most that a rank may hold, in bytes; 0 if there is no limit.
        tokens: the tokens of a step, or its samples if the profile does not give the tokens of a sample.
        stage_costs: the costs that were simulated.
        custom: the schedule itself, if it is not one of the library.
    """

    shape: PlanShape
    stages: tuple[tuple[str, ...], ...]
    recompute: tuple[str, ...]
    seconds: Number
    reduce: Number
    memory: Numbers
    limit: Number
    tokens: Count
    stage_costs: StageCosts = field(repr=False, compare=False)
    custom: CustomSchedule = field(repr=False, default=None)

    __pydantic_config__ = FILE

    def __post_init__(self) -> None:
        shape = self.shape
        check_size("a plan of", shape)
        stages = self.custom.stages if self.custom else shape.ranks * shape.stages_per_rank
        if not len(self.stages) == stages == len(self.stage_costs.forward) or not all(self.stages):
            raise UsageError(
                f"the schedule has {stages} stages, but the plan names modules for {len(self.stages)} and "
                f"costs for {len(self.stage_costs.forward)}"
            )
        if len(self.memory) != shape.ranks:
            raise UsageError(f"the plan has {shape.ranks} ranks, and memory for {len(self.memory)}")

    @property
    def ranks(self) -> int:
        """The ranks of one pipeline."""
        return self.shape.ranks

    @property
    def replicas(self) -> int:
        """The number of pipelines that share the batch."""
        return self.shape.replicas

    @property
    def microbatches(self) -> int:
        """The number of parts into which each pipeline splits its batch."""
        return self.shape.microbatches

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule without messages, with the edges of this cut."""
        if self.custom is not None:
            return self.custom
        return scheduled(self.shape).with_edges(self.stage_costs.edges)

    @property
    def source(self) -> str | Schedule:
        """The ``schedule=`` of a Pipeline: a name, for any number of microbatches, or a schedule."""
        return self.shape.schedule if self.custom is None else self.custom

    @cached_property
    def simulation(self) -> Simulation:
        """The step, simulated with its messages."""
        return simulate(with_messages(self.schedule), self.stage_costs.costs)

    @property
    def timeline(self) -> Timeline:
        """The simulated step."""
        return self.simulation.timeline

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they do not compute."""
        return max(self.simulation.bubble, 0.0)

    @property
    def busiest(self) -> float:
        """The seconds that the busiest rank computes."""
        return max(self.simulation.busy)

    @property
    def rate(self) -> float:
        """Tokens per second, or samples if the profile does not give the tokens of a sample."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        shape = self.shape
        again = {
            "none": "",
            "all": ", all units recomputed",
            OFFLOAD: ", activations offloaded",
        }.get(shape.recompute, f", {len(self.recompute)} units recomputed")
        copies = f" x {shape.replicas} replicas" if shape.replicas > 1 else ""
        return (
            f"{shape.schedule} on {shape.ranks} ranks{copies}, {len(self.stages)} stages, "
            f"{shape.microbatches} microbatches of {shape.samples}{again}: {seconds_as_text(self.seconds)} "
            f"a step, bubble {self.bubble:.1%}, {bytes_as_text(max(self.memory))} on the fullest rank"
        )

    def to_json(self) -> str:
        """The plan as JSON."""
        return write_json(_PlanFile(self))

    @staticmethod
    def from_json(text: str) -> Plan:
        """Read what ``to_json`` wrote.

        Raises:
            InputFileError: the text is not a plan.
        """
        return read_json(_PlanFile, text, "a plan", "Plan.to_json").plan


@dataclass
class _PlanFile:
    plan: Plan
    format: Literal["penstock-plan"] = "penstock-plan"
    version: Literal[6] = 6

    __pydantic_config__ = FILE


def scheduled(shape: PlanShape) -> Schedule:
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


def check_size(what: str, shape: PlanShape) -> None:
    """Refuse a plan that would take minutes to build, before it is built.

    Raises:
        UsageError: a number is too large.
    """
    for name in ("ranks", "replicas", "microbatches"):
        number = getattr(shape, name)
        if number > LARGEST:
            raise UsageError(f"{what} {name}={number}: at most {LARGEST} can be planned")
    if shape.forwards > LARGEST:
        raise UsageError(
            f"{what} microbatches={shape.microbatches} on {shape.ranks * shape.stages_per_rank} stages: "
            f"they make {shape.forwards} forwards, and at most {LARGEST} can be planned"
        )


# ---- memory


class Order:
    """The order in which a schedule's ranks compute, in arrays that make counting memory fast.

    Args:
        schedule: the schedule, with any edges.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._placement, self._microbatches = schedule.placement, schedule.microbatches
        self._ranks = []
        for rank in range(schedule.ranks):
            actions = [action for action in schedule.actions(rank) if action.op in _CODE]
            ops = np.array([_CODE[action.op] for action in actions], dtype=np.intp)
            self._ranks.append((ops, np.array([action.stage for action in actions], dtype=np.intp)))
        self._away = [_away(schedule.actions(rank)) for rank in range(schedule.ranks)]

    def flying(self) -> list[int]:
        """For how many microbatches and stages each rank holds activations at a time, at most."""
        steps = np.array([1, -1, 0, -1])
        return [int(np.cumsum(steps[ops]).max(initial=0)) for ops, _ in self._ranks]

    def held(self, costs: StageCosts) -> list[npt.NDArray[Any]]:
        """The most bytes that each rank holds during each of its actions, in their order."""
        activation, stash, left = map(np.array, (costs.activation, costs.stash, costs.left))
        changes = np.stack([activation, stash - activation + left, -stash, left - activation])
        extra = np.array([costs.extra[op.value] for op in _CODE])
        result = []
        for rank, (ops, stages) in enumerate(self._ranks):
            changed = changes[ops, stages]
            after = np.cumsum(changed)
            most = np.maximum(after, after - changed) + extra[ops, stages]
            most += costs.static_on(self._placement, rank)
            for stage in self._placement.stages_on(rank):
                mine = stages == stage
                forward, backward = mine & (ops == 0), mine & ((ops == 1) | (ops == 3))
                most += self._under_way(forward, backward, stage, costs)
            for stage, start, stop in self._away[rank]:
                most[start + costs.ahead : stop] -= activation[stage]
            result.append(most)
        return result

    def _under_way(self, forward: Any, backward: Any, stage: int, costs: StageCosts) -> Any:
        """The bytes of a stage's messages during each action of its rank.

        The next messages of a kind have memory from the time when the first is used. A rank learns that its
        own message has left only when later ones have arrived, and frees it before its next backward.
        """
        done = backward.cumsum()
        arriving = self._next_ones(forward.cumsum()) * costs.taken[stage]
        arriving = arriving + self._next_ones(done) * costs.returned[stage]
        arriving = arriving + np.minimum(forward.cumsum() - done, AHEAD) * costs.given[stage]
        return arriving + np.minimum(done - backward, AHEAD - backward) * costs.sent[stage]

    def _next_ones(self, used: Any) -> Any:
        """The number of messages that have memory ready once so many of them were used."""
        return np.where(used > 0, np.minimum(self._microbatches - used, AHEAD), 0)

    def peaks(self, costs: StageCosts) -> tuple[float, ...]:
        """The most bytes that each rank holds in a step."""
        return tuple(float(rank.max(initial=0.0)) for rank in self.held(costs))


_CODE = {Op.F: 0, Op.I: 1, Op.W: 2, Op.B: 3}


def _away(actions: Iterable[Action]) -> list[tuple[int, int, int]]:
    """The activations that leave a rank: their stage, and before which actions they leave and come back."""
    away, left, place = list[tuple[int, int, int]](), dict[Any, int](), 0
    for action in actions:
        place += action.op in _CODE
        key = action.stage, action.microbatch
        if action.op is Op.OFFLOAD:
            left[key] = place
        elif action.op is Op.RELOAD:
            away.append((action.stage, left[key], place))
    return away


# ---- comparing plans


def row_of(plan: Plan, best: Plan) -> list[str]:
    """A plan as the cells of a table row, compared with the best one."""
    shape = plan.shape
    again = shape.recompute if shape.recompute != "needed" else f"{len(plan.recompute)} units"
    return [
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
        why_slower(plan, best),
    ]


COLUMNS = [
    "schedule", "ranks", "replicas", "stages", "microbatches", "recomputed", "step", "per second",
    "bubble", "memory by rank", "why not",
]  # fmt: skip


def why_slower(plan: Plan, best: Plan) -> str:
    """The main reason why a plan is slower than the best one."""
    more = plan.seconds - best.seconds
    if plan is best:
        return "the fastest"
    if more <= 1e-9 * best.seconds:
        return "as fast"
    waits = plan.seconds - plan.reduce - plan.busiest
    best_waits = best.seconds - best.reduce - best.busiest
    causes = {
        "its busiest rank waits {} longer": waits - best_waits,
        "its busiest rank computes {} more": plan.busiest - best.busiest,
        "its replicas sum gradients {} longer": plan.reduce - best.reduce,
    }
    text = max(causes, key=lambda cause: causes[cause])
    return f"+{more / best.seconds:.1%}: " + text.format(seconds_as_text(causes[text]))


def _memories(memory: Sequence[float]) -> str:
    """The memory of each rank; if there are many, the least and the most."""
    if len(memory) > 4:
        return f"{bytes_as_text(min(memory))} to {bytes_as_text(max(memory))}"
    return ", ".join(map(bytes_as_text, memory))


def seconds_as_text(seconds: float) -> str:
    """A time in a suitable unit."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
