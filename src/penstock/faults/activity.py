"""What a rank does right now, noted so cheaply that every action can be noted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, NamedTuple

from penstock.faults.slate import Slate

OUTSIDE = "outside of the pipeline"
"""What a rank does between two calls: the code of the user's own loop."""


Probe = Callable[["Activity", Any], object]
_PROBES: list[Probe] = []


def add_probe(probe: Probe) -> Callable[[], None]:
    """Have a function called at the begin of every action, as tests do to make it fail.

    Returns:
        A function that takes it away.
    """
    _PROBES.append(probe)
    return lambda: _PROBES.remove(probe) if probe in _PROBES else None


class Waiting(NamedTuple):
    """What a rank waits for, and from which ranks; None says from all that do not wait alike."""

    why: object
    peers: tuple[int, ...] | None


class Activity:
    """One rank's place in its program: written by the thread that runs it, read by a monitor.

    Attributes:
        rank: whose.
        calls: how many calls of the pipeline it has begun.
        step: how many of them were training steps.
        inside: whether it is in a call now.
        doing: the action it is in or was in last, None before the first of a call and after the last.
        waiting: what it waits for, if it waits.
        since: when that began, on this process's monotonic clock.
        progress: a number that grows with everything it does.
        busy: for each stage the seconds that its actions have taken, and how many there were.
        slate: where every action is written down for others, if there is such a place.
        concern: called before each action; raises where this rank must stop.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls = 0
        self.step = 0
        self.inside = False
        self.doing: Any = None
        self.waiting: Waiting | None = None
        self.since = monotonic()
        self.progress = 0
        self.busy: dict[int, list[float]] = {}
        self.slate: Slate | None = None
        self.concern: Callable[[], None] | None = None

    def begin(self, *, training: bool) -> None:
        """A call of the pipeline begins."""
        self.calls += 1
        self.step += training
        self.inside = True
        self._moved(None)

    def end(self) -> None:
        """The call is over, in whatever way."""
        self.inside = False
        self._moved(None)

    def take_back(self, *, training: bool) -> None:
        """The last call was refused before it began, and does not count."""
        self.calls -= 1
        self.step -= training

    def at(self, action: Any) -> None:
        """An action begins."""
        if self.concern is not None:
            self.concern()
        self._moved(action)
        if self.slate is not None:
            self.slate.write(self.progress, self.calls, self.step, self.since, action)
        if _PROBES:
            for probe in tuple(_PROBES):
                probe(self, action)

    def wait(self, why: object, peers: Sequence[int] | None) -> None:
        """A wait begins."""
        self._moved(self.doing)
        self.waiting = Waiting(why, None if peers is None else tuple(peers))

    def go_on(self) -> None:
        """The wait is over."""
        self._moved(self.doing)

    def over(self) -> None:
        """All actions of the call are done; what follows all ranks do alike."""
        self._moved(None)

    def worked(self, stage: int) -> None:
        """The action was one of a stage's own work, and is over: note how long it took."""
        found = self.busy.get(stage)
        if found is None:
            found = self.busy[stage] = [0.0, 0]
        found[0] += monotonic() - self.since
        found[1] += 1

    def _moved(self, doing: Any) -> None:
        self.waiting = None
        self.doing = doing
        self.since = monotonic()
        self.progress += 1

    def snapshot(self) -> dict[str, Any]:
        """All that as JSON data; read while it changes, so its parts may be of two moments."""
        doing, waiting = self.doing, self.waiting
        return {
            "rank": self.rank,
            "calls": self.calls,
            "step": self.step,
            "inside": self.inside,
            "action": None if doing is None else str(doing),
            "stage": getattr(doing, "stage", None),
            "microbatch": getattr(doing, "microbatch", None),
            "waits": None if waiting is None else str(waiting.why),
            "peers": None if waiting is None or waiting.peers is None else list(waiting.peers),
            "age": monotonic() - self.since,
            "progress": self.progress,
            "busy": {str(stage): list(found) for stage, found in list(self.busy.items())},
        }
