"""One process's watch over its rank: it reports what fails here, and hears of what fails elsewhere."""

from __future__ import annotations

import atexit
import gc
import logging
import multiprocessing
import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    stacks,
    status_of,
    tell_torchrun,
    write_report,
)
from penstock.faults.heartbeats import Heartbeats
from penstock.faults.meeting import Meeting
from penstock.faults.silence import STALE, Place, SilenceVerdict, Stragglers, find_silent

TICK = 0.1
"""Seconds between two looks of the monitor."""
LOOK = 5
"""Ticks between two looks at the processes of this machine."""
JUDGE = 20
"""Ticks between two looks for stragglers."""
CAUSE = 2.0
"""Seconds to wait for the reason why a connection broke."""
LINGER = 1.0
"""Seconds that a failed rank waits for the others to hear why, before a launcher ends them."""
GATHER = 2.0
"""Seconds that the others have to give their stacks; they hear of a failure with their next heartbeat."""
BOW = 0.5
"""Seconds that the others wait, so that the failed rank is the first to end."""
LAST = 4.0
"""Seconds after waits were ended until a rank that still waits ends itself."""
DOUBT = 1.5
"""Seconds without a word from a machine after which it is asked whether it can be reached."""
PROBE = 1.0
"""Seconds in which a machine that can be reached answers."""

_ALL: weakref.WeakSet[Watch] = weakref.WeakSet()

logger = logging.getLogger("penstock")


def _alarm_child() -> None:
    """In a forked process: its checks find out that it is no rank."""
    for watch in _ALL:
        watch.alarm = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_alarm_child)


class Watch:
    """Makes a failure on any rank a named error in this process, and ends waits that nobody will.

    A thread sends heartbeats; another one, the monitor, looks for failures, deaths and silence, even if this
    rank's own thread and the store are blocked. No process is ever killed but this one, by itself.

    Args:
        activity: of this process's rank.
        meeting: the ranks.
        patience: how long a rank may make no progress.

    Attributes:
        alarm: whether :meth:`check` may have a reason to raise.
    """

    def __init__(self, activity: Activity, meeting: Meeting, patience: Patience) -> None:
        self.alarm = False
        self.activity = activity
        self._meeting = meeting
        self._patience = patience
        self._pid = os.getpid()
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
        self._abort: Callable[[], Callable[[], object] | None] = lambda: None
        self._folder: Path | None = None
        self._status = "runs"
        self._stopped = False
        self._failure: Failure | None = None
        self._since_failure = 0.0
        self._broken: float | None = None
        self._aborted = 0.0
        self._reachable: dict[str, bool] = {}
        self._stragglers = Stragglers()
        self._gave_stacks = False
        self._reporting = threading.Lock()
        self._ending = threading.Event()
        self._closed = False
        self._heartbeats = Heartbeats(meeting, self._own_place)
        self._monitor = threading.Thread(target=self._run, name="penstock monitor", daemon=True)
        self._monitor.start()
        _ALL.add(self)
        atexit.register(self._leave)
        if multiprocessing.parent_process() is not None:
            # A child of multiprocessing exits without running what is registered with atexit.
            Finalize(None, self._leave, exitpriority=10)

    def protect(self, abort: Callable[[], None]) -> None:
        """Watch over connections.

        Args:
            abort: ends all waits of this rank and closes its connections, so that the others' waits end too.
                It is called from any thread, and again while a wait goes on. A bound method is only
                weakly held.
        """
        is_method = getattr(abort, "__self__", None) is not None
        self._abort = weakref.WeakMethod(abort) if is_method else lambda: abort

    def made(self) -> None:
        """The pipeline is set up; from now on the limits for steps apply."""
        self.activity.setup = None
        self.activity.rest()
        self._heartbeats.now()

    def await_all(self, what: str) -> None:
        """Wait until all ranks are here: before something that blocks in torch and cannot be ended.

        Args:
            what: what they come for, in words; each is waited for once.

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
        """Give this rank at least so much time for what it does in this context."""
        before = self.activity.slack
        self.activity.slack = max(before, seconds)
        self._heartbeats.now()
        try:
            yield
        finally:
            self.activity.slack = before
            self._heartbeats.now()

    def check(self) -> None:
        """Called before every action; in the usual case it only looks at a flag.

        Raises:
            PeerFailed: another rank has failed.
            UsageError: this process was forked from the rank's.
        """
        if not self.alarm:
            return
        if self._is_child():
            raise UsageError(
                f"this process was forked from that of rank {self.activity.rank}, and is not a rank of the "
                "pipeline: it must not continue the step, but do its own work and exit"
            )
        if self._failure is not None:
            raise self._peer_failed(self._failure)

    def failed(self, error: BaseException) -> BaseException:
        """Report an error here to the other ranks, or find the failure that has caused it.

        Returns:
            What to raise: the error itself, or a :class:`PeerFailed` if it follows from another rank's
            failure.
        """
        if self._is_child() or self._stopped or isinstance(error, PeerFailed):
            return error
        if isinstance(error, SystemExit) and status_of(error) == 0:
            return error
        if self._may_be_broken_wait(error):
            return self._peer_failed(self._find_cause(error))
        culprit = error.rank if isinstance(error, PenstockError) else None
        if culprit in (None, self.activity.rank):
            self._confess(error)
        else:
            # All ranks raise it because of one of them, which reports it.
            self._stop()
            tell_torchrun(of_exception(error, self.activity.place()), error, own=False)
            self._heartbeats.wait_for(lambda: self._has_stopped(culprit), BOW)
        return error

    def close(self) -> None:
        """This rank is done; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._leave)
        if self._is_child():
            return
        self._ending.set()
        if self._monitor is not threading.current_thread():
            self._monitor.join(2 * PROBE)
        self._status = "left"
        self._heartbeats.close(LINGER)

    # ---- in the thread that runs the program

    def _may_be_broken_wait(self, error: BaseException) -> bool:
        if isinstance(error, MessageError | dist.DistError | ConnectionError | TimeoutError):
            return True
        # Gloo's errors are of no class of their own; the second is what ``end_waits`` makes of a wait.
        return type(error) is RuntimeError and (
            "/gloo/" in str(error) or "pair closure" in str(error)
        )

    def _find_cause(self, error: BaseException) -> Failure:
        """Why a wait broke: the failure of another rank, which may be known a little later."""
        self._broken = monotonic()
        self._heartbeats.wait_for(lambda: self._failure is not None, CAUSE)
        # The monitor may need a moment more: it also looks for who is not heard of any more.
        deadline = self._broken + CAUSE + STALE
        while self._failure is None and monotonic() < deadline:
            self._ending.wait(TICK)
        if self._failure is None:
            peer = self.activity.peer
            place = self._places()[self.activity.rank if peer is None else peer]
            what = f"the connection broke, and no rank says why ({type(error).__name__}: {error})"
            self._accuse(at_place(place, "lost", what, by=self.activity.rank))
        return self._failure or of_exception(error, self.activity.place())

    def _confess(self, error: BaseException) -> None:
        failure = of_exception(error, self.activity.place())
        self._stop()
        tell_torchrun(failure, error, own=True)
        self._heartbeats.report(failure)
        self._heartbeats.wait_for(lambda: self._heartbeats.failure is not None, LINGER)
        if not failure.everywhere:
            self._end_waits()
        self._await_others()
        first = self._heartbeats.failure or failure
        if first.rank == self.activity.rank:
            write_report(self._folder, first, self._places().values())

    def _peer_failed(self, failure: Failure) -> PeerFailed:
        """The error with which this rank must stop."""
        self._stop()
        self._end_waits()
        rank = self.activity.rank
        tell_torchrun(failure, own=False)
        if failure.by == rank:
            with self._reporting:
                write_report(self._folder, failure, self._places().values())
        text = str(failure)
        if failure.rank != rank:
            if failure.is_raised:
                self._heartbeats.wait_for(lambda: self._has_left(failure.rank), BOW)
            if self._meeting.hosts:
                # The store ends with this process.
                self._await_others()
            text = f"{self.activity.name} stopped because {text}"
        return PeerFailed(text, (failure,), failure.status)

    def _stop(self) -> None:
        """This rank stops with an error."""
        self._stopped = True
        self._status = "stops"
        self._heartbeats.now()
        # At exit the interpreter would search all objects of torch and the model for cycles, which takes
        # seconds for which the other ranks wait. Frozen objects are not searched; finalizers still run.
        atexit.register(gc.freeze)

    def _leave(self) -> None:
        """The interpreter exits: tell the others, with the reason if it is an uncaught error."""
        if self._closed or self._is_child():
            return
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is not None:
            self.failed(error)
        self.close()

    def _is_child(self) -> bool:
        """Whether this process was forked from the rank's, to which threads and connections belong."""
        return os.getpid() != self._pid

    # ---- what is known of the ranks

    @property
    def _others(self) -> list[int]:
        return list(self._heartbeats.places)

    def _has_left(self, rank: int) -> bool:
        return (
            self._heartbeats.places[rank].status == "left"
            or self._meeting.processes[rank].condition() == "ended"
        )

    def _has_stopped(self, rank: int) -> bool:
        return self._heartbeats.places[rank].status == "stops" or self._has_left(rank)

    def _await_others(self) -> None:
        """Wait a moment until all others that can have heard of the failure."""

        def have_heard() -> bool:
            places = self._places().values()
            return all(
                self._has_stopped(p.rank) or p.is_mute for p in places if p.rank in self._others
            )

        self._heartbeats.wait_for(have_heard, LINGER)

    @property
    def _limit(self) -> float:
        if self.activity.setup is not None:
            return self._patience.rendezvous
        return self._patience.limit(self.activity.durations)

    def _places(self) -> dict[int, Place]:
        """Where every rank is."""
        now, limit = monotonic(), self._limit
        places = {self.activity.rank: self._own_place()}
        for rank in self._others:
            # First its time, as the other thread may replace both.
            stale = now - self._heartbeats.heard[rank]
            condition = self._meeting.processes[rank].condition()
            if condition != "stopped":
                # While the store does not answer, nobody is heard.
                stale -= self._heartbeats.unanswered
            place = replace(
                self._heartbeats.places[rank], stale=max(0.0, stale), condition=condition
            )
            if place.is_mute:
                # It has come as far as this rank, at least: a step ends for all together.
                place = replace(place, limit=max(limit, place.slack))
            places[rank] = place
        return dict(sorted(places.items()))

    def _is_overdue(self) -> bool:
        return monotonic() - self.activity.since > max(self._limit, self.activity.slack)

    def _own_place(self) -> Place:
        return self.activity.place(self._status, self._limit)

    def _accuse(self, failure: Failure) -> None:
        """Report the failure of another rank, unless one is known already."""
        self._heartbeats.report(failure)
        if self._heartbeats.unanswered < DOUBT:
            self._heartbeats.wait_for(lambda: self._heartbeats.failure is not None, LINGER)
        self._learn(self._heartbeats.failure or failure)

    def _learn(self, failure: Failure) -> None:
        if self._failure is None:
            self._failure, self._since_failure = failure, monotonic()

    # ---- in the monitor's thread

    def _run(self) -> None:
        ticks = 0
        for process in self._meeting.processes:
            if process.condition() == "unknown" and process.address:
                self._can_be_reached(process.address)
        while not self._ending.wait(TICK):
            ticks += 1
            if self._launcher is not None and os.getppid() != self._launcher:
                self._end_process("its launcher has ended", TEMPORARY)
            known = self._heartbeats.failure
            if known is not None and not (known.is_raised and known.rank == self.activity.rank):
                self._learn(known)
            if self._failure is not None:
                self._react(self._failure)
            elif known is None and not self._stopped:
                self._look(ticks)

    def _react(self, failure: Failure) -> None:
        """Another rank has failed, or others say that this one has: end the waits here."""
        seconds = monotonic() - self._since_failure
        if failure.kind == "silent" and not self._gave_stacks:
            self._gave_stacks = True
            self._heartbeats.give_stacks(stacks())
        if failure.everywhere and (self._stopped or seconds < LINGER):
            return
        self.alarm = True
        if self._stopped:
            return
        waits = self.activity.waits is not None
        if waits and monotonic() - self._aborted > 1.0:
            self._end_waits()
        is_accused = failure.rank == self.activity.rank
        is_busy = self.activity.inside or self.activity.setup is not None
        if (is_accused and seconds > CAUSE) or (
            seconds > LAST and (waits or (is_busy and self._is_overdue()))
        ):
            self._end_process(str(failure), failure.status)

    def _look(self, ticks: int) -> None:
        if self.activity.rank == 0 and ticks % JUDGE == 0:
            for sentence in self._stragglers.find(
                [self.activity.place(), *self._heartbeats.places.values()]
            ):
                logger.warning("penstock: %s", sentence)
        overdue = self.activity.waits is not None and self._is_overdue()
        if ticks % LOOK and not overdue and self._broken is None:
            return
        failure = self._find_gone()
        if failure is None and overdue and self._broken is None and self._find_silent():
            return
        failure = failure or self._find_lost_store(overdue)
        if failure is not None:
            self._accuse(failure)

    def _find_gone(self) -> Failure | None:
        """The failure of a rank that has left, ended, or is out of reach."""
        rank = self.activity.rank
        for place in self._places().values():
            if place.rank == rank:
                continue
            if place.status == "left":
                is_behind = place.calls < self.activity.calls or self.activity.setup is not None
                if is_behind or self._broken is not None:
                    return of_leaving(place, rank)
            elif place.condition == "ended":
                return at_place(
                    place, "died", f"its process ended without a word; it {place.words}", by=rank
                )
            elif place.condition == "unknown" and (what := self._find_cut(place)):
                return at_place(place, "died" if self._broken else "lost", what, by=rank)
        return None

    def _find_cut(self, place: Place) -> str:
        """Why a rank of another machine is out of reach; empty if that is not known."""
        if self._broken is not None and min(place.stale, monotonic() - self._broken) > CAUSE:
            return (
                "its process ended without a word, its machine is down, or the network to it is cut"
            )
        address = self._meeting.processes[place.rank].address
        if not address or self._heartbeats.lost:
            return ""
        if place.stale < DOUBT or self._can_be_reached(address):
            return ""
        return f"not heard of for {place.stale:.1f} s: its machine is down, or the network to it is cut"

    def _can_be_reached(self, address: str) -> bool:
        """Whether a machine answers; one that never did, as behind a firewall, may all the same."""
        port = self._meeting.host[1] if self._meeting.host else 9
        if address not in self._reachable:
            self._reachable[address] = _answers(address, port)
        return not self._reachable[address] or _answers(address, port)

    def _find_lost_store(self, overdue: bool) -> Failure | None:
        """The failure to reach the store, if that is one."""
        host, silent = self._meeting.host, self._heartbeats.unanswered
        why = self._heartbeats.lost
        if why and any(place.status == "left" for place in self._heartbeats.places.values()):
            # Its host is done, and so may this rank be.
            return None
        is_cut = silent > DOUBT and host is not None and not self._can_be_reached(host[0])
        if not why and (is_cut or (overdue and silent > STALE)):
            why = f"it has not answered for {silent:.1f} s"
        if not why:
            return None
        place = self.activity.place()
        what = (
            f"the control store, through which the ranks leave word, is lost: {why}; the process that hosts "
            "it, usually that of rank 0 or the launcher, has ended or is stopped, or the network to it is "
            f"cut; this rank {place.words}"
        )
        return Failure("lost", 0, what=what, by=place.rank)

    def _find_silent(self) -> bool:
        """Report who holds this rank up, if that can be known; returns whether it can."""
        places = self._places()
        verdict = find_silent(places, self.activity.rank)
        if verdict is None and self._heartbeats.unanswered > STALE:
            # The host of the store may be stopped, and nobody is heard of since then.
            stopped = [p for p in places.values() if p.condition == "stopped" and p.idle >= p.limit]
            verdict = (
                SilenceVerdict((stopped[0].rank,), tuple(map(str, stopped))) if stopped else None
            )
        if verdict is None:
            return False
        with self._reporting:
            self._report_silence(of_silence(verdict, places, self.activity.rank), verdict, places)
        return True

    def _report_silence(
        self, failure: Failure, verdict: SilenceVerdict, places: dict[int, Place]
    ) -> None:
        self._accuse(failure)
        if self._failure is None or self._failure.by != self.activity.rank:
            return
        # Where the store does not answer, nothing of them arrives.
        answers = self._heartbeats.unanswered <= STALE
        able = [rank for rank in self._others if answers and not places[rank].is_mute]
        self._heartbeats.wait_for(lambda: all(r in self._heartbeats.stacks for r in able), GATHER)
        known = {**self._heartbeats.stacks, self.activity.rank: stacks()}
        write_report(self._folder, failure, places.values(), known)
        lines = [str(failure), "what waits for what:", *(f"  {line}" for line in verdict.chain)]
        lines += [
            f"stacks of rank {rank}:\n{known.get(rank, '  none')}" for rank in verdict.culprits
        ]
        logger.error("penstock: %s", "\n".join(lines))

    def _end_waits(self) -> None:
        self._aborted = monotonic()
        abort = self._abort()
        if abort is not None:
            abort()

    def _end_process(self, why: str, status: int) -> None:
        if self._ending.is_set() or self._stopped:
            return
        logger.error("penstock: %s ends itself: %s", self.activity.name, why)
        os._exit(status)


def _answers(address: str, port: int) -> bool:
    """Whether a machine can be reached: it accepts a connection, or refuses it."""
    try:
        socket.create_connection((address, port), timeout=PROBE).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True
