"""One process's watch over the job: it tells the others of failures here, and raises theirs here."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import logging
import multiprocessing
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from time import monotonic
from typing import Any

import torch.distributed as dist

from penstock._engine.faults.activity import Activity, Patience
from penstock._engine.faults.desk import PERIOD, Desk
from penstock._engine.faults.failure import (
    Failure,
    at_place,
    of_exception,
    uncaught_error,
    write_report,
)
from penstock._engine.faults.meeting import Meeting, end_waits
from penstock._engine.faults.places import Place
from penstock._engine.faults.search import STALE, Search
from penstock.errors import (
    TEMPORARY,
    AgreementError,
    MessageError,
    NonFiniteError,
    PeerFailed,
    PenstockError,
    UsageError,
    status_of,
)

TICK = 0.1
"""Seconds between two checks by the monitor."""
UNKNOWN = 4.0
"""Seconds to look for the cause of a broken connection."""
LINGER = 1.5
"""Seconds that a failed rank gives the others to learn the reason, before a launcher ends them."""
HOSTS = 6.0
"""The same of the rank with which the store ends, since a busy machine's ranks read late."""
LAST = 4.0
"""Seconds after a failure until a rank that still hangs ends its own process."""
LOST = 2.0
"""Seconds without the store after which a step in progress is given up."""
LOOKERS = 2
"""How many processes look for a culprit once a second; others look more rarely, since each reads places."""
REPEAT = 60.0
"""Seconds from one line about a slow rank to the next."""
AHEAD = 3.5
"""Seconds before the limit when the search begins, so that who writes nothing is known by then."""

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

    One thread, the desk, uses the store: it writes this process's place, reads the key ``failure``, and only
    when this rank's own wait is broken or overdue follows the waits from place to place to the rank that all
    wait for. Another, the monitor, ends this rank's waits when there is a failure, whatever the store does.
    A watch ends no process but its own.

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
        self._status = "runs"
        self._broken = False
        self._aborted, self._named = 0.0, -REPEAT
        self._search = Search(self._members)
        self._call, self._order, self._next = -1, 0, 0.0
        self._ending = threading.Event()
        self._closed = False
        self._desk = Desk(meeting, lambda: activity.place(self._status), self._look)
        self._monitor = threading.Thread(target=self._run, name="penstock monitor", daemon=True)
        self._monitor.start()
        atexit.register(self._leave)
        is_child = multiprocessing.parent_process() is not None
        # A child of multiprocessing exits without running atexit's functions.
        self._at_exit = Finalize(None, self._leave, exitpriority=10) if is_child else None

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

    def prepared(self) -> None:
        """Note that the pipeline is set up: from now on the limits for steps apply."""
        self.activity.prepared()
        self._desk.now()

    def keep_in(self, folder: Path | None) -> None:
        """Write reports of failures to this folder."""
        self._folder = folder
        self._desk.keep_places(folder is not None)

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
        if self._desk.failure is not None:
            raise self._peer_failed(self._desk.failure)

    def failed(self, error: BaseException) -> BaseException:
        """Report an error of this rank to the others, or find the failure that caused it.

        Returns:
            The exception to raise: the error itself, or a :class:`PeerFailed` if another rank's failure
            caused it.
        """
        if self.is_child() or self._status == "stops" or _is_raised_by_all(error):
            return error
        if isinstance(error, SystemExit) and status_of(error) == 0:
            return error
        if _is_broken_wait(error):
            return self._peer_failed(self._find_cause(error))
        failure = of_exception(error, self.activity.place())
        self._stop()
        self._desk.report(failure, LINGER)
        self._end_waits()
        first = self._desk.failure or failure
        if first.process == self.activity.process:
            self._report(first)  # before the others end, since a launcher then ends this process
        self._await_others()
        return error

    def close(self) -> None:
        """Announce that this rank is done, and stop watching; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._leave)
        if self._at_exit is not None:
            self._at_exit.cancel()  # or it would keep the groups and their threads
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
        self._broken, desk = True, self._desk
        # A store that gives no answer either is on the machine that is gone.
        desk.wait_for(lambda: desk.failure or desk.unanswered > LOST, UNKNOWN)
        if desk.failure is None and (desk.lost or desk.unanswered > LOST):
            desk.learn(self._lost_store())
        if desk.failure is None:
            place = self.activity.place(self._status)
            what = (
                f"its connection broke while it {place.doing} ({type(error).__name__}: {error}), and no rank "
                "reports why; the network between it and that rank is cut, or a library closed the connection"
            )
            failure = at_place(place, "lost", what, by=place.process)
            desk.report(failure, LINGER)
            desk.learn(failure)
        assert desk.failure is not None
        return desk.failure

    def _peer_failed(self, failure: Failure) -> PeerFailed:
        """The error with which this rank must stop."""
        self._stop()
        self._end_waits()
        self._report(failure)
        text = str(failure)
        if failure.process != self.activity.process:
            if self._meeting.hosts:
                # The store ends with this process.
                self._await_others()
            text = f"{self.activity.name} stopped because {text}"
        return PeerFailed(text, (failure,), failure.status)

    def _stop(self) -> None:
        """Note that this rank stops with an error."""
        self._status = "stops"
        # At exit the interpreter would search all objects of torch and the model for cycles, which takes
        # seconds while the other ranks wait. Frozen objects are not searched; finalizers still run.
        atexit.register(gc.freeze)

    def _leave(self) -> None:
        """At the interpreter's exit, tell the other ranks, with the reason if it is an uncaught error."""
        if self._closed or self.is_child():
            return
        error = uncaught_error()
        if error is not None:
            self.failed(error)
        self.close()

    def is_child(self) -> bool:
        """Tell whether this process is a fork of the rank's, which has the threads and connections."""
        return _pid != self._pid

    def _await_others(self) -> None:
        """Wait a moment until all other processes have read of the failure."""
        failure = self._desk.failure
        # Who has died or left reads nothing.
        gone = failure is not None and failure.kind in ("died", "left")
        seconds = HOSTS if self._meeting.hosts else LINGER
        self._desk.wait_for(lambda: self._desk.heard >= len(self._members) - gone, seconds)

    def _report(self, failure: Failure) -> None:
        """Write the report, if this is the rank that noticed the failure."""
        if failure.by == self.activity.process:
            here = self.activity.place(self._status)
            places = self._desk.places | {here.process: here}
            write_report(self._folder, failure, [places[one] for one in sorted(places)])

    # ---- in the monitor's thread

    def _run(self) -> None:
        while not self._ending.wait(TICK):
            if self._launcher is not None and os.getppid() != self._launcher:
                self._end_process("its launcher has ended", TEMPORARY)
            if self._status != "runs":
                continue
            if self._desk.failure is None:
                self._look_at_store()
            else:
                self._react(self._desk.failure)

    def _look_at_store(self) -> None:
        # A store that was closed may be that of a job that is done, unless this rank needs the others.
        waits, idle = self.activity.waits is not None, self._idle
        busy = waits or self.activity.inside or self.activity.setup is not None
        lost = self._desk.lost and busy and idle > LOST
        if lost or (waits and idle > self._limit and self._desk.unanswered > STALE):
            self._desk.learn(self._lost_store())

    def _react(self, failure: Failure) -> None:
        """There is a failure elsewhere: end the waits here, and this process if that does not help."""
        seconds, waits = monotonic() - self._desk.since, self.activity.waits is not None
        if (waits or self.activity.inside) and monotonic() - self._aborted > 1.0:
            self._end_waits(groups=seconds > 1.0)
        # Whatever the store says of this rank: it ends because it hangs, by its own clock.
        if seconds > LAST and (waits or self._idle > self._limit):
            self._end_process(str(failure), failure.status)

    # ---- in the desk's thread

    def _look(self) -> Failure | None:
        """Look for whom this rank waits, if its wait is broken or lasts long."""
        here = self.activity.place(self._status)
        if self._status != "runs" or not self._is_late(here) or monotonic() < self._next:
            return None
        if self._call != here.calls:
            self._call, self._search = here.calls, Search(self._members)
            self._order = self._desk.count(f"look/{here.calls}")
        leads = here.process in self._members[:LOOKERS]
        # Most wait for the same rank: not all of them need to read places.
        rarely = self._order > LOOKERS and not leads
        pause = (
            min(self._order, len(self._members))
            if rarely
            else 0.3
            if self._broken
            else 0.9 * PERIOD
        )
        self._next = monotonic() + pause
        places = self._search.look(here, self._desk.read, self._desk.clock)
        failure = self._search.judge(places, self._limit_of_all, broken=self._broken)
        if failure is None and leads:
            self._name_the_slow(places)
        elif failure is not None and not self._broken:
            listing = "\n".join(f"  {place}" for place in places)
            logger.error("penstock: %s\nwhat waits for what:\n%s", failure, listing)
        return failure

    def _is_late(self, here: Place) -> bool:
        # In a step also what nobody has noted: its collectives are those of wrappers.
        waits = self.activity.waits is not None or (here.waits is not None and here.inside)
        early = min(self._patience.slow(self.activity.durations), self._limit - AHEAD)
        return self._broken or (waits and here.age > early)

    def _name_the_slow(self, places: Sequence[Place]) -> None:
        """The first process of the job, or the second if the first is slow, logs who is waited for."""
        here, *others = places
        ends = [place for place in others if place.waits is None]
        is_first = here.process == self._members[0]
        if not is_first and all(place.process != self._members[0] for place in ends):
            return
        is_slow = here.age > self._patience.slow(self.activity.durations)
        if ends and is_slow and monotonic() - self._named > REPEAT:
            self._named = monotonic()
            logger.warning(
                "penstock: %s has waited for %.0f s, because %s; the job ends after %g s without progress",
                *(here.name, here.age, "; ".join(map(str, ends[:4])), self._limit),
            )

    # ---- in any of them

    @property
    def _idle(self) -> float:
        return monotonic() - self.activity.since

    @property
    def _limit(self) -> float:
        return max(self._limit_of_all, self.activity.slack)

    @property
    def _limit_of_all(self) -> float:
        """The limit of ranks that have asked for no more, whatever this one has asked for."""
        if self.activity.setup is not None:
            return self._patience.rendezvous
        return self._patience.limit(self.activity.durations)

    def _lost_store(self) -> Failure:
        place = self.activity.place(self._status)
        why = self._desk.lost or f"it has not answered for {self._desk.unanswered:.1f} s"
        what = (
            f"the control store, which the ranks report to, is lost: {why}; the process that hosts "
            "it, usually that of rank 0 or the launcher, has ended or is stopped, or the network to it is "
            f"cut; {place}"
        )
        return Failure(0, kind="lost", what=what, by=place.process)

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
        if self._desk.failure is not None:
            self._report(self._desk.failure)
        logger.error("penstock: %s ends itself: %s", self.activity.name, why)
        with suppress(Exception):  # where there is no file to print to
            faulthandler.dump_traceback()
        os._exit(status)


def _is_raised_by_all(error: BaseException) -> bool:
    """Tell whether every rank raises an error, as when they disagree: nobody needs to be told."""
    return isinstance(error, PeerFailed | AgreementError | NonFiniteError) or (
        isinstance(error, PenstockError) and error.rank is not None
    )


def _is_broken_wait(error: BaseException) -> bool:
    """Tell if a connection of Penstock's or of torch.distributed's broke; the user's own errors are not."""
    if isinstance(error, MessageError | dist.DistError):
        return True
    # Gloo's errors have no class of their own; ``end_waits`` makes a wait raise the second.
    root = error.__cause__ or error
    return isinstance(root, dist.DistError) or (
        type(root) is RuntimeError and ("/gloo/" in str(root) or "pair closure" in str(root))
    )
