"""The other ranks as seen from one, and the thread that watches them even if the rank's own is blocked."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from penstock.errors import TEMPORARY
from penstock.faults.board import Board, BoardLostError
from penstock.faults.failure import Failure, stacks, story, summary, write
from penstock.faults.processes import DeadMan, Interrupts, Process, launcher, words_of
from penstock.faults.progress import (
    STALE,
    Activity,
    Patience,
    Place,
    Stragglers,
    Verdict,
    find_silent,
    place_of,
)

# ---- the ranks: their heartbeats, processes, words and failures


BEAT, LEFT, RAISED, STACK, TOLD = "beat", "left", "raised", "stack", "told"
"""Topics of the board.

A heartbeat; a rank is done; it stops with an error; its stacks; a report is written.
"""

_POLL = 0.02


class Team:
    """All ranks of a pipeline, as seen from one of them; used by two threads.

    Args:
        rank: this rank.
        processes: the process of every rank.
        board: where ranks leave messages.
    """

    def __init__(self, rank: int, processes: Mapping[int, Process], board: Board) -> None:
        self.rank = rank
        self.processes = processes
        self.board = board
        self._beats: dict[int, tuple[int, float]] = {}
        self._lock = threading.Lock()
        self._failures: tuple[Failure, ...] = ()

    @property
    def others(self) -> list[int]:
        """All ranks but this one."""
        return [rank for rank in self.processes if rank != self.rank]

    @property
    def is_near(self) -> bool:
        """Whether all ranks are on this machine."""
        return all(process.is_here for process in self.processes.values())

    # ---- words

    def say(self, topic: str, word: Any = True) -> None:
        """Leave a word of this rank on a topic."""
        self.board.post(topic, word)

    def left(self, rank: int) -> dict[str, Any] | None:
        """The word that a rank left when it was done; None if it is not."""
        found = self.board.read(LEFT, rank)
        return found if found is None or isinstance(found, dict) else {}

    def gone(self, rank: int) -> bool:
        """Whether a rank is done, or its process has ended."""
        return self.processes[rank].condition() == "ended" or self.left(rank) is not None

    def await_word(self, topic: str, ranks: list[int], seconds: float) -> bool:
        """Wait until these ranks have left a word on a topic, or are gone.

        Returns whether all did in time.
        """
        deadline = monotonic() + seconds
        while missing := [r for r in ranks if not self.board.read(topic, r) and not self.gone(r)]:
            if monotonic() >= deadline:
                return False
            ranks = missing
            sleep(_POLL)
        return True

    # ---- failures

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The known failures: the first one of each rank, since others follow from it."""
        return self._failures

    @property
    def of_others(self) -> tuple[Failure, ...]:
        """All failures but those that this rank reported itself.

        (A cut network is reported for several ranks.)
        """
        return tuple(f for f in self._failures if f.rank != self.rank or not f.is_raised)

    def report(self, failure: Failure) -> None:
        """Put a failure on the board, unless that rank has one already."""
        self.refresh()
        if all(failure.rank != known.rank for known in self.failures):
            self.board.report(asdict(failure))
            self.refresh()

    def refresh(self) -> None:
        """Read the board again."""
        with self._lock:
            found: dict[int, Failure] = {}
            for failure in map(Failure.from_data, self.board.reports()):
                if failure is not None:
                    found.setdefault(failure.rank, failure)
            self._failures = tuple(found.values())

    # ---- heartbeats

    def places(self, own: dict[str, Any], limit: float) -> dict[int, Place]:
        """Where every rank is.

        Args:
            own: a snapshot of this rank's activity.
            limit: seconds that a rank may make no progress, unless it has asked for more.
        """
        found = {}
        for rank, process in self.processes.items():
            beat = own if rank == self.rank else self.beat(rank)
            stale = 0.0 if rank == self.rank else self._staleness(rank, beat)
            found[rank] = place_of(beat, stale=stale, condition=process.condition(), limit=limit)
        return found

    @staticmethod
    def words_of(own: dict[str, Any]) -> str:
        """What this rank does, in words, from a snapshot of its activity."""
        return place_of(own, stale=0.0, condition="runs", limit=0.0).words

    def beat(self, rank: int) -> dict[str, Any]:
        """The last heartbeat of a rank; an empty one if there is none, or it cannot be read."""
        found: dict[str, Any] = self.board.read(BEAT, rank)
        slate = self.board.slate(rank)
        seen = slate.read() if slate is not None else {}
        if not _is_beat(found):
            # A rank may have done a lot before its first heartbeat.
            found = _unheard(rank)
        # The slate may be newer than the heartbeat.
        return found | seen if seen.get("progress", 0) > found["progress"] else found

    def staleness(self, rank: int) -> float:
        """Seconds since a rank's heartbeat last changed."""
        return self._staleness(rank, self.beat(rank))

    def listen(self) -> None:
        """Note which heartbeats have changed, so that their age is known later."""
        for rank in self.others:
            self.staleness(rank)

    def _staleness(self, rank: int, beat: Mapping[str, Any]) -> float:
        number, now = int(beat.get("beat", 0)), monotonic()
        if self._beats.get(rank, (-1, 0.0))[0] != number:
            self._beats[rank] = (number, now)
        return now - self._beats[rank][1]


_BEAT: dict[str, type | tuple[type, ...]] = {
    "beat": int,
    "rank": int,
    "calls": int,
    "step": int,
    "inside": bool,
    "age": (int, float),
    "progress": int,
    "slack": (int, float),
    "busy": dict,
}
_MAYBE: dict[str, Callable[[Any], bool]] = {
    "stage": lambda v: isinstance(v, int),
    "microbatch": lambda v: isinstance(v, int),
    "action": lambda v: isinstance(v, str),
    "making": lambda v: isinstance(v, str),
    "waits": lambda v: isinstance(v, str),
    "peers": lambda v: isinstance(v, list) and all(isinstance(p, int) for p in v),
}


def _is_beat(found: Any) -> bool:
    return (
        isinstance(found, dict)
        and all(isinstance(found.get(name), kind) for name, kind in _BEAT.items())
        and all(
            name in found and (found[name] is None or fits(found[name]))
            for name, fits in _MAYBE.items()
        )
    )


def _unheard(rank: int) -> dict[str, Any]:
    """Stands for a heartbeat that never came."""
    numbers = dict.fromkeys(("beat", "calls", "step", "age", "progress", "slack"), 0)
    return {**dict.fromkeys(_MAYBE), **numbers, "rank": rank, "inside": True, "busy": {}}


# ---- the thread that watches


TICK = 0.1
_BEATS = 2
"""Ticks from one heartbeat to the next."""
_LOOKS = 20
"""Ticks from one search for stragglers to the next."""
AGAIN = 1.0
"""Seconds between two cuts of the connections."""
LAST = 4.0
"""Seconds after the first cut until a rank that still waits ends itself."""
FROZEN = 2.5
"""Seconds beyond its limit after which a timer kills a rank that runs no threads, if nothing else has."""
GRACE = 1.0
"""Seconds that ranks have to find an error that all of them find, or to give their stacks."""

logger = logging.getLogger("penstock")


class Wires:
    """This rank's connections. They are cut repeatedly, since a first cut may miss one that is in use."""

    def __init__(self) -> None:
        self._break: Callable[[], object] = _nothing
        self._lock = threading.Lock()
        self._last: float | None = None

    def break_by(self, cut: Callable[[], object]) -> None:
        """Set the function that breaks them."""
        self._break = cut

    def cut(self) -> None:
        """Break them, so that waits on them end on this rank and at the other ends."""
        with self._lock:
            if self._last is None or monotonic() - self._last >= AGAIN:
                self._last = monotonic()
                self._break()


def _nothing() -> None:
    """Stands for a cut while there are no connections."""


class Monitor:
    """A thread that sends heartbeats, and looks for failures, deaths, silence and interrupts.

    Attributes:
        alarm: whether the rank must stop.
        stopped: whether it has already stopped with an error.
        cut_off: whether a connection broke and the reason is not known.
        lost: the error, if the board cannot be reached any more.
        folder: where reports of failures are written.
        wires: the rank's connections.
    """

    def __init__(self, activity: Activity, team: Team, patience: Patience) -> None:
        self.alarm = False
        self.stopped = False
        self.cut_off = False
        self.lost: BoardLostError | None = None
        self.folder: Path | None = None
        self.wires = Wires()
        self._activity = activity
        self._team = team
        self._patience = patience
        self._stragglers = Stragglers()
        self._interrupts = Interrupts()
        self._launcher = launcher()
        self._dead_man = DeadMan()
        self._beats = itertools.count()
        self._ticks = 0
        self._heard: float | None = None
        self._told = False
        self._broken: tuple[float, int] | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self.beat()
        self._interrupts.open()
        self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait for it."""
        self._ending.set()
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join(5.0)
        self._interrupts.close()

    def _run(self) -> None:
        try:
            while not self._ending.wait(TICK):
                self._live_on()
                try:
                    self._tick()
                except BoardLostError as lost:
                    self.lost = lost
                    self._activity.halt = True
        finally:
            self._dead_man.retire()

    def _tick(self) -> None:
        self._ticks += 1
        self._follow_launcher()
        if self._interrupts.came():
            self._cut()
        if self.lost is not None:
            self._go_alone()
            return
        if self._ticks % _BEATS == 1:
            self._beat()
        self._team.refresh()
        self._check_board()
        if self._team.of_others:
            self._react()
        elif not self._team.failures:
            self._look()

    def beat(self) -> None:
        """Send a heartbeat now."""
        self._live_on()
        with suppress(BoardLostError):
            self._beat()

    def _live_on(self, more: float = 0.0) -> None:
        """Reset the timer that kills a process that runs no threads."""
        if self._team.others:
            limit = max(self._patience.limit, self._activity.slack)
            self._dead_man.put_off(limit + FROZEN + more)

    def _beat(self) -> None:
        self._team.say(BEAT, {**self._activity.snapshot(), "beat": next(self._beats)})

    def _check_board(self) -> None:
        """Give up a board that does not answer, once nothing else can explain why this rank waits."""
        silent = self._team.board.unanswered
        hopeless = self._overdue() or self.cut_off or silent > self._patience.limit
        if hopeless and silent > STALE:
            raise BoardLostError(f"it has not answered for {silent:.1f} s")

    def _cut(self) -> None:
        """Break the connections again and again until this rank waits no more.

        End it if that does not help.
        """
        if self._ending.is_set() or self.stopped:
            return
        self.wires.cut()
        now, progress, waiting = monotonic(), self._activity.progress, self._activity.waiting
        if self._broken is None or self._broken[1] != progress or waiting is None:
            self._broken = (now, progress)
        elif now - self._broken[0] > LAST:
            why = summary(self._team.of_others) if self._team.of_others else str(self.lost or "")
            self._end_process(
                f"rank {self._activity.rank} ends itself: its connections are broken, but a wait on them "
                f"does not end: {why or waiting.why}",
                TEMPORARY,
            )

    def _go_alone(self) -> None:
        """The board is lost: end waits, and end the process if it is stuck elsewhere."""
        self._cut()
        seconds = monotonic() - self._activity.since
        stuck = self._activity.waiting is None and seconds > self._patience.limit
        if stuck and self._activity.is_busy and not self.stopped:
            self._end_process(
                f"rank {self._activity.rank} ends itself: the control store is lost, and it has made no "
                f"progress for {seconds:.1f} s",
                TEMPORARY,
            )

    # ---- what others say

    def _react(self) -> None:
        """Another rank has failed.

        End the waits here. If all ranks find the same error, leave them time to.
        """
        first = self._team.of_others[0]
        self._heard = self._heard or monotonic()
        if first.kind == "silent":
            self._give_stacks(first)
            self._end_frozen(first.rank)
        if first.everywhere and (self.stopped or monotonic() - self._heard < GRACE):
            return
        self._raise_alarm()
        self._cut()

    def _raise_alarm(self) -> None:
        self.alarm = self._activity.halt = True

    def _give_stacks(self, failure: Failure) -> None:
        if self._told:
            return
        self._told = True
        self._team.say(STACK, stacks())
        if failure.rank == self._activity.rank:
            self._raise_alarm()
            self._cut()
            self._give_up(failure)

    def _end_frozen(self, rank: int) -> None:
        """Kill a silent rank of this machine that runs no threads, and so cannot end itself."""
        if rank != self._activity.rank and self._team.staleness(rank) >= STALE:
            self._team.processes[rank].kill()

    def _give_up(self, failure: Failure) -> None:
        """This rank is the silent one: end its process, unless it stops by itself in time."""
        rank = self._activity.rank
        self._live_on(4 * GRACE)
        try:
            self._team.await_word(TOLD, [failure.by], 2 * GRACE)
        except BoardLostError:
            # The board is gone together with the others, which have heard of it.
            self._ending.wait(GRACE)
        if not self.stopped:
            self._ending.wait(GRACE)
        if not self.stopped:
            self._end_process(f"rank {rank} ends itself, as it {failure.what}", failure.status)

    def _end_process(self, why: str, status: int) -> None:
        logger.error("penstock: %s", why)
        os._exit(status)

    def _follow_launcher(self) -> None:
        if self._launcher is not None and os.getppid() != self._launcher:
            self._end_process(
                f"rank {self._activity.rank} ends, as its launcher has ended", TEMPORARY
            )

    # ---- what can be seen

    def _look(self) -> None:
        self._team.listen()
        for rank in self._team.others:
            self._look_at(rank)
        if self._overdue() and not self._team.failures:
            self._ask_who_is_silent()
        if self._ticks % _LOOKS == 0 and self._activity.rank == 0:
            self._look_for_stragglers()

    def _look_at(self, rank: int) -> None:
        """Whether a rank has left while this one goes on, has ended, or is out of reach."""
        process, left, by = self._team.processes[rank], self._team.left(rank), self._activity.rank
        if left is not None:
            if self._activity.calls > int(left.get("calls", 0)):
                self._post(_left_early(rank, by, left))
        elif process.condition() == "ended":
            how = f"its process ended, {words_of(process.cause_of_end())}"
            self._post(_died(rank, by, self._team.beat(rank), how))
        elif self._is_lost(rank):
            how = (
                "its process ended without a word, its machine is down, or the network to it is cut"
            )
            self._post(_died(rank, by, self._team.beat(rank), how))

    def _is_lost(self, rank: int) -> bool:
        """Whether a rank of another machine has fallen silent at the time when a wire broke."""
        if not self.cut_off or self._team.processes[rank].is_here:
            return False
        return self._team.staleness(rank) > STALE

    def _post(self, failure: Failure) -> None:
        """Report another rank's failure, unless one is known already."""
        self._team.refresh()
        if not self._team.failures:
            self._team.report(failure)

    def _overdue(self) -> bool:
        waits = self._activity.waiting is not None
        return waits and monotonic() - self._activity.since > self._patience.limit

    def _ask_who_is_silent(self) -> None:
        places = self._places()
        verdict = find_silent(places, self._activity.rank)
        if verdict is None:
            return
        failure = _silent(places, verdict, self._activity.rank)
        self._post(failure)
        if self._team.failures[:1] and self._team.failures[0].by == self._activity.rank:
            self._tell(failure, places)

    def _tell(self, failure: Failure, places: dict[int, Place]) -> None:
        """Gather stacks from ranks that can give them, write the report, and kill a frozen rank."""
        self._told = True
        self._team.say(STACK, stacks())
        able = [r for r in self._team.others if places[r].stale < STALE]
        self._team.await_word(STACK, able, GRACE)
        said = {rank: self._team.board.read(STACK, rank) for rank in places}
        found = {rank: text for rank, text in said.items() if isinstance(text, str)}
        logger.error("penstock: %s", _report(failure, places, found))
        write(self.folder, story([failure], places, found, self._activity.rank))
        self._team.say(TOLD)
        self._raise_alarm()
        self._cut()
        if failure.kind == "silent":
            self._end_frozen(failure.rank)

    def _look_for_stragglers(self) -> None:
        beats = [self._activity.snapshot(), *map(self._team.beat, self._team.others)]
        for text in self._stragglers.find(beats):
            logger.warning("penstock: %s", text)

    # ---- the story

    def _places(self) -> dict[int, Place]:
        return self._team.places(self._activity.snapshot(), self._patience.limit)

    def write_story(self, failures: Sequence[Failure]) -> None:
        """Write ``failure.json`` with what is known."""
        if self.folder is not None:
            places = {}
            with suppress(BoardLostError):
                places = self._places()
            write(self.folder, story(failures, places, {}, self._activity.rank))


def _left_early(rank: int, by: int, left: Mapping[str, Any]) -> Failure:
    # Who leaves says where it was; its last heartbeat may be from before.
    step = int(left.get("step", 0))
    what = (
        f"left after {step} training step{'' if step == 1 else 's'}, while others go on; every rank must "
        "make the same calls of the pipeline: look for a loop that ends earlier there"
    )
    return Failure("left", rank, step, what=what, status=TEMPORARY, by=by)


def _died(rank: int, by: int, beat: Mapping[str, Any], how: str) -> Failure:
    where = f", while it made its pipeline ({beat['making']})" if beat.get("making") else ""
    stage, microbatch, action = (beat.get(name) for name in ("stage", "microbatch", "action"))
    step, what = int(beat.get("step", 0)), how + where
    return Failure(
        "died", rank, step, stage, microbatch, action, what=what, status=TEMPORARY, by=by
    )


def _silent(places: dict[int, Place], verdict: Verdict, by: int) -> Failure:
    rank, *others = verdict.culprits
    place = places[rank]
    if others:
        ranks = ", ".join(map(str, verdict.culprits))
        what = (
            f"ranks {ranks} wait for each other, although each has sent what the others wait for: the "
            "network between them is cut, or messages were lost"
        )
        return Failure(
            "lost", rank, place.step, what=what, status=TEMPORARY, by=by, story=verdict.chain
        )
    what = f"makes no progress: it {place.words}{place.advice}"
    return Failure(
        "silent",
        rank,
        place.step,
        place.stage,
        place.microbatch,
        place.action,
        what=what,
        status=TEMPORARY,
        by=by,
        story=verdict.chain,
    )


def _report(failure: Failure, places: dict[int, Place], found: dict[int, str]) -> str:
    lines = [str(failure), "what waits for what:", *(f"  {line}" for line in failure.story)]
    lines += ["where every rank is:", *(f"  {place}" for place in places.values())]
    for rank, place in places.items():
        lines.append(f"stacks of rank {rank}:")
        lines.append(found.get(rank) or f"  none: {place.words}")
    return "\n".join(lines)
