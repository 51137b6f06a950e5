"""The ranks of a pipeline that live in this process, and how they run together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import torch

from penstock.errors import PoisonedError, UsageError
from penstock.parallel import Siblings
from penstock.rng import Generators
from penstock.runtime import (
    Call,
    Rank,
    Refusal,
    Report,
    Task,
    agree_plan,
    channels,
    drive,
    explain,
    reports_of,
    table,
)
from penstock.schedule import Action, Schedule, Span, Timeline, parse_action, replay
from penstock.schedule.base import flat
from penstock.stage import PipelineStage
from penstock.step import TimelineKind

LONG = 300.0
"""Seconds that a rank may take to read or write its weights while the others wait."""

T = TypeVar("T")


class LocalRanks:
    """The ranks that live in this process: all of them if one process runs the pipeline, otherwise one.

    Args:
        ranks: these ranks.
        told: what must be the same on every rank, besides the schedule and the versions.
        siblings: the pipelines beside this one.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        told: Mapping[str, str] | None = None,
        siblings: Siblings | None = None,
    ) -> None:
        self.siblings = siblings or Siblings()
        self.ranks = tuple(ranks)
        self._told = told
        self._failure: BaseException | None = None
        self._closed = False
        self._generators = Generators(stage.device for stage in self.stages)
        self._watch = self.ranks[0].transport.watch

    @property
    def leads(self) -> bool:
        """Whether rank 0 of the first pipeline lives in this process, which then prints and writes."""
        return self.siblings.first and any(rank.number == 0 for rank in self.ranks)

    @property
    def steps(self) -> int:
        """How many training steps have begun."""
        return self.ranks[0].activity.step

    @property
    def stages(self) -> tuple[PipelineStage, ...]:
        """The stages that live in this process, in order."""
        held = {index: stage for rank in self.ranks for index, stage in rank.stages.items()}
        return tuple(held[index] for index in sorted(held))

    def assemble(self, schedule: Schedule) -> None:
        """Check that all ranks have the same plan, and open the channels.

        Raises:
            AgreementError: the ranks have different plans.
        """
        self.run([agree_plan(rank.transport, schedule, self._told) for rank in self.ranks])
        for rank in self.ranks:
            rank.transport.open(channels(schedule))

    def run(self, tasks: Sequence[Task[T]], *, training: bool = False) -> list[T]:
        """Run a task of each rank until all are done.

        Raises:
            PoisonedError: an earlier run failed.
            PeerFailed: another rank failed, died or is silent.
        """
        if self._failure is not None:
            raise PoisonedError(
                f"an earlier call failed ({type(self._failure).__name__}: {self._failure}); "
                "build a new Pipeline"
            ) from self._failure
        for rank in self.ranks:
            rank.activity.begin(training=training)
        try:
            return self._driven(tasks)
        finally:
            for rank in self.ranks:
                rank.activity.end()

    def _driven(self, tasks: Sequence[Task[T]]) -> list[T]:
        try:
            if self._watch is not None:
                self._watch.check()
            return drive(tasks, self.ranks[0].activity)
        except BaseException as error:
            self._failure = self._cause(error)
            for rank in self.ranks:
                rank.clear()
            if self._failure is error:
                raise
            raise self._failure from None

    def _cause(self, error: BaseException) -> BaseException:
        return error if self._watch is None else self._watch.failed(error)

    def each(self, task: Callable[[Rank], Task[T]]) -> T:
        """Run a task on every rank that has the same result on each, and return that."""
        return self.run([task(rank) for rank in self.ranks])[0]

    def carry_out(self, call: Call) -> list[Report]:
        """Run a call of the pipeline; tensors of the batch that require grad get their gradients too.

        Raises:
            PenstockError: the call was refused. Nothing was sent or changed, and another call can be made.
        """
        # A step draws from generators of its own seeds; the caller's go on as if it had drawn nothing.
        kept = nullcontext() if call.draw is None else self._generators.kept()
        with torch.set_grad_enabled(call.trains), kept:
            started = monotonic()
            found = self.run([rank.run(call) for rank in self.ranks], training=call.trains)
            if any(isinstance(one, Refusal) for one in found):
                for rank in self.ranks:
                    rank.activity.take_back(training=call.trains)
            reports = reports_of(found)
            if self._watch is not None:
                self._watch.patience.learn(monotonic() - started)
        owed = [pair for report in reports for pair in report.owed]
        if owed:
            # In one pass: the tensors may share parts of the caller's graph, which a backward frees.
            tensors, gradients = zip(*owed, strict=True)
            torch.autograd.backward(tensors, gradients)
        return reports

    def timeline(self, reports: Sequence[Report]) -> tuple[Timeline, TimelineKind]:
        """The timeline of a step, and whether it was measured or replayed."""
        schedule = reports[0].schedule
        if len(reports) == schedule.ranks > 1:
            return replay(schedule, _durations(reports)), "replayed"
        return self._gather(schedule, reports[0]), "measured"

    def _gather(self, schedule: Schedule, report: Report) -> Timeline:
        """All ranks' spans, each on its own clock from the moment its program began."""
        mine = [[str(span.action), span.start, span.end] for span in report.spans]
        rows: list[Any] = self.each(lambda rank: rank.exchange(mine))
        spans = (
            Span(rank, action, start, end)
            for rank, row in enumerate(rows)
            for text, start, end in row
            for action in flat((parse_action(text),))
        )
        return Timeline(tuple(spans), schedule.ranks, "s", schedule.pairs)

    def leading(self, value: T) -> T:
        """The value that rank 0 has, on every rank; JSON data."""
        values: list[T] = self.each(lambda rank: rank.exchange(value))
        return values[0]

    def tell_stages_apart(self) -> None:
        """Let stages made by hand draw different numbers, even if their modules have the same names."""
        gathered: list[list[str]] = self.each(lambda rank: rank.exchange(rank.drawing_names))
        names = [name for rank in gathered for name in rank]
        if len(set(names)) < len(names):
            for rank in self.ranks:
                rank.tell_stages_apart()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode, with each module's own mode restored afterwards."""
        modes = [(m, m.training) for stage in self.stages for m in stage.module.modules()]
        for stage in self.stages:
            stage.module.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode

    def explain(self) -> str:
        """The program of the last call on each rank of this process, as a table.

        Raises:
            UsageError: there was no call yet.
        """
        found = [rank.bound for rank in self.ranks]
        told = [
            f"rank {rank.number}, schedule {bound.program.schedule.name}\n{table(explain(bound))}"
            for rank, bound in zip(self.ranks, found, strict=True)
            if bound is not None
        ]
        if not told:
            raise UsageError(
                "there is nothing to explain yet; call step(), eval() or predict() first"
            )
        return "\n\n".join(told)

    def patient(self, seconds: float = LONG) -> AbstractContextManager[None]:
        """A context in which this process may take longer than a step without being called silent."""
        return nullcontext() if self._watch is None else self._watch.patient(seconds)

    def report_failures_to(self, folder: Path) -> None:
        """Have the story of a failure written into a folder."""
        if self._watch is not None:
            self._watch.keep_in(folder)

    def close(self, error: BaseException | None = None) -> None:
        """Release what the ranks' transports hold; a second time does nothing.

        Args:
            error: the reason, if it is an error; the other ranks are told.
        """
        # An error after close(), in a with block that closes again, is no failure of the pipeline.
        if self._closed:
            return
        self._closed = True
        if self._watch is not None and error is not None and self._failure is None:
            self._failure = self._watch.failed(error)
        for rank in self.ranks:
            rank.transport.close()


def _durations(reports: Sequence[Report]) -> dict[Action, float]:
    found: dict[Action, float] = {}
    for report in reports:
        for span in report.spans:
            found[span.action] = found.get(span.action, 0.0) + span.duration
    return found
