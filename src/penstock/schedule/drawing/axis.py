"""Time as people read it: a unit, round ticks, short numbers."""

from __future__ import annotations

import math
from typing import NamedTuple

from penstock.schedule.timeline import Timeline

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_STEPS = (1, 2, 5, 10)


class Unit(NamedTuple):
    """A unit to write times in: its name, and how many of it one unit of the timeline is."""

    name: str
    factor: float


def unit_for(timeline: Timeline) -> Unit:
    """The unit in which the makespan is a number from 1 to 1000, where its unit is one of time."""
    if timeline.unit not in _SECONDS:
        return Unit("", 1.0)
    seconds = timeline.makespan * _SECONDS[timeline.unit]
    name = next((name for name, size in _SECONDS.items() if seconds >= size), "us")
    return Unit(name, _SECONDS[timeline.unit] / _SECONDS[name])


def ticks(length: float, wanted: int) -> list[float]:
    """About ``wanted`` round numbers from 0 to ``length``, 1, 2 or 5 times a power of 10 apart."""
    if length <= 0:
        return [0.0]
    rough = length / max(1, wanted)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * s for s in _STEPS if power * s >= rough * (1 - 1e-9))
    return [step * i for i in range(math.floor(length / step * (1 + 1e-9)) + 1)]


def short(number: float) -> str:
    """A number in at most five digits."""
    return f"{number:.5g}"


def percent(share: float) -> str:
    """A share as a percentage."""
    return f"{100 * share:.1f} %"
