"""One rank of a pipeline: its stages, its end of the transport, and its programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from penstock.errors import AgreementError, PenstockError, SpecError, StageError, UsageError
from penstock.faults import has_probes
from penstock.parallel import Adapter, adapter_of, let_cross, unwrapped
from penstock.rng import Generators, Streams
from penstock.runtime.agreement import (
    Agreement,
    Agreements,
    Brought,
    Call,
    ModelCall,
    Refusal,
    Report,
    agree_model_call,
    look_up,
)
from penstock.runtime.bind import BoundProgram, Wanted
from penstock.runtime.describing import (
    Describe,
    describe_by_stage,
    describe_whole,
    why_not_without,
)
from penstock.runtime.driver import Task, Wait
from penstock.runtime.exchange import Inputs, Specs
from penstock.runtime.instrumentation import Health, Recorder, Spot, Trouble, has_finite_gradients
from penstock.runtime.program import RankProgram, channels
from penstock.runtime.results import (
    Names,
    agree_weights,
    check_outputs,
    own_counts,
    share_numbers,
    share_outputs,
)
from penstock.runtime.work import Companion, StepData
from penstock.schedule import Edge, Op, Schedule
from penstock.stage import PipelineStage
from penstock.step import Tally, Weights, WholeBatch
from penstock.transport import Transport
from penstock.values import ValueSpec, named_arguments


class Rank:
    """One rank, which may share its process with all others or have one to itself.

    Args:
        transport: its end of the wires.
        stages: the stages that it holds.
        describe: how the partition tells what travels for a call, if it does.
        by_hand: whether keyword arguments go to all stages of the rank that was given them and to no others,
            rather than to the stages that take them.
    """

    def __init__(
        self,
        transport: Transport,
        stages: Sequence[PipelineStage],
        describe: Describe | None = None,
        *,
        by_hand: bool = False,
    ) -> None:
        self.transport = transport
        self._by_hand = by_hand
        self.activity = transport.activity
        self.stages = {stage.index: stage for stage in stages}
        self._describe = describe
        self._programs: dict[int, tuple[Schedule, RankProgram]] = {}
        self._agreements = Agreements()
        self.bound: BoundProgram | None = None
        self._inputs: Inputs | None = None
        self._names: Names = ()
        self._streams = {stage.index: _streams_of(stage) for stage in stages}
        self._norms: dict[int, WholeBatch] = {}
        self._adapters: dict[int, Adapter] = {}

    @property
    def number(self) -> int:
        """Its position in the pipeline."""
        return self.transport.rank

    @property
    def drawing_names(self) -> list[str]:
        """The names under which modules of its stages draw random numbers."""
        return [name for streams in self._streams.values() for name in streams.names]

    def tell_stages_apart(self) -> None:
        """Put the stage in front of those names."""
        for index, streams in self._streams.items():
            streams.put_before(f"stage {index}: ")

    def wrap_transport(self, wrap: Callable[[Transport], Transport]) -> None:
        """Put something between this rank and its transport."""
        self.transport = wrap(self.transport)

    def run(self, call: Call) -> Task[Report | Refusal]:
        """Carry out a call, as a task: agree on it, run the program, and report what came out.

        Whatever is wrong with the call is found and told to all ranks before anything is sent or changed.
        Every rank then refuses the call, and the next call runs as if this one had never been made.
        """
        let_cross(stage.module for stage in self.stages.values())
        inputs = self._inputs or (yield from self._introduce())
        try:
            agreement, data = yield from self._agree(call, inputs)
        except (UsageError, SpecError, StageError, AgreementError) as error:
            return Refusal(error)
        adapted = self._adapted(call, agreement)
        with self._accompanied(call) as companions, adapted as adapters:
            bound = self._bound(call, agreement, inputs, companions, adapters)
            yield from bound.run(data)
        elapsed = data.recorder.elapsed() if data.recorder else 0.0
        self.activity.wait("waits until what it sent has left", None)
        self.transport.finish()
        self.activity.over()
        return (yield from self._report(call, agreement, data, elapsed))

    def _data(
        self, call: Call, agreement: Agreement, counts: Sequence[float] | None
    ) -> Task[StepData]:
        """What this step brings to this rank."""
        loss, targets = call.loss, call.batch.targets
        weights = Weights()
        if loss is not None:
            weights = yield from agree_weights(
                self.transport, loss, agreement.model_call, counts, call.scale
            )
        device = next(iter(self.stages.values())).device
        return StepData(
            agreement.model_call.completed(self.number, call.batch.parts),
            loss,
            targets or [None] * agreement.model_call.count,
            weights,
            Tally(weights, loss.metrics if loss else {}),
            recorder=Recorder(self.number, device) if call.record else None,
            health=Health(self.number, agreement.schedule.stages) if call.finite else None,
        )

    def _bound(
        self,
        call: Call,
        agreement: Agreement,
        inputs: Inputs,
        companions: Mapping[int, tuple[Companion, ...]],
        adapters: Mapping[int, Adapter],
    ) -> BoundProgram:
        """The program for calls like this one, bound at the first of them."""
        wanted = Wanted(
            with_loss=call.loss is not None,
            outputs=call.outputs or call.keep,
            finite=call.finite,
            recorded=call.record,
            inputs=self._for_call(inputs, agreement.model_call, agreement.schedule),
            companions={
                index: (*found, *(adapters[i] for i in adapters if i == index))
                for index, found in companions.items()
            },
            adapters=adapters,
            replaced=call.replaced,
            hooks=call.hooks,
            noted=call.noted or self.transport.separate,
            probed=has_probes(),
            profiled=torch.autograd._profiler_enabled(),  # type: ignore[attr-defined]  # no public name for it
        )
        key = (
            wanted.with_loss,
            wanted.outputs,
            wanted.finite,
            wanted.recorded,
            wanted.noted,
            wanted.probed,
            wanted.profiled,
            call.hooks is None,
            call.draw is None,
            call.whole_batch,
            tuple(adapters.items()),
            tuple(call.replaced.items()),
        )
        found: BoundProgram | None = agreement.bound.get(key)
        if found is None:
            program = self._program(agreement.schedule)
            found = BoundProgram(
                program, self.stages, self.transport, agreement.specs, wanted, self.activity
            )
            agreement.bound[key] = found
        self.bound = found
        return found

    def _report(
        self, call: Call, agreement: Agreement, data: StepData, elapsed: float
    ) -> Task[Report]:
        """Add up what all ranks found, and put together what this one returns."""
        tally, health = data.tally, data.health
        ill = health is not None and not has_finite_gradients(self.stages.values())
        numbers, self._names, ill = yield from share_numbers(
            self.transport, call.loss, tally.sums(), data.weights, self._names, ill=ill
        )
        trouble = None
        if health is not None and ill:
            spots = health.spots(tally.mains(), self.stages.values())
            trouble = yield from self._trouble(numbers.loss, spots)
        return Report(
            agreement.schedule,
            numbers,
            (yield from self._outputs(agreement, data)) if call.outputs else [],
            data.recorder.spans if data.recorder else [],
            elapsed,
            data.owed,
            agreement.model_call.ready,
            tally.mains(),
            [data.outputs[index] for index in sorted(data.outputs)] if call.keep else [],
            trouble,
        )

    def _trouble(self, loss: float, spots: Sequence[Spot]) -> Task[Trouble]:
        """The first place at which something was not finite, on any rank."""
        told = yield from self.exchange(min(spots, default=None))
        found = [Spot(*spot) for spot in told if spot is not None]
        return Trouble(loss, min(found, default=None))

    @contextmanager
    def _accompanied(self, call: Call) -> Iterator[Mapping[int, tuple[Companion, ...]]]:
        """Install, for the time of this call, what is told of each stage's work."""
        found: list[tuple[int, Companion]] = []
        with ExitStack() as stack:
            for index, streams in self._streams.items():
                if call.draw is not None:
                    stack.enter_context(streams.installed(call.draw))
                    found.append((index, streams))
            for index, stage in self.stages.items():
                if call.whole_batch:
                    norms = self._norms.setdefault(index, WholeBatch(stage.own))
                    stack.enter_context(norms.installed())
                    found.append((index, norms))
            yield {i: tuple(c for at, c in found if at == i) for i in self.stages}

    @contextmanager
    def _adapted(self, call: Call, agreement: Agreement) -> Iterator[Mapping[int, Adapter]]:
        """Put the adapters of replicated and sharded stages around a call.

        They reduce gradients when it ends.
        """
        adapters = self._find_adapters()
        gathers = Op.UNSHARD not in agreement.schedule.ops
        for index, adapter in adapters.items():
            if call.trains and adapter.whole_backward:
                self.stages[index].reduce_later()
            adapter.begin(agreement.model_call.count, trains=call.trains, gathers=gathers)
        try:
            yield adapters
            for adapter in adapters.values():
                adapter.finish()
        except BaseException:
            for adapter in adapters.values():
                adapter.abandon()
            raise

    def _find_adapters(self) -> Mapping[int, Adapter]:
        """The adapters of the stages here; new ones if the user has wrapped a module since the last call."""
        for index, stage in self.stages.items():
            known = self._adapters.get(index)
            if known is None or not known.fits(stage.module):
                found = adapter_of(stage.module, partial(attrgetter("apart"), stage))
                if found is not None:
                    self._adapters[index] = found
                else:
                    self._adapters.pop(index, None)
        return dict(self._adapters)

    def _for_call(self, inputs: Inputs, model_call: ModelCall, schedule: Schedule) -> Inputs:
        """The inputs for this call, where keyword arguments go by rank."""
        if not self._by_hand:
            return inputs
        named = [
            frozenset(key for key in given if isinstance(key, str)) for given in model_call.given
        ]
        rank_of = schedule.placement.rank_of
        return replace(inputs, by_hand={stage: named[rank] for stage, rank in enumerate(rank_of)})

    def _introduce(self) -> Task[Inputs]:
        """Tell the other ranks which keyword arguments the stages here take."""
        mine = [
            [index, None if stage.wired else list(named_arguments(unwrapped(stage.module)))]
            for index, stage in self.stages.items()
        ]
        told = yield from self.exchange(mine)
        self._inputs = Inputs({index: names for rank in told for index, names in rank})
        return self._inputs

    def _agree(self, call: Call, inputs: Inputs) -> Task[tuple[Agreement, StepData]]:
        """The agreement on what all ranks bring, remembered or made now; and the data of this step."""
        refused, counts = call.refused, None
        try:
            counts = own_counts(call.loss, call.batch)
        except PenstockError as error:
            refused = error
        brought = Brought(call.batch, call.mode, refused)
        traits = _traits(self.stages.values())
        key, agreement = yield from look_up(self.transport, brought, self._agreements, traits)
        if agreement is None:
            model_call = yield from agree_model_call(self.transport, brought)
            agreement = yield from self._agreement(call, model_call, inputs)
            self._agreements.write(key, agreement)
        if call.outputs:
            check_outputs(agreement.specs)
        return agreement, (yield from self._data(call, agreement, counts))

    def _agreement(self, call: Call, model_call: ModelCall, inputs: Inputs) -> Task[Agreement]:
        described = self._agreements.described
        digests = [f"{call.mode} {spec.digest()}" for spec in model_call.specs]
        news = {
            d: spec for d, spec in zip(digests, model_call.specs, strict=True) if d not in described
        }
        if self._describe is None:
            # Checked before describe_by_stage tries a stage with arguments that its rank was not given.
            schedule = call.schedules(model_call.count, None)
            inputs = self._for_call(inputs, model_call, schedule)
            if call.batch.parts:
                inputs = replace(inputs, aside=call.batch.parts[0].aside)
            _check_given(model_call, inputs, schedule)
        if news:
            found = yield from self._describe_all(call, model_call, inputs, list(news.values()))
            described.update(zip(news, found, strict=True))
        edges = _one_table([described[digest][0] for digest in digests])
        schedule = call.schedules(model_call.count, edges)
        _check_given(model_call, inputs, schedule)
        yield from self._check_target(call, model_call, schedule, described[digests[0]][1])
        self.transport.open(channels(schedule))
        return Agreement(model_call, tuple(described[digest][1] for digest in digests), schedule)

    def _check_target(
        self, call: Call, model_call: ModelCall, schedule: Schedule, specs: Specs
    ) -> Task[None]:
        """Check that the rank of the last stage was given a target, or that the loss needs none.

        Raises:
            UsageError: it was given none, and the loss function fails without one.
        """
        rank, last = schedule.placement.rank_of[-1], schedule.stages - 1
        if call.loss is None or model_call.targets[rank]:
            return
        if any(model_call.targets):
            raise UsageError(
                f"rank {rank}, which has the last stage, was given no target; pass target= on that rank"
            )
        told = None
        if rank == self.number:
            told = why_not_without(call.loss.function, specs, self.stages[last].device)
        why = (yield from self.exchange(told))[rank]
        if why:
            raise UsageError(
                f"no target was given{_where_it_went(model_call)}, and {why}; pass it as target="
            )

    def _describe_all(
        self, call: Call, model_call: ModelCall, inputs: Inputs, calls: Sequence[ValueSpec]
    ) -> Task[Sequence[tuple[tuple[Edge, ...] | None, Specs]]]:
        """For each of these calls, the edges (if they depend on the call) and the specs of what travels."""
        if self._describe is not None:
            whole = describe_whole(self.transport, self._describe, calls, trains=call.trains)
            return (yield from whole)
        program = self._program(call.schedules(model_call.count, None))
        kin = self._agreements.families(call.mode)
        task = describe_by_stage(program, self.stages, self.transport, inputs, calls, kin)
        return [(None, specs) for specs in (yield from task)]

    def _program(self, schedule: Schedule) -> RankProgram:
        """The schedule's program, made once. The schedule is kept with it, since its id must stay its own."""
        if id(schedule) not in self._programs:
            self._programs[id(schedule)] = (schedule, RankProgram(schedule, self.number))
        return self._programs[id(schedule)][1]

    def _outputs(self, agreement: Agreement, data: StepData) -> Task[list[Any]]:
        source = agreement.schedule.placement.rank_of[-1]
        device = next(iter(self.stages.values())).device
        return (
            yield from share_outputs(self.transport, source, data.outputs, agreement.specs, device)
        )

    def exchange(self, value: Any) -> Task[list[Any]]:
        """Give all ranks the JSON value of every rank, in rank order."""
        ticket = self.transport.agree(value)
        yield Wait(ticket, self.number, "waits for a value of every rank")
        values: list[Any] = ticket.take()
        return values

    def clear(self) -> None:
        """Drop what an interrupted call has left in the stages."""
        for stage in self.stages.values():
            stage.clear()


def _streams_of(stage: PipelineStage) -> Streams:
    # In every wired stage it is the model's own forward that runs; a plain stage has code of its own.
    whole = stage.is_first or (stage.wired and not stage.compiles)
    part = "" if whole else f"stage {stage.index}"
    generators = Generators([stage.device])
    return Streams(stage.own, generators, part, compiled=stage.compiles)


def _traits(stages: Iterable[PipelineStage]) -> tuple[Any, ...]:
    """What changes what travels: each parameter's type and requires_grad, and the traits of wired modules."""
    return tuple(
        (stage.traits, [(p.dtype, p.requires_grad) for p in stage.module.parameters()])
        for stage in stages
    )


def _one_table(tables: Sequence[tuple[Edge, ...] | None]) -> tuple[Edge, ...] | None:
    """The edge table that all microbatches of a call share.

    Raises:
        SpecError: they differ.
    """
    if any(table != tables[0] for table in tables):
        raise SpecError(
            "the microbatches of one call need different values between the stages; call the model "
            "with the same arguments for all of them"
        )
    return tables[0]


def _check_given(model_call: ModelCall, inputs: Inputs, schedule: Schedule) -> None:
    """Check that the ranks were given what their stages need; the same on every rank.

    Raises:
        UsageError: a rank lacks an argument of a stage.
    """
    positions, names = model_call.names
    rank_of = schedule.placement.rank_of
    used = {stage for edge in schedule.edges for stage in edge.targets}
    for stage, rank in enumerate(rank_of):
        if inputs.named.get(stage) is None:
            continue
        first = stage not in used
        needed = [*(positions if first else ()), *inputs.by_name(stage, names, first=first)]
        lacking = [key for key in needed if key not in model_call.given[rank]]
        if lacking:
            raise UsageError(
                f"rank {rank} was not given the arguments {lacking}, which stage {stage} takes; pass "
                "them on that rank, or pass the whole batch on every rank"
            )


def _where_it_went(model_call: ModelCall) -> str:
    """A hint at the argument of the model that may have been meant as the target."""
    positions, names = model_call.names
    if near := get_close_matches("target", names, n=1):
        return f" ({near[0]}= went to the model)"
    if len(positions) > 1:
        return f" (all {len(positions)} arguments by position went to the model)"
    return ""


def check_stages(schedule: Schedule, rank: int, stages: Sequence[PipelineStage]) -> None:
    """Check that a rank was given exactly its stages.

    Raises:
        UsageError: it was given others; the message lists those that the schedule places there.
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
