"""Timelines: when each action of a step ran, simulated or measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from penstock.errors import InputFileError, UsageError, printable
from penstock.schedule.action import COMPUTE_OPS, Action, Overlap, Slice, parse_action
from penstock.schedule.base import flat

MICROSECONDS: Mapping[str, float] = {"s": 1e6, "ms": 1e3, "us": 1.0, "": 1e3}
"""Microseconds in each unit of time; a Chrome trace draws a unit without a name as a millisecond."""


class Span(NamedTuple):
    """An action of a rank and when it ran."""

    rank: int
    action: Action
    start: float
    end: float

    @property
    def duration(self) -> float:
        """The duration of the action."""
        return self.end - self.start


@dataclass(frozen=True)
class Timeline:
    """The spans of a step.

    Args:
        spans: the actions with their ranks and times, in any order.
        ranks: the number of ranks.
        unit: the unit of the times: ``s``, ``ms``, ``us``, or empty for plain numbers.
        pairs: the forwards and backwards that the schedule runs as overlapped pairs.

    Raises:
        UsageError: the unit is unknown, or a span has no valid rank or ends before it starts.
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
    def overlapped(self) -> tuple[Overlap, ...]:
        """The pairs whose halves ran at the same time, rather than one after the other."""
        ran = {span.action: span for span in self.spans if self.pairs}
        return tuple(
            pair
            for pair in self.pairs
            if pair.forward in ran
            and pair.backward in ran
            and ran[pair.forward].end > ran[pair.backward].start
        )

    @cached_property
    def start(self) -> float:
        """The start of the first span; 0 if there are none."""
        return min((span.start for span in self.spans), default=0.0)

    @cached_property
    def makespan(self) -> float:
        """The time from the first start to the last end."""
        return max((span.end for span in self.spans), default=0.0) - self.start

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The computing time of each rank; time in which spans overlap counts once."""
        return tuple(_covered(self.of_rank(rank)) for rank in range(self.ranks))

    @property
    def bubbles(self) -> tuple[float, ...]:
        """The share of the makespan in which each rank did not compute."""
        return tuple(1 - busy / self.makespan if self.makespan else 0.0 for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The share of the makespan in which ranks did not compute, over all ranks."""
        return sum(self.bubbles) / self.ranks

    @cached_property
    def _of_rank(self) -> tuple[tuple[Span, ...], ...]:
        spans: list[list[Span]] = [[] for _ in range(self.ranks)]
        for span in sorted(self.spans, key=lambda span: (span.start, span.end)):
            spans[span.rank].append(span)
        return tuple(map(tuple, spans))

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        """The spans of a rank, in the order in which they start."""
        return self._of_rank[rank]

    def to_chrome_trace(self) -> str:
        """The timeline as Chrome-trace JSON, for ``chrome://tracing`` or Perfetto: one thread per rank."""
        scale = MICROSECONDS[self.unit]
        pairs = [str(pair) for pair in self.pairs]
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "pairs", "pid": 0, "tid": 0, "args": {"pairs": pairs}},
        ] * bool(pairs)
        events += [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank}
            | {"args": {"name": f"rank {rank}"}}
            for rank in range(self.ranks)
        ]
        for rank, action, start, end in self.spans:
            stage, op, part, _ = action
            where = {"microbatch": part}
            if isinstance(part, Slice):
                where = {"microbatch": part.microbatch, "slice": part.number}
            times = {"ts": (start - self.start) * scale, "dur": (end - start) * scale}
            args = {"op": op.value, "stage": stage, **where}
            what = {"ph": "X", "name": str(action), "cat": op.value, "args": args}
            events.append({**what, **times, "pid": 0, "tid": rank})
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})

    @staticmethod
    def from_chrome_trace(text: str) -> Timeline:
        """Read what ``to_chrome_trace`` wrote; times are in seconds.

        Raises:
            InputFileError: the text is not such a trace.
        """
        try:
            events = json.loads(text)["traceEvents"]
            spans = [
                Span(int(event["tid"]), one, event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
                for event in events
                if event["ph"] == "X"
                for one in flat((parse_action(event["name"]),))
            ]
            ranks = 1 + max((int(event["tid"]) for event in events), default=0)
            if ranks > len(events):
                raise InputFileError(
                    f"rank {ranks - 1} among {len(events)} events, one or more a rank"
                )
            named = [event["args"]["pairs"] for event in events if event["name"] == "pairs"]
            parsed = [parse_action(text) for texts in named for text in texts]
            pairs = tuple(pair for pair in parsed if isinstance(pair, Overlap))
            return Timeline(tuple(spans), ranks, "s", pairs)
        except (
            ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError
        ) as error:  # fmt: skip
            raise InputFileError(
                "not a trace of a step as Timeline.to_chrome_trace writes it: "
                + printable(str(error), "")[:300]
            ) from error


def _covered(spans: Iterable[Span]) -> float:
    """Return how long at least one computing span runs; ``spans`` are sorted by start."""
    covered, end = 0.0, float("-inf")
    for span in spans:
        if span.action.op in COMPUTE_OPS and span.end > end:
            covered += span.end - max(span.start, end)
            end = span.end
    return covered
