"""What a rank is doing, and how long it may make no progress.

The thread that runs the program updates its activity by plain assignments, at every action; the watch's
threads read it. A reader may see parts of two moments, but verdicts wait for seconds and do not depend on it.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from threading import Lock, get_ident
from time import monotonic
from types import FrameType
from typing import Any, NamedTuple

import torch

from penstock._engine.faults.places import Place, name_of, ranges
from penstock.errors import UsageError


class Collective(NamedTuple):
    """An operation to which each process of a group comes.

    Args:
        members: the group's processes, as the text that :func:`ranges` makes of their global ranks.
        number: how many operations of this group this process has come to, with this one.
    """

    members: str
    number: int


Probe = Callable[["Activity", Any], object]
_PROBES: list[Probe] = []


def add_probe(probe: Probe) -> Callable[[], None]:
    """Call a function at every action and part of the set-up, as fault injection does.

    Args:
        probe: called with the activity and the action, or the text given to :meth:`Activity.prepare`.

    Returns:
        A function that removes the probe.
    """
    _PROBES.append(probe)
    return lambda: _PROBES.remove(probe) if probe in _PROBES else None


def has_probes() -> bool:
    """Tell whether a probe was added."""
    return bool(_PROBES)


class Activity:
    """What one rank is doing.

    Args:
        rank: the rank in the pipeline.
        pipeline: the global ranks of the pipeline, in order; by default of this rank alone.
        replica: the number of the pipeline, where the job has several.

    Attributes:
        since: when it last made progress, on this process's monotonic clock.
        slack: seconds that the current work may take, if that is more than usual.
        durations: how long the latest training steps took, in seconds; before the first one, how long the
            latest calls took.
        call: the call of the user's that this rank is in and that every rank must make; empty for none.

    The other attributes are those of :class:`~penstock._engine.faults.Place`.
    """

    def __init__(self, rank: int, pipeline: Sequence[int] = (), replica: int | None = None) -> None:
        self.rank = rank
        self.replica = replica
        self.pipeline = tuple(pipeline) or (rank,)
        self.process = self.pipeline[rank] if pipeline else rank
        self._arrived: dict[str, int] = {}
        self.calls = 0
        self.step = 0
        self.inside = False
        self.setup: str | None = "starts"
        self.action: Any = None
        self.waits: str | None = None
        self.peer: int | None = None
        self.collective: Collective | None = None
        self.since = monotonic()
        self.slack = 0.0
        self.durations: deque[float] = deque(maxlen=50)
        self.call = ""
        self._began: float | None = None
        self._thread = get_ident()
        self._beats = itertools.count(1)

    @property
    def name(self) -> str:
        """The rank's name in messages."""
        return name_of(self.rank, self.process, self.replica)

    @contextmanager
    def calling(self, name: str, seconds: float = 0.0) -> Iterator[None]:
        """A context for a call that every rank must make; of calls inside each other, the outermost counts.

        Args:
            name: its name as the user writes it; empty if not every rank makes it.
            seconds: how long it may take, if that is more than usual.
        """
        before = self.call, self.slack
        self.call, self.slack = self.call or name, max(self.slack, seconds)
        try:
            yield
        finally:
            self.call, self.slack = before

    def prepare(self, what: str) -> None:
        """Note that a part of the set-up begins, such as ``"cuts the model"``; this counts as progress."""
        self.setup, self._thread = what, get_ident()
        self._move(None)
        for probe in tuple(_PROBES):
            probe(self, what)

    def prepared(self) -> None:
        """Note that the set-up is over; this counts as progress."""
        self.setup = None
        self._move(None)

    def begin(self, step: int) -> None:
        """Note that a step, or an evaluation after it, begins.

        Args:
            step: the training step, counted from 1; for an evaluation, the last training step.
        """
        self._move(None)
        if step and not self.step:
            # Whatever was computed without training says nothing of the first training step.
            self.durations.clear()
        self._began = self.since if step != self.step or not step else None
        self.step, self._thread = step, get_ident()
        self.calls += 1
        self.inside = True

    def act(self, action: Any) -> None:
        """Note that an action begins, which ends any wait; ``None`` for work outside of the program."""
        self._move(action)
        if _PROBES and action is not None:
            for probe in tuple(_PROBES):
                probe(self, action)

    def wait(
        self, what: str, peer: int | None = None, collective: Collective | None = None
    ) -> None:
        """Note that a wait begins; :meth:`go_on`, :meth:`act`, :meth:`prepare` or :meth:`rest` ends it.

        Whatever is about to hold this process until another one does something calls this, or :meth:`come`,
        first: also what waits for the device, where messages of others may be queued.

        Args:
            what: a message, such as ``"1RECV_F0"``, a collective, or the device.
            peer: the rank of this pipeline that is waited for.
            collective: the collective that is waited for, which this process has come to by :meth:`arrive`.
                With neither, any other rank of this pipeline may be the one that is waited for.
        """
        self._move(self.action)
        self.peer = peer
        self.collective = collective
        self.waits = what

    def arrive(self, members: Sequence[int] | None = None) -> Collective:
        """Count that this process has come to the next collective of a group; call it as that is started.

        Args:
            members: the group's global ranks; by default those of this pipeline.

        Returns:
            What to pass to :meth:`wait` before the process waits for it, now or later.
        """
        text = ranges(self.pipeline if members is None else tuple(members))
        number = self._arrived[text] = self._arrived.get(text, 0) + 1
        return Collective(text, number)

    def come(self, what: str, members: Sequence[int] | None = None) -> None:
        """Come to a collective and wait for it, as by :meth:`arrive` and :meth:`wait`."""
        self.wait(what, collective=self.arrive(members))

    def wait_for(self, what: str, process: int) -> None:
        """Note that a wait for a process of the job begins, given by its global rank."""
        self.wait(what, collective=Collective(str(process), 1))

    def go_on(self) -> None:
        """Note that a wait is over and the rank works again."""
        self._move(self.action)

    def rest(self) -> None:
        """Note that the step or evaluation is over."""
        self._move(None)
        if self._began is not None:
            self.durations.append(self.since - self._began)
        self.inside = False

    def _move(self, action: Any) -> None:
        self.waits = None
        self.action = action
        self.since = monotonic()

    def place(self, status: str = "runs") -> Place:
        """A numbered snapshot for the other processes.

        Args:
            status: the rank's status.
        """
        action, waits, peer, collective = self.action, self.waits, self.peer, self.collective
        if waits is None:
            waits, awaited, collective = self._unnoted(), "", None
        elif collective is not None:
            awaited = collective.members
        elif peer is not None and peer < len(self.pipeline):
            awaited = str(self.pipeline[peer])
        else:
            awaited = ranges(self.pipeline)
        part = getattr(action, "microbatch", None)  # a number, or a slice of one
        return Place(
            self.rank,
            self.process,
            self.replica,
            number=next(self._beats),
            status=status,
            calls=self.calls,
            step=self.step,
            inside=self.inside,
            setup=self.setup,
            stage=getattr(action, "stage", None),
            microbatch=getattr(part, "microbatch", part),
            action=None if action is None else str(action),
            waits=waits,
            awaited=awaited,
            call=self.call,
            collective=None if collective is None else collective.number,
            arrived=" ".join([f"{group}={n}" for group, n in self._arrived.copy().items()]),
            age=round(max(0.0, monotonic() - self.since), 1),
            slack=self.slack,
        )

    def _unnoted(self) -> str | None:
        """A wait that nobody has noted, as in a wrapper's or the user's own collective."""
        if monotonic() - self.since < LONG:
            return None
        frame = _frames().get(_STAND_INS.get(self._thread, self._thread))
        while frame is not None and frame.f_code.co_filename == _OPERATORS:
            frame = frame.f_back
        file = "" if frame is None else frame.f_code.co_filename
        if frame is None or not file.startswith(_COLLECTIVES) or file.startswith(_FILES):
            return None
        return f"{frame.f_code.co_name}() of torch.distributed"


_STAND_INS: dict[int, int] = {}


def stand_in(caller: int, worker: int | None) -> None:
    """Note that a thread works in the place of another, which waits for it; ``None`` if none does any more.

    Args:
        caller: the identifier of the thread that waits.
        worker: that of the thread that works.
    """
    if worker is None:
        _STAND_INS.pop(caller, None)
    else:
        _STAND_INS[caller] = worker


def _frames() -> dict[int, FrameType]:
    """The frames that the threads of this process run.

    A collection of garbage in this call can deadlock with a thread that ends, up to Python 3.11.9 and 3.12.4:
    https://github.com/python/cpython/issues/106883
    """
    with _LOOKING:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


_LOOKING = Lock()
"""Only one thread at a time turns the collection of garbage off and on."""
LONG = 1.0
"""Seconds without progress after which it is looked where the program's thread is."""
_OPERATORS = str(Path(torch.__file__).parent / "_ops.py")
_COLLECTIVES = str(Path(torch.__file__).parent / "distributed") + os.sep
_FILES = str(Path(_COLLECTIVES) / "checkpoint") + os.sep  # reads and writes them


# ---- limits on the time without progress

STEP = 600.0
"""Seconds without progress in a step or between steps, after which a rank is silent."""
MEETING = 300.0
"""Seconds within which all processes must arrive; also the limit for each part of the set-up."""
SLOW = 30.0
"""Seconds without progress, or ten median steps if that is more, after which a rank is named as slow."""
FACTOR = 10.0
_VARIABLES = "PENSTOCK_TIMEOUT", "PENSTOCK_RENDEZVOUS_TIMEOUT"


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Limits in seconds on the time without progress; ``Pipeline(timeout=)`` takes them.

    Args:
        step: in a step or between steps, after which a rank is reported as silent and all ranks stop. By
            default the environment variable ``PENSTOCK_TIMEOUT``, or 600.
        first_step: in the first step, which may compile and set things up; by default ``step``.
        rendezvous: within which all processes must arrive, and for which one rank may hold up the others
            while the Pipeline is made. By default ``PENSTOCK_RENDEZVOUS_TIMEOUT``, or 300.

    Raises:
        UsageError: a limit is not above 0.
    """

    step: float | None = None
    first_step: float | None = None
    rendezvous: float | None = None

    def __post_init__(self) -> None:
        for name, seconds in vars(self).items():
            if seconds is not None and not _is_positive(seconds):
                raise UsageError(f"Timeouts({name}={seconds!r}): must be more than 0 seconds")


Timeout = float | Timeouts | None
"""Seconds for each step, or :class:`Timeouts`; ``None`` stands for the defaults."""


class Patience:
    """How long a rank may make no progress while others wait for it.

    Args:
        timeout: see :class:`Timeouts`; a number is that of each step.

    Raises:
        UsageError: a timeout is not above 0.
    """

    def __init__(self, timeout: Timeout = None) -> None:
        if not (timeout is None or isinstance(timeout, Timeouts) or _is_positive(timeout)):
            raise UsageError(
                f"timeout={timeout!r}: must be more than 0 seconds, or penstock.Timeouts(step=, "
                "first_step=, rendezvous=)"
            )
        limits = timeout if isinstance(timeout, Timeouts) else Timeouts(step=timeout)
        default, meeting = map(_from_environment, _VARIABLES, (STEP, MEETING))
        self.rendezvous = float(limits.rendezvous or meeting)
        self._later = float(limits.step or default)
        self._first = float(limits.first_step or self._later)

    def limit(self, durations: Sequence[float]) -> float:
        """The limit in seconds.

        Args:
            durations: how long the latest steps took, in seconds; empty before the first one ends.
        """
        return self._later if durations else self._first

    def slow(self, durations: Sequence[float]) -> float:
        """Seconds without progress after which a rank is named as slow."""
        return max(SLOW, FACTOR * median(durations)) if durations else SLOW


def _is_positive(seconds: object) -> bool:
    return isinstance(seconds, int | float) and seconds > 0


def _from_environment(name: str, default: float) -> float:
    text = os.environ.get(name)
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not _is_positive(seconds):
        raise UsageError(f"the environment has {name}={text!r}; it must be more than 0 seconds")
    return seconds
