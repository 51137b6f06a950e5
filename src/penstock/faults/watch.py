"""One process's watch over its rank: it reports failures here, and learns of failures elsewhere."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import logging
import multiprocessing
import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.util import Finalize
from pathlib import Path
from time import monotonic, sleep

import torch.distributed as dist

from penstock.errors import TEMPORARY, MessageError, PeerFailed, PenstockError, UsageError
from penstock.faults.activity import Activity, Patience
from penstock.faults.failure import (
    Failure,
    at_place,
    of_exception,
    of_leaving,
    of_silence,
    status_of,
    tell_torchrun,
    write_report,
)
from penstock.faults.heartbeats import Heartbeats
from penstock.faults.meeting import Meeting, own_address
from penstock.faults.places import STALE, Place, find_silent

TICK = 0.1
"""Seconds between two checks by the monitor."""
LOOK = 5
"""Ticks between two checks of all ranks, while nothing is wrong here."""
CAUSE = 2.0
"""Seconds to wait for the cause of a broken connection; a rank that is silent for longer is the cause."""
LINGER = 1.0
"""Seconds that a failed rank gives the others to learn the reason, before a launcher ends them."""
BOW = 0.5
"""Seconds that the other ranks wait, so that the failed one ends first."""
LAST = 4.0
"""Seconds after a failure until a rank that still hangs ends its own process."""
DOUBT = 1.5
"""Seconds of silence from a machine after which the monitor checks that it can be reached."""
PROBE = 1.0
"""Seconds within which a reachable machine answers."""

logger = logging.getLogger("penstock")

_pid = os.getpid()
"""This process's id: asking the system at every action would take longer than the rest of the check."""


def _note_pid() -> None:
    global _pid
    _pid = os.getpid()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_pid)


class Watch:
    """Turns a failure on any rank into a named error in this process, and ends waits that would never end.

    One thread sends heartbeats. Another, the monitor, looks for failures, deaths and silence, even if this
    rank's own thread and the store are blocked. A watch never kills any process but its own.

    Args:
        activity: the activity of this process's rank.
        meeting: the ranks that have met.
        patience: how long a rank may make no progress.
    """

    def __init__(self, activity: Activity, meeting: Meeting, patience: Patience) -> None:
        self.activity = activity
        self._meeting = meeting
        self._patience = patience
        self._address = own_address(meeting.host)
        self._pid = _pid
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._abort: Callable[[], Callable[[], None] | None] = lambda: None
        self._folder: Path | None = None
        self._status = "runs"
        self._alarm = False
        self._failure: Failure | None = None
        self._since_failure = self._aborted = 0.0
        self._broken: float | None = None
        self._reachable: dict[str, bool] = {}
        self._ending = threading.Event()
        self._closed = False
        self._heartbeats = Heartbeats(meeting, self._own_place)
        self._monitor = threading.Thread(target=self._run, name="penstock monitor", daemon=True)
        self._monitor.start()
        atexit.register(self._leave)
        if multiprocessing.parent_process() is not None:
            # A child of multiprocessing exits without running atexit's functions.
            Finalize(None, self._leave, exitpriority=10)

    def protect(self, abort: Callable[[], None]) -> None:
        """Register the method that ends this rank's waits.

        Args:
            abort: a bound method that ends all waits of this rank and closes its connections, so that the
                others' waits end too. It is called from any thread, and again while a wait goes on. Its
                object is held weakly.
        """
        self._abort = weakref.WeakMethod(abort)

    def made(self) -> None:
        """Note that the pipeline is set up: from now on the limits for steps apply."""
        self.activity.setup = None
        self.activity.rest()
        self._heartbeats.now()

    def await_all(self, what: str) -> None:
        """Wait until all ranks arrive, before a call that blocks in torch and cannot be ended.

        Args:
            what: what the ranks come for, in words; each text serves once.

        Raises:
            PeerFailed: another rank has failed.
        """
        store, ranks = self._meeting.store, range(self._meeting.ranks)
        self.activity.wait(what, None)
        store.set(f"{what}/{self.activity.rank}", "")
        while not store.check([f"{what}/{rank}" for rank in ranks]):
            self.check()
            sleep(TICK / 10)

    def keep_in(self, folder: Path | None) -> None:
        """Write reports of failures to this folder."""
        self._folder = folder

    @contextmanager
    def patient(self, seconds: float) -> Iterator[None]:
        """Give this rank at least this many seconds for its work in this context."""
        before = self.activity.slack
        self.activity.slack = max(before, seconds)
        self._heartbeats.now()
        try:
            yield
        finally:
            self.activity.slack = before
            self._heartbeats.now()

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
        rank = self.activity.rank
        culprit = error.rank if isinstance(error, PenstockError) else None
        failure = of_exception(error, self.activity.place())
        self._stop()
        tell_torchrun(failure, error, own=culprit in (None, rank))
        if culprit not in (None, rank):
            # All ranks raise this error because of one rank, which reports it.
            self._heartbeats.wait_for(lambda: self._has_stopped(culprit), BOW)
            return error
        self._heartbeats.report(failure)
        self._heartbeats.wait_for(lambda: self._heartbeats.failure is not None, LINGER)
        if not failure.everywhere:
            self._end_waits()
        self._await_others()
        first = self._heartbeats.failure or failure
        if first.rank == rank:
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
            self._monitor.join(2 * PROBE)
        self._status = "left"
        self._heartbeats.close(LINGER)

    # ---- in the thread that runs the program

    def _find_cause(self, error: BaseException) -> Failure:
        """The failure of another rank that broke a wait; it may become known a little later."""
        self._broken = monotonic()
        self._heartbeats.wait_for(lambda: self._failure is not None, CAUSE)
        # The monitor may need a moment more: it also looks for ranks that have gone silent.
        deadline = self._broken + CAUSE + STALE
        while self._failure is None and monotonic() < deadline:
            self._ending.wait(TICK)
        if self._failure is None:
            peer = self.activity.peer
            place = self._places()[self.activity.rank if peer is None else peer]
            what = f"the connection broke, and no rank says why ({type(error).__name__}: {error})"
            self._accuse(at_place(place, "lost", what, by=self.activity.rank))
        return self._failure or of_exception(error, self.activity.place())

    def _peer_failed(self, failure: Failure) -> PeerFailed:
        """The error with which this rank must stop."""
        self._stop()
        self._end_waits()
        tell_torchrun(failure, own=False)
        self._report(failure)
        text = str(failure)
        if failure.rank != self.activity.rank:
            if failure.is_raised:
                self._heartbeats.wait_for(lambda: self._has_stopped(failure.rank, "left"), BOW)
            if self._meeting.hosts:
                # The store ends with this process.
                self._await_others()
            text = f"{self.activity.name} stopped because {text}"
        return PeerFailed(text, (failure,), failure.status)

    def _stop(self) -> None:
        """Note that this rank stops with an error."""
        self._status = "stops"
        self._heartbeats.now()
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

    # ---- the state of the ranks

    def _has_stopped(self, rank: int, *statuses: str) -> bool:
        return self._heartbeats.places[rank].status in (statuses or ("stops", "left"))

    def _await_others(self) -> None:
        """Wait a moment until all reachable ranks have learned of the failure."""

        def have_heard() -> bool:
            others = [p for p in self._places().values() if p.rank != self.activity.rank]
            return all(place.is_mute or self._has_stopped(place.rank) for place in others)

        self._heartbeats.wait_for(have_heard, LINGER)

    def _own_place(self) -> Place:
        return self.activity.place(self._status, self._address)

    def _places(self) -> dict[int, Place]:
        """Where every rank is."""
        places = {self.activity.rank: self._own_place()}
        for rank in list(self._heartbeats.places):
            # The time first, as the other thread may replace both. Time in which the store does not answer
            # does not count.
            stale = monotonic() - self._heartbeats.heard[rank] - self._heartbeats.unanswered
            places[rank] = replace(self._heartbeats.places[rank], stale=max(0.0, stale))
        return dict(sorted(places.items()))

    @property
    def _limit(self) -> float:
        if self.activity.setup is not None:
            return self._patience.rendezvous
        return self._patience.limit(self.activity.durations)

    def _is_overdue(self) -> bool:
        return monotonic() - self.activity.since > max(self._limit, self.activity.slack)

    def _accuse(self, failure: Failure) -> None:
        """Report the failure of another rank, unless a failure is known already."""
        self._heartbeats.report(failure)
        if self._heartbeats.unanswered < DOUBT:
            self._heartbeats.wait_for(lambda: self._heartbeats.failure is not None, LINGER)
        self._learn(self._heartbeats.failure or failure)

    def _learn(self, failure: Failure) -> None:
        if self._failure is None:
            self._failure, self._since_failure = failure, monotonic()

    def _report(self, failure: Failure) -> None:
        """Write the report, if this is the rank that noticed the failure."""
        if failure.by == self.activity.rank:
            write_report(self._folder, failure, self._places().values())

    # ---- in the monitor's thread

    def _run(self) -> None:
        ticks = 0
        while not self._ending.wait(TICK):
            ticks += 1
            if self._launcher is not None and os.getppid() != self._launcher:
                self._end_process("its launcher has ended", TEMPORARY)
            known = self._heartbeats.failure
            if known is not None and not (known.is_raised and known.rank == self.activity.rank):
                self._learn(known)
            if self._failure is not None:
                self._react(self._failure)
            elif known is None and self._status == "runs":
                self._look(ticks)

    def _react(self, failure: Failure) -> None:
        """Another rank has failed, or others say that this one has: end the waits here."""
        seconds = monotonic() - self._since_failure
        if self._status != "runs" or (failure.everywhere and seconds < LINGER):
            return
        self._alarm = True
        waits = self.activity.waits is not None
        if waits and monotonic() - self._aborted > 1.0:
            self._end_waits()
        # By another rank; a rank that has itself lost the store still runs.
        is_accused = failure.rank == self.activity.rank != failure.by
        is_busy = self.activity.inside or self.activity.setup is not None
        if (is_accused and seconds > CAUSE) or (
            seconds > LAST and (waits or (is_busy and self._is_overdue()))
        ):
            self._end_process(str(failure), failure.status)

    def _look(self, ticks: int) -> None:
        """Accuse a rank that does not report its own failure: it has left, has died, or is silent."""
        overdue = self.activity.waits is not None and self._is_overdue()
        if ticks % LOOK and not overdue and self._broken is None:
            return
        places, unanswered = self._places(), self._heartbeats.unanswered
        failure = self._find_gone(places)
        if failure is None and overdue and self._broken is None:
            culprits = find_silent(places, self.activity.rank, self._limit)
            failure = of_silence(culprits, places, self.activity.rank) if culprits else None
        host = self._meeting.host
        if failure is None and (
            (host is not None and self._is_cut_off(host[0], unanswered))
            or (overdue and unanswered > STALE)
        ):
            failure = self._lost_store(f"it has not answered for {unanswered:.1f} s")
        if failure is None:
            return
        self._accuse(failure)
        if overdue and failure.by == (self._failure or failure).by:
            self._report(failure)
            waits = "\n".join(f"  {place}" for place in places.values())
            logger.error("penstock: %s\nwhat waits for what:\n%s", failure, waits)

    def _find_gone(self, places: dict[int, Place]) -> Failure | None:
        """The failure of a rank that has left, has died or is out of reach, or of the store's host."""
        rank = self.activity.rank
        others = [place for place in places.values() if place.rank != rank]
        others.sort(key=lambda place: (place.rank != self.activity.peer, -place.stale))
        for place in others:
            is_behind = place.calls < self.activity.calls or self.activity.setup is not None
            if place.status == "left" and (is_behind or self._broken is not None):
                return of_leaving(place, rank)
        if self._heartbeats.lost:
            # If another rank is done, the store's host and this rank may be done too.
            is_over = any(place.status == "left" for place in others)
            return None if is_over else self._lost_store(self._heartbeats.lost)
        for place in others:
            if place.stale > CAUSE and self._broken and monotonic() - self._broken > LINGER:
                what = (
                    "its process ended without a word, its machine is down, or the network to it is cut; "
                    f"it {place.doing}, by its last heartbeat {place.stale:.1f} s ago"
                )
                return at_place(place, "died", what, by=rank)
            if self._is_cut_off(place.address, place.stale):
                what = (
                    f"not heard of for {place.stale:.1f} s: its machine is down, or the network to it is "
                    "cut"
                )
                return at_place(place, "lost", what, by=rank)
        return None

    def _lost_store(self, why: str) -> Failure:
        place = self.activity.place()
        what = (
            f"the control store, which the ranks report to, is lost: {why}; the process that hosts "
            "it, usually that of rank 0 or the launcher, has ended or is stopped, or the network to it is "
            f"cut; this rank {place.words}"
        )
        return Failure("lost", 0, what=what, by=place.rank)

    def _is_cut_off(self, address: str, seconds: float) -> bool:
        """Whether a machine that could be reached has been silent for a while and no longer answers."""
        if not address or address == self._address:
            return False
        port = self._meeting.host[1] if self._meeting.host else 9
        if address not in self._reachable:
            # A machine that never answers, as behind a firewall, may still be well.
            self._reachable[address] = _answers(address, port)
            logger.debug("penstock: %s answers: %s", address, self._reachable[address])
        return seconds > DOUBT and self._reachable[address] and not _answers(address, port)

    def _end_waits(self) -> None:
        self._aborted = monotonic()
        abort = self._abort()
        if abort is not None:
            abort()

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
    if isinstance(error, MessageError | dist.DistError | ConnectionError | TimeoutError):
        return True
    # Gloo's errors have no class of their own; ``end_waits`` makes a wait raise the second.
    return type(error) is RuntimeError and ("/gloo/" in str(error) or "pair closure" in str(error))


def _answers(address: str, port: int) -> bool:
    """Whether a machine can be reached: it accepts a connection, or refuses it."""
    try:
        socket.create_connection((address, port), timeout=PROBE).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True
