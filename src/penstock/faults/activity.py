"""What a rank is doing, and how long it may make no progress.

The thread that runs the program updates its activity by plain assignments, at every action; the watch's
threads read it. A reader may see parts of two moments, but verdicts wait for seconds and do not depend on it.
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
    """Call a function at every action and part of the set-up, as fault injection does.

    Args:
        probe: called with the activity and the action, or the text given to :meth:`Activity.prepare`.

    Returns:
        A function that removes the probe.
    """
    _PROBES.append(probe)
    return lambda: _PROBES.remove(probe) if probe in _PROBES else None


def has_probes() -> bool:
    """Whether a probe was added."""
    return bool(_PROBES)


class Activity:
    """What one rank is doing.

    Args:
        rank: the rank in the pipeline.
        global_rank: its rank among all processes.

    Attributes:
        since: when it last made progress, on this process's monotonic clock.
        slack: seconds that the current work may take, if that is more than usual.
        durations: how long the latest training steps took, in seconds.

    The other attributes are those of :class:`~penstock.faults.Place`.
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
        """The rank's name in messages."""
        return name_of(self.rank, self._global_rank)

    def prepare(self, what: str) -> None:
        """Note that a part of the set-up begins, such as ``"cuts the model"``; this counts as progress."""
        self.setup = what
        self._move(None)
        for probe in tuple(_PROBES):
            probe(self, what)

    def begin(self, step: int) -> None:
        """Note that a step, or an evaluation after it, begins.

        Args:
            step: the training step, counted from 1; for an evaluation, the last training step.
        """
        self._move(None)
        self._began = self.since if step != self.step else None
        self.step = step
        self.calls += 1
        self.inside = True

    def act(self, action: Any) -> None:
        """Note that an action begins, which ends any wait; ``None`` for work outside of the program."""
        self._move(action)
        if _PROBES and action is not None:
            for probe in tuple(_PROBES):
                probe(self, action)

    def wait(self, what: str, peer: int | None = None) -> None:
        """Note that a wait begins; :meth:`go_on`, :meth:`act`, :meth:`prepare` or :meth:`rest` ends it.

        Args:
            what: a message, such as ``"1RECV_F0"``, or an operation of all ranks.
            peer: the rank that is waited for; ``None`` for an operation of all ranks.
        """
        self._move(self.action)
        self.peer = peer
        self.waits = what

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

    def place(self, status: str = "runs", address: str = "") -> Place:
        """A numbered snapshot to send to the other ranks.

        Args:
            status: the rank's status.
            address: the address of its machine.
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


# ---- limits on the time without progress

RENDEZVOUS = 30.0
"""Seconds within which all ranks must arrive; also the limit without progress during the set-up."""
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
        rendezvous_timeout: seconds within which all ranks must arrive, and for each part of the set-up.

    Raises:
        UsageError: a timeout is not above 0.
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
            durations: how long the latest steps took, in seconds; empty before the first one ends.
        """
        if not durations:
            return FIRST_STEP if self._first is None else float(self._first)
        if self._later is not None:
            return float(self._later)
        return max(FLOOR, FACTOR * median(durations))


def _is_positive(seconds: object) -> bool:
    return isinstance(seconds, int | float) and seconds > 0
