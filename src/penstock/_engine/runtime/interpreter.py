"""The interpreter of a program: a loop over a rank's actions that calls one short method for each.

Values that pass between stages lie in a store, by the edge's name and the microbatch; the last use of a
value frees it. A single process runs all ranks' actions in one order that respects every dependency
(:func:`penstock.schedule.merged`), and needs only the store. Between processes, SEND and RECV move values
from store to store. The first message of a kind carries its layout; later ones are received ahead.

Microbatches whose arguments look the same are of one *kind*, and send values of one layout.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.profiler import record_function

from penstock._engine.faults import Activity, failing_module, has_probes
from penstock._engine.parallel import arrived, put_together, take_apart
from penstock._engine.runtime.calls import StepState
from penstock._engine.runtime.hooks import ActionEvent
from penstock._engine.runtime.kinds import Kind
from penstock._engine.runtime.stage_losses import StageLosses
from penstock._engine.transport import FIRST_TAG, LEFT, Arrival, Sending, Transport
from penstock._engine.values import (
    Layout,
    TensorLayout,
    check_plain,
    flatten,
    layout_of,
    map_tensors,
    restrided,
    tensors_in,
    unflatten,
)
from penstock.errors import (
    MessageError,
    PenstockError,
    SpecError,
    StageError,
)
from penstock.schedule import Action, Dependencies, Edge, Op, Schedule, merged
from penstock.schedule.action import MESSAGE_OPS, RECV_OPS
from penstock.schedule.dependencies import counterpart, proofs
from penstock.stage import PipelineStage, StageCall, enter

Grads = Sequence[Tensor | None]
_FORWARD, _BACKWARD = 0, 1
_FLAGS = "flags"
"""The first leaf of a message in which gradients may be missing."""


class Wire(NamedTuple):
    """What the messages of one op between two stages carry, and between which ranks.

    Attributes:
        peer: the rank at the other end.
        channel: (source rank, target rank, direction).
        number: identifies the wire within the schedule; number and kind make up a message's tag.
        edges: the edges whose values travel, each with a stage; for gradients, the stage that owes them.
    """

    peer: int
    channel: tuple[int, int, int]
    number: int
    edges: tuple[tuple[Edge, int], ...]


class Instruction(NamedTuple):
    """An action, and the messages that must have arrived before it."""

    action: Action
    needs: tuple[Action, ...]


class Flow:
    """The values that travel for microbatches of one kind.

    Args:
        schedule: the schedule, with its messages spelled out; some may carry nothing.
        rank: this process's rank; None if it runs all of them.
        edges: the values.
    """

    def __init__(self, schedule: Schedule, rank: int | None, edges: Sequence[Edge]) -> None:
        self._schedule, self._rank, self.edges = schedule, rank, tuple(edges)
        stages = range(schedule.stages)
        self.inputs = [tuple(e for e in edges if s in e.targets) for s in stages]
        self.outputs = [tuple(e for e in edges if e.source == s) for s in stages]
        self.learned = [tuple(e for e in of if e.gradient) for of in self.outputs]
        self._wires: dict[tuple[Op, int, int], Wire] = {}
        self.uses = {edge.value: self._count_uses(edge) for edge in edges}
        rank_of = schedule.placement.rank_of
        self.local = {e.value for e in edges if rank is None or rank_of[e.source] == rank}
        """The values made here; their makers may still use the memory."""

    def _count_uses(self, edge: Edge) -> int:
        """How often a value is read here: by the stages that use it, and by the messages that carry it."""
        if self._rank is None:
            return len(edge.targets)
        rank_of = self._schedule.placement.rank_of
        users = [rank_of[target] for target in edge.targets]
        sends = set(users) - {self._rank} if rank_of[edge.source] == self._rank else ()
        return users.count(self._rank) + len(sends)

    def wire_of(self, action: Action) -> Wire:
        """The wire of a message."""
        key = action.op, action.stage, action.peer_stage
        wire = self._wires.get(key)
        if wire is None:
            wire = self._wires[key] = self._make_wire(action)
        return wire

    def _make_wire(self, action: Action) -> Wire:
        schedule, rank_of = self._schedule, self._schedule.placement.rank_of
        home, peer = rank_of[action.stage], rank_of[action.peer_stage]
        sends = action.op in (Op.SEND_F, Op.SEND_B)
        direction = _FORWARD if action.op in (Op.SEND_F, Op.RECV_F) else _BACKWARD
        source, carrier = sorted((action.stage, action.peer_stage))
        edges: list[tuple[Edge, int]] = []
        for edge in self.outputs[source]:
            users = [target for target in edge.targets if rank_of[target] == rank_of[carrier]]
            if direction == _FORWARD and users:
                edges.append((edge, carrier))
            elif direction == _BACKWARD and edge.gradient:
                # Sent one by one, not summed, so that all gradients of a value are added in one order.
                edges += [(edge, user) for user in users]
        number = (source * schedule.stages + carrier) * 2 + direction
        channel = (home, peer, direction) if sends else (peer, home, direction)
        return Wire(peer, channel, number, tuple(edges))


class Program:
    """What this process does in a step: the actions of its rank, or of all ranks in one order.

    Args:
        schedule: the schedule, with its messages spelled out.
        rank: this process's rank; None if it runs all of them.
    """

    def __init__(self, schedule: Schedule, rank: int | None) -> None:
        self.schedule = schedule
        self._rank = rank
        rule = Dependencies(schedule)
        actions = merged(schedule) if rank is None else schedule.actions(rank)
        self.instructions = [
            Instruction(a, () if rank is None else tuple(rule.receives(a))) for a in actions
        ]
        self._flows: dict[tuple[Edge, ...], Flow] = {}
        self.proves = {} if rank is None else proofs(schedule, rank, rule)
        """For each message that arrives, this rank's SENDs that its sender has used by then."""

    def flow(self, edges: Sequence[Edge] | None = None) -> Flow:
        """The flow of values for microbatches with some edges; by default, with those of the schedule."""
        key = self.schedule.edges if edges is None else tuple(edges)
        if key not in self._flows:
            self._flows[key] = Flow(self.schedule, self._rank, key)
        return self._flows[key]

    @property
    def channels(self) -> Iterator[tuple[int, int, int]]:
        """The channels that this schedule's messages use on any rank."""
        flow = self.flow()
        return (
            flow.wire_of(action).channel
            for rank in range(self.schedule.ranks)
            for action in self.schedule.actions(rank)
            if action.op in MESSAGE_OPS
        )


class Interpreter:
    """Runs programs for the stages of this process.

    Args:
        stages: the stages by index: all of them, or those of this rank.
        activity: where this rank notes what it is doing, for the watch.
    """

    def __init__(self, stages: Mapping[int, PipelineStage], activity: Activity) -> None:
        self.stages = stages
        self.activity = activity
        self._transport: Transport | None = None
        self._losses = StageLosses(stages)
        self._usual: dict[Op, Callable[[Action], None]] = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.I: self._backward_input,
            Op.W: self._backward_weight,
            Op.SEND_F: self._send_values,
            Op.SEND_B: self._send_gradients,
            Op.RECV_F: self._receive,
            Op.RECV_B: self._receive,
            Op.WAIT_SEND_F: self._wait_send,
            Op.WAIT_SEND_B: self._wait_send,
            Op.UNSHARD: lambda action: self._adapt(action, "unshard"),
            Op.RESHARD: lambda action: self._adapt(action, "reshard"),
            Op.REDUCE_GRAD: lambda action: self._adapt(action, "reduce"),
            Op.WAIT_REDUCE_GRAD: lambda _: None,  # the end of the step waits for all
        }
        self._methods = self._usual
        self._action: Action | None = None
        self.clear()

    def _perform(self, action: Action) -> None:
        """Run an action by its usual method."""
        self._usual[action.op](action)

    def clear(self) -> None:
        """Empty the store; an interrupted step leaves values in it."""
        self._values: dict[tuple[str, int], list[Any]] = {}
        """Each value, with the number of times that it is still read."""
        self._gradients: defaultdict[tuple[str, int], dict[int, Grads]] = defaultdict(dict)
        self._learners: dict[tuple[str, int], int] = {}
        self._entered: dict[tuple[int, int], list[list[Tensor]]] = {}
        self._arriving: dict[Action, Arrival | None] = {}
        self._leaving: dict[Action, Sending] = {}
        self._described: list[Sending] = []
        self._queued: defaultdict[tuple[int, int, int], deque[Action]] = defaultdict(deque)

    def run(self, program: Program, step: StepState, transport: Transport | None) -> None:
        """Run a step, or an evaluation.

        Args:
            program: the actions to run.
            step: the state of the call; it receives the results.
            transport: this rank's end; None if all ranks share this process.

        Raises:
            StageError: a stage, the loss or a hook raised.
            MessageError: a message could not be sent or received.
        """
        watched = self._begin(program, step, transport, program.proves)
        # In one process, only fault injection needs to know which action runs.
        noted = transport is not None or has_probes()
        with self._errors_named(), self._losses.added:
            for action, needs in program.instructions:
                self._action = action
                if noted:
                    self._note(action, needs)
                if watched:
                    self._run_watched(self._methods[action.op], action)
                else:
                    self._methods[action.op](action)
            self._action = None
            self._end(transport)

    @contextmanager
    def driven(
        self, program: Program, step: StepState, transport: Transport | None
    ) -> Iterator[Callable[[Action], None]]:
        """A context in which the caller runs a program's actions in an order of its own.

        Other ranks may have theirs, so nothing that arrives proves what they have used.

        Args:
            program: what may be run; an I or a W may take the place of a B.
            step: the state of the call.
            transport: this rank's end; None if all ranks share this process.

        Yields:
            A function that runs an action.
        """
        watched = self._begin(program, step, transport, {})
        needs = dict(program.instructions)

        def perform(action: Action) -> None:
            self._action = action
            self._note(action, needs.get(action) or needs.get(action._replace(op=Op.B), ()))
            method = self._methods[action.op]
            self._run_watched(method, action) if watched else method(action)
            self._action = None

        with self._errors_named(), self._losses.added:
            yield perform
            self._end(transport)
        self.clear()

    def _begin(
        self,
        program: Program,
        step: StepState,
        transport: Transport | None,
        proves: Mapping[Action, Sequence[Action]],
    ) -> bool:
        """Take up a step; returns whether somebody watches its actions."""
        self._program, self._step, self._transport = program, step, transport
        self._kinds = step.agreement.kinds
        self._flows: Sequence[Flow] = step.agreement.flows
        self._hooks, self._proves = step.call.hooks, proves
        self._casting = {
            index
            for index, stage in self.stages.items()
            if stage.planned
            and (step.adapters is not None or stage.module is not stage.code)
            and stage.may_cast()
        }
        """The stages whose wrappers may change the types of what they are given."""
        custom = step.call.custom or {}
        self._methods = self._usual | {
            op: partial(function, self._perform) for op, function in custom.items()
        }
        self._losses.take_up(step, has_last=max(self.stages) + 1 == program.schedule.stages)
        profiled = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]  # it has no public name
        return profiled or step.recorder is not None or self._hooks is not None

    def _end(self, transport: Transport | None) -> None:
        """End a step: everything that was sent has left, and everything that arrived was used."""
        if transport is not None:
            self._let_leave(transport)
            if self._arriving:
                unused = ", ".join(map(str, self._arriving))
                raise MessageError(f"no action used what arrived with {unused}")

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        """Re-raise an error with the action in which it happened, and clear what the step left."""
        self._action = None
        try:
            yield
        except Exception as error:
            self.clear()
            for stage in self.stages.values():
                stage.clear()
            self._raise_named(error, self._action)

    def _note(self, action: Action, needs: Sequence[Action]) -> None:
        """Take the messages that an action needs, and note the action for the watch."""
        if self._transport is None:
            self.activity.rank = self._rank_of(action)
        else:
            self._transport.watch.check()
            for message in needs:
                if message in self._arriving:
                    self._take(message)
        # After the waits, whose end it notes.
        self.activity.act(action)

    def _run_watched(self, method: Callable[[Action], None], action: Action) -> None:
        """Run an action under hooks, the clock and the profiler."""
        recorder = self._step.recorder
        self._seen: tuple[Any, Any] = (None, None)
        if action.op not in (Op.F, Op.B, Op.I, Op.SEND_F, Op.SEND_B):
            self._call_hooks("before", action)
        if recorder is not None:
            recorder.start()
        with record_function(str(action)):
            method(action)
        if recorder is not None:
            recorder.stop(self._rank_of(action), action)
        if action.op not in RECV_OPS:
            self._call_hooks("after", action)
        self._seen = (None, None)

    def _look(self, action: Action, inputs: Any) -> None:
        """Call the hooks before an action with its inputs."""
        self._seen = (inputs, None)
        self._call_hooks("before", action)

    def _call_hooks(self, when: Literal["before", "after"], action: Action) -> None:
        if self._hooks is not None:
            inputs, outputs = self._seen
            module = self.stages[action.stage].module
            self._hooks.call(
                when, ActionEvent(action, self._rank_of(action), module, inputs, outputs)
            )

    def _rank_of(self, action: Action) -> int:
        return self._program.schedule.placement.rank_of[action.stage]

    def _raise_named(self, error: Exception, action: Action | None) -> NoReturn:
        """Re-raise an error with the place where it happened."""
        if action is None:
            raise error
        rank = self._rank_of(action)
        name = f"rank {rank}" if self._transport is None else self.activity.name
        at = f"{name}, stage {action.stage}, microbatch {action.microbatch}, action {action}"
        if isinstance(error, StageError):
            raise type(error)(f"{at}: {error}") from error.__cause__
        if isinstance(error, PenstockError):
            error.add_note(f"on {name}, in {action}")
            raise error
        if action.op in MESSAGE_OPS and isinstance(error, RuntimeError):
            # A process group raises this for a peer that has gone.
            raise MessageError(f"{name}, {action}: {error}") from error
        module = failing_module(error)
        where = f"{at}, module {module}" if module else at
        raise StageError(f"{where}: {type(error).__name__}: {error}") from error

    # ---- forward

    def _forward(self, action: Action) -> None:
        index, microbatch = action.stage, action.microbatch or 0
        step, stage = self._step, self.stages[index]
        if self._losses.added.terms:
            # Losses that a checkpoint added again when backward recomputed it.
            self._losses.added.clear()
        leaves: list[Tensor] = []
        args, kwargs = self._arguments(stage, microbatch, leaves)
        draws = step.draws(microbatch, stage.device)
        call = None
        if stage.planned:
            plan, score = self._kinds[microbatch].plan, step.scores[microbatch]
            call = StageCall(plan, microbatch, score, draws, stage.may_cast)
        elif draws is not None:
            draws.enter(f"stage {index}", 0)
        if self._hooks is not None:
            self._look(action, (args, kwargs))
        output = stage.run(args if call is None else (call, *args), kwargs)
        if self._hooks is not None:
            self._seen = (self._seen[0], output)
        inputs = args[0] if call is not None else (args, kwargs)
        roots = self._finish_forward(stage, microbatch, inputs, leaves, output)
        if step.call.trains:
            stage.keep(microbatch, roots, leaves)

    def _arguments(
        self, stage: PipelineStage, microbatch: int, leaves: list[Tensor]
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """The arguments of a stage's module; ``leaves`` gets a leaf for each tensor that requires grad."""
        edges = self._flows[microbatch].inputs[stage.index]
        values, entered, first = {}, [], 0
        for edge in edges:
            value, copies = self._read(edge.value, microbatch)
            values[edge.value] = enter(value, leaves, copies=copies)
            entered.append(leaves[first:])
            first = len(leaves)
        self._entered[stage.index, microbatch] = entered
        part = self._step.parts[microbatch]
        kwargs: dict[str, Any] = {}
        score = self._step.scores[microbatch]
        if score is not None:
            if stage.index in self._casting:
                code: Any = stage.code
                kwargs["given"] = code.given(score, self._kinds[microbatch].plan)
            return [values, *[enter(tensor, leaves, copies=True) for tensor in score.batch]], kwargs
        if stage.planned:
            args: list[Any] = [values]
            for value in part.args:
                args.append(enter(value, leaves, copies=True))
            for name, value in part.kwargs.items():
                kwargs[name] = enter(value, leaves, copies=True)
            return args, {**kwargs, **part.local} if part.local else kwargs
        for name in self._kinds[microbatch].keywords[stage.index]:
            kwargs[name] = enter(part.kwargs[name], leaves, copies=True)
        for name, value in part.local.items():
            kwargs[name] = enter(value, leaves, copies=True)
        if not edges:
            return [enter(value, leaves, copies=True) for value in part.args], kwargs
        if len(edges) > 1:
            return (), values | kwargs
        value = values[edges[0].value]
        return value if type(value) in stage.spread else (value,), kwargs

    def _read(self, name: str, microbatch: int) -> tuple[Any, bool]:
        """Read a value from the store, and whether something else also holds it; the last read frees it."""
        held = self._values[name, microbatch]
        held[1] -= 1
        if held[1]:
            return held[0], True
        del self._values[name, microbatch]
        return held[0], name in self._flows[microbatch].local

    def _store(self, name: str, microbatch: int, value: Any) -> None:
        uses = self._flows[microbatch].uses[name]
        if uses:
            self._values[name, microbatch] = [value, uses]

    def _finish_forward(
        self, stage: PipelineStage, microbatch: int, inputs: Any, leaves: list[Tensor], output: Any
    ) -> list[Tensor]:
        """Put a stage's values into the store, and return the roots of its backward."""
        index, call = stage.index, self._step.call
        edges = self._flows[microbatch].outputs[index]
        if stage.planned:
            output, values = output
        else:
            values = _values_of(edges, output) if edges else {}
        roots: list[Tensor] = []
        for edge in edges:
            name = edge.value
            value, plain = values[name], self._kinds[microbatch].plain
            if name not in plain:
                check_plain(value, f"what stage {index} returned")
                plain.add(name)
            self._store(name, microbatch, value)
            if edge.gradient and call.trains:
                before = len(roots)
                if not isinstance(value, Tensor):
                    roots += [tensor for tensor in tensors_in(value) if tensor.requires_grad]
                elif value.requires_grad:
                    roots.append(value)
                self._learners[name, microbatch] = len(roots) - before
        if stage.is_last and (call.outputs or call.keep):
            self._step.outputs[microbatch] = map_tensors(output, Tensor.detach)
        if stage.is_last or self._losses.added.terms:
            arrived = self._entered[index, microbatch]
            roots += self._losses.roots(stage, microbatch, output, inputs, leaves, arrived)
        return roots

    @property
    def has_loss_inside(self) -> bool:
        """Whether the model's forward seems to compute the loss; known where the last stage is."""
        return self._losses.check.is_inside

    # ---- backward

    def _owed(self, stage: int, microbatch: int) -> list[Tensor | None]:
        """The gradients of a stage's roots: of each value, summed over its users, and of the loss."""
        gradients: list[Tensor | None] = []
        for edge in self._flows[microbatch].learned[stage]:
            key = edge.value, microbatch
            by_user = self._gradients.pop(key, None)
            learners = self._learners.pop(key)
            if by_user is None:
                gradients += [None] * learners
            elif len(by_user) == 1:
                gradients += next(iter(by_user.values()))
            else:
                users = sorted(by_user, reverse=True)
                gradients += [
                    _sum(column) for column in zip(*[by_user[u] for u in users], strict=True)
                ]
        return [*gradients, *self._losses.seeds.pop((stage, microbatch), ())]

    def _backward(self, action: Action) -> None:
        self._run_backward(action, self.stages[action.stage].backward)
        if self._step.adapters is not None:
            self._step.adapters.done(action.stage, action.microbatch or 0)

    def _backward_input(self, action: Action) -> None:
        self._run_backward(action, self.stages[action.stage].backward_input)

    def _run_backward(self, action: Action, half: Callable[[int, Grads | None], Grads]) -> None:
        index, microbatch = action.stage, action.microbatch or 0
        owed = self._owed(index, microbatch)
        if self._hooks is not None:
            self._look(action, owed)
        gradients = half(microbatch, owed)
        if self._hooks is not None:
            self._seen = (owed, gradients)
        start = 0
        entered = self._entered.pop((index, microbatch))
        for edge, leaves in zip(self._flows[microbatch].inputs[index], entered, strict=True):
            end = start + len(leaves)
            if edge.gradient:
                part = gradients[start:end]
                self._gradients[edge.value, microbatch][index] = part
                if self._transport is not None and any(g is None for g in part):
                    missing = self._kinds[microbatch].missing
                    missing[edge.value] = [_gradient_like(leaf) for leaf in leaves]
            start = end
        if start < len(gradients):
            self._keep_batch_gradients(index, microbatch, gradients[start:])

    def _keep_batch_gradients(self, stage: int, microbatch: int, gradients: Grads) -> None:
        """Keep the gradients of the batch's own tensors that require grad."""
        part = self._step.parts[microbatch]
        placed = not self.stages[stage].planned
        args = () if placed and self._flows[microbatch].inputs[stage] else part.args
        names = self._kinds[microbatch].keywords[stage] if placed else part.kwargs
        passed = [*args, *(part.kwargs[name] for name in names), *part.local.values()]
        if self.stages[stage].is_last:
            passed.append(self._step.targets[microbatch])
        learners = [tensor for tensor in tensors_in(passed) if tensor.requires_grad]
        # A microbatch of weight 0 has not used its target.
        for tensor, gradient in zip(learners, gradients, strict=False):
            if gradient is not None:
                self._step.batch_gradients.append((tensor, gradient))

    def _backward_weight(self, action: Action) -> None:
        self.stages[action.stage].backward_weight(action.microbatch or 0)
        if self._step.adapters is not None:
            self._step.adapters.done(action.stage, action.microbatch or 0)

    # ---- messages

    def _wire(self, action: Action) -> Wire:
        """The wire of a message; it has no edges if nothing travels for this kind of microbatch."""
        return self._flows[action.microbatch or 0].wire_of(action)

    def _send_values(self, action: Action) -> None:
        wire, microbatch = self._wire(action), action.microbatch or 0
        if not wire.edges:
            return
        values = [self._read(edge.value, microbatch)[0] for edge, _ in wire.edges]
        if self._hooks is not None:
            self._look(action, tensors_in(values))
        leaves, tree = flatten(values[0] if len(values) == 1 else values)
        self._send(action, wire, leaves, lambda: Layout(tree, tuple(map(_layout, leaves))))

    def _send_gradients(self, action: Action) -> None:
        wire, microbatch = self._wire(action), action.microbatch or 0
        if not wire.edges:
            return
        parts: list[Grads] = []
        for edge, user in wire.edges:
            by_user = self._gradients[edge.value, microbatch]
            parts.append(by_user.pop(user))
            if not by_user:
                del self._gradients[edge.value, microbatch]
        gradients = [gradient for part in parts for gradient in part]
        if self._hooks is not None:
            self._look(action, gradients)
        kind = self._kinds[microbatch]
        self._send(action, wire, gradients, partial(_gradient_layout, wire, kind, parts))

    def _send(
        self, action: Action, wire: Wire, leaves: Sequence[Any], describe: Callable[[], Layout]
    ) -> None:
        assert self._transport is not None
        kind = self._kinds[action.microbatch or 0]
        layout, tag = kind.layouts.get(wire.number), self._tag(wire, kind)
        device = self.stages[action.stage].device
        if layout is None:
            layout = kind.layouts[wire.number] = describe()
            self._described += self._transport.describe(wire.peer, tag, layout.describe())
        if layout.leaves[:1] == (_FLAGS,):
            flags = torch.tensor(
                [leaf is not None for leaf in leaves], dtype=torch.uint8, device="cpu"
            )
            leaves = [_FLAGS, flags.to(device), *leaves]
        tensors = _checked(action, leaves, layout, device)
        if tensors:
            sending = self._transport.send(wire.peer, tag, tensors, wire.channel[2])
            if sending is not LEFT:
                self._leaving[action] = sending

    def _tag(self, wire: Wire, kind: Kind) -> int:
        return FIRST_TAG + kind.number * 2 * self._program.schedule.stages**2 + wire.number

    def _receive(self, action: Action) -> None:
        """Start to receive if the layout is known; otherwise queue the action until it is."""
        wire = self._wire(action)
        if not wire.edges:
            return
        queue = self._queued[wire.channel]
        known = wire.number in self._kinds[action.microbatch or 0].layouts
        self._arriving[action] = None
        if known and not queue:
            self._post(action, wire)
        else:
            queue.append(action)

    def _post(self, action: Action, wire: Wire) -> None:
        assert self._transport is not None
        kind = self._kinds[action.microbatch or 0]
        layout = kind.layouts[wire.number]
        self._arriving[action] = (
            self._transport.post(wire.peer, self._tag(wire, kind), layout.tensors, wire.channel[2])
            if layout.tensors
            else None
        )

    def _take(self, action: Action) -> None:
        """Wait for a message, and put its contents into the store."""
        transport, wire = self._transport, self._wire(action)
        assert transport is not None
        microbatch = action.microbatch or 0
        transport.activity.wait(str(action), wire.peer)
        queue = self._queued[wire.channel]
        # A channel's messages are posted in order, even behind one whose layout was not known.
        while action in queue:
            first = queue.popleft()
            first_wire = self._wire(first)
            kind = self._kinds[first.microbatch or 0]
            if first_wire.number not in kind.layouts:
                text = transport.described(first_wire.peer, self._tag(first_wire, kind))
                kind.layouts[first_wire.number] = Layout.read(text)
            self._post(first, first_wire)
        arrival = self._arriving.pop(action)
        layout = self._kinds[microbatch].layouts[wire.number]
        arrived = iter(arrival.take() if arrival is not None else ())
        leaves = [
            _rebuilt(next(arrived), leaf) if isinstance(leaf, TensorLayout) else leaf
            for leaf in layout.leaves
        ]
        for send in self._proves.get(action, ()):
            self._leaving.pop(send, LEFT).used()
        if action.op is Op.RECV_F:
            self._store_arrived(wire, microbatch, unflatten(leaves, layout.tree))
        else:
            if leaves[:1] == [_FLAGS]:
                flags, gradients = leaves[1].tolist(), leaves[2:]
                leaves = [g if there else None for there, g in zip(flags, gradients, strict=True)]
            self._store_gradients(wire, microbatch, leaves)
        if self._hooks is not None:
            self._seen = (None, [leaf for leaf in leaves if isinstance(leaf, Tensor)])
            self._call_hooks("after", action)

    def _store_arrived(self, wire: Wire, microbatch: int, payload: Any) -> None:
        if len(wire.edges) == 1:
            self._store(wire.edges[0][0].value, microbatch, payload)
            return
        for (edge, _), value in zip(wire.edges, payload, strict=True):
            self._store(edge.value, microbatch, value)

    def _store_gradients(self, wire: Wire, microbatch: int, gradients: list[Any]) -> None:
        start = 0
        for edge, user in wire.edges:
            end = start + self._learners[edge.value, microbatch]
            self._gradients[edge.value, microbatch][user] = gradients[start:end]
            start = end

    def _wait_send(self, action: Action) -> None:
        assert self._transport is not None
        self._transport.activity.wait(str(action), self._wire(counterpart(action)).peer)
        self._leaving.pop(counterpart(action), LEFT).wait()

    def _let_leave(self, transport: Transport) -> None:
        """At the end of a step, wait until everything that was sent has left."""
        for action, sending in self._leaving.items():
            transport.activity.wait(f"{action} to leave", self._wire(action).peer)
            sending.wait()
        for sending in self._described:
            sending.wait()
        self._leaving.clear()
        self._described.clear()
        transport.settle()

    # ---- sharded stages

    def _adapt(self, action: Action, method: Literal["unshard", "reshard", "reduce"]) -> None:
        if self._step.adapters is not None:
            self._step.adapters.tell(action.stage, method)


def _values_of(edges: Sequence[Edge], output: Any) -> dict[str, Any]:
    """The values in a plain stage's output by name: the whole output, or several items of a dict."""
    if len(edges) == 1:
        return {edges[0].value: output}
    names = [edge.value for edge in edges]
    if not isinstance(output, dict) or not output.keys() >= set(names):
        returned = list(output) if isinstance(output, dict) else f"a {type(output).__name__}"
        raise SpecError(
            f"stage {edges[0].source} must return a dict with {names}, but it returned {returned}"
        )
    return output


def _sum(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of gradients in order; None if there are none."""
    present = [gradient for gradient in gradients if gradient is not None]
    if len(present) < 2:
        return present[0] if present else None
    total = present[0] + present[1]
    for gradient in present[2:]:
        total = total + gradient
    return total


def _layout(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if type(leaf) is Tensor or isinstance(leaf, torch.nn.Parameter):
        return layout_of(leaf)
    # A pending collective's result no longer requires grad once it has been waited for.
    learns = leaf.requires_grad
    local, sharding = take_apart(arrived(leaf))
    return layout_of(local)._replace(strides=None, learns=learns, sharding=sharding)


def _gradient_like(leaf: Any) -> Any:
    """The layout of a gradient of a tensor like this."""
    return _layout(leaf)._replace(strides=None, learns=False)


def _gradient_layout(wire: Wire, kind: Kind, parts: Sequence[Grads]) -> Layout:
    """The layout of gradients. If some are missing, each message carries flags that say which.

    A missing gradient travels as zeros of the forward value's size.
    """
    layouts: list[Any] = []
    for (edge, _), part in zip(wire.edges, parts, strict=True):
        layouts += kind.missing.get(edge.value) or map(_gradient_like, part)
    if any(gradient is None for part in parts for gradient in part):
        flags = torch.empty(len(layouts), dtype=torch.uint8, device="cpu")
        layouts = [_FLAGS, layout_of(flags), *layouts]
    return Layout(flatten([0])[1], tuple(layouts))


def _checked(
    action: Action, leaves: Sequence[Any], layout: Layout, device: torch.device
) -> list[Tensor]:
    """The tensors of a message, checked against the layout that its receiver expects."""
    if len(leaves) != len(layout.leaves):
        raise _unlike(action, f"{len(leaves)} values", len(layout.leaves))
    tensors = []
    for leaf, expected in zip(leaves, layout.leaves, strict=True):
        if not isinstance(expected, TensorLayout):
            if isinstance(leaf, Tensor) or leaf != expected:
                raise _unlike(action, _leaf_shown(leaf), repr(expected))
            continue
        if leaf is None and action.op is Op.SEND_B:
            leaf = expected.empty(device).zero_()
        learns = action.op is Op.SEND_F and isinstance(leaf, Tensor) and leaf.requires_grad
        if isinstance(leaf, Tensor) and type(leaf) is not Tensor:
            leaf = take_apart(arrived(leaf), expected.sharding)[0]
        if not isinstance(leaf, Tensor) or leaf.shape != expected.shape:
            raise _unlike(action, _leaf_shown(leaf), expected)
        if leaf.dtype != expected.torch_dtype or learns is not expected.learns:
            raise _unlike(action, _leaf_shown(leaf), expected)
        tensors.append(leaf)
    return tensors


def _unlike(action: Action, shown: str, expected: object) -> SpecError:
    return SpecError(
        f"{action}: {shown} where the first message of this kind had {expected}; what a stage returns may "
        "depend on the shapes of its arguments, not on the numbers in them"
    )


def _leaf_shown(leaf: Any) -> str:
    return str(layout_of(leaf)) if isinstance(leaf, Tensor) else repr(leaf)


def _rebuilt(tensor: Tensor, layout: TensorLayout) -> Tensor:
    """Give an arrived tensor its sender's strides, sharding and ``requires_grad``."""
    if layout.sharding is not None:
        tensor = put_together(tensor, layout.sharding)
    elif layout.strides is not None:
        tensor = restrided(tensor, layout.strides)
    return tensor.requires_grad_() if layout.learns and torch.is_grad_enabled() else tensor
