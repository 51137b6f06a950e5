"""The machine that runs a rank's program for one step.

It runs action by action until it must wait for a message, and then says which: whoever drives it may
block, or let another rank run meanwhile. What an action does stands in one method for each op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.errors import MessageError, PenstockError, SpecError, StageError
from penstock.microbatch import Microbatch
from penstock.runtime.arguments import as_arguments, as_values
from penstock.runtime.clock import Recorder
from penstock.runtime.driver import Task, Wait
from penstock.runtime.program import RankProgram, Wire
from penstock.runtime.turns import Turns
from penstock.runtime.values import GradientSums, Values
from penstock.schedule import Action, Edge, Op
from penstock.specs import TensorSpec, ValueSpec, flatten
from penstock.stage import PipelineStage
from penstock.step import Loss
from penstock.transport import Ticket, Transport

Specs = Mapping[str, ValueSpec]
"""The spec of each value that travels, by name."""


@dataclass
class Work:
    """What a step brings to a rank, and what the rank leaves there.

    Args:
        microbatches: the parts of the batch.
        specs: for each microbatch, what was agreed about its values.
        targets: for each microbatch, what the loss compares with.
        loss: computed on the last stage, where there is one.
        weights: from what each microbatch's backward starts.
        keep_outputs: whether to keep the last stage's outputs.
        recorder: notes when each action ran, where asked.
    """

    microbatches: Sequence[Microbatch]
    specs: Sequence[Specs]
    targets: Sequence[Any] = ()
    loss: Loss | None = None
    weights: Sequence[float] = ()
    keep_outputs: bool = False
    recorder: Recorder | None = None
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)


class Machine:
    """One rank, one step.

    Args:
        program: what to do.
        stages: the rank's stages by index.
        transport: the rank's end.
        work: the step's data; losses and outputs are left there.
    """

    def __init__(
        self,
        program: RankProgram,
        stages: Mapping[int, PipelineStage],
        transport: Transport,
        work: Work,
    ) -> None:
        self._program = program
        self._stages = stages
        self._transport = transport
        self._work = work
        self._values = Values()
        self._gradients = GradientSums()
        self._posted: dict[Action, Ticket] = {}
        self._turns = {index: Turns() for index in stages}

    def run(self) -> Task[None]:
        """The program as a task, see :func:`penstock.runtime.driver.drive`."""
        rank = self._program.rank
        for action, receives in self._program.instructions:
            for receive in receives:
                # Of several stages that use one message, the first has taken it for all.
                ticket = self._posted.pop(receive, None)
                if ticket is None:
                    continue
                if not ticket.ready():
                    yield Wait(ticket, rank, f"waits in {action} for {receive}")
                self._accept(receive, ticket.take())
            self._do(action)
        if self._posted:
            left = ", ".join(map(str, self._posted))
            raise MessageError(f"rank {rank}: nobody used what came with {left}")

    def _do(self, action: Action) -> None:
        try:
            _HANDLERS[action.op](self, action)
        except StageError as error:
            raise self._failed(action, str(error)) from error.__cause__
        except PenstockError as error:
            error.add_note(f"on rank {self._program.rank}, in {action}")
            raise
        except Exception as error:
            raise self._failed(action, f"{type(error).__name__}: {error}") from error

    def _failed(self, action: Action, what: str) -> StageError:
        return StageError(
            f"rank {self._program.rank}, stage {action.stage}, microbatch {action.microbatch}, "
            f"action {action}: {what}"
        )

    # ---- compute

    def _forward(self, action: Action) -> None:
        stage, microbatch = self._stages[action.stage], _index(action)
        args, kwargs = self._arguments(stage, microbatch)
        with self._timed(action):
            output = stage.forward(microbatch, args, kwargs, self._loss_of(stage, microbatch))
        self._keep(stage, microbatch, output)

    def _arguments(self, stage: PipelineStage, microbatch: int) -> Any:
        taken = self._program.taken(stage.index)
        if not taken:
            batch = self._work.microbatches[microbatch]
            return batch.args, batch.kwargs
        values = {edge.value: self._values.take(edge.value, microbatch) for edge in taken}
        return as_arguments(taken, values)

    def _loss_of(self, stage: PipelineStage, microbatch: int) -> Callable[[Any], Tensor] | None:
        loss, work = self._work.loss, self._work
        if loss is None or not stage.is_last:
            return None

        def compute(output: Any) -> Tensor:
            found = loss.of_microbatch(output, work.targets[microbatch])
            work.losses[microbatch] = found.detach()
            return found

        return compute

    def _keep(self, stage: PipelineStage, microbatch: int, output: Any) -> None:
        given = self._program.given(stage.index)
        for name, value in as_values(given, output).items() if given else ():
            self._values.put(name, microbatch, value, self._uses(name))
        if stage.is_last and self._work.keep_outputs:
            self._work.outputs[microbatch] = output

    def _uses(self, name: str) -> int:
        return self._program.uses_of[name]

    def _backward(self, action: Action) -> None:
        stage, microbatch = self._stages[action.stage], _index(action)
        grads = self._output_gradients(stage, microbatch)
        with self._timed(action):
            if self._turns[action.stage].is_next(microbatch):
                found = stage.backward(microbatch, grads)
            else:
                found = stage.backward_input(microbatch, grads)
            self._add_weights(stage, microbatch)
        self._hand_back(stage, microbatch, found)

    def _backward_input(self, action: Action) -> None:
        stage, microbatch = self._stages[action.stage], _index(action)
        grads = self._output_gradients(stage, microbatch)
        with self._timed(action):
            found = stage.backward_input(microbatch, grads)
        self._hand_back(stage, microbatch, found)

    def _backward_weight(self, action: Action) -> None:
        with self._timed(action):
            self._add_weights(self._stages[action.stage], _index(action))

    def _add_weights(self, stage: PipelineStage, microbatch: int) -> None:
        """The weights' half of what is due, in the order of the microbatches whatever the schedule's."""
        for due in self._turns[stage.index].arrived(microbatch):
            if stage.owes_weights(due):
                stage.backward_weight(due)

    def _output_gradients(self, stage: PipelineStage, microbatch: int) -> list[Tensor | None]:
        given = self._program.given(stage.index)
        if stage.is_last:
            weight = self._work.weights[microbatch]
            return [torch.full_like(self._work.losses[microbatch], weight)]
        return [grad for edge in given for grad in self._total(edge, microbatch)]

    def _total(self, edge: Edge, microbatch: int) -> list[Tensor | None]:
        found = self._gradients.take(edge.value, microbatch)
        return found or [None] * len(self._spec(edge, microbatch).tensors)

    def _hand_back(
        self, stage: PipelineStage, microbatch: int, grads: Sequence[Tensor | None]
    ) -> None:
        start = 0
        for edge in self._program.taken(stage.index):
            stop = start + len(self._spec(edge, microbatch).tensors)
            if edge.gradient:
                self._gradients.put(edge.value, microbatch, stage.index, grads[start:stop])
            start = stop

    def _timed(self, action: Action) -> Any:
        return _NOT_TIMED if self._work.recorder is None else self._work.recorder.timed(action)

    # ---- messages

    def _spec(self, edge: Edge, microbatch: int) -> ValueSpec:
        return self._work.specs[microbatch][edge.value]

    def _send_values(self, action: Action) -> None:
        wire, microbatch = self._program.wire(action), _index(action)
        tensors: list[Tensor] = []
        for edge in wire.edges:
            value = self._values.take(edge.value, microbatch)
            tensors += _checked(value, self._spec(edge, microbatch), action)
        self._transport.post_send(wire.channel, tensors)

    def _post_values(self, action: Action) -> None:
        wire, microbatch = self._program.wire(action), _index(action)
        self._post(
            action,
            wire,
            [spec for edge in wire.edges for spec in self._spec(edge, microbatch).tensors],
        )

    def _send_gradients(self, action: Action) -> None:
        wire, microbatch = self._program.wire(action), _index(action)
        device = self._stages[action.stage].device
        tensors: list[Tensor] = []
        for edge in wire.edges:
            specs = self._spec(edge, microbatch).tensors
            totals = self._total(edge, microbatch)
            tensors += [
                spec.empty(device).zero_() if total is None else total
                for spec, total in zip(specs, totals, strict=True)
                if spec.requires_grad
            ]
        self._transport.post_send(wire.channel, tensors)

    def _post_gradients(self, action: Action) -> None:
        wire, microbatch = self._program.wire(action), _index(action)
        self._post(
            action,
            wire,
            [spec for edge in wire.edges for spec in self._spec(edge, microbatch).differentiable],
        )

    def _post(self, action: Action, wire: Wire, specs: list[TensorSpec]) -> None:
        device = self._stages[action.stage].device
        self._posted[action] = self._transport.post_receive(wire.channel, specs, device)

    def _accept(self, receive: Action, tensors: list[Tensor]) -> None:
        """Take a message apart: values for their users here, or gradients for their maker."""
        wire, microbatch = self._program.wire(receive), _index(receive)
        arrived = iter(tensors)
        for edge in wire.edges:
            spec = self._spec(edge, microbatch)
            if receive.op is Op.RECV_F:
                value = spec.fill(
                    [next(arrived).requires_grad_(t.requires_grad) for t in spec.tensors]
                )
                self._values.put(edge.value, microbatch, value, self._uses(edge.value))
            else:
                grads = [next(arrived) if t.requires_grad else None for t in spec.tensors]
                self._gradients.put(edge.value, microbatch, receive.peer_stage, grads)


def _checked(value: Any, spec: ValueSpec, action: Action) -> list[Tensor]:
    """The tensors of a value, if it is what was agreed with the receiver."""
    tensors, structure = flatten(value)
    if not spec.fits(tensors, structure, gradients=torch.is_grad_enabled()):
        raise SpecError(
            f"{action}: what stage {action.stage} made is not what was agreed: "
            f"{spec.difference(ValueSpec.of(value))}"
        )
    return tensors


def _index(action: Action) -> int:
    if action.microbatch is None:
        raise MessageError(f"{action} names no microbatch")
    return action.microbatch


def _nothing(machine: Machine, action: Action) -> None:
    """Some ops ask nothing of a stage that is neither sharded nor replicated."""


# Functions, not bound methods: a machine that held those would be a cycle, and keep its step's tensors.
_HANDLERS: dict[Op, Callable[[Machine, Action], None]] = {
    Op.F: Machine._forward,
    Op.B: Machine._backward,
    Op.I: Machine._backward_input,
    Op.W: Machine._backward_weight,
    Op.SEND_F: Machine._send_values,
    Op.RECV_F: Machine._post_values,
    Op.SEND_B: Machine._send_gradients,
    Op.RECV_B: Machine._post_gradients,
    # The transport keeps what it sends until it has left, and nothing here is sharded.
    Op.WAIT_SEND_F: _nothing,
    Op.WAIT_SEND_B: _nothing,
    Op.UNSHARD: _nothing,
    Op.RESHARD: _nothing,
    Op.REDUCE_GRAD: _nothing,
}


class _NotTimed:
    def __enter__(self) -> None:
        """Start nothing."""

    def __exit__(self, *_: object) -> None:
        """Note nothing."""


_NOT_TIMED = _NotTimed()
