"""One process's watch over its rank: it reports what fails here, and hears of what fails elsewhere."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.util import Finalize
from pathlib import Path
from time import monotonic, sleep
from weakref import WeakSet

import torch.distributed as dist

from penstock.errors import TEMPORARY, MessageError, PeerFailed, PenstockError, UsageError
from penstock.faults.board import BoardLostError
from penstock.faults.failure import (
    Failure,
    is_orderly,
    of_exception,
    summary,
    tell_torchrun,
)
from penstock.faults.monitor import LEFT, RAISED, Monitor, Team
from penstock.faults.progress import Activity, Patience

WORD = 1.5
"""Seconds to wait for the cause on the board after a connection broke."""
WORD_FROM_AFAR = 4.0
"""The same across machines, where a death shows only in missing heartbeats."""
LINGER = 1.0
"""Seconds that a failed rank waits for the others to hear why, before a launcher kills them."""
BOW = 0.3
"""Seconds that the others wait, so that the failed rank is the first to end."""
DELIVERY = 0.5
"""Seconds that the last word of a rank may take to reach the store."""
_POLL = 0.02
_ALL: WeakSet[Watch] = WeakSet()


def _concern_child() -> None:
    """In a forked process: make every activity check whether it still is the rank's."""
    for watch in _ALL:
        watch.activity.halt = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_concern_child)


class Watch:
    """Makes a failure on any rank a named error in this process. It begins when the ranks have met.

    Args:
        activity: of this process's rank.
        team: all ranks.
        patience: how long a rank may make no progress.
    """

    def __init__(self, activity: Activity, team: Team, patience: Patience) -> None:
        self.activity = activity
        self.patience = patience
        self._team = team
        self._pid = os.getpid()
        self._monitor = Monitor(activity, team, patience)
        self._closed = threading.Event()
        activity.concern = self.check
        _ALL.add(self)
        activity.slate = team.board.slate(activity.rank)
        self._monitor.start()
        atexit.register(self.leave)
        if multiprocessing.parent_process() is not None:
            # A multiprocessing child exits without running what is registered with atexit.
            Finalize(None, self.leave, exitpriority=10)

    def made(self) -> None:
        """The pipeline is set up; from now on the limits for steps apply."""
        self.patience.made = True
        self.activity.make(None)

    def over(self, cut: Callable[[], object]) -> None:
        """Watch over connections.

        Args:
            cut: breaks this rank's connections, so that waits on them end.
        """
        self._monitor.wires.break_by(cut)

    @contextmanager
    def patient(self, seconds: float) -> Iterator[None]:
        """Give this rank at least so much time for what it does in this context."""
        before = self.activity.slack
        self.activity.slack = max(before, seconds)
        self._monitor.beat()
        try:
            yield
        finally:
            self.activity.slack = before
            self._monitor.beat()

    def keep_in(self, folder: Path | None) -> None:
        """Write reports of failures to this folder."""
        self._monitor.folder = folder

    def check(self) -> None:
        """Called before an action if there may be a reason to stop.

        Raises:
            PeerFailed: another rank has failed.
            UsageError: this process was forked from the rank's.
        """
        if self._is_child():
            raise UsageError(
                f"this process was forked from that of rank {self.activity.rank}, and is not a rank of the "
                "pipeline: it must not continue the step, but do its own work and exit"
            )
        if self._monitor.alarm or self._monitor.lost is not None:
            raise self._stopped()

    def failed(self, error: BaseException) -> BaseException:
        """Report an error here to the other ranks, or find the failure that has caused it.

        Returns:
            What to raise: the error itself, or a :class:`PeerFailed` if it follows from another rank's
            failure.
        """
        if self._is_child() or self._monitor.stopped:
            return error
        if isinstance(error, PeerFailed) or is_orderly(error):
            return error
        if _of_wires(error):
            try:
                if self._hear_why():
                    return self._stopped()
            except BoardLostError as lost:
                return self._cut_off(lost)
        culprit = error.rank if isinstance(error, PenstockError) else None
        if culprit is None or culprit == self.activity.rank:
            self._confess(error)
        else:
            self._follow(error, culprit)
        return error

    def close(self) -> None:
        """This rank is done; a second call does nothing."""
        if self._closed.is_set():
            return
        self._closed.set()
        atexit.unregister(self.leave)
        self.activity.concern = None
        if self._is_child():
            return
        self._monitor.stop()
        with suppress(BoardLostError):
            place = self.activity.snapshot()
            self._team.say(LEFT, {name: place[name] for name in ("calls", "step")})
            self._team.board.flush(DELIVERY)
        self._team.board.close()

    def leave(self) -> None:
        """The interpreter exits: tell the others, with the reason if it is an uncaught error."""
        if self._closed.is_set() or self._is_child():
            return
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is not None:
            self.failed(error)
        followed = [f.rank for f in self._team.of_others[:1] if f.rank != self.activity.rank]
        self.close()
        if self._monitor.stopped and followed:
            # A launcher reports the process that ends first.
            self._await_departure(followed)

    # ---- how it is done

    def _is_child(self) -> bool:
        """Whether this process was forked from the rank's, to which connections, board and slate belong."""
        if os.getpid() == self._pid:
            return False
        self.activity.slate = None
        return True

    def _hear_why(self) -> bool:
        """Wait for another rank to say why a connection broke; returns whether one did."""
        self._monitor.cut_off = True
        deadline = monotonic() + (WORD if self._team.is_near else WORD_FROM_AFAR)
        self._team.refresh()
        while not self._team.of_others and monotonic() < deadline:
            if self._monitor.lost is not None:
                raise self._monitor.lost
            sleep(_POLL)
            self._team.refresh()
        return bool(self._team.of_others)

    def _confess(self, error: BaseException) -> None:
        failure = of_exception(error, self.activity.rank, self.activity.snapshot())
        if isinstance(error, PenstockError) and not isinstance(error, MessageError):
            # An error before the first action is raised on all ranks.
            early = self.activity.is_busy and self.activity.doing is None
            failure = replace(failure, everywhere=early)
        self._stop()
        tell_torchrun(failure, own=True)
        # If the board is lost, the error is still raised, and the others notice by broken connections.
        with suppress(BoardLostError):
            self._team.report(failure)
            self._team.say(RAISED)
        if not failure.everywhere:
            self._monitor.wires.cut()
        with suppress(BoardLostError):
            self._team.await_word(RAISED, self._team.others, LINGER)
        self._monitor.write_story(self._team.failures or (failure,))

    def _follow(self, error: BaseException, culprit: int) -> None:
        """All ranks raise this error because of one of them, which should be the first to end."""
        self._stop()
        tell_torchrun(of_exception(error, culprit, self.activity.snapshot()), own=False)
        with suppress(BoardLostError):
            self._team.say(RAISED)
        self._await_departure([culprit])

    def _stop(self) -> None:
        """This rank has stopped with an error."""
        self._monitor.stopped = True
        # At exit the interpreter would search all objects of torch and the model for cycles, which takes
        # seconds for which the other ranks wait. Frozen objects are not searched; finalizers still
        # run.
        atexit.register(gc.freeze)

    def _stopped(self) -> PeerFailed:
        """The error with which this rank must stop."""
        if self._monitor.lost is not None and not self._team.of_others:
            return self._cut_off(self._monitor.lost)
        failures = self._team.of_others
        self._stop()
        self._monitor.wires.cut()
        tell_torchrun(failures[0], own=False)
        with suppress(BoardLostError):
            self._team.say(RAISED)
        text = summary(failures)
        if failures[0].rank != self.activity.rank:
            self._await_departure([failures[0].rank])
            text = f"rank {self.activity.rank} stopped because {text}"
        if failures[0].by == self.activity.rank and failures[0].kind not in ("silent", "lost"):
            # For a rank that cannot write it; for a silent or lost one, the monitor has written it.
            self._monitor.write_story(self._team.failures)
        return PeerFailed(text, failures, failures[0].status)

    def _await_departure(self, ranks: list[int]) -> None:
        try:
            self._team.await_word(LEFT, ranks, BOW)
        except BoardLostError:
            sleep(BOW)

    def _cut_off(self, lost: BoardLostError) -> PeerFailed:
        self._stop()
        self._monitor.wires.cut()
        where = self._team.words_of(self.activity.snapshot())
        what = f"the control store, through which ranks leave word, is lost: {lost}"
        failure = Failure("lost", 0, what=what, status=TEMPORARY, by=self.activity.rank)
        tell_torchrun(failure, own=False)
        self._monitor.write_story((failure,))
        text = (
            f"rank {self.activity.rank} stopped because {what}; the process that hosts it, usually that of "
            f"rank 0, has ended or is stopped, or the network to it is cut; this rank {where}"
        )
        return PeerFailed(text, (failure,), TEMPORARY)


def _of_wires(error: BaseException) -> bool:
    """Whether an error may be just the sign of a broken connection."""
    return isinstance(error, (MessageError, dist.DistError)) or type(error) is RuntimeError
