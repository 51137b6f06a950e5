"""When each action ran: of a simulated step, or of a measured one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from penstock.errors import UsageError
from penstock.schedule.action import COMPUTE_OPS, Action, Overlap

MICROSECONDS: Mapping[str, float] = {"s": 1e6, "ms": 1e3, "us": 1.0, "": 1e3}
"""What a unit of time is in a Chrome trace; where the unit has no name, one is drawn as a millisecond."""


class Span(NamedTuple):
    """An action of a rank and when it ran."""

    rank: int
    action: Action
    start: float
    end: float

    @property
    def duration(self) -> float:
        """How long it ran."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The spans of a step.

    Args:
        spans: when which action ran on which rank; in any order.
        ranks: how many ranks there are.
        unit: of the times: ``s``, ``ms``, ``us``, or empty where they are just numbers.
        pairs: the forwards and backwards that the schedule runs as overlapped pairs.

    Raises:
        UsageError: an unknown unit, a span of a rank that is not there or that ends before it starts.
    """

    spans: tuple[Span, ...]
    ranks: int
    unit: str = "s"
    pairs: tuple[Overlap, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "spans", tuple(self.spans))
        if self.unit not in MICROSECONDS:
            raise UsageError(
                f"unit={self.unit!r}: must be one of {', '.join(map(repr, MICROSECONDS))}"
            )
        for span in self.spans:
            if not (0 <= span.rank < self.ranks and span.start <= span.end):
                raise UsageError(
                    f"{span}: must be of a rank below {self.ranks} and end after it starts"
                )

    @cached_property
    def start(self) -> float:
        """When the first span starts; 0 where there is none."""
        return min((span.start for span in self.spans), default=0.0)

    @cached_property
    def makespan(self) -> float:
        """From the first start to the last end."""
        return max((span.end for span in self.spans), default=0.0) - self.start

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For each rank how long it computed; what overlaps counts once."""
        return tuple(_covered(self.of_rank(rank)) for rank in range(self.ranks))

    @property
    def bubbles(self) -> tuple[float, ...]:
        """For each rank the share of the makespan in which it did not compute."""
        return tuple(1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The share of the makespan in which ranks did not compute, over all ranks."""
        return sum(self.bubbles) / self.ranks

    @cached_property
    def _of_rank(self) -> tuple[tuple[Span, ...], ...]:
        found: list[list[Span]] = [[] for _ in range(self.ranks)]
        for span in sorted(self.spans, key=lambda span: (span.start, span.end)):
            found[span.rank].append(span)
        return tuple(map(tuple, found))

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        """The spans of a rank by start."""
        return self._of_rank[rank]

    def to_chrome_trace(self) -> str:
        """The timeline as Chrome-trace JSON, for ``chrome://tracing`` or Perfetto: one thread per rank."""
        scale = MICROSECONDS[self.unit]
        names = (_thread_name(rank) for rank in range(self.ranks))
        events = (_event(span, self.start, scale) for span in self.spans)
        return json.dumps({"traceEvents": [*names, *events], "displayTimeUnit": "ms"})


def _covered(spans: Iterable[Span]) -> float:
    """How long any computing span of a rank runs; ``spans`` are by start."""
    covered, end = 0.0, float("-inf")
    for span in spans:
        if span.action.op in COMPUTE_OPS and span.end > end:
            covered += span.end - max(span.start, end)
            end = span.end
    return covered


def _thread_name(rank: int) -> dict[str, object]:
    return {
        "ph": "M",
        "name": "thread_name",
        "pid": 0,
        "tid": rank,
        "args": {"name": f"rank {rank}"},
    }


def _event(span: Span, origin: float, scale: float) -> dict[str, object]:
    stage, op, microbatch, _ = span.action
    return {
        "ph": "X",
        "name": str(span.action),
        "cat": op.value,
        "pid": 0,
        "tid": span.rank,
        "ts": (span.start - origin) * scale,
        "dur": span.duration * scale,
        "args": {"op": op.value, "stage": stage, "microbatch": microbatch},
    }
