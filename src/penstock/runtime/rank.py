"""One rank of a pipeline: its stages, its end of the transport, and its programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.errors import SpecError, UsageError
from penstock.microbatch import Microbatch
from penstock.runtime.agreement import OUTPUT, SpecBook, agree_specs
from penstock.runtime.clock import Recorder
from penstock.runtime.driver import Task, Wait
from penstock.runtime.exchange import Specs
from penstock.runtime.machine import Machine, Work
from penstock.runtime.program import RankProgram
from penstock.schedule import Schedule, Span
from penstock.specs import ValueSpec, flatten, spec_of_arguments
from penstock.stage import PipelineStage
from penstock.step import Loss, squared_norms, total
from penstock.transport import Transport


@dataclass(frozen=True)
class Order:
    """One call of the pipeline, the same for all ranks.

    Args:
        schedule: with its messages, for as many microbatches as there are.
        microbatches: the parts of the batch.
        targets: for each microbatch, what the loss compares with; empty without a loss.
        loss: how to compute the loss, where there is one.
        outputs: whether every rank shall get the last stage's outputs.
        record: whether to note when each action ran.
    """

    schedule: Schedule
    microbatches: Sequence[Microbatch]
    targets: Sequence[Any] = ()
    loss: Loss | None = None
    outputs: bool = False
    record: bool = False

    @property
    def weights(self) -> list[float]:
        """By what each microbatch's loss is scaled."""
        if self.loss is None:
            return []
        return self.loss.weights([part.samples for part in self.microbatches])


@dataclass(frozen=True)
class Report:
    """What a rank knows after a call."""

    loss: float
    outputs: list[Any] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    elapsed: float = 0.0


class Rank:
    """One rank, wherever it lives.

    Args:
        transport: its end.
        stages: those it holds.
    """

    def __init__(self, transport: Transport, stages: Sequence[PipelineStage]) -> None:
        self.transport = transport
        self.stages = {stage.index: stage for stage in stages}
        self._programs: dict[int, tuple[Schedule, RankProgram]] = {}
        self._book = SpecBook()

    @property
    def number(self) -> int:
        """Its position in the pipeline."""
        return self.transport.rank

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of its stages, stage by stage; also frozen ones, which may thaw."""
        return [
            parameter
            for index in sorted(self.stages)
            for parameter in self.stages[index].module.parameters()
        ]

    def run(self, order: Order) -> Task[Report]:
        """Carry out a call, as a task."""
        program = self._program(order.schedule)
        calls = _calls(order.microbatches)
        specs = yield from agree_specs(program, self.stages, self.transport, calls, self._book)
        device = next(iter(self.stages.values())).device
        recorder = Recorder(self.number, device) if order.record else None
        work = Work(
            order.microbatches,
            specs,
            order.targets,
            order.loss,
            order.weights,
            keep_outputs=order.outputs,
            recorder=recorder,
        )
        yield from Machine(program, self.stages, self.transport, work).run()
        work.settle()
        elapsed = recorder.elapsed() if recorder else 0.0
        self.transport.finish()
        return (yield from self._report(program, work, elapsed))

    def _program(self, schedule: Schedule) -> RankProgram:
        """The schedule's program, prepared once; held with it, since it is found by identity."""
        if id(schedule) not in self._programs:
            self._programs[id(schedule)] = (schedule, RankProgram(schedule, self.number))
        return self._programs[id(schedule)][1]

    def _report(self, program: RankProgram, work: Work, elapsed: float) -> Task[Report]:
        found = [work.losses[index] for index in sorted(work.losses)]
        mine = torch.tensor([total(found, work.weights)], dtype=torch.float64)
        loss = yield from self._sum(mine)
        outputs: list[Any] = []
        if work.keep_outputs:
            outputs = yield from self._share_outputs(program, work)
        spans = work.recorder.spans if work.recorder else []
        return Report(float(loss), outputs, spans, elapsed)

    def _sum(self, values: Tensor) -> Task[Tensor]:
        ticket = self.transport.sum(values)
        yield Wait(ticket, self.number, "waits for a sum over the ranks")
        summed: Tensor = ticket.take()
        return summed

    def _share_outputs(self, program: RankProgram, work: Work) -> Task[list[Any]]:
        """Give every rank the outputs of the last stage."""
        source = program.schedule.placement.rank_of[-1]
        outputs = []
        for microbatch, specs in enumerate(work.specs):
            outputs.append((yield from self._share(source, work.outputs.get(microbatch), specs)))
        return outputs

    def _share(self, source: int, output: Any, specs: Specs) -> Task[Any]:
        if OUTPUT not in specs:
            raise SpecError(
                "the model's output holds values that cannot travel to other ranks; give tensors, None, "
                "bools, ints, floats, strings, and tuples, lists and dicts of them, or use step and eval"
            )
        spec = specs[OUTPUT]
        device = next(iter(self.stages.values())).device
        shared = []
        for index, tensor_spec in enumerate(spec.tensors):
            own = self.number == source
            tensor = _tensor_at(output, index) if own else tensor_spec.empty(device)
            ticket = self.transport.broadcast(tensor, source)
            yield Wait(ticket, self.number, "waits for the outputs of the last stage")
            shared.append(ticket.take())
        return spec.fill(shared)

    def gradient_norm(self, counts: Sequence[int]) -> Task[float]:
        """The 2-norm of all gradients of the pipeline.

        Args:
            counts: how many parameters each rank holds.
        """
        squares = torch.zeros(sum(counts), dtype=torch.float64)
        start = sum(counts[: self.number])
        squares[start : start + counts[self.number]] = squared_norms(self.parameters)
        return float((yield from self._sum(squares)).sum().sqrt())

    def exchange(self, value: Any) -> Task[list[Any]]:
        """Give every rank's JSON value to all."""
        ticket = self.transport.agree(value)
        yield Wait(ticket, self.number, "waits for a value of every rank")
        values: list[Any] = ticket.take()
        return values

    def clear(self) -> None:
        """Drop what an interrupted call left in the stages."""
        for stage in self.stages.values():
            stage.clear()


def _tensor_at(value: Any, index: int) -> Tensor:
    return flatten(value)[0][index]


def _calls(parts: Sequence[Microbatch]) -> list[ValueSpec]:
    """The spec of each microbatch's arguments; microbatches alike share one object."""
    unlike = {part.samples: part for part in parts}
    specs = {size: spec_of_arguments(part.args, part.kwargs) for size, part in unlike.items()}
    return [specs[part.samples] for part in parts]


def check_stages(schedule: Schedule, rank: int, stages: Sequence[PipelineStage]) -> None:
    """Check that a rank was given exactly its stages.

    Raises:
        UsageError: others; the message lists what the schedule places there.
    """
    given = sorted(stage.index for stage in stages)
    expected = list(schedule.placement.stages_on(rank))
    if given != expected:
        raise UsageError(
            f"rank {rank} holds stages {given}; {schedule.name} places {expected} there"
        )
    counts = sorted({stage.count for stage in stages})
    if counts != [schedule.stages]:
        raise UsageError(
            f"the stages of rank {rank} belong to pipelines of {counts} stages; "
            f"{schedule.name} has {schedule.stages}"
        )
