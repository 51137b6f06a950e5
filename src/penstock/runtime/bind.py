"""Bind a rank's program: turn each action into plain functions that have everything they need at hand.

Whatever can be known of a call before it runs is decided here, once, and kept for later calls of the same
kind: what each action works on, which messages it waits for, and which of several ways applies. What the
call does not need is not in the program at all. :meth:`BoundProgram.run` is a loop over the resulting list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from torch.profiler import record_function

from penstock.errors import MessageError, PenstockError, StageError
from penstock.faults import Activity, failing_module
from penstock.parallel import Adapter
from penstock.runtime.driver import Task, Wait
from penstock.runtime.exchange import Exchange, Inputs, Specs, microbatch_of
from penstock.runtime.instrumentation import ActionEvent, Hooks
from penstock.runtime.program import RankProgram, parts
from penstock.runtime.work import Companion, Desk, Part, StageWork, StepData
from penstock.schedule import Action, Op
from penstock.schedule.action import COMPUTE_OPS, MESSAGE_OPS, OVERLAPPED, RECV_OPS, Entry
from penstock.stage import PipelineStage
from penstock.transport import Transport

# ---- what is bound

Perform = Callable[[Action], Any]
"""Does an action in the usual way; a forward returns the stage's output."""
Replacement = Callable[[Entry, Perform], None]
"""Does an action, or an overlapped pair, in its own way."""


@dataclass(frozen=True)
class Wanted:
    """What a call asks of a rank besides its program. A program is bound for exactly that.

    Args:
        with_loss: whether the call computes a loss.
        outputs: whether to keep the last stage's outputs.
        finite: whether to note values that are not finite.
        recorded: whether to note when each action ran.
        inputs: which of the model's arguments each stage is given.
        companions: for each stage, what is told of each piece of its work.
        adapters: of the stages that are replicated or sharded.
        replaced: custom functions, by the kind of action that they do instead.
        hooks: what to call before and after actions; None if there are none.
        noted: whether anything looks at what the rank is doing right now.
        probed: whether probes are called at every action. Otherwise sends and receives are not noted, since
            they only start something, and a wait for them is noted by itself.
        profiled: whether a torch profiler runs, which then shows each action as a named range.
    """

    with_loss: bool = False
    outputs: bool = False
    finite: bool = False
    recorded: bool = False
    inputs: Inputs = field(default_factory=lambda: Inputs({}))
    companions: Mapping[int, Sequence[Companion]] = field(default_factory=dict)
    adapters: Mapping[int, Adapter] = field(default_factory=dict)
    replaced: Mapping[str, Replacement] = field(default_factory=dict)
    hooks: Hooks | None = None
    noted: bool = True
    probed: bool = False
    profiled: bool = False


class Lack(NamedTuple):
    """What an action waits for; its text is made only when somebody asks for it.

    Attributes:
        entry: the action, or an overlapped pair.
        message: the receive, or the send that must have left.
        peers: the rank at its other end.
    """

    entry: Entry
    message: Action
    peers: tuple[int, ...]

    def __str__(self) -> str:
        return f"waits in {self.entry} for {self.message}"


class BoundAction(NamedTuple):
    """An action, ready to run; or the step that takes a message before the action that needs it.

    Attributes:
        action: names it in error messages; for an overlapped pair that is done as one, its first action.
        lack: for a message, what waits for it.
        row: the functions to call, in order.
        microbatch: the argument that they are called with.
    """

    action: Action
    lack: Lack | None
    row: tuple[Part, ...]
    microbatch: int


class BoundProgram:
    """One rank's program, bound for one kind of call. It runs one step at a time, any number of times.

    Args:
        program: what to do.
        stages: the rank's stages by index.
        transport: the rank's end.
        specs: for each microbatch, the agreed specs of its values.
        wanted: what the call asks for.
        activity: records what the rank is doing.
    """

    def __init__(
        self,
        program: RankProgram,
        stages: Mapping[int, PipelineStage],
        transport: Transport,
        specs: Sequence[Specs],
        wanted: Wanted,
        activity: Activity | None = None,
    ) -> None:
        self.program = program
        self.specs = specs
        self._rank = program.rank
        self._activity = activity or Activity(program.rank)
        devices = {index: stage.device for index, stage in stages.items()}
        self._exchange = Exchange(program, transport, specs, devices)
        self._work = {
            index: StageWork(
                stage,
                program,
                self._exchange,
                wanted.inputs,
                wanted.companions.get(index, ()),
                with_loss=wanted.with_loss,
                casts=index in wanted.adapters and wanted.adapters[index].casts,
            )
            for index, stage in stages.items()
        }
        binder = _Binder(program, self._work, self._exchange, wanted, self._activity)
        self.actions = binder.actions()
        self._restart = binder.restart

    def run(self, data: StepData) -> Task[None]:
        """Run a step, as a task, see :func:`penstock.runtime.driver.drive`.

        Raises:
            StageError: the code of a stage, of the loss or of a hook raised.
            MessageError: a message could not be carried.
        """
        self._restart()
        for work in self._work.values():
            work.data = data
        try:
            yield from self._run()
            if self._exchange.untaken:
                left = ", ".join(map(str, self._exchange.untaken))
                raise MessageError(f"rank {self._rank}: no action used what arrived with {left}")
        finally:
            self._exchange.clear()
            for work in self._work.values():
                work.clear()

    def _run(self) -> Task[None]:
        pending = self._exchange.pending
        for action, lack, row, microbatch in self.actions:  # noqa: PLR1702 - a call less per action
            try:
                if lack is not None:
                    ticket = pending(action)
                    if ticket is None:
                        # An earlier action has taken the message.
                        continue
                    if not ticket.ready():
                        yield Wait(ticket, self._rank, lack, lack.peers)
                for part in row:
                    part(microbatch)
            except Exception as error:
                self._raise_named(error, action)

    def _raise_named(self, error: Exception, action: Action) -> NoReturn:
        """Raise an error again with the place where it happened."""
        if isinstance(error, StageError):
            raise self._failed(action, str(error)) from error.__cause__
        if isinstance(error, PenstockError):
            error.add_note(f"on rank {self._rank}, in {action}")
            raise error
        if action.op in MESSAGE_OPS and isinstance(error, RuntimeError):
            # A process group raises this for a peer that is gone.
            raise MessageError(f"rank {self._rank}, {action}: {error}") from error
        module = failing_module(error)
        what = f"{type(error).__name__}: {error}"
        raise self._failed(action, what, f", module {module}" if module else "") from error

    def _failed(self, action: Action, what: str, module: str = "") -> StageError:
        return StageError(
            f"rank {self._rank}, stage {action.stage}, microbatch {action.microbatch}, "
            f"action {action}{module}: {what}"
        )


# ---- how it is bound


class Turns:
    """Lets microbatches through in order, from 0.

    Sums of floating-point numbers depend on their order. With one order for all schedules, all of them give
    the same bits.
    """

    def __init__(self) -> None:
        self._next = 0
        self._early: set[int] = set()

    def is_next(self, microbatch: int) -> bool:
        """Whether it is this microbatch's turn."""
        return microbatch == self._next

    def arrived(self, microbatch: int) -> list[int]:
        """Those that may pass now that ``microbatch`` is here: none, or it and those that waited for it."""
        self._early.add(microbatch)
        return self._due()

    def passed(self) -> list[int]:
        """Those that waited and may pass, now that the next microbatch has gone through directly."""
        self._next += 1
        return self._due()

    def _due(self) -> list[int]:
        due = []
        while self._next in self._early:
            self._early.remove(self._next)
            due.append(self._next)
            self._next += 1
        return due


class _Binder:
    """Makes the rows of a program's actions."""

    def __init__(
        self,
        program: RankProgram,
        work: Mapping[int, StageWork],
        exchange: Exchange,
        wanted: Wanted,
        activity: Activity,
    ) -> None:
        self._program = program
        self._work = work
        self._exchange = exchange
        self._wanted = wanted
        self._activity = activity
        self._turns = {index: Turns() for index in work}

    def restart(self) -> None:
        """A step begins. With custom functions, turns are taken anew while it runs."""
        if self._wanted.replaced:
            self._turns = {index: Turns() for index in self._work}

    def actions(self) -> list[BoundAction]:
        """The whole program in order, with each message just before the first action that needs it."""
        if OVERLAPPED in self._wanted.replaced:
            entries: Iterable[tuple[Entry, tuple[Action, ...]]] = self._program.paired
        else:
            entries = self._program.instructions
        found: list[BoundAction] = []
        for entry, messages in entries:
            found += [self._message(entry, message) for message in messages]
            found.append(self._action(entry))
        return [action for action in found if action.row]

    def _action(self, entry: Entry) -> BoundAction:
        actions = parts(entry)
        first = actions[0]
        if self._wanted.replaced:
            row: tuple[Part, ...] = (self._replaced(entry),)
        else:
            row = tuple(part for action in actions for part in self._row(action))
        if self._wanted.profiled and row:
            row = (_as_range(str(entry), row),)
        if self._wanted.probed or (self._wanted.noted and first.op not in MESSAGE_OPS):
            row = (self._activity.noting(first, works=first.op in COMPUTE_OPS), *row)
        return BoundAction(first, None, row, first.microbatch or 0)

    def _row(self, action: Action) -> tuple[Part, ...]:
        return tuple(_ROWS[action.op](self, action))

    def _message(self, entry: Entry, message: Action) -> BoundAction:
        source, target, _ = self._program.wire(message).channel
        settle: Part = self._exchange.settler(message)
        hooks = self._wanted.hooks
        if hooks is not None and message.op in RECV_OPS:
            settle = self._with_hooks(settle, message, hooks)
        lack = Lack(entry, message, (target if source == self._program.rank else source,))
        return BoundAction(message, lack, (settle,), message.microbatch or 0)

    def _with_hooks(self, settle: Part, message: Action, hooks: Hooks) -> Part:
        """Call the hooks after a receive; it is done when its message is taken."""

        def settle_and_call(microbatch: int) -> None:
            arrived = settle(microbatch)
            self._activity.at(message)
            hooks.after(self._event(message, outputs=arrived))

        return settle_and_call

    def _replaced(self, entry: Entry) -> Part:
        """One function that does an action, or hands it to the user's custom function.

        A custom function may do anything, such as both halves of backward at once, or other actions' work.
        So only while the step runs is it known whose turn it is, and each action is bound when it is
        performed.
        """
        actions = parts(entry)

        def perform(action: Action) -> Any:
            output = None
            for part in self._row(action):
                part(action.microbatch or 0)
                # Read after each part, since the last one clears the desk.
                found = self._work[action.stage].desk.output
                output = output if found is None else found
            return output

        def perform_all(_: int) -> None:
            for action in actions:
                perform(action)

        own = self._wanted.replaced.get(OVERLAPPED if len(actions) > 1 else actions[0].op.value)
        return perform_all if own is None else lambda _: own(entry, perform)

    # ---- rows

    def _forward(self, action: Action) -> Iterator[Part]:
        work, wanted = self._work[action.stage], self._wanted
        yield work.gather
        yield from self._hook("before", action, lambda desk: (desk.arguments, None))
        yield from self._timed(action, [*work.told("forward"), work.compute])
        if wanted.finite and not work.stage.is_last:
            yield work.note_output
        yield work.keep
        if wanted.outputs and work.stage.is_last:
            yield work.keep_output
        yield from self._hook("after", action, lambda desk: (desk.arguments, desk.output))
        yield work.end_forward

    def _backward(self, action: Action) -> Iterator[Part]:
        """Both halves at once.

        But where an earlier microbatch is still due, the weights' half waits for it.
        """
        work, turns = self._work[action.stage], self._turns[action.stage]
        microbatch = microbatch_of(action)
        if turns.is_next(microbatch):
            yield from self._gradients(action, work.backward)
            yield from work.told("done")
            late = turns.passed()
        else:
            yield from self._gradients(action, work.backward_input)
            late = turns.arrived(microbatch)
        yield from self._weights(action, late)
        yield from self._end_backward(action)

    def _backward_input(self, action: Action) -> Iterator[Part]:
        yield from self._gradients(action, self._work[action.stage].backward_input)
        yield from self._end_backward(action)

    def _gradients(self, action: Action, half: Part) -> Iterator[Part]:
        work = self._work[action.stage]
        yield work.owed
        yield from self._hook("before", action, lambda desk: (desk.grads, None))
        yield from self._timed(action, [*work.told("backward"), half])
        if self._wanted.finite:
            yield work.note_gradients
        yield work.hand_back

    def _end_backward(self, action: Action) -> Iterator[Part]:
        yield from self._hook("after", action, lambda desk: (desk.grads, desk.found))
        yield self._work[action.stage].end_backward

    def _backward_weight(self, action: Action) -> Iterator[Part]:
        yield from self._hook("before", action)
        due = self._turns[action.stage].arrived(microbatch_of(action))
        yield from self._weights(action, due)
        yield from self._hook("after", action)

    def _weights(self, action: Action, due: Sequence[int]) -> Iterator[Part]:
        """The weights' half of all microbatches that are due, in their own order, not the schedule's."""
        work = self._work[action.stage]
        row = (*work.told("backward"), work.stage.backward_weight, *work.told("done"))
        found = [_for(microbatch, part) for microbatch in due for part in row]
        if found:
            yield from self._timed(action, found)

    def _send(self, action: Action) -> Iterator[Part]:
        pack, send = self._exchange.packer(action), self._exchange.sender(action)
        if self._wanted.hooks is None:
            yield lambda microbatch: send(pack(microbatch))
            return
        desk = self._work[action.stage].desk

        def lay(microbatch: int) -> None:
            desk.output = pack(microbatch)

        yield lay
        yield from self._hook("before", action, lambda desk: (desk.output, None))
        yield lambda _: send(desk.output)
        yield from self._hook("after", action, lambda desk: (desk.output, None))
        yield self._work[action.stage].end_forward

    def _receive(self, action: Action) -> Iterator[Part]:
        # Hooks after a receive are called when its message is taken, see _with_hooks.
        yield from self._hook("before", action)
        yield self._exchange.poster(action)

    def _nothing(self, action: Action) -> Iterator[Part]:
        """A WAIT_SEND asks nothing of a stage.

        The wait itself stands before the action, as for any message.
        """
        yield from self._hook("before", action)
        yield from self._hook("after", action)

    def _on_parameters(self, action: Action) -> Iterator[Part]:
        """Gather or free the parameters of a sharded stage, or reduce a stage's gradients."""
        yield from self._hook("before", action)
        adapter = self._wanted.adapters.get(action.stage)
        if adapter is not None:
            do = _ADAPTED[action.op]
            yield lambda _: do(adapter)
        yield from self._hook("after", action)

    # ---- what goes around

    def _timed(self, action: Action, row: Sequence[Part]) -> Iterator[Part]:
        if not self._wanted.recorded:
            yield from row
            return
        work = self._work[action.stage]
        yield lambda _: work.recorder.start()
        yield from row
        yield lambda _: work.recorder.stop(action)

    def _hook(
        self, when: str, action: Action, shown: Callable[[Desk], tuple[Any, Any]] | None = None
    ) -> Iterator[Part]:
        """Call the user's hooks, if there are any."""
        hooks = self._wanted.hooks
        if hooks is None:
            return
        call = hooks.before if when == "before" else hooks.after
        desk = self._work[action.stage].desk

        def call_hooks(_: int) -> None:
            inputs, outputs = shown(desk) if shown else (None, None)
            call(self._event(action, inputs, outputs))

        yield call_hooks

    def _event(self, action: Action, inputs: Any = None, outputs: Any = None) -> ActionEvent:
        module = self._work[action.stage].stage.module
        return ActionEvent(action, self._program.rank, module, inputs, outputs)


def _as_range(name: str, row: Sequence[Part]) -> Part:
    """All parts of an action as one range in a profiler's trace."""

    def run(microbatch: int) -> None:
        with record_function(name):
            for part in row:
                part(microbatch)

    return run


_ROWS: dict[Op, Callable[[_Binder, Action], Iterator[Part]]] = {
    Op.F: _Binder._forward,
    Op.B: _Binder._backward,
    Op.I: _Binder._backward_input,
    Op.W: _Binder._backward_weight,
    Op.SEND_F: _Binder._send,
    Op.RECV_F: _Binder._receive,
    Op.SEND_B: _Binder._send,
    Op.RECV_B: _Binder._receive,
    Op.WAIT_SEND_F: _Binder._nothing,
    Op.WAIT_SEND_B: _Binder._nothing,
    Op.UNSHARD: _Binder._on_parameters,
    Op.RESHARD: _Binder._on_parameters,
    Op.REDUCE_GRAD: _Binder._on_parameters,
}

_ADAPTED: dict[Op, Callable[[Adapter], None]] = {
    Op.UNSHARD: lambda adapter: adapter.unshard(),
    Op.RESHARD: lambda adapter: adapter.reshard(),
    Op.REDUCE_GRAD: lambda adapter: adapter.reduce(),
}


def _for(microbatch: int, part: Part) -> Part:
    """A part for another microbatch than the action's."""
    return lambda _: part(microbatch)
