"""The clock: what actions cost, and the one loop that runs programs on simulated clocks.

The loop takes programs of numbers. ``numbered.py`` makes them of a schedule, for the validator and the
simulator; the search makes its own.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.errors import UsageError
from penstock.schedule.action import Action, Op, Slice
from penstock.schedule.base import Schedule

# ---- what actions cost


Cost = float | Sequence[float]
"""One number for every stage, or one per stage."""


@dataclass(frozen=True)
class Costs:
    """The costs of actions: one number for all stages, or one per stage.

    Args:
        forward: time of F.
        input: time of I.
        weight: time of W.
        backward: time of B; input + weight if not given.
        latency: time from the moment a message is posted at both ends until it has arrived.
        bandwidth: bytes that a channel carries per unit of time, one message after the other.
        links: latency and bandwidth between pairs of ranks, where they differ from these two.
        message: bytes of each value by its name in the edge table, or one number for all.
        activation: memory that F of a stage holds until its I or B is done.
        stash: memory that I holds until W is done.
        host_latency: time that a copy between a device and its host takes beside that of its bytes.
        host_bandwidth: units of ``activation`` that such a copy moves per unit of time.
        overlap: the share of the shorter half that an overlapped pair hides, from 0 to 1, by the stage of its
            F; 0 where F runs first, and then the backward.
        slice_times: the share of a microbatch's times that each of its slices takes; by default equal. Later
            slices of causal attention take more.
        slice_sizes: the share of its memory and of its messages that each of them has; by default equal.
        unit: the unit of the times: ``s``, ``ms``, ``us``, or empty for plain numbers.

    Raises:
        UsageError: a number that is negative or not finite, or a bandwidth of 0.
    """

    forward: Cost = 1
    input: Cost = 1
    weight: Cost = 1
    backward: Cost | None = None
    latency: float = 0
    bandwidth: float = math.inf
    links: Mapping[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    message: float | Mapping[str, float] = 0
    activation: Cost = 1
    stash: Cost = 1
    host_latency: float = 0
    host_bandwidth: float = math.inf
    overlap: Cost = 0
    slice_times: Sequence[float] | None = None
    slice_sizes: Sequence[float] | None = None
    unit: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for name in ("forward", "input", "weight", "activation", "stash"):
            _check_cost(name, getattr(self, name))
        if self.backward is not None:
            _check_cost("backward", self.backward)
        _check_cost(
            "message",
            list(self.message.values()) if isinstance(self.message, Mapping) else self.message,
        )
        for latency, bandwidth in ((self.latency, self.bandwidth), *self.links.values()):
            _check_cost("latency", latency)
            _check_bandwidth("bandwidth", bandwidth)
        _check_cost("host_latency", self.host_latency)
        _check_bandwidth("host_bandwidth", self.host_bandwidth)
        for name in ("slice_times", "slice_sizes"):
            _check_cost(name, getattr(self, name) or 0)
        for share in self.overlap if isinstance(self.overlap, Sequence) else (self.overlap,):
            if not 0 <= share <= 1:
                raise UsageError(f"overlap={share}: must be from 0 to 1")

    def per_stage(self, name: str, stages: int) -> list[float]:
        """One of the costs as a list, with a number for each stage.

        Args:
            name: ``forward``, ``input``, ``weight``, ``backward``, ``activation``, ``stash`` or ``overlap``.
            stages: the number of stages.

        Raises:
            UsageError: the cost is a list of another length.
        """
        if name == "backward" and self.backward is None:
            halves = zip(
                self.per_stage("input", stages), self.per_stage("weight", stages), strict=True
            )
            return [first + second for first, second in halves]
        cost: Cost = getattr(self, name)
        if not isinstance(cost, Sequence):
            return [cost] * stages
        if len(cost) != stages:
            raise UsageError(
                f"{name} has {len(cost)} numbers for {stages} stages: give one for each stage, or one for all"
            )
        return list(cost)

    def per_slice(self, name: str, schedule: Schedule) -> Callable[[int | Slice | None], float]:
        """The share that a part of a microbatch has of its costs: 1 for a whole one.

        Args:
            name: ``slice_times`` or ``slice_sizes``.
            schedule: the schedule, which says how many slices there are.

        Raises:
            UsageError: the cost is a list of another length.
        """
        if schedule.slices == 1:
            return lambda _: 1.0
        shares = getattr(self, name) or [1 / schedule.slices] * schedule.slices
        if len(shares) != schedule.slices:
            raise UsageError(
                f"{name} has {len(shares)} numbers for {schedule.slices} slices: give one for each"
            )
        return lambda part: shares[part.number] if isinstance(part, Slice) else 1.0

    def wire(self, source: int, target: int) -> tuple[float, float]:
        """Latency and bandwidth of messages from one rank to another."""
        return self.links.get((source, target), (self.latency, self.bandwidth))

    def bytes_of(self, value: str) -> float:
        """The bytes that a value of the edge table takes in a message."""
        return self.message.get(value, 0) if isinstance(self.message, Mapping) else self.message


def _check_cost(name: str, cost: Cost) -> None:
    for number in cost if isinstance(cost, Sequence) else (cost,):
        if not (math.isfinite(number) and number >= 0):
            raise UsageError(f"{name}={number}: must be a finite number, at least 0")


def _check_bandwidth(name: str, bandwidth: float) -> None:
    if not bandwidth > 0:
        raise UsageError(f"{name}={bandwidth}: must be above 0")


COST_OF = {Op.F: "forward", Op.I: "input", Op.W: "weight", Op.B: "backward"}
"""The name of the time of each op that takes time."""


def durations(costs: Costs, stages: int) -> dict[Op, list[float]]:
    """The durations of each op that takes time, by stage."""
    return {op: costs.per_stage(name, stages) for op, name in COST_OF.items()}


def growths(costs: Costs, stages: int) -> dict[Op, list[float]]:
    """By how much each such op changes what its rank holds."""
    activation, stash = (costs.per_stage(name, stages) for name in ("activation", "stash"))
    return {
        Op.F: activation,
        Op.I: [left - held for left, held in zip(stash, activation, strict=True)],
        Op.W: [-left for left in stash],
        Op.B: [-held for held in activation],
    }


def transfer_of(schedule: Schedule, send: Action, costs: Costs) -> float:
    """The time for which a message, given by its SEND, keeps its channel busy."""
    if not costs.message:
        return 0.0
    forward = send.op is Op.SEND_F
    maker, user = (send.stage, send.peer_stage) if forward else (send.peer_stage, send.stage)
    rank_of = schedule.placement.rank_of
    size = sum(
        costs.bytes_of(edge.value)
        for edge in schedule.edges
        if edge.source == maker
        and (forward or edge.gradient)
        and rank_of[user] in {rank_of[target] for target in edge.targets}
    )
    return size / costs.wire(rank_of[send.stage], rank_of[send.peer_stage])[1]


# ---- the loop


Link = tuple[int, float]
"""A number that is needed, and how long after its end its result arrives."""
NOT_YET = -1.0
ITS_TURN = -1


class Ran(NamedTuple):
    """The progress of programs, with times.

    Attributes:
        start: when each number started, or ``NOT_YET``.
        end: when each number ended, or ``NOT_YET``.
        cause: the need whose result came last and made each number wait, or ``ITS_TURN`` if none came after
            the number before it in its program had ended.
        order: the numbers in an order in which one process may run them.
        stuck: for each program that did not finish, the number at which it stopped and the one it needs.
    """

    start: list[float]
    end: list[float]
    cause: list[int]
    order: list[int]
    stuck: dict[int, tuple[int, int]]


def run(
    programs: Sequence[Sequence[int]], duration: Sequence[float], needs: Sequence[Sequence[Link]]
) -> Ran:
    """Run programs, each on a clock of its own: a number starts as soon as its program and needs allow.

    A program runs until it needs a time that is not known yet, so the loop is linear in the numbers.

    Args:
        programs: the numbers of each program, in order.
        duration: how long each number takes.
        needs: what each number needs from other programs.
    """
    start, end = [NOT_YET] * len(duration), [NOT_YET] * len(duration)
    cause, order = [ITS_TURN] * len(duration), list[int]()
    asleep: dict[int, list[int]] = {}
    clock, at = [0.0] * len(programs), [0] * len(programs)
    ready = deque(range(len(programs)))

    def advance(one: int) -> None:
        """Run a program until it ends, or until it needs a number that has not ended."""
        now, program = clock[one], programs[one]
        for place in range(at[one], len(program)):
            number = program[place]
            for needed, lag in needs[number]:
                when = end[needed]
                if when < 0:
                    clock[one], at[one] = now, place
                    asleep.setdefault(needed, []).append(one)
                    return
                if when + lag > now:
                    now = when + lag
                    cause[number] = needed
            order.append(number)
            start[number] = now
            end[number] = now = now + duration[number]
            if number in asleep:
                ready.extend(asleep.pop(number))

    while ready:
        advance(ready.popleft())
    waiting = ((one, needed) for needed, each in asleep.items() for one in each)
    stuck = {one: (programs[one][at[one]], needed) for one, needed in waiting}
    return Ran(start, end, cause, order, stuck)
