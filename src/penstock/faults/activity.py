"""What a rank is doing, and how long it may make no progress.

The thread that runs the program writes it by plain assignments, at every action; the watch's threads read
it. So a reader may see parts of two moments, which no verdict depends on: those wait for seconds.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from time import monotonic
from typing import Any

from penstock.errors import UsageError
from penstock.faults.places import Place, name_of

Probe = Callable[["Activity", Any], object]
_PROBES: list[Probe] = []


def add_probe(probe: Probe) -> Callable[[], None]:
    """Call a function at every action and part of the set-up; fault injection does so.

    Args:
        probe: called with the activity and the action, or the text given to :meth:`Activity.prepare`.

    Returns:
        A function that removes it.
    """
    _PROBES.append(probe)
    return lambda: _PROBES.remove(probe) if probe in _PROBES else None


def has_probes() -> bool:
    """Whether any such function was added."""
    return bool(_PROBES)


class Activity:
    """What one rank is doing.

    Args:
        rank: the rank.
        global_rank: its rank among all processes.

    Attributes:
        since: when it last made progress, on this process's monotonic clock.
        slack: seconds that it may need for what it does now, if that is more than usual.
        durations: seconds of the latest training steps.

    The others are those of :class:`~penstock.faults.Place`.
    """

    def __init__(self, rank: int, global_rank: int | None = None) -> None:
        self.rank = rank
        self._global_rank = None if global_rank == rank else global_rank
        self.calls = 0
        self.step = 0
        self.inside = False
        self.setup: str | None = "starts"
        self.action: Any = None
        self.waits: str | None = None
        self.peer: int | None = None
        self.since = monotonic()
        self.slack = 0.0
        self.durations: deque[float] = deque(maxlen=50)
        self._began: float | None = None
        self._beats = itertools.count(1)

    @property
    def name(self) -> str:
        """What messages call the rank."""
        return name_of(self.rank, self._global_rank)

    def prepare(self, what: str) -> None:
        """A part of the set-up begins, such as ``"cuts the model"``; it counts as progress."""
        self.setup = what
        self._move(None)
        for probe in tuple(_PROBES):
            probe(self, what)

    def begin(self, step: int) -> None:
        """A step, or an evaluation after it, begins.

        Args:
            step: the number of the training step, from 1; for an evaluation, that of the last one.
        """
        self._move(None)
        self._began = self.since if step != self.step else None
        self.step = step
        self.calls += 1
        self.inside = True

    def act(self, action: Any) -> None:
        """An action begins, and any wait is over; ``None`` for what is no action of the program."""
        self._move(action)
        if _PROBES and action is not None:
            for probe in tuple(_PROBES):
                probe(self, action)

    def wait(self, what: str, peer: int | None = None) -> None:
        """A wait begins; the next :meth:`go_on`, :meth:`act`, :meth:`prepare` or :meth:`rest` ends it.

        Args:
            what: a message, such as ``"1RECV_F0"``, or what the ranks do together.
            peer: the rank whose message it is; ``None`` for something that all ranks do together.
        """
        self._move(self.action)
        self.peer = peer
        self.waits = what

    def go_on(self) -> None:
        """A wait is over, and the rank works; what it does between two calls may take any time."""
        self._move(self.action)

    def rest(self) -> None:
        """The step or evaluation is over."""
        self._move(None)
        if self._began is not None:
            self.durations.append(self.since - self._began)
        self.inside = False

    def _move(self, action: Any) -> None:
        self.waits = None
        self.action = action
        self.since = monotonic()

    def place(self, status: str = "runs", address: str = "") -> Place:
        """A copy of it, as it is sent to the other ranks; each has a number of its own.

        Args:
            status: of the rank.
            address: of its machine.
        """
        action, waits = self.action, self.waits
        return Place(
            self.rank,
            number=next(self._beats),
            status=status,
            calls=self.calls,
            step=self.step,
            inside=self.inside,
            setup=self.setup,
            stage=getattr(action, "stage", None),
            microbatch=getattr(action, "microbatch", None),
            action=None if action is None else str(action),
            waits=waits,
            peer=None if waits is None else self.peer,
            age=max(0.0, monotonic() - self.since),
            slack=self.slack,
            address=address,
            global_rank=self._global_rank,
        )


# ---- how long a rank may make no progress

RENDEZVOUS = 30.0
"""Seconds until all ranks must be there, and that a rank may make no progress during the set-up."""
FIRST_STEP = 300.0
"""Seconds for the first step, in which much is compiled, allocated and connected."""
FLOOR = 30.0
FACTOR = 10.0

Timeout = float | tuple[float | None, float | None] | None
"""Seconds; or a pair for the first step and for later ones; or ``None`` for the defaults."""


class Patience:
    """How long a rank may make no progress while others wait for it.

    Args:
        timeout: seconds; or a pair for the first step and for later ones. ``None`` stands for 300 s in the
            first step, and then the larger of 30 s and ten times the median step.
        rendezvous_timeout: seconds until all ranks must be there, and for each part of the set-up.

    Raises:
        UsageError: one of them is not above 0.
    """

    def __init__(self, timeout: Timeout = None, rendezvous_timeout: float = RENDEZVOUS) -> None:
        pair = timeout if isinstance(timeout, tuple) else (timeout, timeout)
        if len(pair) != 2 or not all(seconds is None or _is_positive(seconds) for seconds in pair):
            raise UsageError(
                f"timeout={timeout!r}: must be more than 0 seconds, None, or a pair of these for the first "
                "step and the later ones"
            )
        if not _is_positive(rendezvous_timeout):
            raise UsageError(
                f"rendezvous_timeout={rendezvous_timeout!r}: must be more than 0 seconds"
            )
        self.rendezvous = float(rendezvous_timeout)
        self._first, self._later = pair

    def limit(self, durations: Sequence[float]) -> float:
        """The limit in seconds.

        Args:
            durations: how long the latest steps took, in seconds; empty before the first one is done.
        """
        if not durations:
            return FIRST_STEP if self._first is None else float(self._first)
        if self._later is not None:
            return float(self._later)
        return max(FLOOR, FACTOR * median(durations))


def _is_positive(seconds: object) -> bool:
    return isinstance(seconds, int | float) and seconds > 0
