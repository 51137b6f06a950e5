"""Carries out calls of a pipeline for the ranks of this process: all of them, or one."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from inspect import Parameter, signature
from itertools import chain, zip_longest
from math import nan
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from penstock._engine.faults import failing_module, without_library_frames
from penstock._engine.microbatches import MISSING, Batch, Microbatch
from penstock._engine.parallel import (
    Adapter,
    Adapters,
    ReplicatedStage,
    adapter_of,
    let_cross,
    local_part,
    unwrapped,
)
from penstock._engine.rng import Draws, generators_kept
from penstock._engine.runtime.alike import (
    NOTHING,
    Sampled,
    Turns,
    check_alike,
    may_differ,
    samples_of,
)
from penstock._engine.runtime.calls import (
    MOST_SUMS,
    REFUSED,
    Call,
    Head,
    StepState,
    first_known,
    is_known,
)
from penstock._engine.runtime.interpreter import Interpreter
from penstock._engine.runtime.kinds import (
    EACH,
    Agreement,
    Brought,
    Key,
    Kind,
    KnownCalls,
    ModelCall,
    Settled,
    has_data,
    merge,
)
from penstock._engine.runtime.learning import check_learning, mark_of
from penstock._engine.runtime.loss import StepLoss, Weights
from penstock._engine.runtime.program import Program
from penstock._engine.runtime.result import Numbers
from penstock._engine.runtime.stopping import GracefulStop
from penstock._engine.transport import BROKEN, STEP, Group, Job, Replicas
from penstock._engine.values import map_tensors
from penstock.errors import (
    AgreementError,
    PenstockError,
    PlanError,
    StageError,
    UsageError,
)
from penstock.schedule import Action, Edge, Op, Schedule
from penstock.stage import PipelineStage, StageModule

logger = logging.getLogger("penstock")
_MOST_DIGESTS = 1024
Schedules: TypeAlias = Callable[..., Schedule]
"""Returns the proven schedule for a number of microbatches, the edges if they depend on the call, and whether
it trains."""


class Runner:
    """The ranks of a pipeline that live in this process, and the calls that they carry out.

    Args:
        schedules: returns the schedule of a call.
        job: this process among the others.
        device: where the stages will live.

    Attributes:
        job: this process among the others.
        stages: the stages of this process, by index; none before :meth:`hold`.
        interpreter: runs the programs.
        stopping: whether the job stops now, as the last training step has found out.
    """

    def __init__(self, schedules: Schedules, job: Job, device: torch.device) -> None:
        self.job = job
        self.stages: dict[int, PipelineStage] = {}
        self.schedules = schedules
        self._planned: StageModule | None = None
        self._numbers = {True: Numbers(), False: Numbers()}
        self._adapters: dict[int, Adapter] = {}
        self._averages: dict[int, ReplicatedStage] = {}
        self._known = KnownCalls(job.rank)
        self._digests: dict[Hashable, int] = {}
        self._turns = Turns()
        self.stopping = False
        self._argument_names: dict[int, list[str]] = {}
        self.interpreter = Interpreter(self.stages, job.activity)
        self._devices = [device]

    def hold(self, stages: Sequence[PipelineStage]) -> None:
        """Take the stages of this process; all processes of the pipeline call this."""
        self.stages.update((stage.index, stage) for stage in stages)
        code = stages[0].code
        self._planned = code if isinstance(code, StageModule) else None
        if self._planned is None:
            named = [[i, argument_names(unwrapped(s.module))] for i, s in self.stages.items()]
            rows = self.job.meet(lambda: named, among=self.job.pipeline)
            self._argument_names = {index: names for row in rows for index, names in row}
        self._devices = list({stage.device for stage in stages})
        self.job.live_on(self._devices[0])

    # ---- a call

    def run(self, call: Call) -> StepState:
        """Carry out a call.

        Raises:
            PoisonedError: an earlier call failed in the middle, in several processes.
            PenstockError: the call was refused, and nothing was sent or changed; or it failed.
        """
        with self._carrying_out(call) as step:
            self.interpreter.run(step.agreement.program.instructions)
        return step

    @contextmanager
    def driven(self, call: Call) -> Iterator[tuple[StepState, Callable[[Action], None]]]:
        """A context that carries out a call whose actions the caller runs, in any order of its own.

        Yields:
            The state of the call, and a function that runs an action.
        """
        with self._carrying_out(call, in_order=False) as step:
            program = step.agreement.program
            yield step, lambda action: self.interpreter.run([program.instruction(action)])

    @contextmanager
    def _carrying_out(self, call: Call, *, in_order: bool = True) -> Iterator[StepState]:
        """A context between the agreement on a call and the sum over its results, for its actions."""
        with self._begun(call):
            step = self._agree(call)
            self.job.steps += call.trains
            # Without a seed of its own, a call draws from torch's generators, and moves them on.
            kept = nullcontext() if call.seed is None else generators_kept(self._devices)
            actions = self.interpreter.step(step, self.job.transport, in_order=in_order)
            try:
                with kept, self._adapted(step), actions:
                    yield step
            except PlanError:
                self._known.drop(step.agreement)
                raise
            self._finish(step)

    @contextmanager
    def _begun(self, call: Call) -> Iterator[None]:
        """A context from the beginning of a call to its end, or to its refusal."""
        self.job.check_usable()
        activity = self.interpreter.activity
        if activity.inside:
            raise UsageError(
                f"{call.method} was called in the middle of another call of this pipeline, as by a hook of "
                "pipe.on(...), by loss_fn or by the model's own code; call it after that one, or in a hook "
                "of pipe.on_step(...), which runs between steps"
            )
        activity.begin(self.job.steps + call.trains)
        try:
            with torch.set_grad_enabled(call.trains):
                yield
        except _Refused as refused:
            raise refused.error.with_traceback(None) from refused.error.__cause__
        except BaseException as error:
            raise self.job.fail(error) from None if error.__cause__ is None else error.__cause__
        finally:
            activity.rest()

    def _finish(self, step: StepState) -> None:
        """Add up the losses and metrics of all ranks, and share outputs that all ranks want."""
        call, agreement = step.call, step.agreement
        if {*map(attrgetter("type"), self._devices)} != {"cpu"}:
            self.interpreter.activity.wait("the device")
        largest = largest_gradient(self.stages.values()) if call.finite else None
        group = self._group(call)
        numbers = self._numbers[group is self.job.pipeline]
        step.result = numbers.share(self.job, group, step.tally, call.loss, step.weights, largest)
        of_batch = agreement.model_call
        sums = of_batch.sums_gradients or (self._planned is not None and of_batch.learns)
        if call.trains and self.job.transport is not None and sums:
            step.sum_batch_gradients(self.job)
        if call.trains:
            self.stopping = bool(GracefulStop.agree(*numbers.wishes)) or self.stopping
        if call.outputs:
            step.shared = self.job.share(
                step.kept, agreement.program.schedule.placement.rank_of[-1]
            )
        step.flops = partial(self._count_flops, agreement.kinds, 3 if call.trains else 1)

    def _group(self, call: Call) -> Group:
        """Return who makes a call: the job one that trains or is summed over replicas, else this pipeline."""
        whole = call.trains or (call.loss is not None and call.loss.replicas.number > 1)
        return self.job.whole if whole else self.job.pipeline

    def _count_flops(self, kinds: Sequence[Kind], times: int) -> float | None:
        """The model's floating-point operations in a call: ``times`` those of its forward."""
        if self._planned is None:
            return None
        for kind in {*kinds}:
            if kind.flops is None:
                example = kind.example
                try:
                    kind.flops = kind.plan.flops or self._planned.flops(
                        example.args, example.kwargs
                    )
                except Exception as error:
                    logger.info(
                        "penstock: the operations of the model cannot be counted: %s", error
                    )
                    return None
        return sum(times * kind.flops for kind in kinds if kind.flops is not None)

    # ---- before a step

    def cut_by(
        self,
        call: Call,
        agree: Callable[[Callable[[], tuple[int, Any, Any]]], None],
        take_stages: Callable[[], None],
    ) -> None:
        """Cut a model by what the first call brings; all processes of the job call this.

        Args:
            call: the call.
            agree: lets all ranks cut at the same places, or none. It is given a function that returns the
                first rank that has arguments, and those and the target of a microbatch.
            take_stages: takes the stages of this process.

        Raises:
            PenstockError: the call was refused, or the model cannot be cut, and nothing was changed.
        """

        def describe() -> dict[str, Any]:
            if call.refusal is not None:
                raise call.refusal
            return Brought(call.mode, [], call.batch).describe()

        def bring() -> tuple[int, Any, Any]:
            model_call = merge(self.job.pipeline.meet(describe))
            part = self._with_batch(model_call, call.batch.parts, count=1)[0]
            target = call.batch.targets[0] if call.batch.targets else MISSING
            return min(model_call.holders, default=0), (part.args, part.kwargs), target

        activity = self.interpreter.activity
        with self._begun(call):
            activity.prepare("cuts the model")
            try:
                with refusals():
                    agree(bring)
                activity.prepare("makes its stages")
                with torch.inference_mode(mode=False), torch.enable_grad():
                    take_stages()
            finally:
                activity.prepared()

    def _agree(self, call: Call) -> StepState:
        """Learn what all ranks bring. If it is wrong, all of them raise ``_Refused`` before they begin.

        A call that all of them know takes one row of numbers from each; while these stay the same, all that
        they say has been looked into. Otherwise the ranks of a pipeline meet to look into it, and then all
        pipelines of the job, since none begins if one refuses.
        """
        let_cross(map(attrgetter("module"), self.stages.values()))
        group, number = self._group(call), self.interpreter.activity.step
        mine = self._bring(call, number, group)
        rows = group.announce(STEP, mine.numbers, f"the digest before step {number}", call.method)
        settled = mine.settled
        if settled is not None and settled.is_said_again(rows):
            agreement, weights = self._known.get(settled.digests), settled.weights
            assert agreement is not None
            self._complete(call, mine, agreement)
        else:
            agreement, weights = self._look_into(call, group, mine, rows)
        devices = {index: stage.device for index, stage in self.stages.items()}
        return StepState(call, agreement, weights, mine.parts or (), devices, mine.scores)

    def _look_into(
        self, call: Call, group: Group, mine: _Mine, rows: Sequence[Sequence[int]]
    ) -> tuple[Agreement, Weights]:
        """Look into what all ranks say of a call, which settles it for calls in which they say the same."""
        job, heads = self.job, [Head.read(row) for row in rows]
        pipelines, own = job.by_pipeline(heads), job.own(heads)
        new: list[Agreement] = []
        if mine.settled is not None:
            mine.counts = _counts_here(call.loss, call.batch)

        def sort_out() -> list[float]:
            """Sums of weights, as they lie in a head."""
            new.append(self._sort_out(call, mine, own))
            return [sum(of) for of in mine.counts.values()]

        with refusals():
            check_steps([of[0].step for of in pipelines])
            if all(map(is_known, pipelines)):
                sums = [list(head.sums) for head in heads]
            elif group is job.pipeline:
                sums = [sort_out()] * group.size
            else:
                sums = group.meet(sort_out)
            check_learning(group, [head.learns for head in heads], self.stages.values())
        agreement = new[0] if new else self._sort_out(call, mine, own)
        weights, loss = Weights(), call.loss
        if loss is not None:
            with refusals():
                weights = loss.weigh(mine.counts, self._totals(loss, mine.counts, sums))
        by_target = agreement.model_call.weighted or (loss is not None and loss.asks_targets)
        tells_totals = loss is None or loss.replicas.number == 1 or job.reaches_replicas
        if not new and not by_target and tells_totals:
            said = [row[EACH:] for row in rows]
            agreement.settled = Settled(said, digests_of(own), loss, weights)
        return agreement, weights

    def _bring(self, call: Call, step: int, group: Group) -> _Mine:
        """Return what this rank brings to a call, which is or follows a step of this number."""
        refusal, sampled, scores, settled = call.refusal, NOTHING, None, None
        counts: Mapping[str, Sequence[float]] = {}
        digest, expected, sums = REFUSED, 0, tuple[float, ...]()
        parts = call.batch.parts
        try:
            if call.trains and not call.finalizes:
                for adapter in self._find_adapters().values():
                    adapter.check_postpones()
            plans = refusal is None and self._planned is not None
            if plans and parts and any(p.args or p.kwargs for p in parts) and has_data(call.batch):
                # What fails here fails again below, unless the ranks were given different arguments.
                with suppress(PenstockError):
                    scores = self._scores(call, parts)
            digest = self._digest_of(call, scores)
            if self.job.transport is not None:
                sampled = self._sampled(call, digest)
            agreement = self._known.expected(digest)
            if agreement is not None and refusal is None:
                settled = agreement.settled
                if settled is not None and settled.loss is call.loss:
                    numbers = [step, sampled.mark, *settled.rows[group.rank]]
                    return _Mine(numbers, None, sampled, {}, parts, scores, settled)
            counts = _counts_here(call.loss, call.batch)
            if agreement is not None:
                known = self._counts(call.loss, agreement.model_call, counts, asks=False)
                sums = tuple([sum(of) for of in known.values()])
                expected = agreement.number if len(sums) <= MOST_SUMS and not refusal else 0
        except PenstockError as error:
            refusal = refusal or error
        replicas = Replicas() if call.loss is None or not call.trains else call.loss.replicas
        learns = mark_of(self.stages.values(), replicas, averages=call.finalizes)
        digest = REFUSED if refusal is not None else digest
        head = Head(step, sampled.mark, digest, expected, learns, sums)
        return _Mine(head.numbers(), refusal, sampled, counts, parts, scores)

    def _digest_of(self, call: Call, scores: Sequence[Any] | None) -> int:
        """A hash of how what this rank brings to a call looks."""
        paths = tuple([_path_of(score) for score in scores]) if scores else None
        mode, state, batch = call.mode, self._state(), call.batch
        key = batch.look, mode, state, paths
        digest = None if batch.look is None else self._digests.get(key)
        if digest is None:
            digest = Brought(mode, state, batch, paths).digest
            if len(self._digests) == _MOST_DIGESTS:
                self._digests.clear()
            if batch.look is not None:
                self._digests[key] = digest
        return digest

    def _sort_out(self, call: Call, mine: _Mine, heads: Sequence[Head]) -> Agreement:
        """Find what was agreed on for a call, or look into it if it is new or odd; all ranks do.

        Raises:
            PenstockError: it is refused.
        """
        digests, marks = digests_of(heads), [head.mark for head in heads]
        agreement = None if REFUSED in digests else self._known.get(digests)
        differs = may_differ(marks)

        def describe() -> list[Any]:
            if mine.refusal is not None:
                raise mine.refusal
            facts = None
            if agreement is None and REFUSED not in digests:
                paths = [_path_of(score) for score in mine.scores] if mine.scores else None
                facts = Brought(call.mode, self._state(), call.batch, paths).describe()
            return [facts, mine.sampled.samples if differs else None]

        if agreement is None or differs:
            rows = self.job.pipeline.meet(describe)
        if agreement is None:
            model_call = merge([facts for facts, _ in rows])
            mine.parts = self._with_batch(model_call, mine.parts)
            agreement, mine.scores = self._make_agreement(call, model_call, mine.parts, mine.scores)
            self._known.add(digests, agreement)
        else:
            self._complete(call, mine, agreement)
        mine.counts = self._counts(call.loss, agreement.model_call, mine.counts)
        if differs:
            check_alike(marks, [samples for _, samples in rows])
        return agreement

    def _complete(self, call: Call, mine: _Mine, agreement: Agreement) -> None:
        """Send ranks the microbatches that they lack for a known call; these write their scores now."""
        mine.parts = self._with_batch(agreement.model_call, mine.parts)
        if mine.scores is None and self._planned is not None:
            mine.scores = self._scores(call, mine.parts)
            self._check_paths(agreement, mine.scores)

    def _totals(
        self,
        loss: StepLoss,
        counts: Mapping[str, Sequence[float]],
        sums: Sequence[Sequence[float]],
    ) -> list[float]:
        """For each loss, the sum of its weights over all replicas.

        Args:
            loss: the loss.
            counts: the weights of this pipeline's microbatches.
            sums: those sums that each process has told.
        """
        here = [sum(of) for of in counts.values()]
        if loss.replicas.number == 1:
            return here
        if not self.job.reaches_replicas:
            numbers = torch.tensor(here, dtype=torch.float64, device="cpu")
            added: list[float] = loss.replicas.added(numbers).tolist()
            return added
        replicas = self.job.by_replica(sums)
        if any(len(of) != len(here) for rows in replicas for of in rows):
            raise AgreementError(
                "replicas were given weights of different losses; give every replica the same names"
            )
        return [sum(of) for of in zip(*map(first_known, replicas), strict=True)]

    def _scores(self, call: Call, parts: Sequence[Microbatch]) -> Sequence[Any] | None:
        """Return what the author's code does in each microbatch; None for stages that were placed by hand."""
        planned = self._planned
        if planned is None:
            return None

        calls = [
            (part.args, {**part.kwargs, **part.local}, self._draws(call, index))
            for index, part in enumerate(parts)
        ]
        with nullcontext() if call.seed is None else generators_kept(self._devices):
            scores: Sequence[Any] = without_data(lambda: planned.scores(calls), trains=call.trains)
        return scores

    def _draws(self, call: Call, microbatch: int) -> Draws | None:
        if call.seed is None:
            return None
        return Draws(*call.seed, microbatch, self._devices[0])

    def _with_batch(
        self, model_call: ModelCall, parts: Sequence[Microbatch] | None, count: int | None = None
    ) -> Sequence[Microbatch]:
        """A rank's microbatches; ranks without those of a model that was cut are sent them.

        Args:
            model_call: what all ranks bring.
            parts: what this rank was given.
            count: how many microbatches are needed; by default all.
        """
        completed = model_call.complete(self.job.rank, parts)[:count]
        transport, holders = self.job.transport, model_call.holders
        by_hand = self._planned is None and bool(self.stages)
        if by_hand or transport is None or not holders or len(holders) == transport.ranks:
            return completed
        source, device = min(holders), self._devices[0]

        def bring(tensor: Tensor) -> Tensor:
            here = not tensor.is_meta
            like = tensor.detach().to(device) if here else torch.empty_like(tensor, device=device)
            came = transport.broadcast(like, source)
            return tensor if here else came.requires_grad_(tensor.requires_grad)

        rows = [map_tensors([part.args, part.kwargs], bring) for part in completed]
        return [
            replace(part, args=tuple(args), kwargs=kwargs)
            for part, (args, kwargs) in zip(completed, rows, strict=True)
        ]

    def _check_paths(self, agreement: Agreement, scores: Sequence[Any] | None) -> None:
        """Check that the author's code does here what it does on the ranks that were given the batch."""
        for index, (kind, score) in enumerate(zip(agreement.kinds, scores or (), strict=False)):
            if kind.path != _path_of(score):
                raise AgreementError(
                    f"rank {self.job.rank}: the model's code does something else with microbatch {index} "
                    "here than on the ranks that were given the batch; it may depend on something that "
                    "differs between processes, such as an attribute or a random number of Python's"
                )

    def _sampled(self, call: Call, look: int) -> Sampled:
        """Return what this rank has that others must have too, as far as the call compares it."""
        turn = self._turns.come(look)
        compares = call.same_batch or (call.same_batch is None and turn)
        batch = samples_of(call.batch) if compares else {}
        settings = call.settings() if turn else {}
        return Sampled({**batch, **settings}, strict=bool(call.same_batch))

    def _state(self) -> tuple[tuple[int, str], ...]:
        """Return what plans and layouts depend on in the stages of this process, as JSON data."""
        if self._planned is not None:
            return ((self.job.rank, self._planned.settings()),)
        return tuple(zip(self.stages, map(_state_of, self.stages.values()), strict=True))

    def _make_agreement(
        self,
        call: Call,
        model_call: ModelCall,
        parts: Sequence[Microbatch],
        scores: Sequence[Any] | None,
    ) -> tuple[Agreement, Sequence[Any] | None]:
        """Agree on a call that is new: all ranks plan it.

        Raises:
            PenstockError: it is refused, the same on all ranks.
        """

        def planned() -> tuple[Agreement, Sequence[Any] | None]:
            written = self._scores(call, parts) if scores is None else scores
            return self._plan_call(call, model_call, parts, written), written

        made: list[tuple[Agreement, Sequence[Any] | None]] = []

        def compared() -> list[list[Any]]:
            made.append(planned())
            return _compared(made[0][0])

        plans = self.job.pipeline.meet(compared)
        agreement, written = made[0]
        unlike = next((rank for rank, plan in enumerate(plans) if plan != plans[0]), None)
        if unlike is not None:
            raise self._unlike(plans, unlike, written)
        if self.job.transport is not None:
            self.job.transport.connect(agreement.program.channels)
        return agreement, written

    def _unlike(
        self, plans: Sequence[Any], rank: int, scores: Sequence[Any] | None
    ) -> AgreementError:
        """The error for ranks on which the author's code does different things; all ranks call this."""
        rows = self.job.pipeline.meet(
            lambda: [[] if score is None else score.described() for score in scores or ()]
        )
        for index, (one, other) in enumerate(zip(rows[0], rows[rank], strict=False)):
            for mine, theirs in zip_longest(one, other, fillvalue="the end of the forward"):
                if mine != theirs:
                    return AgreementError(
                        f"the model's code does different things on the ranks with microbatch {index}: "
                        f"rank 0 comes to {mine}, and rank {rank} to {theirs}; give every rank the same "
                        "model, in the same state, and the same batch"
                    )
        return AgreementError(_apart(plans[0], plans[rank], rank))

    def _plan_call(
        self,
        call: Call,
        model_call: ModelCall,
        parts: Sequence[Microbatch],
        scores: Sequence[Any] | None,
    ) -> Agreement:
        new: list[Kind] = []
        of_parts: list[Kind] = []
        numbers, planned = self._known.free_numbers(), self._planned
        for index, (text, arguments) in enumerate(
            zip(model_call.texts, model_call.layouts, strict=True)
        ):
            score = None if scores is None else scores[index]
            path = _path_of(score)
            alike = (*new[::-1], *self._known.kinds)
            kind = next((k for k in alike if k.text == text and k.path == path), None)
            if kind is None:
                kind = Kind(text, next(numbers), arguments, path)
                kind.plan = None if planned is None else planned.plan(score)
                new.append(kind)
            of_parts.append(kind)
        edges = _all_edges([kind.plan for kind in of_parts]) if self._planned else None
        schedule = self.schedules(model_call.count, edges, trains=call.trains)
        for kind in new:
            kind.keywords = self._keywords(kind.arguments, schedule)
        self._check_holders(model_call, of_parts[0], schedule)
        self._check_target(call, model_call, schedule, of_parts[0])
        programs = (known.program for known in self._known)
        program = next((p for p in programs if p.schedule is schedule), None)
        if program is None:
            program = Program(schedule, None if self.job.transport is None else self.job.rank)
        plans = [kind.plan for kind in of_parts]
        flows = tuple(program.flow(None if plan is None else plan.edges) for plan in plans)
        for kind, flow in zip(of_parts, flows, strict=True):
            if kind in new:
                kind.bindings = {
                    index: stage.binding(
                        kind.plan,
                        [edge.value for edge in flow.inputs[index]],
                        [edge.value for edge in flow.outputs[index]],
                        kind.keywords.get(index, ()),
                    )
                    for index, stage in self.stages.items()
                }
        return Agreement(model_call, tuple(of_parts), program, flows)

    def _keywords(self, names: Iterable[Key], schedule: Schedule) -> dict[int, list[str]]:
        """The keyword arguments that go to each stage that was placed by hand.

        Those that no stage takes go to the stage where the batch enters.
        """
        keywords = [name for name in names if isinstance(name, str)]
        users = {stage for edge in schedule.edges for stage in edge.targets}
        # The first argument of any other stage is the value from the stage before.
        takes = {
            stage: set(names[stage in users :]) for stage, names in self._argument_names.items()
        }
        taken = {name for stage, names in takes.items() if stage in users for name in names}
        return {
            stage: [n for n in keywords if n in names or (stage not in users and n not in taken)]
            for stage, names in takes.items()
        }

    def _check_holders(self, model_call: ModelCall, kind: Kind, schedule: Schedule) -> None:
        """Check that every rank has the arguments that stages take which were placed there by hand."""
        users = {stage for edge in schedule.edges for stage in edge.targets}
        for stage, keywords in kind.keywords.items():
            rank = schedule.placement.rank_of[stage]
            takes = list(kind.arguments) if stage not in users else keywords
            if self.job.transport is not None and takes and rank not in model_call.holders:
                raise UsageError(
                    f"rank {rank} was not given the arguments {takes}, which stage {stage} takes; give that "
                    "rank all of the model's arguments"
                )

    def _check_target(
        self, call: Call, model_call: ModelCall, schedule: Schedule, kind: Kind
    ) -> None:
        """Check that the rank of the last stage has a target, or that the loss needs none."""
        rank = schedule.placement.rank_of[-1] if self.job.transport is not None else 0
        loss = call.loss
        if loss is None or model_call.targets[rank] or kind.plan is None:
            return
        try:
            kind.plan.with_output(lambda output: loss.of_microbatch(output, None), loss.function)
        except Exception as error:
            if "None" not in str(error) and not isinstance(error, PenstockError):
                return  # it fails for another reason, such as what it reads elsewhere
            positions = [key for key in kind.arguments if isinstance(key, int)]
            names = [key for key in kind.arguments if isinstance(key, str)]
            near = get_close_matches("target", names, n=1)
            hint = f" ({near[0]}= went to the model)" if near else ""
            if not near and len(positions) > 1:
                hint = f" (all {len(positions)} arguments by position went to the model)"
            raise UsageError(
                f"no target was given{hint}, and loss_fn fails without one ({type(error).__name__}: "
                f"{error}); pass {loss.target or 'target'}=, at least on rank {rank}, which has the last "
                "stage"
            ) from error

    def _counts(
        self,
        loss: StepLoss | None,
        model_call: ModelCall,
        here: Mapping[str, Sequence[float]],
        *,
        asks: bool = True,
    ) -> Mapping[str, Sequence[float]]:
        """Return how much each microbatch counts in each loss, the same on every rank.

        If that depends on targets that some ranks lack, the first rank that has them sends it.

        Args:
            loss: the loss.
            model_call: what all ranks bring.
            here: the counts that this rank knows.
            asks: whether others send it; otherwise nan stands for what is not known here.
        """
        if loss is None:
            return {}
        counts, by_target = dict[str, Sequence[float]](), list[str]()
        for name, weight in loss.weights.items():
            by_labels = model_call.weighted and weight is None
            counts[name] = here.get(name, ())
            if callable(weight) or by_labels:
                by_target.append(name)
            elif not counts[name] or model_call.counted:
                counts[name] = loss.counts(model_call.samples, (), name)
            if callable(weight) and not any(model_call.targets):
                raise UsageError(
                    "the weight of the loss is a function of the target, but the step was given no target="
                )
        knows = [
            target or (not any(model_call.targets) and rank in model_call.holders)
            for rank, target in enumerate(model_call.targets)
        ]
        if not by_target or all(knows) or self.job.transport is None:
            return counts
        tells = knows.index(True) == self.job.rank
        absent = [0.0 if asks else nan] * model_call.count
        rows = [(tells and counts[name]) or absent for name in by_target]
        if asks:
            numbers = torch.tensor(rows, dtype=torch.float64, device="cpu")
            rows = self.job.pipeline.sum(numbers, "the weights of the microbatches").tolist()
        return {**counts, **dict(zip(by_target, rows, strict=True))}

    # ---- replicated and sharded stages

    @contextmanager
    def _adapted(self, step: StepState) -> Iterator[None]:
        """Run a call inside the adapters of replicated and sharded stages, which reduce gradients."""
        call, of_stage = step.call, dict[int, list[Adapter]]()
        for index, adapter in self._find_adapters().items():
            of_stage[index] = [adapter]
        for index, adapters in of_stage.items():
            if call.trains and adapters[0].whole_backward:
                self.stages[index].reduce_later()
        if call.trains and call.loss is not None and call.loss.replicas.group is not None:
            for index, stage in self.stages.items():
                average = self._averages.get(index)
                if average is None or not average.fits(stage.module):
                    average = self._averages[index] = ReplicatedStage(
                        stage.module,
                        partial(attrgetter("shared_context"), stage),
                        call.loss.replicas.group,
                        self.interpreter.activity,
                        call.loss.replicas.dims,
                    )
                of_stage.setdefault(index, []).append(average)
        if not of_stage:
            yield
            return
        step.adapters = Adapters(
            of_stage,
            step.agreement.model_call.count,
            trains=call.trains,
            finalizes=call.finalizes,
        )
        step.adapters.begin(gathers=Op.UNSHARD not in step.agreement.program.schedule.ops)
        try:
            yield
            step.adapters.finish()
        except BaseException:
            step.adapters.abandon()
            raise

    def _find_adapters(self) -> Mapping[int, Adapter]:
        """The adapters of wrapped stages; new ones if the user has wrapped a module since the last call."""
        for index, stage in self.stages.items():
            known = self._adapters.get(index)
            if known is None or not known.fits(stage.module):
                apart = partial(attrgetter("shared_context"), stage)
                adapter = adapter_of(stage.module, apart, self.interpreter.activity)
                if adapter is not None:
                    self._adapters[index] = adapter
                else:
                    self._adapters.pop(index, None)
        return self._adapters

    @property
    def holds_gradients(self) -> bool:
        """Whether wrappers keep gradients apart from ``.grad``, until they reduce them."""
        return any(adapter.holds_gradients for adapter in self._find_adapters().values())

    def drop_gradients(self) -> None:
        """Drop gradients that wrappers keep apart from ``.grad``."""
        for adapter in (*self._find_adapters().values(), *self._averages.values()):
            adapter.drop()


def without_data(run: Callable[[], Any], *, trains: bool) -> Any:
    """Run the model's code without data; explain its errors."""
    try:
        # Tensors made in inference mode have no versions, by which a run without data sees changes.
        with torch.inference_mode(mode=False), torch.set_grad_enabled(trains):
            return run()
    except PenstockError:
        raise
    except Exception as error:
        module = failing_module(error)
        where = f"module {module}, before" if module else "before"
        what = f"{type(error).__name__}: {error}"
        if isinstance(error, ValueError | LookupError | ArithmeticError | AssertionError):
            what += "; this run had no data: numbers that units compute were ones"
        what = "; ".join([what, *getattr(error, "__notes__", ())])
        cause = error.with_traceback(without_library_frames(error))
        raise StageError(f"{where} the first microbatch: {what}") from cause


@dataclass
class _Mine:
    """What a rank brings to a call, completed by what others send it.

    Attributes:
        numbers: what it says of it, see :class:`Head`.
        refusal: the error in what it was given, if any.
        sampled: what it has that others must have too.
        counts: how much each microbatch counts, as far as this rank knows; nothing if that is settled.
        parts: the arguments of each microbatch; None if it was given none.
        scores: what the author's code does in each microbatch, where this rank has the batch.
        settled: what holds if the others say the same as before, too.
    """

    numbers: Sequence[int]
    refusal: PenstockError | None
    sampled: Sampled
    counts: Mapping[str, Sequence[float]]
    parts: Sequence[Microbatch] | None
    scores: Sequence[Any] | None
    settled: Settled | None = None


def digests_of(heads: Sequence[Head]) -> tuple[int, ...]:
    """Return what the ranks of a pipeline bring."""
    return tuple([head.digest for head in heads])


def check_steps(steps: Sequence[int]) -> None:
    """Check that all pipelines of the job begin the same step.

    Raises:
        AgreementError: they do not.
    """
    if len({*steps}) > 1:
        listed = ", ".join(f"replica {index} step {n}" for index, n in enumerate(steps))
        raise AgreementError(
            f"the replicas begin different steps: {listed}; call step as often on every replica"
        )


@contextmanager
def refusals() -> Iterator[None]:
    """A context in which all ranks agree, so that an error ends the call before any rank begins it."""
    try:
        yield
    except BROKEN:
        raise
    except PenstockError as error:
        raise _Refused(error) from None


class _Refused(Exception):
    """Ends a call before any rank begins it."""

    def __init__(self, error: PenstockError) -> None:
        super().__init__(str(error))
        self.error = error


def largest_gradient(stages: Any) -> Tensor | None:
    """The largest number in the weights' gradients, if there are some; of a DTensor, in the part here."""
    of_weights: list[Tensor | None] = []
    for stage in stages:
        # Gradients of shared weights are collected apart from .grad; this context puts them there.
        with stage.shared_context:
            of_weights += map(attrgetter("grad"), stage.module.parameters())
    gradients: list[Tensor] = []
    for gradient in of_weights:
        if gradient is not None:
            part = gradient if type(gradient) is Tensor else local_part(gradient)
            part = part._values() if part.is_sparse else part
            if part.numel():
                gradients.append(part)
    # Of finite numbers the largest is finite; a sum of their squares is not always, least of all in float16.
    return nn.utils.get_total_norm(gradients, torch.inf) if gradients else None


def _path_of(score: Any) -> str:
    """A hash of what the author's code does; nothing where the model runs as it is."""
    return "" if score is None else str(score.digest)


def _state_of(stage: PipelineStage) -> str:
    """The modes of a stage's modules, and which of its parameters learn."""
    modes = map(attrgetter("training"), stage.module.modules())
    learns = map(attrgetter("requires_grad"), stage.module.parameters())
    return "".join(map("01".__getitem__, chain(modes, learns)))


def argument_names(module: nn.Module) -> list[str]:
    """The names of the arguments of a module's forward, in order."""
    parameters = signature(module.forward).parameters.values()
    inner = dict(module.named_children())
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
        for wrapped in inner.keys() & {"module", "_orig_mod"}:
            return argument_names(inner[wrapped])
    named = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_ONLY)
    return [parameter.name for parameter in parameters if parameter.kind in named]


def _counts_here(loss: StepLoss | None, batch: Batch) -> dict[str, list[float]]:
    """The weights of the microbatches in each loss that this process can compute from what it was passed."""
    counts = dict[str, list[float]]()
    if loss is None:
        return counts
    for name, weight in loss.weights.items():
        known = batch.targets if callable(weight) else batch.samples
        if known is None:
            continue
        samples = batch.weights if weight is None and batch.weights is not None else batch.samples
        try:
            counts[name] = loss.counts(samples or (), batch.targets or (), name)
        except PenstockError:
            raise
        except Exception as error:
            raise StageError(
                f"the weight of the loss, called with a target, raised {type(error).__name__}: {error}"
            ) from error
    return counts


def _compared(agreement: Agreement) -> list[list[Any]]:
    """What must be equal on all ranks in what they have planned: values that travel, and kinds of calls."""
    edges = dict.fromkeys(edge for flow in agreement.flows for edge in flow.edges)
    rows = [[edge.value, edge.source, [*edge.targets], edge.gradient] for edge in edges]
    return [rows, [kind.number for kind in agreement.kinds]]


def _apart(first: Sequence[Any], other: Sequence[Any], rank: int) -> str:
    """Return how the plan of a rank differs from that of rank 0, in words."""
    remedy = "give every rank the same model, in the same state"
    of_first, of_other = ({json.dumps(row[:3]): row for row in plan[0]} for plan in (first, other))
    for key, (value, source, targets, gradient) in {**of_other, **of_first}.items():
        travels = f"the value {value!r} travels from stage {source} to stages {targets}"
        if key not in of_first or key not in of_other:
            has, lacks = (0, rank) if key in of_first else (rank, 0)
            return f"{travels} on rank {has}, and on rank {lacks} it does not; {remedy}"
        if of_other[key][3] != gradient:
            has, lacks = (0, rank) if gradient else (rank, 0)
            return (
                f"the ranks train different weights: {travels}, and its gradient comes back on rank {has}, "
                f"but not on rank {lacks}; give requires_grad the same values on every rank"
            )
    return f"rank 0 and rank {rank} have made different calls before this one; {remedy}"


def _all_edges(plans: Sequence[Any]) -> tuple[Edge, ...]:
    """The edges of a call: the values that travel for any of its microbatches.

    Their order is the same for all mixtures of kinds, so that their schedule is made once.
    """
    first: tuple[Edge, ...] = plans[0].edges
    if all(plan.edges == first for plan in plans):
        return first
    every: dict[tuple[int, str], Edge] = {}
    for edge in (edge for plan in plans for edge in plan.edges):
        known = every.setdefault((edge.source, edge.value), edge)
        targets = tuple(sorted({*known.targets, *edge.targets}))
        every[edge.source, edge.value] = replace(
            known, targets=targets, gradient=known.gradient or edge.gradient
        )
    sources = Counter(value for _, value in every)
    return tuple(
        replace(edge, value=f"{value} of stage {source}") if sources[value] > 1 else edge
        for (source, value), edge in sorted(every.items())
    )
