"""The processes that save and load together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from penstock.errors import (
    AgreementError,
    CheckpointError,
    PenstockError,
    UsageError,
    error_named,
    public_name,
)
from penstock.pipeline import Pipeline
from penstock.transport import Circle

_WORD = "all processes"
"""Marks a value of these exchanges, to distinguish it from those of other calls."""


class ProcessTeam:
    """All processes of a run, taken from a pipeline and its replicas or from a process group.

    Args:
        pipe: the pipeline whose ranks and replicas form the team.
        group: a process group of all processes instead; if there is no pipeline either, the default group of
            ``torch.distributed``.

    Attributes:
        rank: this process's rank in the team.
        layout: the number of replicas, and of processes in each.

    Raises:
        UsageError: the replicas cannot be reached.
    """

    def __init__(self, pipe: Pipeline | None, group: Any = None) -> None:
        self._pipe = pipe if group is None else None
        groups = (group,) if self._pipe is None else self._pipe.siblings.groups
        circles = [Circle(one) for one in groups]
        self._circles: list[tuple[int, int, Callable[[Any], list[Any]]]] = [
            (circle.rank, circle.size, circle.exchange) for circle in circles
        ]
        if self._pipe is None:
            self.rank, self.layout = circles[0].rank, (1, circles[0].size)
            return
        replicas = self._pipe.replicas
        if not circles and replicas.number > 1:
            if replicas.exchange is None:
                raise UsageError(
                    "the Pipeline was given replicas that can only add up numbers; give "
                    "penstock.Checkpoints(group=...) the process group of all ranks of all replicas"
                )
            self._circles = [(replicas.index, replicas.number, replicas.exchange)]
        replica, count = 0, 1
        for rank, size, _ in self._circles:
            replica, count = replica + count * rank, count * size
        ranks = self._pipe.ranks
        processes = self._pipe.schedule.ranks if len(ranks) == 1 else 1
        self.layout = (count, processes)
        self.rank = replica * processes + (ranks[0] if processes > 1 else 0)

    @property
    def size(self) -> int:
        """The number of processes."""
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
            AgreementError: some rank called something else.
        """
        values = [value] if self._pipe is None else self._gather(self._pipe, value)
        for _, _, exchange in self._circles:
            values = [one for of_one in exchange(values) for one in of_one]
        return values

    def _gather(self, pipe: Pipeline, value: Any) -> list[Any]:
        try:
            return [one[_WORD] for one in pipe.agree({_WORD: value})[: self.layout[1]]]
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            if isinstance(error, PenstockError) and not isinstance(error, AgreementError):
                raise
            raise AgreementError(
                "all ranks must save and load together, and some of them called something else: was this "
                f"called on one rank only, as under `if pipe.leads:`? ({error})"
            ) from error

    def together(self, doing: str, task: Callable[[], Any]) -> list[Any]:
        """Run a task on every process; if one fails, all raise its error.

        Args:
            doing: the verb for the messages of the others: ``cannot <doing>``.
            task: the task, which returns a JSON value.

        Returns:
            The task's result on each process.
        """
        value, error, problem = None, None, ["", ""]
        try:
            value = task()
        except Exception as raised:
            error = raised
            kind = type(error) if isinstance(error, PenstockError) else CheckpointError
            problem = [public_name(kind), str(error)]
        replies = self.agree([problem, value])
        if error is not None:
            raise error
        for process, ((kind_name, text), _) in enumerate(replies):
            if kind_name:
                other = error_named(kind_name)(f"{self.name(process)} cannot {doing}: {text}")
                other.rank = process
                raise other
        return [value for _, value in replies]

    def patient(self, seconds: float) -> AbstractContextManager[None]:
        """Let this process take so many seconds before it counts as silent."""
        return nullcontext() if self._pipe is None else self._pipe.patient(seconds)
