"""The processes that save and load together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from penstock.errors import CheckpointError, PenstockError, UsageError, error_named, public_name
from penstock.pipeline import Pipeline
from penstock.transport import Circle


class Team:
    """All processes of a run, from a pipeline and its replicas, or from a process group.

    Args:
        pipe: the pipeline, whose ranks take part, and whose replicas do.
        group: a process group of all processes instead, or ``torch.distributed``'s own where there is no
            pipeline.

    Raises:
        UsageError: the replicas cannot be reached.
    """

    def __init__(self, pipe: Pipeline | None, group: Any) -> None:
        self._pipe = pipe if group is None else None
        self._circle = None if self._pipe else Circle(group)
        if self._circle is not None or self._pipe is None:
            circle = self._circle or Circle(group)
            self.rank, self.layout = circle.rank, (1, circle.size)
            return
        replicas, ranks = self._pipe.replicas, self._pipe.schedule.ranks
        if replicas.number > 1 and replicas.exchange is None:
            raise UsageError(
                "the Pipeline was given replicas that only add numbers up; give "
                "penstock.Checkpoints(group=...) the process group of all ranks of all replicas"
            )
        processes = ranks if len(self._pipe.ranks) == 1 else 1
        self.layout = (replicas.number, processes)
        self.rank = replicas.index * processes + (self._pipe.ranks[0] if processes > 1 else 0)

    @property
    def size(self) -> int:
        """How many there are."""
        return self.layout[0] * self.layout[1]

    @property
    def leads(self) -> bool:
        """Whether this process is the one that makes checkpoints appear."""
        return self.rank == 0

    def name(self, process: int) -> str:
        """A process in words."""
        if self.layout[0] == 1:
            return f"rank {process}"
        return f"rank {process % self.layout[1]} of replica {process // self.layout[1]}"

    def agree(self, value: Any) -> list[Any]:
        """Exchange a JSON value between all; all values, by process."""
        if self._pipe is None:
            return [value] if self._circle is None else self._circle.exchange(value)
        told = self._pipe.agree(value)[: self.layout[1]]
        if self.layout[0] == 1 or self._pipe.replicas.exchange is None:
            return told
        return [one for replica in self._pipe.replicas.exchange(told) for one in replica]

    def together(self, doing: str, task: Callable[[], Any]) -> list[Any]:
        """Do something on every process; where one cannot, all raise its error.

        Args:
            doing: what, for the others' messages: ``cannot ...``.
            task: gives a JSON value.

        Returns:
            What it gave on each.
        """
        found, error, own = None, None, ["", ""]
        try:
            found = task()
        except Exception as problem:
            error, own = problem, [_kind(problem), str(problem)]
        told = self.agree([own, found if error is None else None])
        if error is not None:
            raise error
        for process, ((kind, text), _) in enumerate(told):
            if kind:
                raised = error_named(kind)(f"{self.name(process)} cannot {doing}: {text}")
                raised.rank = process
                raise raised
        return [value for _, value in told]

    def patient(self, seconds: float) -> AbstractContextManager[None]:
        """Let this process take so long."""
        return nullcontext() if self._pipe is None else self._pipe.patient(seconds)


def _kind(error: Exception) -> str:
    return (
        public_name(type(error)) if isinstance(error, PenstockError) else CheckpointError.__name__
    )
