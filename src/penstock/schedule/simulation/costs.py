"""What the actions of a schedule cost: plain numbers, in any one unit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.errors import UsageError

Cost = float | Sequence[float]
"""One number for every stage, or one per stage."""


@dataclass(frozen=True)
class Costs:
    """What each action costs, one number for all stages or one per stage.

    Args:
        forward: time of F.
        input: time of I.
        weight: time of W.
        backward: time of B; input + weight where not given.
        latency: time from the moment a message is posted at both ends until it is there.
        bandwidth: bytes that a channel carries in a unit of time; its messages go one after the other.
        message: bytes of each value by its name in the edge table, or one number for all.
        activation: what F of a stage holds until its I or B is done.
        stash: what I leaves until W is done.
        overlap: the share of the shorter half that an overlapped pair of F and B hides, from 0 to 1.
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
    message: float | Mapping[str, float] = 0
    activation: Cost = 1
    stash: Cost = 1
    overlap: float = 0
    unit: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for name in ("forward", "input", "weight", "activation", "stash", "latency"):
            _check(name, getattr(self, name))
        if self.backward is not None:
            _check("backward", self.backward)
        _check(
            "message",
            list(self.message.values()) if isinstance(self.message, Mapping) else self.message,
        )
        if not self.bandwidth > 0:
            raise UsageError(f"bandwidth={self.bandwidth}: must be above 0")
        if not 0 <= self.overlap <= 1:
            raise UsageError(f"overlap={self.overlap}: must be from 0 to 1")

    def per_stage(self, name: str, stages: int) -> list[float]:
        """One of the costs, a number per stage.

        Args:
            name: ``forward``, ``input``, ``weight``, ``backward``, ``activation`` or ``stash``.
            stages: how many stages there are.

        Raises:
            UsageError: a list of another length.
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

    def bytes_of(self, value: str) -> float:
        """The bytes of one message of a value of the edge table."""
        return self.message.get(value, 0) if isinstance(self.message, Mapping) else self.message


def _check(name: str, cost: Cost) -> None:
    for number in cost if isinstance(cost, Sequence) else (cost,):
        if not (math.isfinite(number) and number >= 0):
            raise UsageError(f"{name}={number}: must be a finite number, at least 0")
