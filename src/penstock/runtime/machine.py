"""The machine that runs a rank's program for one step.

It runs action by action until it must wait for a message, and then says which: whoever drives it may
block, or let another rank run meanwhile. What an action does stands in one method for each op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.errors import MessageError, PenstockError, StageError
from penstock.microbatch import Microbatch
from penstock.runtime.arguments import Call, Inputs, chosen
from penstock.runtime.clock import Recorder
from penstock.runtime.companions import Companions
from penstock.runtime.driver import Task, Wait
from penstock.runtime.exchange import Exchange, Specs, microbatch_of
from penstock.runtime.program import RankProgram, parts
from penstock.runtime.turns import Turns
from penstock.schedule import Action, Op, Overlap
from penstock.schedule.action import OVERLAPPED, Entry
from penstock.specs import flatten
from penstock.stage import PipelineStage
from penstock.step import Loss
from penstock.transport import Transport

Backward = Callable[[int, Sequence[Tensor | None]], Sequence[Tensor | None]]
"""A stage's backward, or its inputs' half, of a microbatch."""


Perform = Callable[[Action], Any]
"""Does an action as it would be done; a forward gives its output."""
Replacement = Callable[[Entry, Perform], None]
"""Does an action, or an overlapped pair, in its own way."""


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
        losses: of each microbatch, not scaled.
        outputs: of the last stage for each microbatch, where asked.
        owed: arguments of the call and their gradients.
        inputs: which of the model's arguments each stage is given.
        companions: what goes along with each stage's microbatches.
        replaced: by kind of work, what does it instead.
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
    owed: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    inputs: Inputs = field(default_factory=lambda: Inputs({}))
    companions: Companions = field(default_factory=dict)
    replaced: Mapping[str, Replacement] = field(default_factory=dict)


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
        self._work = work
        devices = {index: stage.device for index, stage in stages.items()}
        self._exchange = Exchange(program, transport, work.specs, devices)
        self._turns = {index: Turns() for index in stages}
        self._companions = {index: work.companions.get(index, ()) for index in stages}

    def run(self) -> Task[None]:
        """The program as a task, see :func:`penstock.runtime.driver.drive`."""
        rank, exchange = self._program.rank, self._exchange
        for action, messages in self._entries():
            for message in messages:
                ticket = exchange.pending(message)
                if ticket is None:
                    continue
                if not ticket.ready():
                    yield Wait(ticket, rank, f"waits in {action} for {message}")
                exchange.settle(message)
            self._do(action)
        if exchange.untaken:
            left = ", ".join(map(str, exchange.untaken))
            raise MessageError(f"rank {rank}: nobody used what came with {left}")

    def _entries(self) -> Iterable[tuple[Entry, tuple[Action, ...]]]:
        """What to do and the messages to wait for before; a pair is one where something does it as one."""
        if OVERLAPPED in self._work.replaced:
            return self._program.paired
        return self._program.instructions

    def _do(self, entry: Entry) -> None:
        action = parts(entry)[0]
        try:
            if self._work.replaced:
                self._replace(entry)
            else:
                _HANDLERS[action.op](self, action)
        except StageError as error:
            raise self._failed(action, str(error)) from error.__cause__
        except PenstockError as error:
            error.add_note(f"on rank {self._program.rank}, in {action}")
            raise
        except Exception as error:
            raise self._failed(action, f"{type(error).__name__}: {error}") from error

    def _replace(self, entry: Entry) -> None:
        """Do an action as the caller wants it done, or as it would be."""
        name = OVERLAPPED if isinstance(entry, Overlap) else entry.op.value
        if name in self._work.replaced:
            self._work.replaced[name](entry, self._perform)
            return
        for action in parts(entry):
            self._perform(action)

    def _perform(self, action: Action) -> Any:
        return _HANDLERS[action.op](self, action)

    def _failed(self, action: Action, what: str) -> StageError:
        return StageError(
            f"rank {self._program.rank}, stage {action.stage}, microbatch {action.microbatch}, "
            f"action {action}: {what}"
        )

    def _forward(self, action: Action) -> Any:
        stage, microbatch = self._stages[action.stage], microbatch_of(action)
        args, kwargs = self._arguments(stage, microbatch)
        root = self._loss_of(stage, microbatch) or self._values_of(stage)
        with self._timed(action):
            for companion in self._companions[stage.index]:
                companion.forward(microbatch)
            output = stage.forward(microbatch, args, kwargs, root)
        self._exchange.keep(stage.index, microbatch, output, wired=stage.wired)
        if stage.is_last and self._work.keep_outputs:
            self._work.outputs[microbatch] = output
        return output

    def _arguments(self, stage: PipelineStage, microbatch: int) -> Call:
        values = self._exchange.values(stage.index, microbatch)
        taken, part = self._program.taken(stage.index), self._work.microbatches[microbatch]
        return self._work.inputs.arguments(stage, taken, values, part)

    def _values_of(self, stage: PipelineStage) -> Callable[[Any], list[Any]] | None:
        """Picks out what gradients come back for, where that is not the output as it is."""
        given = self._program.given(stage.index)
        if not given or (len(given) == 1 and not stage.wired):
            return None
        return partial(chosen, given, wired=stage.wired)

    def _loss_of(self, stage: PipelineStage, microbatch: int) -> Callable[[Any], Tensor] | None:
        loss, work = self._work.loss, self._work
        if loss is None or not stage.is_last:
            return None

        def compute(output: Any) -> Tensor:
            for companion in self._companions[stage.index]:
                companion.loss(microbatch)
            found = loss.of_microbatch(output, work.targets[microbatch])
            # A copy: the scalar that mse_loss gives lies in memory as large as the output.
            work.losses[microbatch] = found.detach().clone()
            return found

        return compute

    def _backward(self, action: Action) -> None:
        """Both halves at once, or the weights' half later where another microbatch is due before."""
        turns = self._turns[action.stage]
        if not turns.is_next(microbatch_of(action)):
            self._backward_input(action)
            self._backward_weight(action)
            return
        self._run_backward(action, self._stages[action.stage].backward)
        self._done(action.stage, microbatch_of(action))
        late = turns.passed()
        if late:
            self._add_weights(action, late)

    def _backward_input(self, action: Action) -> None:
        self._run_backward(action, self._stages[action.stage].backward_input)

    def _run_backward(self, action: Action, half: Backward) -> None:
        stage, microbatch = self._stages[action.stage], microbatch_of(action)
        grads = self._output_gradients(stage, microbatch)
        with self._timed(action):
            for companion in self._companions[stage.index]:
                companion.backward(microbatch)
            found = half(microbatch, grads)
        rest = self._exchange.hand_back(stage.index, microbatch, found)
        if any(gradient is not None for gradient in rest):
            self._owe(stage, microbatch, rest)

    def _owe(
        self, stage: PipelineStage, microbatch: int, gradients: Sequence[Tensor | None]
    ) -> None:
        """Note the gradients of the batch's own tensors, where they require some."""
        taken, part = self._program.taken(stage.index), self._work.microbatches[microbatch]
        tensors, _ = flatten(self._work.inputs.batch_part(stage, taken, part))
        pairs = zip(tensors, gradients, strict=True)
        self._work.owed.extend((tensor, found) for tensor, found in pairs if found is not None)

    def _backward_weight(self, action: Action) -> None:
        self._add_weights(action, self._turns[action.stage].arrived(microbatch_of(action)))

    def _add_weights(self, action: Action, due: Sequence[int]) -> None:
        """The weights' half of what is due, in the order of the microbatches whatever the schedule's."""
        with self._timed(action):
            for microbatch in due:
                for companion in self._companions[action.stage]:
                    companion.backward(microbatch)
                self._stages[action.stage].backward_weight(microbatch)
                self._done(action.stage, microbatch)

    def _done(self, stage: int, microbatch: int) -> None:
        for companion in self._companions[stage]:
            companion.done(microbatch)

    def _output_gradients(self, stage: PipelineStage, microbatch: int) -> list[Tensor | None]:
        if stage.is_last:
            weight = self._work.weights[microbatch]
            return [torch.full_like(self._work.losses[microbatch], weight)]
        return self._exchange.owed(stage.index, microbatch)

    def _timed(self, action: Action) -> Any:
        return _NOT_TIMED if self._work.recorder is None else self._work.recorder.timed(action)

    def _send_values(self, action: Action) -> None:
        self._exchange.send_values(action)

    def _send_gradients(self, action: Action) -> None:
        self._exchange.send_gradients(action)

    def _post(self, action: Action) -> None:
        self._exchange.post(action)


def _nothing(machine: Machine, action: Action) -> None:
    """Some ops ask nothing of a stage."""


# Functions, not bound methods: a machine that held those would be a cycle, and keep its step's tensors.
_HANDLERS: dict[Op, Callable[[Machine, Action], Any]] = {
    Op.F: Machine._forward,
    Op.B: Machine._backward,
    Op.I: Machine._backward_input,
    Op.W: Machine._backward_weight,
    Op.SEND_F: Machine._send_values,
    Op.RECV_F: Machine._post,
    Op.SEND_B: Machine._send_gradients,
    Op.RECV_B: Machine._post,
    # The wait itself, as for every message, comes before the action.
    Op.WAIT_SEND_F: _nothing,
    Op.WAIT_SEND_B: _nothing,
    # Nothing here is sharded.
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
