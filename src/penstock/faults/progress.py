"""Where a rank is, and who holds everybody up.

A rank notes what it does right now, so cheaply that every action can be noted. Its heartbeats carry that to
the others, from which each finds how long a rank may do nothing, which one does, and which stage is far too
slow.
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

# ---- what a rank does right now


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


# ---- how long a rank may make no progress

PATIENCE = 30.0
"""Seconds until all ranks must be there, and that a rank may hold up the others while they set up."""
FIRST_STEP = 300.0
"""Seconds for the first step, which compiles, allocates and connects."""
FLOOR = 30.0
FACTOR = 10.0
_REMEMBERED = 50

Timeout = float | tuple[float | None, float | None] | None
"""Seconds; or those of the first step and of later ones; or None."""


class Patience:
    """How long a rank may make no progress while others wait for it.

    In a step and between steps that is learned from the steps, or fixed; until the Pipeline is made it is the
    time in which the ranks have to meet.

    Args:
        fixed: seconds that always hold, or two numbers: for the first step and for all later ones. None
            for 300 s in the first step, then the larger of 30 s and ten times the median step.
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
        """A step took so long."""
        self._steps.append(seconds)

    @property
    def limit(self) -> float:
        """Seconds that a rank has now."""
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
    """Where a rank is, as its last heartbeat tells and as it looks by now.

    Args:
        rank: whose.
        calls: how many calls of the pipeline it has begun.
        inside: whether it is in one.
        making: what it does to set its pipeline up, None once that is made.
        step: how many training steps it has begun.
        stage: where in its program it is, as far as it is in an action.
        microbatch: likewise.
        action: likewise.
        waits: what it waits for, None if it does not wait.
        peers: from which ranks, None: from all that do not wait alike.
        age: seconds since it last moved.
        stale: seconds since its last heartbeat.
        condition: of its process: ``runs``, ``stopped``, ``ended`` or ``unknown``.
        limit: seconds that it may go without progress.
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
        """What it does, and for how long."""
        if self.is_mute:
            return (
                f"has not been heard of for {self.stale:.1f} s; by its last word it {self._doing}; its "
                "process is stopped, its machine is down, or the network to it is cut"
            )
        return f"{self._doing} for {self.age:.1f} s{self._trouble}"

    @property
    def advice(self) -> str:
        """What else is known of a rank that is silent, and what to do."""
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
        """Whether it gives no heartbeat, and its process cannot be looked at from here."""
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
"""Seconds without a heartbeat after which a rank's own threads do not run any more."""


# ---- who is silent


@dataclass(frozen=True)
class Verdict:
    """Who is silent, and how that follows.

    Args:
        culprits: the ranks that wait for nobody and make no progress.
        chain: the way there in words, from the rank that asked.
    """

    culprits: tuple[int, ...]
    chain: tuple[str, ...]


def find_silent(places: Mapping[int, Place], start: int) -> Verdict | None:
    """Follow the waits from a rank to where they end.

    Args:
        places: of every rank.
        start: the rank that waits too long.

    Returns:
        None while those at the end still make progress.
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
    """For whom a rank waits: in an operation of all, those that are not in one; where all are, each other."""
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
    """Whether it waits; a process that no longer runs its threads waits for nobody, whatever it said."""
    place = places[rank]
    return place.waits is not None and place.stale < STALE and place.condition != "stopped"


def _late(place: Place) -> bool:
    return place.condition == "ended" or place.age >= place.limit or place.condition == "stopped"


def place_of(found: Mapping[str, Any], *, stale: float, condition: str, limit: float) -> Place:
    """A place from a heartbeat, grown older by the time since."""
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


# ---- which stage is slow: told, never stopped

SLOW = 3.0
"""So many times the others' median makes a straggler: a plan gives all stages about the same."""
FEWEST = 8
"""Actions of each stage before it is judged."""
SHORTEST = 0.005
"""Seconds below which an action is too short to matter."""


class Stragglers:
    """Compares the stages of a pipeline by how long their actions take, since the last look."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[float, int]] = {}
        self._named: set[int] = set()

    def find(self, beats: Iterable[Mapping[str, Any]]) -> list[str]:
        """What to say about stages that were not named before.

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
            f"stage {stage} is a straggler: an action takes {1e3 * seen:.1f} ms there, planned are "
            f"{1e3 * usual:.1f} ms as in the other stages; everybody waits for it: look at its device, "
            "or cut the model so that it holds less"
        )
