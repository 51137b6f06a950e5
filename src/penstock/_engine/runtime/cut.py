"""The cut of a model, which waits for the first call: all ranks of the job make the same one, or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from penstock._engine.transport import Job

Example = tuple[Sequence[Any], Mapping[str, Any]]


class LateCut(Protocol):
    """A model that is not cut yet."""

    def decide(self, call: Example | None, target: Any, *, plans: bool) -> Any:
        """Where to cut, as JSON data; with it the stages are made, but nothing is moved or freed.

        Args:
            call: the arguments of the model for a microbatch.
            target: the target of the loss for it, ``MISSING`` without one.
            plans: whether this rank measures the model, where that decides the schedule.
        """

    def adopt(self, where: Any) -> None:
        """Make the stages where another rank has decided to cut."""

    def carry_out(self) -> None:
        """Take the stages of this process, and free the others."""


def agree_on_cut(
    job: Job, cut: LateCut, bring: Callable[[], tuple[int, Example | None, Any]]
) -> None:
    """Let all ranks of the job cut at the same places: where the first rank with arguments would.

    Args:
        job: all processes.
        cut: the model.
        bring: returns the first rank that was given arguments, and a microbatch's arguments and target.

    Raises:
        PenstockError: a rank cannot cut; nothing is changed.
    """

    def decide() -> Any:
        first, call, target = bring()
        plans = job.transport is None or job.rank == first
        return [plans, cut.decide(call, target, plans=plans)]

    decisions = job.meet(decide, among=job.whole)
    where = next(decision for plans, decision in decisions if plans)
    if any(decision != where for _, decision in decisions):
        job.meet(lambda: cut.adopt(where), among=job.whole)
