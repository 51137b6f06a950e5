"""The processes that save and load together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from penstock.errors import (
    AgreementError,
    CheckpointError,
    MessageError,
    PenstockError,
    UsageError,
    error_named,
    public_name,
)
from penstock.pipeline import Pipeline
from penstock.transport import Circle

_WORD = "checkpoint"
"""Marks a value as one of these exchanges, to tell it from those of other calls."""


class _Told(NamedTuple):
    """Replicas that are reached in a way that the user has given."""

    rank: int
    size: int
    exchange: Callable[[Any], list[Any]]


_Circle = Circle | _Told


class Team:
    """All processes of a run, taken from a pipeline and its replicas or from a process group.

    Args:
        pipe: the pipeline, whose ranks and replicas take part.
        group: a process group of all processes instead; if there is no pipeline either, the default group of
            ``torch.distributed``.

    Raises:
        UsageError: the replicas cannot be reached.
    """

    def __init__(self, pipe: Pipeline | None, group: Any) -> None:
        self._pipe = pipe if group is None else None
        self._circles: list[_Circle] = []
        if self._pipe is None:
            everyone = Circle(group)
            self._circles, self.rank, self.layout = [everyone], everyone.rank, (1, everyone.size)
            return
        ranks = self._pipe.ranks
        processes = self._pipe.schedule.ranks if len(ranks) == 1 else 1
        self._circles = [Circle(group) for group in self._pipe.siblings.groups] or self._told()
        beside, count = 0, 1
        for circle in self._circles:
            beside, count = beside + count * circle.rank, count * circle.size
        self.layout = (count, processes)
        self.rank = beside * processes + (ranks[0] if processes > 1 else 0)

    def _told(self) -> list[_Circle]:
        """The replicas, if the user has said how they are reached."""
        replicas = self._pipe.replicas if self._pipe is not None else None
        if replicas is None or replicas.number == 1:
            return []
        if replicas.exchange is None:
            raise UsageError(
                "the Pipeline was given replicas that can only add up numbers; give "
                "penstock.Checkpoints(group=...) the process group of all ranks of all replicas"
            )
        return [_Told(replicas.index, replicas.number, replicas.exchange)]

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self.layout[0] * self.layout[1]

    @property
    def leads(self) -> bool:
        """Whether this process is the one that makes checkpoints visible."""
        return self.rank == 0

    def name(self, process: int) -> str:
        """The name of a process, for messages."""
        if self.layout[0] == 1:
            return f"rank {process}"
        return f"rank {process % self.layout[1]} of replica {process // self.layout[1]}"

    def agree(self, value: Any) -> list[Any]:
        """Exchange a JSON value between all processes; returns all values, by process.

        Raises:
            AgreementError: some rank has called something else.
        """
        told = [value] if self._pipe is None else self._of_pipeline(self._pipe, value)
        for circle in self._circles:
            told = [one for values in circle.exchange(told) for one in values]
        return told

    def _of_pipeline(self, pipe: Pipeline, value: Any) -> list[Any]:
        try:
            told = pipe.agree({_WORD: value})[: self.layout[1]]
            return [one[_WORD] for one in told]
        except (MessageError, TypeError, KeyError) as error:
            raise AgreementError(
                "all ranks must save and load together, and some of them called something else: was this "
                f"called on one rank only, as under `if pipe.leads:`? ({error})"
            ) from error

    def together(self, doing: str, task: Callable[[], Any]) -> list[Any]:
        """Do something on every process; if one fails, all raise its error.

        Args:
            doing: what it is, for the messages of the others: ``cannot ...``.
            task: does it, and returns a JSON value.

        Returns:
            What it returned on each process.
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
        """Let this process take so many seconds before it is called silent."""
        return nullcontext() if self._pipe is None else self._pipe.patient(seconds)


def _kind(error: Exception) -> str:
    return (
        public_name(type(error)) if isinstance(error, PenstockError) else CheckpointError.__name__
    )
