"""One process's watch over its rank: says what failed here, hears what failed elsewhere."""

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
from penstock.faults.activity import Activity
from penstock.faults.board import BoardLostError
from penstock.faults.failure import (
    Failure,
    is_orderly,
    of_exception,
    summary,
    tell_torchrun,
)
from penstock.faults.monitor import Monitor
from penstock.faults.silence import Patience
from penstock.faults.team import LEFT, RAISED, Team

WORD = 1.5
"""Seconds that a broken wire has until its cause must be on the board."""
WORD_FROM_AFAR = 4.0
"""Likewise across machines, where a death is known by heartbeats that do not come."""
LINGER = 1.0
"""Seconds that a failed rank waits for the others to hear why, before a launcher ends them."""
BOW = 0.3
"""Seconds that the others leave to the failed rank to say it first."""
DELIVERY = 0.5
"""Seconds that the last word of a rank may take to the store."""
_POLL = 0.02
_ALL: WeakSet[Watch] = WeakSet()


def _concern_child() -> None:
    """Let a process that was forked from a rank's find out that it is none."""
    for watch in _ALL:
        watch.activity.halt = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_concern_child)


class Watch:
    """What a process does so that a failure anywhere is a named error here; from its first moment on.

    Args:
        activity: what this process's rank does.
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
            # A process of multiprocessing ends without what is registered with atexit.
            Finalize(None, self.leave, exitpriority=10)

    def made(self) -> None:
        """The pipeline is set up: from now on a rank has the time of a step."""
        self.patience.made = True
        self.activity.make(None)

    def over(self, cut: Callable[[], object]) -> None:
        """Take these wires under watch.

        Args:
            cut: breaks this rank's own, so that a wait on them ends.
        """
        self._monitor.wires.break_by(cut)

    @contextmanager
    def patient(self, seconds: float) -> Iterator[None]:
        """Give this rank so much time for what it does here, if a step has less."""
        before = self.activity.slack
        self.activity.slack = max(before, seconds)
        self._monitor.beat()
        try:
            yield
        finally:
            self.activity.slack = before
            self._monitor.beat()

    def keep_in(self, folder: Path | None) -> None:
        """Write the story of a failure to this folder."""
        self._monitor.folder = folder

    def check(self) -> None:
        """Called before an action, where there may be a reason to stop.

        Raises:
            PeerFailed: another rank has failed.
            UsageError: this process was forked from the rank's.
        """
        if self._is_child():
            raise UsageError(
                f"this process was forked from that of rank {self.activity.rank} and is no rank of the "
                "pipeline: it must not go on with the step, but do its own work and end"
            )
        if self._monitor.alarm or self._monitor.lost is not None:
            raise self._stopped()

    def failed(self, error: BaseException) -> BaseException:
        """Tell the others of an error here, or find whose it is.

        Returns:
            What to raise: the error itself, or a :class:`PeerFailed` if it only follows from another's.
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
        """This rank is done; idempotent."""
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
        """The interpreter ends: say so, and why if it is for an error that nobody caught."""
        if self._closed.is_set() or self._is_child():
            return
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is not None:
            self.failed(error)
        followed = [f.rank for f in self._team.of_others[:1] if f.rank != self.activity.rank]
        self.close()
        if self._monitor.stopped and followed:
            # A launcher names whoever ends first.
            self._await_departure(followed)

    # ---- how it is done

    def _is_child(self) -> bool:
        """Whether this process was forked from the rank's, to which wires, board and slate belong."""
        if os.getpid() == self._pid:
            return False
        self.activity.slate = None
        return True

    def _hear_why(self) -> bool:
        """Wait for the word of another rank on why a wire broke."""
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
            # What is refused before the first action is refused by all ranks.
            early = self.activity.is_busy and self.activity.doing is None
            failure = replace(failure, everywhere=early)
        self._stop()
        tell_torchrun(failure, own=True)
        # Where no word can be left the error is still this one: wires that break tell the others.
        with suppress(BoardLostError):
            self._team.report(failure)
            self._team.say(RAISED)
        if not failure.everywhere:
            self._monitor.wires.cut()
        with suppress(BoardLostError):
            self._team.await_word(RAISED, self._team.others, LINGER)
        self._monitor.write_story(self._team.failures or (failure,))

    def _follow(self, error: BaseException, culprit: int) -> None:
        """All ranks raise this error because of one of them, which is to say it first."""
        self._stop()
        tell_torchrun(of_exception(error, culprit, self.activity.snapshot()), own=False)
        with suppress(BoardLostError):
            self._team.say(RAISED)
        self._await_departure([culprit])

    def _stop(self) -> None:
        """This rank has stopped with an error."""
        self._monitor.stopped = True
        # To search the objects that torch and the model have made for cycles takes an ending interpreter
        # seconds, for which everybody waits; what has to be done at the end is done nevertheless.
        atexit.register(gc.freeze)

    def _stopped(self) -> PeerFailed:
        """Why this rank must stop."""
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
            # For a rank that cannot; who finds a silent one has told the story.
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
            f"rank {self.activity.rank} stopped because {what}; the process that hosts it, as a rule "
            f"that of rank 0, has ended or is stopped, or the network to it is cut; this rank {where}"
        )
        return PeerFailed(text, (failure,), TEMPORARY)


def _of_wires(error: BaseException) -> bool:
    """Whether an error may only say that a wire broke, and not why."""
    return isinstance(error, (MessageError, dist.DistError)) or type(error) is RuntimeError
