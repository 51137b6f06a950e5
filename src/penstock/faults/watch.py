"""One process's watch over the job: it tells the others of failures here, and raises theirs here."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import logging
import multiprocessing
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.util import Finalize
from pathlib import Path
from time import monotonic
from typing import Any

import torch.distributed as dist

from penstock.errors import TEMPORARY, MessageError, PeerFailed, PenstockError, UsageError
from penstock.faults.activity import Activity, Patience
from penstock.faults.desk import PERIOD, Desk
from penstock.faults.failure import (
    Failure,
    at_place,
    of_exception,
    of_leaving,
    status_of,
    tell_torchrun,
    write_report,
)
from penstock.faults.meeting import Meeting, end_waits
from penstock.faults.places import Place
from penstock.faults.search import STALE, Search

TICK = 0.1
"""Seconds between two checks by the monitor."""
UNKNOWN = 4.0
"""Seconds to look for the cause of a broken connection."""
LINGER = 1.5
"""Seconds that a failed rank gives the others to learn the reason, before a launcher ends them."""
BOW = 0.5
"""Seconds that the other ranks wait, so that the failed one ends first."""
LAST = 4.0
"""Seconds after a failure until a rank that still hangs ends its own process."""
LOST = 2.0
"""Seconds without the store after which a step in progress is given up."""
LOOKERS = 2
"""How many processes look for a culprit once a second; others look more rarely, since each reads places."""
REPEAT = 60.0
"""Seconds from one line about a slow rank to the next."""

logger = logging.getLogger("penstock")

_pid = os.getpid()
"""This process's id: asking the system at every action would take longer than the rest of the check."""


def _note_pid() -> None:
    global _pid
    _pid = os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_pid)


class Watch:
    """Turns a failure anywhere in the job into a named error in this process, and ends waits for it.

    One thread, the desk, uses the store: it writes this process's place and reads the key ``failure``.
    Another, the monitor, ends this rank's waits when there is a failure. Only when this rank's own wait is
    broken or overdue does it follow the waits from place to place to the rank that all wait for. A watch
    ends no process but its own.

    Args:
        activity: the activity of this process's rank.
        meeting: the processes that have met.
        patience: how long a rank may make no progress.
    """

    def __init__(self, activity: Activity, meeting: Meeting, patience: Patience) -> None:
        self.activity = activity
        self._meeting = meeting
        self._members = meeting.job.members
        self._patience = patience
        self._pid = _pid
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._aborts: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._groups: tuple[Any, ...] = ()
        self._folder: Path | None = None
        self._places: dict[int, Place] = {}
        self._status = "runs"
        self._alarm = False
        self._failure: Failure | None = None
        self._since_failure = self._aborted = 0.0
        self._broken: float | None = None
        self._search = Search(self._members)
        self._named = 0.0
        self._ending = threading.Event()
        self._closed = False
        self._desk = Desk(meeting, lambda: self.activity.place(self._status))
        self._monitor = threading.Thread(target=self._run, name="penstock monitor", daemon=True)
        self._monitor.start()
        atexit.register(self._leave)
        if multiprocessing.parent_process() is not None:
            # A child of multiprocessing exits without running atexit's functions.
            Finalize(None, self._leave, exitpriority=10)

    def protect(self, abort: Callable[[], None]) -> None:
        """Register a method that ends waits of this rank.

        Args:
            abort: a bound method that ends waits of this rank and closes its connections, so that the
                others' waits end too. It is called from any thread, and again while a wait goes on. Its
                object is held weakly.
        """
        self._aborts.append(weakref.WeakMethod(abort))

    def protect_groups(self, groups: Sequence[Any]) -> None:
        """Register process groups of the user's, which end if a failure finds this rank waiting there."""
        self._groups = tuple(groups)

    def made(self) -> None:
        """Note that the pipeline is set up: from now on the limits for steps apply."""
        self.activity.setup = None
        self.activity.rest()
        self._desk.now()

    def keep_in(self, folder: Path | None) -> None:
        """Write reports of failures to this folder."""
        self._folder = folder

    @contextmanager
    def patient(self, seconds: float) -> Iterator[None]:
        """Give this rank at least this many seconds for its work in this context."""
        before = self.activity.slack
        self.activity.slack = max(before, seconds)
        self._desk.now()
        try:
            yield
        finally:
            self.activity.slack = before
            self._desk.now()

    def check(self) -> None:
        """Raise if this rank must stop; called before every action.

        Raises:
            PeerFailed: another rank has failed.
            UsageError: this process is a fork of the rank's.
        """
        if _pid != self._pid:
            raise UsageError(
                f"this process was forked from that of rank {self.activity.rank}, and is not a rank of the "
                "pipeline: it must not continue the step, but do its own work and exit"
            )
        if self._alarm and self._failure is not None:
            raise self._peer_failed(self._failure)

    def failed(self, error: BaseException) -> BaseException:
        """Report an error of this rank to the others, or find the failure that caused it.

        Returns:
            The exception to raise: the error itself, or a :class:`PeerFailed` if another rank's failure
            caused it.
        """
        if self.is_child() or self._status == "stops" or isinstance(error, PeerFailed):
            return error
        if isinstance(error, SystemExit) and status_of(error) == 0:
            return error
        if _is_broken_wait(error):
            return self._peer_failed(self._find_cause(error))
        failure = of_exception(error, self.activity.place())
        own = not isinstance(error, PenstockError) or error.rank in (None, self.activity.rank)
        self._stop()
        tell_torchrun(failure, error, own=own)
        if not own:
            # All ranks raise this error because of one rank, which reports it.
            self._desk.wait_for(lambda: self._desk.failure, BOW)
            return error
        self._note_places()
        self._desk.report(failure)
        self._desk.wait_for(lambda: self._desk.failure, LINGER)
        if not failure.everywhere:
            self._end_waits()
        self._await_others()
        first = self._desk.failure or failure
        if first.process == self.activity.process:
            self._report(first)
        return error

    def close(self) -> None:
        """Announce that this rank is done, and stop watching; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._leave)
        if self.is_child():
            return
        self._ending.set()
        if self._monitor is not threading.current_thread():
            self._monitor.join(2 * PERIOD)
        self._status = "left"
        self._desk.close(LINGER)

    # ---- in the thread that runs the program

    def _find_cause(self, error: BaseException) -> Failure:
        """The failure of another rank that broke a wait; it may become known a little later."""
        self._broken = monotonic()
        # A store that gives no answer either is on the machine that is gone.
        self._desk.wait_for(lambda: self._failure or self._desk.unanswered > LOST, UNKNOWN)
        if self._failure is None and (self._desk.lost or self._desk.unanswered > LOST):
            self._learn(self._lost_store())
        if self._failure is None:
            place = self.activity.place(self._status)
            what = (
                f"its connection broke while it {place.doing} ({type(error).__name__}: {error}), and no rank "
                "reports why; the network between it and that rank is cut, or a library closed the connection"
            )
            self._tell(at_place(place, "lost", what, by=place.process))
        assert self._failure is not None
        return self._failure

    def _peer_failed(self, failure: Failure) -> PeerFailed:
        """The error with which this rank must stop."""
        self._stop()
        self._end_waits()
        tell_torchrun(failure, own=False)
        self._report(failure)
        text = str(failure)
        if failure.process != self.activity.process:
            if failure.is_raised:
                self._desk.wait_for(lambda: self._has_ended(failure.process), BOW)
            if self._meeting.hosts:
                # The store ends with this process.
                self._await_others()
            text = f"{self.activity.name} stopped because {text}"
        return PeerFailed(text, (failure,), failure.status)

    def _has_ended(self, process: int) -> bool:
        places = self._desk.places([process], BOW) or {}
        return process in places and places[process].status != "runs"

    def _stop(self) -> None:
        """Note that this rank stops with an error."""
        self._status = "stops"
        self._desk.now()
        # At exit the interpreter would search all objects of torch and the model for cycles, which takes
        # seconds while the other ranks wait. Frozen objects are not searched; finalizers still run.
        atexit.register(gc.freeze)

    def _leave(self) -> None:
        """At the interpreter's exit, tell the other ranks, with the reason if it is an uncaught error."""
        if self._closed or self.is_child():
            return
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is not None:
            self.failed(error)
        self.close()

    def is_child(self) -> bool:
        """Whether this process is a fork of the rank's, which has the threads and connections."""
        return _pid != self._pid

    def _await_others(self) -> None:
        """Wait a moment until all other processes have read of the failure."""
        failure = self._desk.failure or self._failure
        # Who has died or left reads nothing.
        gone = failure is not None and failure.kind in ("died", "left")
        count = len(self._members) - gone
        self._desk.wait_for(
            lambda: (self._desk.ask(lambda store: store.add("heard", 0)) or 0) >= count, LINGER
        )

    def _tell(self, failure: Failure) -> None:
        """Report a failure that this rank has found, unless one is known already."""
        self._note_places()
        self._desk.report(failure)
        if not self._desk.lost and self._desk.unanswered < LOST:
            self._desk.wait_for(lambda: self._desk.failure, LINGER)
        self._learn(self._desk.failure or failure)

    def _learn(self, failure: Failure) -> None:
        if self._failure is None:
            self._failure, self._since_failure = failure, monotonic()

    def _note_places(self) -> None:
        """Read where everybody is, for the report, before the others learn of the failure and leave."""
        if self._folder is not None and not self._desk.lost:
            self._places = self._desk.places(self._members) or {}

    def _report(self, failure: Failure) -> None:
        """Write the report, if this is the rank that noticed the failure."""
        if failure.by == self.activity.process:
            own = self.activity.place(self._status)
            places = self._places | {own.process: own}
            write_report(self._folder, failure, [places[one] for one in sorted(places)])

    # ---- in the monitor's thread

    def _run(self) -> None:
        while not self._ending.wait(TICK):
            if self._launcher is not None and os.getppid() != self._launcher:
                self._end_process("its launcher has ended", TEMPORARY)
            known = self._desk.failure
            if known is not None and not (
                known.is_raised and known.process == self.activity.process
            ):
                self._learn(known)
            if self._failure is not None:
                self._react(self._failure)
            elif known is None and self._status == "runs":
                self._look()

    def _react(self, failure: Failure) -> None:
        """There is a failure elsewhere: end the waits here, and this process if that does not help."""
        seconds = monotonic() - self._since_failure
        if self._status != "runs" or (failure.everywhere and seconds < LINGER):
            return
        self._alarm = True
        waits = self.activity.waits is not None
        if (waits or self.activity.inside) and monotonic() - self._aborted > 1.0:
            self._end_waits(groups=seconds > 1.0)
        # Whatever the store says of this rank: it ends because it hangs, by its own clock.
        if seconds > LAST and (waits or self._idle > self._limit):
            self._end_process(str(failure), failure.status)

    def _look(self) -> None:
        """Look for the rank that this one waits for, if its wait is broken or lasts too long."""
        idle, waits = self._idle, self.activity.waits is not None
        overdue = waits and idle > self._limit
        if self._desk.lost or self._desk.unanswered > LOST:
            self._look_at_store(overdue=overdue)
        elif self._broken is not None or overdue:
            self._search_for_culprit()
        elif idle > self._patience.slow(self.activity.durations):
            self._name_the_slow(idle)

    def _look_at_store(self, *, overdue: bool) -> None:
        # A store that was closed may be that of a job that is done, unless this rank is in a step.
        busy = self.activity.inside or self.activity.waits is not None
        lost = self._desk.lost and busy and self._idle > LOST
        if lost or (overdue and self._desk.unanswered > STALE):
            self._learn(self._lost_store())

    def _search_for_culprit(self) -> None:
        if monotonic() < self._search.next:
            return
        calls = self.activity.calls
        if self._search.calls != calls:
            order = self._desk.ask(lambda store: store.add(f"look/{calls}", 1))
            self._search = Search(self._members, calls, order or 1)
        broken, order = self._broken is not None, self._search.order
        # Most wait for the same rank: not all of them need to read places.
        pause = float(order) if order > LOOKERS else 0.3 if broken else PERIOD
        self._search.next = monotonic() + pause
        places = self._places_on_the_way()
        failure = self._search.judge(places, self._limit, broken=broken)
        if failure is None or self._desk.failure is not None:
            return
        self._tell(failure)
        if not broken and self._failure is failure:
            listing = "\n".join(f"  {place}" for place in places)
            logger.error("penstock: %s\nwhat waits for what:\n%s", failure, listing)

    def _places_on_the_way(self) -> list[Place]:
        own = self.activity.place(self._status)
        return self._search.look(own, self._desk.places, lambda: self._desk.clock)

    def _name_the_slow(self, idle: float) -> None:
        """The first process of the job, or the second if the first is slow, logs who is waited for."""
        position = self._members.index(self.activity.process)
        if position > 1 or self.activity.waits is None or monotonic() - self._named < REPEAT:
            return
        self._named = monotonic()
        ends = [place for place in self._places_on_the_way() if place.waits is None]
        if position == 1 and all(place.process != self._members[0] for place in ends):
            return
        calls = self.activity.calls
        if left := [one for one in ends if one.status == "left" and one.calls < calls]:
            self._tell(of_leaving(left[0], self.activity.process))
        elif ends:
            logger.warning(
                "penstock: %s has waited for %.0f s, because %s; the job ends after %g s without progress",
                *(self.activity.name, idle, "; ".join(map(str, ends[:4])), self._limit),
            )

    @property
    def _idle(self) -> float:
        return monotonic() - self.activity.since

    @property
    def _limit(self) -> float:
        if self.activity.setup is not None:
            limit = self._patience.rendezvous
        else:
            limit = self._patience.limit(self.activity.durations)
        return max(limit, self.activity.slack)

    def _lost_store(self) -> Failure:
        place = self.activity.place(self._status)
        why = self._desk.lost or f"it has not answered for {self._desk.unanswered:.1f} s"
        what = (
            f"the control store, which the ranks report to, is lost: {why}; the process that hosts "
            "it, usually that of rank 0 or the launcher, has ended or is stopped, or the network to it is "
            f"cut; {place}"
        )
        return Failure("lost", 0, what=what, by=place.process)

    def _end_waits(self, *, groups: bool = False) -> None:
        self._aborted = monotonic()
        for method in self._aborts:
            abort = method()
            if abort is not None:
                abort()
        for group in self._groups if groups else ():
            end_waits(group)

    def _end_process(self, why: str, status: int) -> None:
        if self._ending.is_set() or self._status != "runs":
            return
        if self._failure is not None:
            self._report(self._failure)
        logger.error("penstock: %s ends itself: %s", self.activity.name, why)
        with suppress(Exception):  # where there is no file to print to
            faulthandler.dump_traceback()
        os._exit(status)


def _is_broken_wait(error: BaseException) -> bool:
    """Whether a connection of Penstock's or of torch.distributed's broke; the user's own errors are not."""
    if isinstance(error, MessageError | dist.DistError):
        return True
    # Gloo's errors have no class of their own; ``end_waits`` makes a wait raise the second.
    root = error.__cause__ or error
    return isinstance(root, dist.DistError) or (
        type(root) is RuntimeError and ("/gloo/" in str(root) or "pair closure" in str(root))
    )
