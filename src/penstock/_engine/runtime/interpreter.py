"""The interpreter of a program: a loop over a rank's actions that calls one short method for each.

Values that pass between stages lie in a store, by the edge's name and the microbatch; the last use of a
value frees it. A single process runs all ranks' actions in one order that respects every dependency
(:func:`penstock.schedule.merged`), and needs only the store. Between processes, SEND and RECV move values
from store to store, see :class:`Messages`.

Microbatches whose arguments look the same are of one *kind*, and send values of one layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.profiler import record_function

from penstock._engine.faults import Activity, failing_module, has_probes
from penstock._engine.runtime.calls import StepState
from penstock._engine.runtime.hooks import WatchedAction
from penstock._engine.runtime.messages import Messages, gradient_layout
from penstock._engine.runtime.program import Flow, Instruction, Program, StageInstruction
from penstock._engine.runtime.stage_losses import StageLosses
from penstock._engine.runtime.states import STATE, States
from penstock._engine.transport import Transport
from penstock._engine.values import check_plain, map_tensors, tensors_in, unflatten
from penstock.errors import MessageError, PenstockError, StageError
from penstock.schedule import Action, Op, Overlap
from penstock.schedule.action import MESSAGE_OPS, RECV_OPS
from penstock.stage import (
    CHANGED,
    LEAF_CHANGED,
    Entrance,
    OverlapFunction,
    PairForward,
    PipelineStage,
    looks_of,
    run_pair,
)

Grads: TypeAlias = Sequence[Tensor | None]
Watched: TypeAlias = WatchedAction | None
"""What a method tells of its action, where somebody watches."""
_TELLS_INPUTS = frozenset({Op.F, Op.B, Op.I, Op.SEND_F, Op.SEND_B})
"""The ops whose methods begin the watch themselves, since they find out what an action is given."""


class Interpreter:
    """Runs programs for the stages of this process.

    Args:
        stages: the stages by index: all of them, or those of this rank.
        activity: where this rank notes what it is doing, for the watch.
    """

    def __init__(self, stages: Mapping[int, PipelineStage], activity: Activity) -> None:
        self.stages = stages
        self.activity = activity
        self._losses = StageLosses(stages)
        self._usual: dict[Op, Callable[..., None]] = {
            Op.F: self._forward,
            Op.OFFLOAD: self._offload,
            Op.RELOAD: self._reload,
            Op.B: self._backward,
            Op.I: self._backward,
            Op.W: self._backward_weight,
            Op.SEND_F: self._send_values,
            Op.SEND_B: self._send_gradients,
            Op.RECV_F: lambda receive, *_: self._messages.receive(receive),
            Op.RECV_B: lambda receive, *_: self._messages.receive(receive),
            Op.WAIT_SEND_F: lambda wait, *_: self._messages.wait_sent(wait),
            Op.WAIT_SEND_B: lambda wait, *_: self._messages.wait_sent(wait),
            Op.UNSHARD: partial(self._adapt, "unshard"),
            Op.RESHARD: partial(self._adapt, "reshard"),
            Op.REDUCE_GRAD: partial(self._adapt, "reduce"),
            Op.WAIT_REDUCE_GRAD: lambda *_: None,  # the end of the step waits for all
        }
        self.clear()

    def clear(self) -> None:
        """Empty the store; an interrupted step leaves values in it."""
        self._values: dict[tuple[str, int], list[Any]] = {}
        """Each value, with the number of times that it is still read."""
        self._gradients: defaultdict[tuple[str, int], dict[int, Grads]] = defaultdict(dict)
        """The gradients of each value, by the stage that owes them."""
        self._learners: dict[tuple[str, int], int] = {}
        """The number of tensors in each value that learn."""
        self._begun: Instruction | None = None
        """The forward of an overlapped pair, until its backward is due."""
        self._instead: Callable[..., Any] | None = None
        """What is called in place of a stage's module."""
        self._looks: dict[tuple[int, int], str] = {}
        """How the output of a stage looks for a kind of microbatch, in steps with pairs."""
        self._entered: dict[tuple[int, int], tuple[list[list[Tensor]], list[Tensor]]] = {}
        """For each forward the leaves of each value that came, and the batch's tensors that learn."""

    @contextmanager
    def step(
        self, step: StepState, transport: Transport | None, *, in_order: bool = True
    ) -> Iterator[None]:
        """A context between the beginning of a step, or an evaluation, and its end.

        Args:
            step: the state of the call; it receives the results.
            transport: this rank's end; None if all ranks share this process.
            in_order: whether all ranks run their programs as they are. If not, nothing that arrives proves
                what its sender has used.

        Raises:
            StageError: a stage, the loss or a hook raised.
            MessageError: a message could not be sent or received.
        """
        program: Program = step.agreement.program
        self._program, self._step, self._transport = program, step, transport
        self._kinds = step.agreement.kinds
        self._flows: Sequence[Flow] = step.agreement.flows
        self._now: Instruction | StageInstruction | None = None
        self._moves = step.call.trains and bool(program.offloaded)
        profiled = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]  # it has no public name
        self._usual[Op.F] = self._forward_to_offload if self._moves else self._forward
        is_watched = profiled or step.recorder is not None or step.call.hooks is not None
        self._methods = dict.fromkeys(self._usual, self._run_watched) if is_watched else self._usual
        self._replaced: dict[Op, Callable[[Action], None]] = {}
        for op, function in (step.call.custom or {}).items():
            self._replaced[op] = partial(function, self._perform)
        self._pairs: dict[Action, tuple[Overlap, OverlapFunction]] = {}
        if program.pairs and in_order and step.call.trains and not self._replaced:
            self._pairs.update(self._overlapping(program))
        self._usual[Op.B] = self._backward_of_pair if self._pairs else self._backward
        self._alone = self._methods[Op.F]
        if self._pairs:
            self._methods = {**self._methods, Op.F: self._begin_pair}
        # In one process, only fault injection needs to know which action runs.
        self._is_noted = transport is not None or has_probes()
        if transport is not None:
            devices = {index: stage.device for index, stage in self.stages.items()}
            proves = program.proves if in_order else {}
            self._messages = Messages(program, step, transport, devices, proves)
        for stage in self.stages.values():
            stage.follow_wrappers(adapted=step.adapters is not None)
        slices, trains = step.call.slices, step.call.trains
        self._states = States(program.schedule.slices, trains=trains) if slices else None
        self._losses.take_up(step, has_last=self.stages[max(self.stages)].is_last)
        try:
            with self._losses.added:
                yield
            if transport is not None:
                self._messages.end()
        except BaseException as error:
            # Also after Ctrl-C in a notebook, where the next step begins anew.
            for stage in self.stages.values():
                stage.clear()
            if isinstance(error, Exception):
                self._raise_named(error)
            raise
        finally:
            self.clear()

    def run(self, instructions: Iterable[Instruction | StageInstruction]) -> None:
        """Run actions of the step that is under way."""
        for instruction in instructions:
            self._now, op = instruction, instruction.action.op
            if self._is_noted:
                self._note(instruction)
            if op in self._replaced:
                self._replaced[op](instruction.action)
            else:
                self._methods[op](instruction)
        self._now = None

    def _note(self, instruction: Instruction | StageInstruction) -> None:
        """Take the messages that an action needs, and note the action for the watch."""
        if self._transport is None:
            self.activity.rank = self._rank_of(instruction.action)
        else:
            self._transport.watch.check()
            for message in instruction.needs:
                self._take(message)
        # After the waits, whose end it notes.
        self.activity.act(instruction.action)

    def _perform(self, action: Action) -> None:
        """Run an action for a function that has replaced one."""
        self._methods[action.op](self._program.instruction(action))

    def _run_watched(self, instruction: Instruction | StageInstruction) -> None:
        """Run an action under hooks, the clock and the profiler."""
        action, recorder = instruction.action, self._step.recorder
        watched = self._watched(action)
        if action.op not in _TELLS_INPUTS:
            watched.begin()
        if recorder is not None:
            recorder.start()
        with record_function(str(action)):
            self._usual[action.op](instruction, watched)
        if recorder is not None:
            recorder.stop(watched.rank, action)
        if action.op not in RECV_OPS:
            watched.end()

    def _watched(self, action: Action) -> WatchedAction:
        module = self.stages[action.stage].module
        return WatchedAction(self._step.call.hooks, action, self._rank_of(action), module)

    def _rank_of(self, action: Action) -> int:
        return self._program.schedule.placement.rank_of[action.stage]

    def _raise_named(self, error: Exception) -> NoReturn:
        """Re-raise an error with the place where it happened."""
        if self._now is None:
            raise error
        action = self._now.action
        rank = self._rank_of(action)
        name = f"rank {rank}" if self._transport is None else self.activity.name
        at = f"{name}, stage {action.stage}, microbatch {action.microbatch}, action {action}"
        if action in self._pairs and self._begun is None:
            pair, function = self._pairs[action]
            at += f" in {pair}, which {getattr(function, '__qualname__', function)} runs"
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
        hint = f" If the leaf is no weight, {CHANGED}" if LEAF_CHANGED in str(error) else ""
        raise StageError(f"{where}: {type(error).__name__}: {error}{hint}") from error

    # ---- forward

    def _forward(self, instruction: Instruction, watched: Watched = None) -> None:
        _, index, microbatch, _ = instruction
        step, stage, kind = self._step, self.stages[index], self._kinds[microbatch]
        flow: Flow = self._flows[microbatch]
        if self._losses.added.terms:
            # Losses that a checkpoint added again when backward recomputed it.
            self._losses.added.clear()
        binding, draws = kind.bindings[index], step.draws[index][microbatch]
        entrance = Entrance(binding.writes)
        leaves = entrance.leaves
        values: dict[str, Any] = {}
        entered: list[list[Tensor]] = []
        for edge in flow.inputs[index]:
            value, shared = self._read(edge.value, microbatch)
            before = len(leaves)
            values[edge.value] = entrance.take(value, shared)
            entered.append(leaves[before:])
        states = self._states
        state = None if states is None else states.enter(index, microbatch, entrance)
        part, score = step.parts[microbatch], step.scores[microbatch]
        call, args, kwargs = binding.bind(microbatch, values, part, score, draws, entrance)
        if states is not None:
            kwargs = {**kwargs, STATE: state}
        self._entered[index, microbatch] = entered, entrance.of_batch
        if watched is not None:
            watched.begin((args, kwargs))
        output = (self._instead or stage.call)(*call, *args, **kwargs)
        if watched is not None:
            watched.outputs = output
        if entrance.versions:
            binding.leave(entrance)
        of_state: list[Tensor] = []
        if states is not None:
            output, of_state = states.take_apart(index, microbatch, output)
        if self._pairs:
            self._check_alike(index, kind.number, output)
        output, made = binding.take_apart(output)
        roots: list[Tensor] = []
        for edge in flow.outputs[index]:
            name, value = edge.value, made[edge.value]
            if name not in kind.plain:
                check_plain(value, f"what stage {index} returned")
                kind.plain.add(name)
            uses = flow.uses[name]
            if uses:
                self._values[name, microbatch] = [value, uses]
            if edge.gradient and step.call.trains:
                before = len(roots)
                if not isinstance(value, Tensor):
                    roots += [tensor for tensor in tensors_in(value) if tensor.requires_grad]
                elif value.requires_grad:
                    roots.append(value)
                self._learners[name, microbatch] = len(roots) - before
        roots += of_state
        if stage.is_last and (step.call.outputs or step.call.keep):
            step.outputs[microbatch] = map_tensors(output, Tensor.detach)
        if stage.is_last or self._losses.added.terms:
            inputs = values if call else (args, kwargs)
            roots += self._losses.roots(stage, microbatch, output, inputs, leaves, entered)
        if step.call.trains:
            stage.keep(microbatch, roots, leaves)

    # ---- overlapped pairs

    def _overlapping(
        self, program: Program
    ) -> Iterator[tuple[Action, tuple[Overlap, OverlapFunction]]]:
        """Both halves of the pairs that a function runs, with that: the user's, or the forward's module's."""
        for pair in program.pairs:
            function = self._step.call.overlap or self.stages[pair.forward.stage].overlapping
            if function is not None and pair.backward.op is Op.B:
                yield from dict.fromkeys(pair, (pair, function)).items()

    def _begin_pair(self, forward: Instruction) -> None:
        """Run a forward; that of a pair once its backward is due, when the values for both have come."""
        if forward.action in self._pairs:
            self._begun = forward
        else:
            self._alone(forward)

    def _backward_of_pair(self, backward: Instruction, watched: Watched = None) -> None:
        """Run a B, with its forward if it is one of a pair."""
        forward, self._begun = self._begun, None
        if forward is None:
            self._backward(backward, watched)
        else:
            self._backward(backward, watched, partial(self._run_both, forward, backward))

    def _run_both(
        self, forward: Instruction, backward: Instruction, microbatch: int, owed: Grads
    ) -> Grads:
        """Run both halves of a pair by their function; return what a backward does."""
        stage, other = self.stages[forward.stage], self.stages[backward.stage]
        _, function = self._pairs[backward.action]
        gradients: Grads = ()

        def both(*args: Any, **kwargs: Any) -> Any:
            nonlocal gradients
            run = partial(stage.call, *args, **kwargs)
            first, second = (
                PairForward(stage.module, args, kwargs, run),
                other.backward_of_pair(microbatch, owed),
            )
            with other.shared_context:
                output, gradients = run_pair(function, first, second)
            return output

        self._instead = both
        try:
            self._alone(forward)
        finally:
            self._instead = None
        return gradients

    def _check_alike(self, stage: int, kind: int, output: Any) -> None:
        """Check that a stage returns alike in a pair and alone: what needs no gradient would get none."""
        looks = looks_of(output)
        before = self._looks.setdefault((stage, kind), looks)
        if looks != before:
            raise StageError(
                f"stage {stage} returned the tensors {looks}, and for another microbatch that looks alike "
                f"{before}; let its forward and the function for pairs return the same"
            )

    # ---- activations that wait on the host

    def _forward_to_offload(self, instruction: Instruction, watched: Watched = None) -> None:
        """Run a forward so that what it saves can leave, if it is to leave."""
        index, microbatch = instruction.stage, instruction.microbatch
        if (index, microbatch) not in self._program.offloaded:
            self._forward(instruction, watched)
            return
        part = self._step.parts[microbatch]
        batch = tensors_in([part.args, part.kwargs, part.local, self._step.targets[microbatch]])
        with self.stages[index].offloading(microbatch, batch):
            self._forward(instruction, watched)

    def _offload(self, instruction: Instruction, _: Watched = None) -> None:
        if self._moves:
            self.stages[instruction.stage].offload(instruction.microbatch)

    def _reload(self, instruction: Instruction, _: Watched = None) -> None:
        if self._moves:
            self.stages[instruction.stage].reload(instruction.microbatch)

    # ---- values

    def _read(self, name: str, microbatch: int) -> tuple[Any, bool]:
        """Read a value from the store, and whether something else also holds it; the last read frees it."""
        held = self._values[name, microbatch]
        held[1] -= 1
        if held[1]:
            return held[0], True
        del self._values[name, microbatch]
        return held[0], name in self._flows[microbatch].local

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
        if self._states is not None:
            gradients += self._states.owed(stage, microbatch)
        return [*gradients, *self._losses.seeds.pop((stage, microbatch), ())]

    def _backward(
        self,
        instruction: Instruction,
        watched: Watched = None,
        half: Callable[[int, Grads], Grads] | None = None,
    ) -> None:
        """Run a B or an I: from the gradients that are owed to those of what the stage was given.

        Args:
            instruction: which.
            watched: the watch of it.
            half: computes those of a microbatch from what it is owed; by default, the stage does.
        """
        action, index, microbatch, _ = instruction
        stage, owed = self.stages[index], self._owed(index, microbatch)
        if watched is not None:
            watched.begin(owed)
        if action.op is Op.B and self._step.adapters is not None:
            self._step.adapters.watch(index, lambda: None)
        if half is None:
            half = stage.backward if action.op is Op.B else stage.backward_input
        gradients = half(microbatch, owed)
        if watched is not None:
            watched.outputs = gradients
        entered, of_batch = self._entered.pop((index, microbatch))
        start = 0
        for edge, leaves in zip(self._flows[microbatch].inputs[index], entered, strict=True):
            end = start + len(leaves)
            if edge.gradient:
                part = gradients[start:end]
                self._gradients[edge.value, microbatch][index] = part
                if self._transport is not None and any(g is None for g in part):
                    missing = self._kinds[microbatch].missing
                    missing[edge.value] = [gradient_layout(leaf) for leaf in leaves]
            start = end
        if self._states is not None:
            start += self._states.keep(index, microbatch, gradients[start:])
        if start < len(gradients):
            self._keep_batch_gradients(stage, microbatch, of_batch, gradients[start:])
        if action.op is Op.B and self._step.adapters is not None:
            self._step.adapters.done(index, microbatch)

    def _keep_batch_gradients(
        self, stage: PipelineStage, microbatch: int, of_batch: Sequence[Tensor], gradients: Grads
    ) -> None:
        """Keep the gradients of the batch's own tensors that require grad, and of its target's."""
        learners = [*of_batch]
        if stage.is_last:
            targets = tensors_in(self._step.targets[microbatch])
            learners += [tensor for tensor in targets if tensor.requires_grad]
        # A microbatch of weight 0 has not used its target.
        for tensor, gradient in zip(learners, gradients, strict=False):
            if gradient is not None:
                self._step.batch_gradients.append((tensor, gradient))

    def _backward_weight(self, instruction: Instruction, _: Watched = None) -> None:
        index, microbatch = instruction.stage, instruction.microbatch
        stage = self.stages[index]
        if self._step.adapters is not None:
            self._step.adapters.watch(index, partial(stage.weights_of_half, microbatch))
        stage.backward_weight(microbatch)
        if self._step.adapters is not None:
            self._step.adapters.done(index, microbatch)

    # ---- messages

    def _send_values(self, instruction: Instruction, watched: Watched = None) -> None:
        wire = self._messages.wire(instruction)
        if wire.edges:
            values = [self._read(edge.value, instruction.microbatch)[0] for edge, _ in wire.edges]
            if watched is not None:
                watched.begin(tensors_in(values))
            self._messages.send_values(instruction, wire, values)

    def _send_gradients(self, instruction: Instruction, watched: Watched = None) -> None:
        wire = self._messages.wire(instruction)
        parts: list[Grads] = []
        for edge, user in wire.edges:
            by_user = self._gradients[edge.value, instruction.microbatch]
            parts.append(by_user.pop(user))
            if not by_user:
                del self._gradients[edge.value, instruction.microbatch]
        if parts:
            if watched is not None:
                watched.begin([gradient for part in parts for gradient in part])
            self._messages.send_gradients(instruction, wire, parts)

    def _take(self, instruction: Instruction) -> None:
        """Wait for a message, and put its contents into the store."""
        came = self._messages.take(instruction)
        if came is None:
            return
        wire, leaves, tree = came
        microbatch, start = instruction.microbatch, 0
        if instruction.action.op is Op.RECV_F:
            payload = unflatten(leaves, tree)
            values = [payload] if len(wire.edges) == 1 else payload
            for (edge, _), value in zip(wire.edges, values, strict=True):
                uses = self._flows[microbatch].uses[edge.value]
                if uses:
                    self._values[edge.value, microbatch] = [value, uses]
        else:
            for edge, user in wire.edges:
                end = start + self._learners[edge.value, microbatch]
                self._gradients[edge.value, microbatch][user] = leaves[start:end]
                start = end
        if self._methods is not self._usual:
            watched = self._watched(instruction.action)
            watched.outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            watched.end()

    # ---- sharded stages

    def _adapt(
        self,
        method: Literal["unshard", "reshard", "reduce"],
        instruction: StageInstruction,
        _: Watched = None,
    ) -> None:
        if self._step.adapters is not None:
            self._step.adapters.tell(instruction.stage, method)


def _sum(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of gradients in order; None if there are none."""
    present = [gradient for gradient in gradients if gradient is not None]
    if len(present) < 2:
        return present[0] if present else None
    total = present[0] + present[1]
    for gradient in present[2:]:
        total = total + gradient
    return total
