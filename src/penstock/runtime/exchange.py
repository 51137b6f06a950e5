"""What a rank passes on in a step: values to the stages that use them, gradients to those that made them.

Stages of one rank hand over directly; for the others there are messages, checked before they are sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import SpecError
from penstock.runtime.arguments import chosen
from penstock.runtime.program import RankProgram
from penstock.runtime.values import GradientSums, Held, Values
from penstock.schedule import Action, Edge, Op
from penstock.schedule.action import RECV_OPS
from penstock.specs import TensorSpec, ValueSpec, flatten, paths
from penstock.transport import Ticket, Transport

Specs = Mapping[str, ValueSpec]
"""The spec of each value that travels, by name."""


class Exchange:
    """The values and gradients of one rank in one step.

    Args:
        program: what the rank does.
        transport: its end.
        specs: for each microbatch, what was agreed about its values.
        devices: where each of its stages lives.
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
        self._specs = specs
        self._devices = devices
        self._values = Values()
        self._gradients = GradientSums()
        self._posted: dict[Action, Ticket] = {}

    @property
    def untaken(self) -> list[Action]:
        """The receives whose messages nobody has used."""
        return [action for action in self._posted if action.op in RECV_OPS]

    # ---- between the stages of this rank

    def values(self, stage: int, microbatch: int) -> dict[str, Any]:
        """The values that a stage uses, by name."""
        taken = self._program.taken(stage)
        return {edge.value: self._values.take(edge.value, microbatch).value for edge in taken}

    def check_unchanged(self, stage: int, microbatch: int, changed: Sequence[int]) -> None:
        """Check that no later stage uses what a stage has changed in place.

        It would see the change in the unsplit model. Here each user of a value has its own, and the gradient
        of one does not flow through what another did.

        Args:
            stage: which one.
            microbatch: of which microbatch.
            changed: which tensors among its arguments.

        Raises:
            SpecError: a later one does.
        """
        start = 0
        for edge in self._program.taken(stage):
            where = list(paths(self._spec(edge, microbatch).structure))
            found = [where[i - start] for i in changed if start <= i < start + len(where)]
            later = [target for target in edge.targets if target > stage]
            if found and later:
                raise SpecError(
                    f"stage {stage} changes the value {edge.value!r} in place ({', '.join(found)}), and "
                    f"stages {later} use it too; use an operation that is not in place, or clone it first"
                )
            start += len(where)

    def keep(self, stage: int, microbatch: int, output: Any, *, wired: bool = False) -> None:
        """Keep the values that a stage's output holds until they are used and sent.

        Raises:
            SpecError: one is not what was agreed on; nothing of it is sent.
        """
        given = self._program.given(stage)
        for edge, value in zip(given, chosen(given, output, wired=wired), strict=True):
            tensors = _checked(value, self._spec(edge, microbatch), edge, microbatch)
            uses = self._program.uses_of[edge.value]
            self._values.put(edge.value, microbatch, Held(value, tensors), uses)

    def owed(self, stage: int, microbatch: int) -> list[Tensor | None]:
        """The gradients that came back for a stage's values, one for each of their tensors."""
        given = self._program.given(stage)
        return [grad for edge in given for grad in self._total(edge, microbatch)]

    def hand_back(
        self, stage: int, microbatch: int, grads: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """Keep the gradients of a stage's arguments for the stages that made the values.

        Returns:
            The gradients of what was no value but the batch's.
        """
        start = 0
        for edge in self._program.taken(stage):
            stop = start + len(self._spec(edge, microbatch).tensors)
            if edge.gradient:
                self._gradients.put(edge.value, microbatch, stage, grads[start:stop])
            start = stop
        return grads[start:]

    def _total(self, edge: Edge, microbatch: int) -> list[Tensor | None]:
        found = self._gradients.take(edge.value, microbatch)
        return found or [None] * len(self._spec(edge, microbatch).tensors)

    def _spec(self, edge: Edge, microbatch: int) -> ValueSpec:
        return self._specs[microbatch][edge.value]

    # ---- messages

    def values_to_send(self, action: Action) -> list[Tensor]:
        """The tensors of a SEND_F."""
        wire, microbatch = self._program.wire(action), microbatch_of(action)
        tensors: list[Tensor] = []
        for edge in wire.edges:
            found = self._values.take(edge.value, microbatch).tensors
            tensors += _packed(self._spec(edge, microbatch).tensors, found)
        return tensors

    def gradients_to_send(self, action: Action) -> list[Tensor]:
        """The tensors of a SEND_B: for each that travelled a gradient, zeros where it has none.

        Where a gradient may be missing, the last tensor says which are there.
        """
        wire, microbatch = self._program.wire(action), microbatch_of(action)
        device = self._devices[action.stage]
        tensors: list[Tensor] = []
        there: list[bool] = []
        for edge in wire.edges:
            specs = self._spec(edge, microbatch).tensors
            for spec, total in zip(specs, self._total(edge, microbatch), strict=True):
                if spec.requires_grad:
                    tensors.append(spec.packed.zeros(device) if total is None else spec.pack(total))
                if spec.optional:
                    there.append(total is not None)
        if there:
            tensors.append(torch.tensor(there, dtype=torch.uint8, device=device))
        return tensors

    def send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Start a SEND_F or SEND_B."""
        channel = self._program.wire(action).channel
        self._posted[action] = self._transport.post_send(channel, tensors)

    def post(self, action: Action) -> None:
        """Start a RECV_F or RECV_B."""
        wire, microbatch = self._program.wire(action), microbatch_of(action)
        specs: list[TensorSpec] = []
        for edge in wire.edges:
            spec = self._spec(edge, microbatch)
            tensors = spec.tensors if action.op is Op.RECV_F else spec.differentiable
            specs += [tensor.packed for tensor in tensors]
        if action.op is Op.RECV_B and (optional := self._optional(wire.edges, microbatch)):
            specs.append(TensorSpec((optional,), "uint8", False))
        self._posted[action] = self._transport.post_receive(
            wire.channel, specs, self._devices[action.stage]
        )

    def pending(self, message: Action) -> Ticket | None:
        """The ticket of what was posted; of several stages that use a message, the first takes it for all."""
        return self._posted.get(message)

    def settle(self, message: Action) -> Sequence[Tensor]:
        """Let go of what was sent, or take what arrived: the tensors."""
        tensors: Sequence[Tensor] = self._posted.pop(message).take()
        if message.op in RECV_OPS:
            self._accept(message, tensors)
        return tensors

    def _accept(self, receive: Action, tensors: Sequence[Tensor]) -> None:
        """Take a message apart: values for their users here, or gradients for their maker."""
        wire, microbatch = self._program.wire(receive), microbatch_of(receive)
        if receive.op is Op.RECV_B:
            self._accept_gradients(wire.edges, receive.peer_stage, microbatch, tensors)
            return
        arrived = iter(tensors)
        for edge in wire.edges:
            spec = self._spec(edge, microbatch)
            given = [t.unpack(next(arrived)).requires_grad_(t.requires_grad) for t in spec.tensors]
            uses = self._program.uses_of[edge.value]
            self._values.put(edge.value, microbatch, Held(spec.fill(given), given), uses)

    def _accept_gradients(
        self, edges: Sequence[Edge], user: int, microbatch: int, tensors: Sequence[Tensor]
    ) -> None:
        there = iter(tensors[-1].tolist() if self._optional(edges, microbatch) else ())
        arrived = iter(tensors)
        for edge in edges:
            grads: list[Tensor | None] = []
            for spec in self._spec(edge, microbatch).tensors:
                gradient = spec.unpack(next(arrived)) if spec.requires_grad else None
                grads.append(gradient if not spec.optional or next(there) else None)
            self._gradients.put(edge.value, microbatch, user, grads)

    def _optional(self, edges: Sequence[Edge], microbatch: int) -> int:
        """For how many tensors of these values a gradient may be missing."""
        return sum(t.optional for edge in edges for t in self._spec(edge, microbatch).tensors)


def _checked(value: Any, spec: ValueSpec, edge: Edge, microbatch: int) -> list[Tensor]:
    """The tensors of a value, if it is what was agreed with those that use it."""
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
        f"{gap}; what a stage gives may depend on the shapes and types of what it is called with, not on "
        "the numbers in it"
    )


def _packed(specs: Sequence[TensorSpec], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [spec.pack(tensor) for spec, tensor in zip(specs, tensors, strict=True)]


def microbatch_of(action: Action) -> int:
    """The microbatch of an action that has one."""
    if action.microbatch is None:
        raise SpecError(f"{action} names no microbatch")
    return action.microbatch
