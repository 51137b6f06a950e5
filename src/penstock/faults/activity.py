"""What a rank does right now, noted so cheaply that every action can be noted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, NamedTuple

from penstock.faults.board import Slate

Probe = Callable[["Activity", Any], object]
_PROBES: list[Probe] = []


def add_probe(probe: Probe) -> Callable[[], None]:
    """Have a function called at the begin of all that a rank does, as tests do to make it fail.

    Returns:
        A function that takes it away.
    """
    _PROBES.append(probe)
    return lambda: _PROBES.remove(probe) if probe in _PROBES else None


def has_probes() -> bool:
    """Whether there is such a function."""
    return bool(_PROBES)


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
        making: what it does to set its pipeline up; None once that is made.
        doing: the action it is in or was in last, None before the first of a call and after the last.
        waiting: what it waits for, if it waits.
        since: when that began, on this process's monotonic clock.
        progress: a number that grows with everything it does.
        slack: seconds that it needs for what it does now, where that is more than a step's time.
        busy: for each stage the seconds that its actions have taken, and how many there were.
        slate: where actions are written down for others, if there is such a place.
        halt: whether there may be a reason to stop, to be looked into before the next action; the monitor and
            a fork set it, so that an action without one asks nothing more than this.
        concern: looks into it, and raises where this rank must stop.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls = 0
        self.step = 0
        self.inside = False
        self.making: str | None = None
        self.doing: Any = None
        self.waiting: Waiting | None = None
        self.since = monotonic()
        self.progress = 0
        self.slack = 0.0
        self.busy: dict[int, list[float]] = {}
        self.slate: Slate | None = None
        self._running: list[float] | None = None
        self.halt = False
        self.concern: Callable[[], None] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether it is in a call, or its pipeline is being set up."""
        return self.inside or self.making is not None

    def make(self, doing: str | None) -> None:
        """The pipeline is being set up, by this; with None it is made."""
        self.making = doing
        self._moved(None)
        self._write_down()
        if doing is not None:
            self._probe(doing)

    def begin(self, *, training: bool) -> None:
        """A call of the pipeline begins."""
        self.calls += 1
        self.step += training
        self.inside = True
        self._moved(None)
        self._write_down()

    def end(self) -> None:
        """The call is over, in whatever way."""
        self.inside = False
        self._moved(None)
        self._write_down()

    def take_back(self, *, training: bool) -> None:
        """The last call was refused before it began, and does not count."""
        self.calls -= 1
        self.step -= training

    def at(self, action: Any) -> None:
        """An action begins."""
        if self.halt and self.concern is not None:
            self.concern()
        self._moved(action)
        self._write_down()
        if _PROBES:
            self._probe(action)

    def noting(self, action: Any, *, works: bool) -> Callable[[object], None]:
        """Gives :meth:`at` of one action, for a program that runs it many times; called with anything.

        Args:
            action: which one.
            works: whether it is a stage's own work, whose time counts until what is noted next.
        """
        write = None if self.slate is None else self.slate.writer(action)
        account = self.busy.setdefault(action.stage, [0.0, 0]) if works else None

        def note(_: object) -> None:
            if self.halt and self.concern is not None:
                self.concern()
            self._settle(now := monotonic())
            self._running = account
            self.waiting = None
            self.doing = action
            self.since = now
            self.progress = progress = self.progress + 1
            if write is not None:
                write(progress, self.calls, self.step, now)
            if _PROBES:
                self._probe(action)

        return note

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

    def _settle(self, now: float) -> None:
        """What ran until now, if anything did, is over: note how long it took."""
        if self._running is not None:
            self._running[0] += now - self.since
            self._running[1] += 1
            self._running = None

    def _moved(self, doing: Any) -> None:
        self._settle(now := monotonic())
        self.waiting = None
        self.doing = doing
        self.since = now
        self.progress += 1

    def _probe(self, doing: Any) -> None:
        for probe in tuple(_PROBES):
            probe(self, doing)

    def _write_down(self) -> None:
        if self.slate is not None:
            self.slate.write(
                self.progress,
                self.calls,
                self.step,
                self.since,
                self.inside,
                self.slate.text(self.doing or self.making),
                making=self.doing is None and self.making is not None,
            )

    def snapshot(self) -> dict[str, Any]:
        """All that as JSON data; read while it changes, so its parts may be of two moments."""
        doing, waiting = self.doing, self.waiting
        return {
            "rank": self.rank,
            "calls": self.calls,
            "step": self.step,
            "inside": self.inside,
            "making": self.making,
            "action": None if doing is None else str(doing),
            "stage": getattr(doing, "stage", None),
            "microbatch": getattr(doing, "microbatch", None),
            "waits": None if waiting is None else str(waiting.why),
            "peers": None if waiting is None or waiting.peers is None else list(waiting.peers),
            "age": monotonic() - self.since,
            "progress": self.progress,
            "slack": self.slack,
            "busy": {str(stage): list(found) for stage, found in list(self.busy.items())},
        }
