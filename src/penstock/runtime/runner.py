"""Carries out calls of a pipeline for the ranks of this process: all of them, or one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from inspect import Parameter, signature
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from penstock.errors import PenstockError, PoisonedError, SpecError, StageError, UsageError
from penstock.faults import Activity, failing_module, without_own_frames
from penstock.parallel import Adapter, adapter_of, let_cross, local_part, unwrapped
from penstock.rng import generators_kept
from penstock.runtime.calls import (
    REFUSED,
    Agreement,
    Call,
    ModelCall,
    StepState,
    check_marks,
    complete,
    describe_call,
    layout_in,
    merge_offers,
    raise_refusals,
    word_of,
)
from penstock.runtime.interpreter import Interpreter, Program, Takes
from penstock.runtime.loss import Loss, Weights
from penstock.runtime.result import Numbers
from penstock.schedule import Edge, Op, Schedule
from penstock.stage import PipelineStage, StageModule
from penstock.transport import Transport
from penstock.values import (
    Batch,
    Layout,
    Microbatch,
    TensorLayout,
    check_plain,
    layout_of,
    tensors_in,
    unflatten,
)

logger = logging.getLogger("penstock")
Schedules: TypeAlias = Callable[..., Schedule]
"""Returns the proven schedule for a number of microbatches, the edges if they depend on the call, and whether
it trains."""
_WEIGHTS, _WEIGHTS_TAG = 2, 8
"""The direction and the tag of messages that carry weights."""
_REMEMBERED = 1024
"""The number of agreements kept; the oldest are dropped first, the same ones on every rank."""


class Runner:
    """The ranks of a pipeline that live in this process, and the calls that they carry out.

    Args:
        stages: the stages of this process.
        schedules: returns the schedule of a call.
        transport: this rank's end, if each rank is a process; None if all ranks share this process.
        by_rank: whether keyword arguments go to all stages of the rank that was passed them and to no
            others, instead of to the stages that take them.

    Attributes:
        interpreter: runs the programs.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        schedules: Schedules,
        transport: Transport | None = None,
        *,
        by_rank: bool = False,
    ) -> None:
        self.stages = {stage.index: stage for stage in stages}
        self.transport = transport
        self.schedules = schedules
        code = stages[0].code
        self._planned = code if isinstance(code, StageModule) else None
        self._flops: dict[str, float] = {}
        self._by_rank = by_rank
        self._numbers = Numbers()
        self._adapters: dict[int, Adapter] = {}
        self._agreements: dict[tuple[int, ...], Agreement] = {}
        self._looks: dict[Any, Any] = {}
        self._kinds: dict[str, int] = {}
        self._plans: dict[str, Any] = {}
        self._programs: dict[int, Program] = {}
        self._failure: BaseException | None = None
        self._steps = 0
        named = {i: _argument_names(s) for i, s in self.stages.items()}
        rows = self.gather([[index, names] for index, names in named.items()])
        self._takes = Takes({index: names for row in rows for index, names in row})
        self.interpreter = Interpreter(
            self.stages, Activity(0) if transport is None else transport.activity, self._takes
        )
        self._devices = list({stage.device for stage in stages})

    @property
    def rank(self) -> int:
        """This rank's position; 0 where all ranks share this process."""
        return 0 if self.transport is None else self.transport.rank

    def wrap_transport(self, wrap: Callable[[Transport], Any]) -> None:
        """Wrap this rank's transport; does nothing where all ranks share this process."""
        if self.transport is not None:
            self.transport = wrap(self.transport)

    @property
    def steps(self) -> int:
        """The number of training steps that have begun."""
        return self._steps

    # ---- exchange of weights, see penstock.weights.ranks

    def gather(self, value: Any) -> list[Any]:
        """The JSON values of all processes, in rank order; all of them call this."""
        if self.transport is None:
            return [value]
        self.check_usable()
        try:
            return self.transport.exchange(value)
        except BaseException as error:
            raise self.fail(error) from None

    def open(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Prepare :meth:`swap` for pairs of ranks (source, target); all processes call this."""
        if self.transport is not None:
            self.transport.open([(source, target, _WEIGHTS) for source, target in pairs])

    def swap(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]]
    ) -> None:
        """Send tensors to ranks, and fill others with what ranks send; both ends pass the same shapes."""
        transport = self.transport
        assert transport is not None
        try:
            for peer, tensors in sends.items():
                transport.send(peer, _WEIGHTS_TAG, tensors, _WEIGHTS)
            for peer, tensors in receives.items():
                layouts = [layout_of(tensor.detach()) for tensor in tensors]
                transport.activity.wait("weights", peer)
                arrived = transport.post(peer, _WEIGHTS_TAG, layouts, _WEIGHTS).take()
                for tensor, value in zip(tensors, arrived, strict=True):
                    tensor.detach().copy_(value)
            transport.settle()
        except BaseException as error:
            raise self.fail(error) from None

    # ---- a call

    def run(self, call: Call) -> StepState:
        """Carry out a call.

        Raises:
            PoisonedError: an earlier call failed in the middle, in several processes.
            PenstockError: the call was refused, and nothing was sent or changed; or it failed.
        """
        self.check_usable()
        self._steps += call.trains
        self.interpreter.activity.begin(self._steps)
        try:
            with torch.set_grad_enabled(call.trains):
                step = self._agree(call)
                with generators_kept(self._devices if call.seed is not None else []):
                    self._carry_out(step)
            return step
        except _Refused as refused:
            self._steps -= call.trains
            raise refused.error.with_traceback(None) from refused.error.__cause__
        except BaseException as error:
            raise self.fail(error) from None if error.__cause__ is None else error.__cause__
        finally:
            self.interpreter.activity.rest()

    @property
    def usable(self) -> bool:
        """False once a call between processes has failed in the middle."""
        return self._failure is None

    def check_usable(self) -> None:
        """Check that no earlier call has failed in the middle.

        Raises:
            PoisonedError: one has.
        """
        if self._failure is not None:
            raise PoisonedError(
                f"an earlier call failed ({type(self._failure).__name__}: {self._failure}), and this "
                "Pipeline was closed, since its ranks may be anywhere in the step; make a new Pipeline"
            ) from self._failure

    def fail(self, error: BaseException) -> BaseException:
        """The error to raise for one in the middle of a call; between processes, the pipeline has ended."""
        if self.transport is None:
            return error
        self._failure = self.transport.watch.failed(error)
        return self._failure

    def _carry_out(self, step: StepState) -> None:
        call, agreement = step.call, step.agreement
        self._route(agreement.model_call, agreement.program.schedule)
        with self._adapted(step):
            self.interpreter.run(agreement.program, step, self.transport)
        finite = not call.finite or has_finite_gradients(self.stages.values())
        step.result = self._numbers.share(
            self.transport, step.tally, call.loss, step.weights, finite=finite
        )
        if call.outputs:
            step.shared = self.share(step.kept, agreement.program.schedule.placement.rank_of[-1])
        step.flops = partial(self._count_flops, agreement.model_call, 3 if call.trains else 1)

    def _count_flops(self, model_call: ModelCall, times: int) -> float | None:
        """The model's floating-point operations in a call: ``times`` those of its forward."""
        if self._planned is None:
            return None
        total = 0.0
        for text, kind in zip(model_call.descriptions, model_call.kinds, strict=True):
            if text not in self._flops:
                part = complete(Microbatch((), {}, 0), kind)
                try:
                    self._flops[text] = self._planned.flops(part.args, part.kwargs)
                except Exception as error:
                    logger.info(
                        "penstock: the operations of the model cannot be counted: %s", error
                    )
                    return None
            total += times * self._flops[text]
        return total

    # ---- the word before the step

    def _agree(self, call: Call) -> StepState:
        """Learn what all ranks bring. If it is wrong, all of them raise ``_Refused`` before they begin."""
        let_cross(stage.module for stage in self.stages.values())
        offer, counts, refusal = {}, None, call.refusal
        try:
            counts = _own_counts(call.loss, call.batch)
            offer = describe_call(call, self._traits(), self._looks)
        except PenstockError as error:
            refusal = refusal or error
        word = REFUSED if refusal is not None else word_of(offer)
        words, marks = (word,), (call.mark,)
        if self.transport is not None:
            rows = self.transport.gather(torch.tensor([word, call.mark]))
            words, marks = zip(*[row.tolist() for row in rows], strict=True)
        try:
            if REFUSED in words:
                raise_refusals(self.transport, refusal)
            agreement = self._agreements.get(words)
            if agreement is None:
                agreement = self._make_agreement(call, self.gather(offer))
                self._agreements[words] = agreement
                if len(self._agreements) > _REMEMBERED:
                    del self._agreements[next(iter(self._agreements))]
            check_marks(marks)
            weights = self._weigh(call.loss, agreement.model_call, counts)
        except PenstockError as error:
            raise _Refused(error) from None
        return StepState(call, agreement, weights, self.rank, self._devices)

    def _traits(self) -> str:
        """Which parameters of this process's stages learn, and which stages are in training mode."""
        modules = [stage.module for stage in self.stages.values()]
        flags = [[m.training, *(p.requires_grad for p in m.parameters())] for m in modules]
        return "".join(["01"[flag] for row in flags for flag in row])

    def _make_agreement(self, call: Call, offers: Sequence[Mapping[str, Any]]) -> Agreement:
        model_call = merge_offers(offers)
        plans = [self._plan(model_call, microbatch) for microbatch in range(model_call.count)]
        edges = _check_edges(plans) if self._planned is not None else None
        schedule = self.schedules(model_call.count, edges, trains=call.trains)
        self._route(model_call, schedule)
        self._check_passed(model_call, schedule)
        self._check_target(call, model_call, schedule, plans[0])
        program = self._programs.get(id(schedule))
        if program is None:
            rank = None if self.transport is None else self.transport.rank
            program = self._programs[id(schedule)] = Program(schedule, rank)
            if self.transport is not None:
                self.transport.open(program.channels)
        traits = " ".join(offer["traits"] for offer in offers)
        texts = [f"{traits} {schedule.stages} {text}" for text in model_call.descriptions]
        kinds = tuple(self._kinds.setdefault(text, len(self._kinds)) for text in texts)
        return Agreement(model_call, kinds, tuple(plans), program)

    def _route(self, model_call: ModelCall, schedule: Schedule) -> None:
        """With ``by_rank``, route keyword arguments to the stages of the ranks that were passed them."""
        if self._by_rank:
            passed = [{key for key in keys if isinstance(key, str)} for keys in model_call.passed]
            rank_of = schedule.placement.rank_of
            self._takes.by_stage = {s: frozenset(passed[rank]) for s, rank in enumerate(rank_of)}

    def _plan(self, model_call: ModelCall, microbatch: int) -> Any:
        """The partition's plan for a microbatch, made from its arguments without data."""
        if self._planned is None:
            return None
        key = f"{torch.is_grad_enabled()} {self._traits()} {model_call.descriptions[microbatch]}"
        if key not in self._plans:
            part = complete(Microbatch((), {}, 0), model_call.kinds[microbatch])
            try:
                self._plans[key] = self._planned.plan(part.args, part.kwargs)
            except PenstockError:
                raise
            except Exception as error:
                module = failing_module(error)
                where = f"module {module}, before" if module else "before"
                what = f"{type(error).__name__}: {error}"
                cause = error.with_traceback(without_own_frames(error))
                raise StageError(f"{where} the first microbatch: {what}") from cause
        return self._plans[key]

    def _check_passed(self, model_call: ModelCall, schedule: Schedule) -> None:
        """Check that every rank was passed the arguments that its plain stages take."""
        positions, names = model_call.names
        users = {stage for edge in schedule.edges for stage in edge.targets}
        if self.transport is None:
            return
        for stage, rank in enumerate(schedule.placement.rank_of):
            if self._takes.named.get(stage) is None:
                continue
            first = stage not in users
            needed: list[int | str] = [
                *(positions if first else ()),
                *self._takes.names(stage, dict.fromkeys(names), first=first),
            ]
            missing = [key for key in needed if key not in model_call.passed[rank]]
            if missing:
                raise UsageError(
                    f"rank {rank} was not given the arguments {missing}, which stage {stage} takes; pass "
                    "them on that rank, or pass the whole batch on every rank"
                )

    def _check_target(
        self, call: Call, model_call: ModelCall, schedule: Schedule, plan: Any
    ) -> None:
        """Check that the rank of the last stage has a target, or that the loss needs none."""
        rank = schedule.placement.rank_of[-1] if self.transport is not None else 0
        loss = call.loss
        if loss is None or model_call.targets[rank]:
            return
        if plan is None:
            return
        try:
            plan.with_output(lambda output: loss.of_microbatch(output, None), loss.function)
        except Exception as error:
            if "None" not in str(error) and not isinstance(error, PenstockError):
                return  # it fails for another reason, such as what it reads elsewhere
            positions, names = model_call.names
            near = get_close_matches("target", names, n=1)
            hint = f" ({near[0]}= went to the model)" if near else ""
            if not near and len(positions) > 1:
                hint = f" (all {len(positions)} arguments by position went to the model)"
            raise UsageError(
                f"no target was given{hint}, and loss_fn fails without one ({type(error).__name__}: "
                f"{error}); pass target=, at least on rank {rank}, which has the last stage"
            ) from error

    def _weigh(
        self, loss: Loss | None, model_call: ModelCall, counts: Sequence[float] | None
    ) -> Weights:
        """The weights of the microbatches, the same on every rank.

        If they depend on targets that some ranks lack, the first rank that has them sends the weights.
        """
        if loss is None:
            return Weights()
        if not callable(loss.loss_weight):
            return loss.weigh(loss.counts(model_call.samples, ()) if counts is None else counts)
        if not any(model_call.targets):
            raise UsageError(
                "loss_weight is a function of the target, but the step was given no target="
            )
        if not all(model_call.targets) and self.transport is not None:
            tells = counts is not None and model_call.targets.index(True) == self.rank
            mine = counts if tells and counts is not None else [0.0] * model_call.count
            counts = self.transport.sum(torch.tensor(mine, dtype=torch.float64)).tolist()
        assert counts is not None
        return loss.weigh(counts)

    # ---- replicated and sharded stages

    @contextmanager
    def _adapted(self, step: StepState) -> Iterator[None]:
        """Run a call inside the adapters of replicated and sharded stages, which reduce gradients."""
        step.adapters = adapters = self._find_adapters()
        gathers = Op.UNSHARD not in step.agreement.program.schedule.ops
        for index, adapter in adapters.items():
            if step.call.trains and adapter.whole_backward:
                self.stages[index].reduce_later()
            count = step.agreement.model_call.count
            adapter.begin(count, trains=step.call.trains, gathers=gathers)
        try:
            yield
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
                adapter = adapter_of(stage.module, partial(attrgetter("shared_context"), stage))
                if adapter is not None:
                    self._adapters[index] = adapter
                else:
                    self._adapters.pop(index, None)
        return self._adapters

    # ---- one rank's value, for all ranks

    def share(self, value: Any, source: int) -> Any:
        """Send one rank's value to every rank; all of them call this.

        Raises:
            SpecError: the value holds something that cannot travel.
        """
        if self.transport is None:
            return value
        self.check_usable()
        description, problem = None, None
        if self.rank == source:
            try:
                check_plain(value, "the model's output")
                description = layout_in(value).describe()
            except SpecError as error:
                problem = str(error)
        description, problem = self.transport.exchange([description, problem])[source]
        if problem is not None:
            raise SpecError(f"{problem}; or use step and eval without outputs=True")
        layout = Layout.read(description)
        if self.rank == source:
            tensors = tensors_in(value)
        else:
            tensors = [entry.empty(self._devices[0]) for entry in layout.tensors]
        arrived = iter([self.transport.broadcast(tensor, source) for tensor in tensors])
        leaves = [next(arrived) if isinstance(x, TensorLayout) else x for x in layout.leaves]
        return unflatten(leaves, layout.tree)


class _Refused(Exception):
    """Ends a call before any rank begins it."""

    def __init__(self, error: PenstockError) -> None:
        super().__init__(str(error))
        self.error = error


def has_finite_gradients(stages: Any) -> bool:
    """Whether the norm of the weights' gradients is finite; of a DTensor, that of the part here."""
    gradients: list[Tensor] = []
    for stage in stages:
        # Gradients of shared weights are collected apart from .grad; this context puts them there.
        with stage.shared_context:
            grads = [parameter.grad for parameter in stage.module.parameters()]
        parts = [g if type(g) is Tensor else local_part(g) for g in grads if g is not None]
        gradients += [part._values() if part.is_sparse else part for part in parts]
    return not gradients or bool(nn.utils.get_total_norm(gradients).isfinite())


def _argument_names(stage: PipelineStage) -> list[str] | None:
    """The names of a plain stage's arguments, in order; None for a stage that is called by plan."""
    return None if stage.planned else argument_names(unwrapped(stage.module))


def argument_names(module: nn.Module) -> list[str]:
    """The names of the arguments of a module's forward, in order."""
    parameters = signature(module.forward).parameters.values()
    inner = dict(module.named_children())
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
        for wrapped in inner.keys() & {"module", "_orig_mod"}:
            return argument_names(inner[wrapped])
    named = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_ONLY)
    return [parameter.name for parameter in parameters if parameter.kind in named]


def _own_counts(loss: Loss | None, batch: Batch) -> list[float] | None:
    """The weight of each microbatch, if this process can compute it from what it was passed."""
    known = batch.targets if loss is not None and callable(loss.loss_weight) else batch.samples
    if loss is None or known is None:
        return None
    try:
        return loss.counts(batch.samples or (), batch.targets or ())
    except PenstockError:
        raise
    except Exception as error:
        raise StageError(
            f"loss_weight, called with a target, raised {type(error).__name__}: {error}"
        ) from error


def _check_edges(plans: Sequence[Any]) -> tuple[Edge, ...]:
    """The edges of a call, which must be the same for all its microbatches."""
    edges: tuple[Edge, ...] = plans[0].edges
    for microbatch, plan in enumerate(plans):
        if plan.edges != edges:
            raise SpecError(
                f"microbatch {microbatch} needs other values from stage to stage than microbatch 0, because "
                "of its shapes; give a batch that splits evenly, or microbatches of one shape"
            )
    return edges
