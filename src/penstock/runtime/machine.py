"""The machine that runs a rank's program for one step.

It runs action by action until it must wait for a message, and then says which: whoever drives it may
block, or let another rank run meanwhile. What an action does stands in one method for each op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from penstock.errors import MessageError, PenstockError, StageError
from penstock.faults import Activity, failing_module
from penstock.losses import collect_losses
from penstock.microbatch import Microbatch
from penstock.parallel import Adapter
from penstock.runtime.arguments import Call, Inputs
from penstock.runtime.clock import Recorder
from penstock.runtime.companions import Companions
from penstock.runtime.driver import Task, Wait
from penstock.runtime.exchange import Exchange, Specs, microbatch_of
from penstock.runtime.health import Health
from penstock.runtime.hooks import ActionEvent, Hooks
from penstock.runtime.program import RankProgram, parts
from penstock.runtime.roots import Roots
from penstock.runtime.turns import Turns
from penstock.schedule import Action, Op, Overlap
from penstock.schedule.action import COMPUTE_OPS, MESSAGE_OPS, OVERLAPPED, RECV_OPS, Entry
from penstock.specs import flatten
from penstock.stage import PipelineStage
from penstock.transport import Transport

Gradients = Sequence[Tensor | None]
Backward = Callable[[int, Gradients], Gradients]
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
        roots: from what backward starts; losses and metrics are noted there.
        keep_outputs: whether to keep the last stage's outputs.
        recorder: notes when each action ran, where asked.
        outputs: of the last stage for each microbatch, where asked.
        owed: arguments of the call and their gradients.
        inputs: which of the model's arguments each stage is given.
        companions: what goes along with each stage's microbatches.
        adapters: of the stages that are replicated or sharded.
        replaced: by kind of work, what does it instead.
        hooks: what to call before and after actions; None where nobody asked for any.
        health: notes whether what leaves the stages is finite, where asked.
    """

    microbatches: Sequence[Microbatch]
    specs: Sequence[Specs]
    roots: Roots = field(default_factory=Roots)
    keep_outputs: bool = False
    recorder: Recorder | None = None
    outputs: dict[int, Any] = field(default_factory=dict)
    owed: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    inputs: Inputs = field(default_factory=lambda: Inputs({}))
    companions: Companions = field(default_factory=dict)
    adapters: Mapping[int, Adapter] = field(default_factory=dict)
    replaced: Mapping[str, Replacement] = field(default_factory=dict)
    hooks: Hooks | None = None
    health: Health | None = None


class Lack(NamedTuple):
    """What an action waits for; put into words only where somebody asks."""

    entry: Entry
    message: Action

    def __str__(self) -> str:
        return f"waits in {self.entry} for {self.message}"


class Machine:
    """One rank, one step.

    Args:
        program: what to do.
        stages: the rank's stages by index.
        transport: the rank's end.
        work: the step's data; what it leaves is noted there.
        activity: where it is noted what the rank does.
    """

    def __init__(
        self,
        program: RankProgram,
        stages: Mapping[int, PipelineStage],
        transport: Transport,
        work: Work,
        activity: Activity | None = None,
    ) -> None:
        self._program = program
        self._activity = activity or Activity(program.rank)
        self._stages = stages
        self._work = work
        devices = {index: stage.device for index, stage in stages.items()}
        self._exchange = Exchange(program, transport, work.specs, devices)
        self._turns = {index: Turns() for index in stages}
        self._companions = {
            index: (
                *work.companions.get(index, ()),
                *(found for at, found in work.adapters.items() if at == index),
            )
            for index in stages
        }

    def run(self) -> Task[None]:
        """The program as a task, see :func:`penstock.runtime.driver.drive`."""
        rank, exchange = self._program.rank, self._exchange
        for action, messages in self._entries():
            for message in messages:
                ticket = exchange.pending(message)
                if ticket is None:
                    continue
                if not ticket.ready():
                    yield Wait(ticket, rank, Lack(action, message), self._end(message))
                self._settle(message)
            self._do(action)
        if exchange.untaken:
            left = ", ".join(map(str, exchange.untaken))
            raise MessageError(f"rank {rank}: nobody used what came with {left}")

    def _entries(self) -> Iterable[tuple[Entry, tuple[Action, ...]]]:
        """What to do and the messages to wait for before; a pair is one where something does it as one."""
        if OVERLAPPED in self._work.replaced:
            return self._program.paired
        return self._program.instructions

    def _settle(self, message: Action) -> None:
        arrived = self._exchange.settle(message)
        if self._work.hooks is not None and message.op in RECV_OPS:
            self._do(message, lambda _: self._after(message, outputs=arrived))

    def _end(self, message: Action) -> tuple[int, ...]:
        """The rank at the other end of a message."""
        source, target, _ = self._program.wire(message).channel
        return (target if source == self._program.rank else source,)

    def _do(self, entry: Entry, perform: Callable[[Entry], Any] | None = None) -> None:
        action = parts(entry)[0]
        try:
            self._activity.at(action)
            if perform is not None:
                perform(entry)
            elif self._work.replaced or isinstance(entry, Overlap):
                self._replace(entry)
            else:
                _HANDLERS[entry.op](self, entry)
        except StageError as error:
            raise self._failed(action, str(error)) from error.__cause__
        except PenstockError as error:
            error.add_note(f"on rank {self._program.rank}, in {action}")
            raise
        except Exception as error:
            if action.op in MESSAGE_OPS and isinstance(error, RuntimeError):
                # What a process group raises for a peer that is gone.
                raise MessageError(f"rank {self._program.rank}, {action}: {error}") from error
            module = failing_module(error)
            what = f"{type(error).__name__}: {error}"
            raise self._failed(action, what, f", module {module}" if module else "") from error
        if action.op in COMPUTE_OPS:
            self._activity.worked(action.stage)

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

    def _failed(self, action: Action, what: str, module: str = "") -> StageError:
        return StageError(
            f"rank {self._program.rank}, stage {action.stage}, microbatch {action.microbatch}, "
            f"action {action}{module}: {what}"
        )

    def _before(self, action: Action, inputs: Any = None) -> None:
        if self._work.hooks is not None:
            self._work.hooks.before(self._event(action, inputs))

    def _after(self, action: Action, inputs: Any = None, outputs: Any = None) -> None:
        if self._work.hooks is not None:
            self._work.hooks.after(self._event(action, inputs, outputs))

    def _event(self, action: Action, inputs: Any, outputs: Any = None) -> ActionEvent:
        module = self._stages[action.stage].module
        return ActionEvent(action, self._program.rank, module, inputs, outputs)

    def _forward(self, action: Action) -> Any:
        stage, microbatch = self._stages[action.stage], microbatch_of(action)
        args, kwargs = self._arguments(stage, microbatch)
        given, companions = self._program.given(stage.index), self._companions[stage.index]
        self._before(action, (args, kwargs))
        with self._timed(action), collect_losses() as added:
            for companion in companions:
                companion.forward(microbatch)
            roots = self._work.roots.maker(stage, microbatch, given, added, companions)
            aside = self._work.microbatches[microbatch].aside
            output = stage.forward(microbatch, args, kwargs, roots, aside)
        if self._work.health is not None and not stage.is_last:
            self._work.health.forward(stage.index, microbatch, output)
        if stage.changed:
            self._exchange.check_unchanged(stage.index, microbatch, stage.changed)
        self._exchange.keep(stage.index, microbatch, output, wired=stage.wired)
        if stage.is_last and self._work.keep_outputs:
            self._work.outputs[microbatch] = output
        self._after(action, (args, kwargs), output)
        return output

    def _arguments(self, stage: PipelineStage, microbatch: int) -> Call:
        values = self._exchange.values(stage.index, microbatch)
        taken, part = self._program.taken(stage.index), self._work.microbatches[microbatch]
        return self._work.inputs.arguments(stage, taken, values, part)

    def _backward(self, action: Action) -> None:
        """Both halves at once, or the weights' half later where another microbatch is due before."""
        stage, microbatch = self._stages[action.stage], microbatch_of(action)
        turns, grads = self._turns[action.stage], self._output_gradients(stage, microbatch)
        self._before(action, grads)
        if turns.is_next(microbatch):
            found = self._run_backward(action, stage.backward, grads)
            self._done(action.stage, microbatch)
            late = turns.passed()
        else:
            found = self._run_backward(action, stage.backward_input, grads)
            late = turns.arrived(microbatch)
        if late:
            self._add_weights(action, late)
        self._after(action, grads, found)

    def _backward_input(self, action: Action) -> None:
        stage = self._stages[action.stage]
        grads = self._output_gradients(stage, microbatch_of(action))
        self._before(action, grads)
        self._after(action, grads, self._run_backward(action, stage.backward_input, grads))

    def _run_backward(self, action: Action, half: Backward, grads: Gradients) -> Gradients:
        stage, microbatch = self._stages[action.stage], microbatch_of(action)
        with self._timed(action):
            for companion in self._companions[stage.index]:
                companion.backward(microbatch)
            found = half(microbatch, grads)
        if self._work.health is not None:
            self._work.health.backward(stage.index, microbatch, found)
        rest = self._exchange.hand_back(stage.index, microbatch, found)
        if any(gradient is not None for gradient in rest):
            self._owe(stage, microbatch, rest)
        return found

    def _owe(self, stage: PipelineStage, microbatch: int, gradients: Gradients) -> None:
        """Note the gradients of the batch's own tensors, where they require some."""
        taken, part = self._program.taken(stage.index), self._work.microbatches[microbatch]
        tensors, _ = flatten(self._work.inputs.batch_part(stage, taken, part))
        pairs = zip(tensors, gradients, strict=True)
        self._work.owed.extend((tensor, found) for tensor, found in pairs if found is not None)

    def _backward_weight(self, action: Action) -> None:
        self._before(action)
        self._add_weights(action, self._turns[action.stage].arrived(microbatch_of(action)))
        self._after(action)

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

    def _output_gradients(self, stage: PipelineStage, microbatch: int) -> Gradients:
        owed = self._exchange.owed(stage.index, microbatch)
        return [*owed, *self._work.roots.seeds(stage.index, microbatch)]

    def _timed(self, action: Action) -> Any:
        return _NOT_TIMED if self._work.recorder is None else self._work.recorder.timed(action)

    def _send_values(self, action: Action) -> None:
        self._send(action, self._exchange.values_to_send(action))

    def _send_gradients(self, action: Action) -> None:
        self._send(action, self._exchange.gradients_to_send(action))

    def _send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        self._before(action, tensors)
        self._exchange.send(action, tensors)
        self._after(action, tensors)

    def _post(self, action: Action) -> None:
        # What comes after it is called when the message has arrived.
        self._before(action)
        self._exchange.post(action)

    def _nothing(self, action: Action) -> None:
        """Some ops ask nothing of a stage."""
        self._before(action)
        self._after(action)

    def _on_parameters(self, action: Action) -> None:
        """Gather, free or reduce what belongs to a sharded or replicated stage."""
        self._before(action)
        adapter = self._work.adapters.get(action.stage)
        if adapter is not None:
            _ADAPTED[action.op](adapter)
        self._after(action)


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
    Op.WAIT_SEND_F: Machine._nothing,
    Op.WAIT_SEND_B: Machine._nothing,
    Op.UNSHARD: Machine._on_parameters,
    Op.RESHARD: Machine._on_parameters,
    Op.REDUCE_GRAD: Machine._on_parameters,
}

_ADAPTED: dict[Op, Callable[[Adapter], None]] = {
    Op.UNSHARD: lambda adapter: adapter.unshard(),
    Op.RESHARD: lambda adapter: adapter.reshard(),
    Op.REDUCE_GRAD: lambda adapter: adapter.reduce(),
}


class _NotTimed:
    def __enter__(self) -> None:
        """Start nothing."""

    def __exit__(self, *_: object) -> None:
        """Note nothing."""


_NOT_TIMED = _NotTimed()
