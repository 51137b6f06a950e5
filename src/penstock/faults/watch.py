"""One process's watch over its rank: says what failed here, hears what failed elsewhere."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.util import Finalize
from pathlib import Path
from time import sleep

import torch.distributed as dist

from penstock.errors import MessageError, PeerFailed, PenstockError
from penstock.faults import report
from penstock.faults.activity import Activity
from penstock.faults.board import Board, BoardLostError
from penstock.faults.failure import TEMPORARY, Failure, is_orderly, of_exception
from penstock.faults.ledger import Ledger
from penstock.faults.monitor import Monitor, Wires
from penstock.faults.patience import Patience
from penstock.faults.processes import Process
from penstock.faults.team import LEFT, RAISED, Team

WORD = 1.5
"""Seconds that a broken wire has until its cause must be on the board."""
WORD_FROM_AFAR = 4.0
"""Likewise across machines, where a death is known by heartbeats that do not come."""
LINGER = 1.0
"""Seconds that a failed rank waits for the others to hear why, before a launcher ends them."""
BOW = 0.3
"""Seconds that the others leave to the failed rank to say it first."""


class Watch:
    """What a process does so that a failure anywhere is a named error here.

    Args:
        activity: what this process's rank does.
        processes: of every rank.
        board: where the ranks leave word.
        close_wires: breaks this rank's own wires, so that a wait on them ends.
        patience: how long a rank may make no progress.
    """

    def __init__(
        self,
        activity: Activity,
        processes: Mapping[int, Process],
        board: Board,
        close_wires: Callable[[], None],
        patience: Patience,
    ) -> None:
        self._activity = activity
        self._board = board
        self._pid = os.getpid()
        self._team = Team(activity.rank, processes, board)
        self._ledger = Ledger(board, activity.rank)
        self._wires = Wires(close_wires)
        self._monitor = Monitor(activity, self._team, self._ledger, self._wires, patience)
        self._closed = threading.Event()
        activity.concern = self.check
        activity.slate = board.slate(activity.rank)
        self._team.say("ready")
        self._monitor.start()
        atexit.register(self.leave)
        if multiprocessing.parent_process() is not None:
            # A process of multiprocessing ends without what is registered with atexit.
            Finalize(None, self.leave, exitpriority=10)

    @property
    def folder(self) -> Path | None:
        """Where ``failure.json`` goes."""
        return self._monitor.folder

    def keep_in(self, folder: Path | None) -> None:
        """Write the story of a failure to this folder."""
        self._monitor.folder = folder

    def check(self) -> None:
        """Called before each action.

        Raises:
            PeerFailed: another rank has failed.
        """
        if self._monitor.alarm:
            raise self._peer_failed()

    def failed(self, error: BaseException) -> BaseException:
        """Tell the others of an error here, or find whose it is.

        Returns:
            What to raise: the error itself, or a :class:`PeerFailed` if it only follows from another's.
        """
        if self._monitor.stopped or isinstance(error, PeerFailed) or is_orderly(error):
            return error
        try:
            if _of_wires(error) and self._hear_why():
                return self._peer_failed()
            culprit = error.rank if isinstance(error, PenstockError) else None
            if culprit is None or culprit == self._activity.rank:
                self._confess(error)
            else:
                self._follow(error, culprit)
        except BoardLostError as lost:
            return self._cut_off(lost)
        return error

    def _hear_why(self) -> bool:
        """Wait for the word of another rank on why a wire broke."""
        self._monitor.cut_off = True
        return bool(self._ledger.await_others(WORD if self._team.is_near else WORD_FROM_AFAR))

    def close(self) -> None:
        """This rank is done; idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        atexit.unregister(self.leave)
        self._activity.concern = None
        self._monitor.stop()
        if os.getpid() != self._pid:
            return
        try:
            self._depart()
        except BoardLostError:
            return

    def leave(self) -> None:
        """The interpreter ends: say so, and why if it is for an error that nobody caught."""
        if self._closed.is_set() or os.getpid() != self._pid:
            return
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is not None:
            self.failed(error)
        followed = [f.rank for f in self._ledger.of_others[:1] if f.rank != self._activity.rank]
        self.close()
        if self._monitor.stopped and followed:
            # A launcher names whoever ends first.
            self._await_departure(followed)

    def _depart(self) -> None:
        self._team.say(LEFT, json.dumps({"step": self._activity.step}))
        if all(self._team.gone(rank) for rank in self._team.others):
            self._board.remove()

    def _confess(self, error: BaseException) -> None:
        self._monitor.stopped = True
        failure = of_exception(error, self._activity.rank, self._activity.snapshot())
        if isinstance(error, PenstockError) and not isinstance(error, MessageError):
            # What is refused before the first action is refused by all ranks.
            early = self._activity.inside and self._activity.doing is None
            failure = replace(failure, everywhere=early)
        report.tell_torchrun(failure, own=True)
        self._ledger.post(failure)
        self._team.say(RAISED)
        if not failure.everywhere:
            self._wires.cut()
        self._team.await_word(RAISED, self._team.others, LINGER)
        self._monitor.write_story()

    def _follow(self, error: BaseException, culprit: int) -> None:
        """All ranks raise this error because of one of them, which is to say it first."""
        self._monitor.stopped = True
        failure = of_exception(error, culprit, self._activity.snapshot())
        report.tell_torchrun(failure, own=False)
        self._team.say(RAISED)
        self._await_departure([culprit])

    def _peer_failed(self) -> PeerFailed:
        failures = self._ledger.of_others
        self._monitor.stopped = True
        self._wires.cut()
        report.tell_torchrun(failures[0], own=False)
        self._team.say(RAISED)
        text = report.summary(failures)
        if failures[0].rank != self._activity.rank:
            self._await_departure([failures[0].rank])
            text = f"rank {self._activity.rank} stopped because {text}"
        self._monitor.finish_story()
        return PeerFailed(text, failures, failures[0].status)

    def _await_departure(self, ranks: list[int]) -> None:
        try:
            self._team.await_word(LEFT, ranks, BOW)
        except BoardLostError:
            sleep(BOW)

    def _cut_off(self, lost: BoardLostError) -> PeerFailed:
        self._monitor.stopped = True
        self._wires.cut()
        what = f"the control store, through which ranks leave word, is lost: {lost}"
        failure = Failure("lost", 0, what=what, status=TEMPORARY, by=self._activity.rank)
        report.tell_torchrun(failure, own=False)
        text = (
            f"rank {self._activity.rank} stopped because {what}; the process that hosts it, as a rule "
            "that of rank 0, has ended or cannot be reached"
        )
        return PeerFailed(text, (failure,), TEMPORARY)


def _of_wires(error: BaseException) -> bool:
    """Whether an error may only say that a wire broke, and not why."""
    return isinstance(error, (MessageError, dist.DistError)) or type(error) is RuntimeError
