"""How long a rank may make no progress before it is called silent."""

from __future__ import annotations

from collections import deque
from statistics import median

from penstock.errors import UsageError

FIRST_STEP = 300.0
"""Seconds for the first step, which compiles, allocates and connects."""
FLOOR = 30.0
FACTOR = 10.0
_REMEMBERED = 50

Timeout = float | tuple[float | None, float | None] | None
"""Seconds; or those of the first step and of later ones; or None."""


class Patience:
    """The step timeout: learned from the steps, or fixed.

    Args:
        fixed: seconds that always hold, or two numbers: for the first step and for all later ones. None
            for 300 s in the first step, then the larger of 30 s and ten times the median step.

    Raises:
        UsageError: ``fixed`` is not above 0.
    """

    def __init__(self, fixed: Timeout = None) -> None:
        pair = fixed if isinstance(fixed, tuple) else (fixed, fixed)
        numbers = all(isinstance(seconds, int | float | None) for seconds in pair)
        if not numbers or len(pair) != 2 or not all(s is None or s > 0 for s in pair):
            raise UsageError(
                f"timeout={fixed!r}: must be more than 0 seconds, None, or a pair of these for the first "
                "step and the later ones"
            )
        first, later = pair
        self._first = FIRST_STEP if first is None else first
        self._fixed = later
        self._steps: deque[float] = deque(maxlen=_REMEMBERED)

    def learn(self, seconds: float) -> None:
        """A step took so long."""
        self._steps.append(seconds)

    @property
    def inside(self) -> float:
        """Seconds without progress that a rank has in a call."""
        if not self._steps:
            return self._first
        if self._fixed is not None:
            return self._fixed
        return max(FLOOR, FACTOR * median(self._steps))

    @property
    def outside(self) -> float:
        """Seconds that a rank has between two calls while others wait: it may save or evaluate."""
        return self.inside if self._fixed is not None else max(self._first, self.inside)
