"""This process among those that train with it: what they tell each other besides steps, and how long."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial, wraps
from math import prod
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from penstock._engine.parallel import Siblings
from penstock._engine.runtime import Replicas, Runner
from penstock._engine.transport import Circle, Transport
from penstock._engine.weights.team import Level, Team, exchanging
from penstock.errors import UsageError

_P = ParamSpec("_P")
_R = TypeVar("_R")


def collective(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Mark a method that every rank must call, so that messages can say who is in it."""

    @wraps(method)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        owner: Any = args[0]
        with owner.job.calling(method.__name__):
            return method(*args, **kwargs)

    return called


class PipelineJob:
    """The processes that train together: the ranks of a pipeline, and the pipelines side by side with it.

    Args:
        runner: reaches the other ranks of the pipeline.
        ranks: the number of ranks of the pipeline.
        replicas: the pipelines that train the same weights on other data.

    Attributes:
        ranks: the number of ranks of the pipeline.
        siblings: the pipelines side by side with this one, given by ``mesh=`` or ``replicas=``.
    """

    def __init__(self, runner: Runner, ranks: int, replicas: Replicas) -> None:
        self._runner, self._transport = runner, runner.transport
        self.ranks, self._replicas = ranks, replicas
        self.siblings = Siblings()

    @property
    def job(self) -> PipelineJob:
        """Itself, for :func:`collective`."""
        return self

    def stand_beside(self, siblings: Siblings) -> None:
        """Take the pipelines side by side with this one."""
        self.siblings = siblings
        if self._transport is not None:
            self._transport.watch.protect_groups(siblings.groups)

    @property
    def is_main_process(self) -> bool:
        """Whether this process prints and writes for all; see :attr:`Pipeline.is_main_process`."""
        return self.siblings.first and self._runner.rank == 0

    def circles(self) -> list[Circle]:
        """For each dimension of pipelines side by side, the processes at this place in them."""
        watch = None if self._transport is None else self._transport.watch
        return [Circle(group, watch) for group in self.siblings.groups]

    def team(self) -> Team:
        """All processes that save and load together: the ranks of this pipeline and of its siblings.

        Raises:
            UsageError: the replicas cannot be reached.
        """
        circles, replicas = self.circles(), self._replicas
        levels = [level_of(self._runner)]
        levels += [Level(one.rank, one.size, one.to_first, one.from_first) for one in circles]
        if not circles and replicas.number > 1:
            if replicas.exchange is None:
                raise UsageError(
                    "the Pipeline was given replicas that can only add up numbers; give "
                    "penstock.Checkpoints(group=...) the process group of all ranks of all replicas"
                )
            levels.append(exchanging(replicas.index, replicas.number, replicas.exchange))
        return Team(
            levels, (prod(level.size for level in levels[1:]), levels[0].size), self.calling
        )

    def decide(
        self,
        doing: str,
        answer: Callable[[list[Any]], Any],
        value: Callable[[], Any] = lambda: None,
    ) -> Any:
        """Let the first of all processes decide for all of them; every one calls this.

        Args:
            doing: what they do, for messages.
            answer: called in the first process with what all of them bring; returns a JSON value for all.
            value: returns what this process brings, a JSON value.

        Raises:
            PenstockError: what ``answer`` raised, or ``value`` on one of the processes.
        """
        return self.team().meet(doing, value, lambda values: [answer(values)] * len(values))

    # ---- what the ranks of the pipeline tell each other

    @collective
    def agree(self, value: Any) -> list[Any]:
        """Exchange JSON values: every rank gets the values of all ranks, in rank order."""
        values = self._runner.gather(value)
        return values * self.ranks if self._transport is None else values

    @collective
    def share(self, value: Any, rank: int) -> Any:
        """Send one rank's value, made of tensors and plain data, to every rank; all of them call this."""
        return self._runner.share(value, rank)

    def wrap_transport(self, wrap: Callable[[Transport], Any]) -> None:
        """Wrap this rank's transport, such as by a counter; does nothing in one process."""
        self._runner.wrap_transport(wrap)

    # ---- what the watch over them is told

    def calling(self, name: str, seconds: float = 0.0) -> AbstractContextManager[None]:
        """A context for a call that every rank must make, and that may take so many seconds.

        Args:
            name: the name by which messages speak of it.
            seconds: how long it may take, if that is more than usual.
        """
        return self._runner.interpreter.activity.calling(name, seconds)

    def patient(self, seconds: float) -> AbstractContextManager[None]:
        """Let this rank take longer than ``timeout`` allows between two steps, such as to save.

        Args:
            seconds: the time that it may need. The ranks that wait for it need not call this.
        """
        return self.calling("", seconds)

    def when_checkpointed(self) -> Callable[[], None]:
        """Return what is to be called when a checkpoint of this moment is complete.

        If the job fails later, the steps since then are counted in the log.
        """
        return partial(self._runner.note_saved, self._runner.steps)

    def report_failures_to(self, folder: str | os.PathLike[str]) -> None:
        """Write the report of a failed rank to ``failure.json`` in a folder."""
        if self._transport is not None:
            self._transport.watch.keep_in(Path(folder))


def level_of(runner: Runner) -> Level:
    """The ranks of a pipeline, of which the first collects what the others tell."""
    size = 1 if runner.transport is None else runner.transport.ranks
    return Level(runner.rank, size, runner.to_first, runner.from_first)
