"""Where each rank is, and which one holds up the others.

A rank notes what it is doing, at so little cost that it can note every action. Heartbeats carry this to the
other ranks. From them, each rank finds out how long a rank may make no progress, which rank makes none, and
which stage is far too slow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import monotonic
from typing import Any, NamedTuple

from penstock.errors import UsageError
from penstock.faults.board import Slate

# ---- what a rank is doing


Probe = Callable[["Activity", Any], object]
_PROBES: list[Probe] = []


def add_probe(probe: Probe) -> Callable[[], None]:
    """Have a function called at the beginning of everything that a rank does; tests use it to inject faults.

    Returns:
        A function that removes it.
    """
    _PROBES.append(probe)
    return lambda: _PROBES.remove(probe) if probe in _PROBES else None


def has_probes() -> bool:
    """Whether any such function was added."""
    return bool(_PROBES)


class Waiting(NamedTuple):
    """What a rank waits for, and for which ranks; None stands for all that are not in the same operation."""

    why: object
    peers: tuple[int, ...] | None


class Activity:
    """One rank's place in its program, written by the thread that runs it and read by the monitor.

    Attributes:
        rank: the rank.
        calls: how many calls of the pipeline it has begun.
        step: how many of them were training steps.
        inside: whether it is in a call now.
        making: what it is doing to set up its pipeline; None when that is done.
        doing: the current or last action; None before the first one of a call and after the last one.
        waiting: what it waits for, if it waits.
        since: when that began, on this process's monotonic clock.
        progress: a number that grows with everything that it does.
        slack: seconds that it may need for what it does now, if that is more than a step's time.
        busy: for each stage, the seconds that its actions have taken, and their number.
        slate: where actions are noted for other ranks to read, if there is such a place.
        halt: whether there may be a reason to stop. The monitor and a fork set it, so that in the usual
            case an action checks nothing but this flag.
        concern: finds out whether there is one, and raises if this rank must stop.
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
        """The set-up of the pipeline does this now; None says that it is done."""
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
        """The call is over, or has failed."""
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
        """A fast :meth:`at` for one action that runs many times; its argument is ignored.

        Args:
            action: the action.
            works: whether it is a stage's own work, whose time is counted until the next note.
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
        """All actions of the call are done; what follows, all ranks do together."""
        self._moved(None)

    def _settle(self, now: float) -> None:
        """Add the time of the stage's work that has just ended, if any."""
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
        """All of this as JSON data. It may change while it is read, so its parts may be of two moments."""
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


# ---- how long a rank may make no progress

PATIENCE = 30.0
"""Seconds until all ranks must be there, and that one rank may hold up the others during the set-up."""
FIRST_STEP = 300.0
"""Seconds for the first step, in which much is compiled, allocated and connected."""
FLOOR = 30.0
FACTOR = 10.0
_REMEMBERED = 50

Timeout = float | tuple[float | None, float | None] | None
"""Seconds; or a pair for the first step and for later ones; or None for the defaults."""


class Patience:
    """How long a rank may make no progress while others wait for it.

    In a step and between steps, the limit is learned from earlier steps, or fixed. Until the Pipeline is
    made, it is the time in which the ranks have to meet.

    Args:
        fixed: seconds; or a pair for the first step and for later ones. None stands for 300 s in the first
            step, and then the larger of 30 s and ten times the median step.
        meeting: seconds in which the ranks have to meet.

    Raises:
        UsageError: one of them is not above 0.
    """

    def __init__(self, fixed: Timeout = None, meeting: float = PATIENCE) -> None:
        pair = fixed if isinstance(fixed, tuple) else (fixed, fixed)
        numbers = all(isinstance(seconds, int | float | None) for seconds in pair)
        if not numbers or len(pair) != 2 or not all(s is None or s > 0 for s in pair):
            raise UsageError(
                f"timeout={fixed!r}: must be more than 0 seconds, None, or a pair of these for the first "
                "step and the later ones"
            )
        first, later = pair
        if not meeting > 0:
            raise UsageError(f"rendezvous_timeout={meeting}: must be more than 0 seconds")
        self.meeting = meeting
        self.made = False
        self._first = FIRST_STEP if first is None else first
        self._fixed = later
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)

    def learn(self, seconds: float) -> None:
        """Note how long a step took."""
        self._steps.append(seconds)

    @property
    def limit(self) -> float:
        """The limit in seconds now."""
        if not self.made:
            return self.meeting
        if not self._steps:
            return self._first
        if self._fixed is not None:
            return self._fixed
        return max(FLOOR, FACTOR * median(self._steps))


# ---- where a rank is


@dataclass(frozen=True)
class Place:
    """Where a rank is, from its last heartbeat and the time since.

    Args:
        rank: the rank.
        calls: how many calls of the pipeline it has begun.
        inside: whether it is in a call.
        making: what it is doing to set up its pipeline; None when that is done.
        step: how many training steps it has begun.
        stage: of the current action, if it is in one.
        microbatch: of the current action.
        action: the current action.
        waits: what it waits for; None if it does not wait.
        peers: the ranks that it waits for; None stands for all that are not in the same operation.
        age: seconds since it last made progress.
        stale: seconds since its last heartbeat.
        condition: of its process: ``runs``, ``stopped``, ``ended`` or ``unknown``.
        limit: seconds that it may make no progress.
    """

    rank: int
    calls: int = 0
    inside: bool = True
    making: str | None = None
    step: int = 0
    stage: int | None = None
    microbatch: int | None = None
    action: str | None = None
    waits: str | None = None
    peers: tuple[int, ...] | None = None
    age: float = 0.0
    stale: float = 0.0
    condition: str = "runs"
    limit: float = 0.0

    def __str__(self) -> str:
        return f"rank {self.rank} {self.words}"

    @property
    def words(self) -> str:
        """What it is doing, and for how long."""
        if self.is_mute:
            return (
                f"has not been heard of for {self.stale:.1f} s; by its last word it {self._doing}; its "
                "process is stopped, its machine is down, or the network to it is cut"
            )
        return f"{self._doing} for {self.age:.1f} s{self._trouble}"

    @property
    def advice(self) -> str:
        """For a silent rank: what else is known, and what to do."""
        if self.is_mute:
            return ""
        runs = self.condition in ("runs", "unknown") and self.stale < STALE
        if not runs or (self.inside and self.making is None):
            return ", and waits for nobody"
        more = (
            "raise rendezvous_timeout=" if self.making is not None else "say so by pipe.patient()"
        )
        return f", and waits for nobody; if it needs that long, {more}"

    @property
    def is_mute(self) -> bool:
        """Whether it sends no heartbeats, and its process cannot be seen from here."""
        return self.stale >= STALE and self.condition == "unknown"

    @property
    def _doing(self) -> str:
        if self.waits is not None and self.making is None:
            return f"{self.waits}{self._sources}"
        if self.making is not None:
            return f"is making its pipeline ({self.waits or self.making})"
        if not self.inside:
            steps = (
                f"between steps, after step {self.step}" if self.step else "before its first step"
            )
            return f"is {steps}, in its own code,"
        return f"is in {self.action}" if self.action else "prepares a call"

    @property
    def _sources(self) -> str:
        if not self.peers:
            return ""
        ranks = ", ".join(map(str, self.peers))
        return f" from rank{'s' if len(self.peers) > 1 else ''} {ranks}"

    @property
    def _trouble(self) -> str:
        if self.condition == "stopped":
            return "; its process is stopped by a signal"
        if self.condition == "ended":
            return "; its process has ended"
        held = "; its interpreter is held by code that does not let other threads run"
        return held if self.stale >= STALE else ""


STALE = 1.5
"""Seconds without a heartbeat after which a rank's threads are taken not to run any more."""


# ---- which rank is silent


@dataclass(frozen=True)
class Verdict:
    """Which ranks are silent, and how that was found.

    Args:
        culprits: the ranks that wait for nobody and make no progress.
        chain: the chain of waits in words, from the rank that asked.
    """

    culprits: tuple[int, ...]
    chain: tuple[str, ...]


def find_silent(places: Mapping[int, Place], start: int) -> Verdict | None:
    """Follow the waits from a rank to where they end.

    Args:
        places: of every rank.
        start: the rank that has waited too long.

    Returns:
        The verdict; None while the ranks at the end still make progress.
    """
    order = _reached(places, start)
    idle = [rank for rank in order if not _held_up(places, rank)]
    late = [rank for rank in idle if _late(places[rank])]
    chain = tuple(str(places[rank]) for rank in order)
    if late:
        return Verdict((max(late, key=lambda rank: places[rank].age),), chain)
    if idle:
        return None
    waiting = [rank for rank in order if places[rank].age >= places[rank].limit]
    return Verdict(tuple(sorted(waiting)), chain) if len(waiting) == len(order) else None


def awaited(places: Mapping[int, Place], rank: int) -> Sequence[int]:
    """The ranks that a rank waits for.

    In an operation of all ranks, those that are not in it, if there are any.
    """
    place = places[rank]
    if place.waits is None:
        return ()
    if place.peers is not None:
        return [peer for peer in place.peers if peer in places and peer != rank]
    absent = [other for other in places if not _in_operation_of_all(places[other])]
    return absent or [other for other in places if other != rank]


def _in_operation_of_all(place: Place) -> bool:
    within = place.inside or place.making is not None
    return within and place.waits is not None and place.peers is None


def _reached(places: Mapping[int, Place], start: int) -> list[int]:
    order = [start]
    for rank in order:
        order += [peer for peer in awaited(places, rank) if peer not in order]
    return order


def _held_up(places: Mapping[int, Place], rank: int) -> bool:
    """Whether it waits for others.

    A process whose threads do not run waits for nobody, whatever it said last.
    """
    place = places[rank]
    return place.waits is not None and place.stale < STALE and place.condition != "stopped"


def _late(place: Place) -> bool:
    return place.condition == "ended" or place.age >= place.limit or place.condition == "stopped"


def place_of(found: Mapping[str, Any], *, stale: float, condition: str, limit: float) -> Place:
    """A place from a heartbeat and the time since."""
    peers = found["peers"]
    return Place(
        int(found["rank"]),
        int(found["calls"]),
        bool(found["inside"]),
        found["making"],
        int(found["step"]),
        found["stage"],
        found["microbatch"],
        found["action"],
        found["waits"],
        None if peers is None else tuple(int(peer) for peer in peers),
        float(found["age"]) + (0.0 if found.get("exact") else stale),
        stale,
        condition,
        max(limit, float(found["slack"])),
    )


# ---- which stage is slow: that is only logged

SLOW = 3.0
"""A stage this many times slower than the others' median is a straggler, as stages should be balanced."""
FEWEST = 8
"""Actions of a stage before it is judged."""
SHORTEST = 0.005
"""Seconds of an action below which a stage is too fast to matter."""


class Stragglers:
    """Compares the stages of a pipeline by how long their actions take, since the last look."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[float, int]] = {}
        self._named: set[int] = set()

    def find(self, beats: Iterable[Mapping[str, Any]]) -> list[str]:
        """Messages about stragglers that were not reported before.

        Args:
            beats: the heartbeats of all ranks.
        """
        now = {
            int(stage): (float(seconds), int(count))
            for beat in beats
            for stage, (seconds, count) in beat.get("busy", {}).items()
        }
        means = self._means(now)
        if len(means) < len(now) or len(means) < 2:
            return []
        self._before = now
        return [text for stage in means if (text := self._judge(stage, means))]

    def _means(self, now: Mapping[int, tuple[float, int]]) -> dict[int, float]:
        means = {}
        for stage, (seconds, count) in now.items():
            seconds_before, count_before = self._before.get(stage, (0.0, 0))
            if count - count_before >= FEWEST:
                means[stage] = (seconds - seconds_before) / (count - count_before)
        return means

    def _judge(self, stage: int, means: Mapping[int, float]) -> str:
        usual = median(mean for other, mean in means.items() if other != stage)
        seen = means[stage]
        if stage in self._named or seen < max(SHORTEST, SLOW * usual):
            return ""
        self._named.add(stage)
        return (
            f"stage {stage} is a straggler: an action takes {1e3 * seen:.1f} ms there, and "
            f"{1e3 * usual:.1f} ms in the other stages, which wait for it; look at its device, or cut the "
            "model so that this stage holds less"
        )
