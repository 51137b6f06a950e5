"""What passes between the stages of a step, and how it becomes the arguments of their modules.

Values go forward to the stages that use them, and gradients come back to the stages that made the values.
Everything here is made once, for a rank's bound program, and serves every step of it. A value that this rank
holds lies in a slot, one for each value and microbatch, and so do the gradients that each user of the value
owes for it. The program is known, so it is known who reads a slot last, and that read empties it. Stages of
the same rank hand over through slots alone; between ranks there are messages, whose values are checked before
they are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import InternalError, SpecError
from penstock.runtime.program import RankProgram
from penstock.schedule import Action, Edge, Op
from penstock.schedule.action import RECV_OPS
from penstock.stage import PipelineStage
from penstock.transport import Ticket, Transport
from penstock.values import Microbatch, TensorSpec, ValueSpec, flatten, paths

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Inputs:
    """Which of the model's arguments each stage is given.

    Args:
        named: for each stage, the names of its module's arguments; ``None`` for a wired stage, which is given
            the whole call.
        by_hand: for each stage, the keyword arguments that its rank was given for it. Where this is set, it
            decides, and ``named`` does not.
        aside: keyword arguments of a microbatch that stay in this process and are not described to others.
    """

    named: Mapping[int, Sequence[str] | None]
    by_hand: Mapping[int, frozenset[str]] | None = None
    aside: Mapping[str, Any] = field(default_factory=dict)

    def by_name(self, stage: int, names: Sequence[str], *, first: bool) -> list[str]:
        """The keyword arguments that go to a stage.

        Args:
            stage: which one.
            names: all keyword arguments of the call.
            first: whether the batch enters at this stage: it also gets the arguments that no other stage
                takes.
        """
        if self.by_hand is not None:
            return [name for name in names if name in self.by_hand[stage]]
        if not first:
            # The first of its own arguments is the value that it uses.
            own = (self.named.get(stage) or ())[1:]
            return [name for name in names if name in own]
        own = self.named.get(stage) or ()
        others = {name for s, of in self.named.items() if s != stage for name in (of or ())[1:]}
        return [name for name in names if name in own or name not in others]

    def arguments(
        self,
        stage: PipelineStage,
        taken: Sequence[Edge],
        values: Mapping[str, Any],
        part: Microbatch,
    ) -> Arguments:
        """What a stage's module is called with.

        First the values of other stages, then arguments of the batch.
        """
        if stage.wired:
            return (dict(values), part.args, part.kwargs), {}
        names = self.by_name(stage.index, list(part.kwargs), first=not taken)
        own = {name: part.kwargs[name] for name in names}
        if not taken:
            return part.args, own
        args, by_value = as_arguments(taken, values, spread=stage.spreads)
        return args, {**by_value, **own}

    def batch_part(
        self, stage: PipelineStage, taken: Sequence[Edge], part: Microbatch
    ) -> Arguments:
        """Those of a stage's arguments that come from the batch."""
        if stage.wired:
            return part.args, part.kwargs
        names = self.by_name(stage.index, list(part.kwargs), first=not taken)
        return () if taken else part.args, {name: part.kwargs[name] for name in names}


def as_arguments(
    taken: Sequence[Edge], values: Mapping[str, Any], *, spread: Sequence[type] = (tuple,)
) -> Arguments:
    """The arguments of a plain stage that uses these values.

    A single value is passed by position; if its type is in ``spread``, its items become several arguments.
    Several values are passed by name.
    """
    if len(taken) > 1:
        return (), {edge.value: values[edge.value] for edge in taken}
    value = values[taken[0].value]
    return (tuple(value) if type(value) in spread else (value,)), {}


def chosen(given: Sequence[Edge], output: Any, *, wired: bool = False) -> list[Any]:
    """The values in a stage's output, in the order of the edges."""
    return list(as_values(given, output, wired=wired).values()) if given else []


def as_values(given: Sequence[Edge], output: Any, *, wired: bool = False) -> dict[str, Any]:
    """The values in a stage's output by name: the whole output, or several items of a dict.

    Raises:
        SpecError: several values are needed, and the output is not a dict that has them all.
    """
    if len(given) == 1 and not wired:
        return {given[0].value: output}
    names = [edge.value for edge in given]
    if not isinstance(output, dict) or not output.keys() >= set(names):
        found = list(output) if isinstance(output, dict) else f"a {type(output).__name__}"
        raise SpecError(
            f"stage {given[0].source} must return a dict with {names}, but it returned {found}"
        )
    return {name: output[name] for name in names}


# ---- slots and messages


Specs = Mapping[str, ValueSpec]
"""The spec of each value that travels, by name."""

Gradients = Sequence[Tensor | None]


class Held(NamedTuple):
    """A value, and the tensors in it."""

    value: Any
    tensors: Sequence[Tensor]


class Exchange:
    """The slots and channels of one rank's bound program.

    Each method returns a function of the microbatch, which the program then calls in every step.

    Args:
        program: what the rank does.
        transport: its end.
        specs: for each microbatch, the agreed specs of its values.
        devices: the device of each stage.
    """

    def __init__(
        self,
        program: RankProgram,
        transport: Transport,
        specs: Sequence[Specs],
        devices: Mapping[int, torch.device],
    ) -> None:
        self._program = program
        self._transport = transport
        self.specs = specs
        self._devices = devices
        self._count = len(specs)
        self._values: dict[str, list[Held | None]] = {}
        self._owed: dict[tuple[str, int], list[Gradients | None]] = {}
        self._posted: dict[Action, Ticket] = {}

    def clear(self) -> None:
        """Empty all slots; an interrupted step leaves some filled."""
        for held in self._values.values():
            held[:] = [None] * self._count
        for owed in self._owed.values():
            owed[:] = [None] * self._count
        self._posted.clear()

    @property
    def untaken(self) -> list[Action]:
        """The receives whose messages no action has used."""
        return [action for action in self._posted if action.op in RECV_OPS]

    # ---- values, forward

    def reader(self, stage: int) -> Callable[[int], list[Any]]:
        """Reads the values that a stage uses, in the order of its edges."""
        read = [self._read(edge, stage) for edge in self._program.taken(stage)]
        if len(read) == 1:
            (only,) = read
            return lambda microbatch: [only(microbatch).value]
        return lambda microbatch: [one(microbatch).value for one in read]

    def _read(self, edge: Edge, reader: int | Action) -> Callable[[int], Held]:
        slots = self._slots(edge.value)
        last = self._program.last_reads(edge.value, reader)

        def read(microbatch: int) -> Held:
            held = slots[microbatch]
            if held is None:
                raise InternalError(f"value {edge.value!r} of microbatch {microbatch} is not here")
            if microbatch in last:
                slots[microbatch] = None
            return held

        return read

    def _slots(self, value: str) -> list[Held | None]:
        return self._values.setdefault(value, [None] * self._count)

    def keeper(self, stage: int, *, wired: bool) -> Callable[[int, Any], None]:
        """Keeps the values in a stage's output until they have been used and sent.

        The function raises SpecError if a value is not what was agreed on, before anything of it is sent.
        """
        given = self._program.given(stage)
        specs = [[of[edge.value] for edge in given] for of in self.specs]
        slots = [self._slots(edge.value) for edge in given]
        read = [bool(self._program.uses_of[edge.value]) for edge in given]
        if len(given) == 1 and not wired and read[0]:
            (edge,), (held,) = given, slots

            def keep_one(microbatch: int, output: Any) -> None:
                tensors = _checked(output, specs[microbatch][0], edge, microbatch)
                held[microbatch] = Held(output, tensors)

            return keep_one

        def keep(microbatch: int, output: Any) -> None:
            values = chosen(given, output, wired=wired)
            for i, value in enumerate(values):
                tensors = _checked(value, specs[microbatch][i], given[i], microbatch)
                if read[i]:
                    slots[i][microbatch] = Held(value, tensors)

        return keep

    def check_unchanged(self, stage: int, microbatch: int, changed: Sequence[int]) -> None:
        """Check that no later stage uses a value that this stage has changed in place.

        In the unsplit model the later stage would see the change. Here each user of a value has its own
        copy, and the gradient of one user does not flow through what another one did to it.

        Args:
            stage: the stage that changed something.
            microbatch: in which microbatch.
            changed: the positions of the changed tensors among its arguments.

        Raises:
            SpecError: a later stage uses one of them.
        """
        start = 0
        for edge in self._program.taken(stage):
            where = list(paths(self.specs[microbatch][edge.value].structure))
            found = [where[i - start] for i in changed if start <= i < start + len(where)]
            later = [target for target in edge.targets if target > stage]
            if found and later:
                raise SpecError(
                    f"stage {stage} changes the value {edge.value!r} in place ({', '.join(found)}), and "
                    f"stages {later} use it too; use an out-of-place operation, or clone the value first"
                )
            start += len(where)

    # ---- gradients, backward

    def owed(self, stage: int) -> Callable[[int], list[Tensor | None]]:
        """Adds up the gradients that came back for a stage's values: one for each tensor in them."""
        totals = [self._total(edge) for edge in self._program.given(stage)]
        if len(totals) == 1:
            return totals[0]
        return lambda microbatch: [grad for total in totals for grad in total(microbatch)]

    def _total(self, edge: Edge) -> Callable[[int], list[Tensor | None]]:
        """The sum over a value's users, from the last stage to the first whatever order they came in."""
        users = self._program.payers(edge) if edge.gradient else ()
        owed = [self._debts(edge.value, user) for user in users]
        lengths = [len(of[edge.value].tensors) for of in self.specs]
        if len(owed) == 1:
            (only,) = owed

            def total_of_one(microbatch: int) -> list[Tensor | None]:
                gradients, only[microbatch] = only[microbatch], None
                return [None] * lengths[microbatch] if gradients is None else list(gradients)

            return total_of_one

        def total(microbatch: int) -> list[Tensor | None]:
            found = []
            for debts in owed:
                gradients = debts[microbatch]
                if gradients is not None:
                    found.append(gradients)
                    debts[microbatch] = None
            if len(found) == 1:
                return list(found[0])
            if not found:
                return [None] * lengths[microbatch]
            return [_add(column) for column in zip(*found, strict=True)]

        return total

    def _debts(self, value: str, user: int) -> list[Gradients | None]:
        return self._owed.setdefault((value, user), [None] * self._count)

    def handing_back(self, stage: int) -> Callable[[int, Gradients], Gradients]:
        """Keeps the gradients of a stage's arguments for the stages that made those values.

        The function returns the gradients that are left over: those of the batch's own tensors.
        """
        taken = self._program.taken(stage)
        if not taken:
            return lambda microbatch, grads: grads
        debts = [self._debts(edge.value, stage) if edge.gradient else None for edge in taken]
        lengths = [[len(of[edge.value].tensors) for edge in taken] for of in self.specs]
        only = debts[0]
        if len(debts) == 1 and only is not None:

            def hand_back_one(microbatch: int, grads: Gradients) -> Gradients:
                (length,) = lengths[microbatch]
                only[microbatch] = grads[:length]
                return grads[length:]

            return hand_back_one

        def hand_back(microbatch: int, grads: Gradients) -> Gradients:
            start = 0
            for slot, length in zip(debts, lengths[microbatch], strict=True):
                if slot is not None:
                    slot[microbatch] = grads[start : start + length]
                start += length
            return grads[start:]

        return hand_back

    # ---- messages

    def packer(self, action: Action) -> Callable[[int], list[Tensor]]:
        """Makes the list of tensors that a SEND_F or SEND_B sends."""
        edges = self._program.wire(action).edges
        if action.op is Op.SEND_F:
            return self._value_packer(edges, action)
        return self._gradient_packer(edges, self._devices[action.stage])

    def _value_packer(self, edges: Sequence[Edge], action: Action) -> Callable[[int], list[Tensor]]:
        read = [self._read(edge, action) for edge in edges]
        packs = [[[t.pack for t in of[edge.value].tensors] for edge in edges] for of in self.specs]

        def pack(microbatch: int) -> list[Tensor]:
            return [
                one(tensor)
                for value, of in zip(read, packs[microbatch], strict=True)
                for one, tensor in zip(of, value(microbatch).tensors, strict=True)
            ]

        return pack

    def _gradient_packer(
        self, edges: Sequence[Edge], device: torch.device
    ) -> Callable[[int], list[Tensor]]:
        """A gradient for each tensor that travelled, zeros where it has none.

        If gradients may be missing, one more tensor at the end says which of them are there.
        """
        totals = [self._total(edge) for edge in edges]
        specs = [[spec for edge in edges for spec in of[edge.value].tensors] for of in self.specs]

        def pack(microbatch: int) -> list[Tensor]:
            tensors: list[Tensor] = []
            there: list[bool] = []
            found = [grad for total in totals for grad in total(microbatch)]
            for spec, grad in zip(specs[microbatch], found, strict=True):
                if spec.requires_grad:
                    tensors.append(spec.packed.zeros(device) if grad is None else spec.pack(grad))
                if spec.optional:
                    there.append(grad is not None)
            if there:
                tensors.append(torch.tensor(there, dtype=torch.uint8, device=device))
            return tensors

        return pack

    def sender(self, action: Action) -> Callable[[Sequence[Tensor]], None]:
        """Starts a SEND_F or SEND_B."""
        channel, posted = self._program.wire(action).channel, self._posted
        post_send = self._transport.post_send
        # Only a send that the program waits for must be found again by its action; the transport keeps the
        # rest.
        if action not in self._program.awaited:
            return lambda tensors: (post_send(channel, tensors), None)[1]

        def send(tensors: Sequence[Tensor]) -> None:
            posted[action] = post_send(channel, tensors)

        return send

    def poster(self, action: Action) -> Callable[[int], None]:
        """Starts a RECV_F or RECV_B."""
        wire, device = self._program.wire(action), self._devices[action.stage]
        specs = self._receive_specs(action, wire.edges)
        channel, posted, post = wire.channel, self._posted, self._transport.post_receive

        def receive(_: int) -> None:
            posted[action] = post(channel, specs, device)

        return receive

    def _receive_specs(self, action: Action, edges: Sequence[Edge]) -> list[TensorSpec]:
        of = self.specs[microbatch_of(action)]
        if action.op is Op.RECV_F:
            return [tensor.packed for edge in edges for tensor in of[edge.value].tensors]
        specs = [t.packed for edge in edges for t in of[edge.value].differentiable]
        optional = _optional(of, edges)
        return [*specs, TensorSpec((optional,), "uint8", False)] if optional else specs

    def pending(self, message: Action) -> Ticket | None:
        """The ticket of a message, or None once it was taken.

        The first stage that uses it takes it for all.
        """
        return self._posted.get(message)

    def settler(self, message: Action) -> Callable[[int], Sequence[Tensor]]:
        """Takes a message that is complete.

        Releases what was sent, or stores what arrived. Returns its tensors.
        """
        posted = self._posted
        accept = self._accepter(message) if message.op in RECV_OPS else None

        def settle(_: int) -> Sequence[Tensor]:
            tensors: Sequence[Tensor] = posted.pop(message).take()
            if accept is not None:
                accept(tensors)
            return tensors

        return settle

    def _accepter(self, receive: Action) -> Callable[[Sequence[Tensor]], None]:
        """Puts what a message brought into its slots.

        Values for their users, or gradients for their maker.
        """
        edges, microbatch = self._program.wire(receive).edges, microbatch_of(receive)
        if receive.op is Op.RECV_B:
            return self._gradient_accepter(edges, receive.peer_stage, microbatch)
        rows = [(self._slots(e.value), self.specs[microbatch][e.value]) for e in edges]

        def accept(tensors: Sequence[Tensor]) -> None:
            arrived = iter(tensors)
            for slots, spec in rows:
                given = [
                    t.unpack(next(arrived)).requires_grad_(t.requires_grad) for t in spec.tensors
                ]
                slots[microbatch] = Held(spec.fill(given), given)

        return accept

    def _gradient_accepter(
        self, edges: Sequence[Edge], user: int, microbatch: int
    ) -> Callable[[Sequence[Tensor]], None]:
        of = self.specs[microbatch]
        rows = [(self._debts(edge.value, user), of[edge.value].tensors) for edge in edges]
        optional = bool(_optional(of, edges))

        def accept(tensors: Sequence[Tensor]) -> None:
            there = iter(tensors[-1].tolist() if optional else ())
            arrived = iter(tensors)
            for debts, specs in rows:
                grads: list[Tensor | None] = []
                for spec in specs:
                    gradient = spec.unpack(next(arrived)) if spec.requires_grad else None
                    grads.append(gradient if not spec.optional or next(there) else None)
                debts[microbatch] = grads

        return accept


def _optional(specs: Specs, edges: Sequence[Edge]) -> int:
    """How many tensors of these values may be left without a gradient."""
    return sum(tensor.optional for edge in edges for tensor in specs[edge.value].tensors)


def _add(gradients: Sequence[Tensor | None]) -> Tensor | None:
    present = [gradient for gradient in gradients if gradient is not None]
    return reduce(torch.add, present) if present else None


def _checked(value: Any, spec: ValueSpec, edge: Edge, microbatch: int) -> list[Tensor]:
    """The tensors of a value, after a check that it is what was agreed with its users."""
    gradients = torch.is_grad_enabled()
    try:
        tensors, structure = flatten(value)
        if spec.fits(tensors, structure, gradients=gradients):
            return tensors
        gap = spec.difference(ValueSpec.of(value), gradients=gradients)
    except SpecError as error:
        gap = str(error)
    raise SpecError(
        f"the value {edge.value!r} of stage {edge.source}, microbatch {microbatch}, is not what was agreed: "
        f"{gap}; what a stage returns may depend only on the shapes and types of its arguments, not on the "
        "numbers in them"
    )


def microbatch_of(action: Action) -> int:
    """The microbatch of an action that has one."""
    if action.microbatch is None:
        raise SpecError(f"{action} names no microbatch")
    return action.microbatch
