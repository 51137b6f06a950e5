"""Why an action started when it did."""

from __future__ import annotations

from penstock.schedule.action import COMPUTE_OPS
from penstock.schedule.packed import NOWHERE, Wiring
from penstock.schedule.simulation.clock import Times


class Causes:
    """Follows the times of a run backwards.

    Args:
        wiring: the schedule.
        times: when each action ran.
    """

    def __init__(self, wiring: Wiring, times: Times) -> None:
        packed = wiring.packed
        self._wiring = wiring
        self._packed = packed
        self._times = times
        self._computes = packed.having(COMPUTE_OPS)

    def awaited(self, number: int) -> int:
        """The action that the rank last waited for before ``number`` could start; ``NOWHERE`` if for none.

        Messages and other actions that take no time stand between two computing actions; the wait may have
        been at any of them.
        """
        at: int | None = number
        while at is not None:
            if self._idle_before(at):
                return self._latest_wait(at)
            at = self._before(at)
            if at is not None and self._computes[at]:
                return NOWHERE
        return NOWHERE

    def cause(self, number: int) -> int:
        """The computing action whose end let ``number`` start; ``NOWHERE`` for the first."""
        awaited = self.awaited(number)
        if awaited == NOWHERE:
            return self._compute_before(number)
        if self._computes[awaited]:
            return awaited
        other = int(self._wiring.partner[awaited])
        later = max(awaited, other, key=lambda end: float(self._times.start[end]))
        return self.cause(later)

    def _before(self, number: int) -> int | None:
        first = self._packed.starts[self._packed.rank[number]]
        return number - 1 if number > first else None

    def _compute_before(self, number: int) -> int:
        at = self._before(number)
        while at is not None and not self._computes[at]:
            at = self._before(at)
        return NOWHERE if at is None else at

    def _idle_before(self, number: int) -> bool:
        before = self._before(number)
        free = 0.0 if before is None else self._times.end[before]
        return bool(self._times.start[number] > free)

    def _latest_wait(self, number: int) -> int:
        waits = [int(column[number]) for column in self._wiring.waits]
        found = [awaited for awaited in waits if awaited != NOWHERE]
        return max(found, key=lambda awaited: float(self._times.there[awaited]), default=NOWHERE)
