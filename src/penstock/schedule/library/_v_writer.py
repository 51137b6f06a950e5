"""Writes the program of a rank on the V placement, phase by phase."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from penstock.schedule.action import Action, Op, Overlap


class VWriter:
    """A rank's two stages; each op on a stage takes the stage's next microbatch.

    Args:
        rank: which rank.
        ranks: how many there are.

    Attributes:
        down: the stage that microbatches pass on the way from the first rank to the last.
        up: the stage that they pass on the way back.
        below: how many ranks come after this one.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank = rank
        self.down, self.up = rank, 2 * ranks - 1 - rank
        self.below = ranks - 1 - rank
        self._begun: Counter[tuple[int, bool]] = Counter()
        self._due: deque[Action] = deque()

    def forward(self, stage: int) -> Action:
        """F of the next microbatch."""
        return self._next(stage, Op.F)

    def full(self, stage: int) -> Action:
        """B of the next microbatch."""
        return self._next(stage, Op.B)

    def pair(self, forward: int, backward: int) -> Overlap:
        """F of one stage overlapped with B of the other."""
        return Overlap(self.forward(forward), self.full(backward))

    def input(self, stage: int) -> Action:
        """I of the next microbatch; its W is due from now on."""
        action = self._next(stage, Op.I)
        self._due.append(action._replace(op=Op.W))
        return action

    def weight(self) -> Iterator[Action]:
        """The W that has been due for longest, if any is."""
        if self._due:
            yield self._due.popleft()

    def weights(self) -> Iterator[Action]:
        """All Ws that are due."""
        while self._due:
            yield self._due.popleft()

    def _next(self, stage: int, op: Op) -> Action:
        key = (stage, op is Op.F)
        self._begun[key] += 1
        return Action(stage, op, self._begun[key] - 1)
