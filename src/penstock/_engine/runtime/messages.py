"""The messages of one rank in a step: received ahead, and freed once their receiver has used them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock._engine.parallel import arrived, put_together, take_apart
from penstock._engine.runtime.calls import StepState
from penstock._engine.runtime.kinds import Kind
from penstock._engine.runtime.program import Instruction, Program, Wire
from penstock._engine.transport import FIRST_TAG, LEFT, Arrival, Sending, Transport
from penstock._engine.values import Layout, TensorLayout, flatten, layout_of, restrided
from penstock.errors import MessageError, SpecError
from penstock.schedule import Action, Op
from penstock.schedule.dependencies import counterpart

_FLAGS = "flags"
"""The first leaf of a message in which gradients may be missing."""


class Messages:
    """What is on its way to and from this rank.

    Time goes to the right. Sends never wait; a receive is posted where the program says so, and taken by the
    action that needs it::

        rank 0   0F0 0SEND_F0 ...............................  0RECV_B0 ......  0B0 takes the gradient,
                      │ keeps its tensors                         ▲             and lets go of 0SEND_F0
                      ▼                                           │
        rank 1   1RECV_F0 ... 1F0 takes the value  ... 1B0 1SEND_B0

    **Layouts.** The first message of a kind on a wire is preceded by its layout. Its receive cannot be posted
    before that has come: it queues, as do those behind it, since a channel's messages are posted in order.
    Later ones have memory ready from their RECV on.

    **Proofs.** Rank 1 has sent the gradient after it had used the value. So when the gradient is taken, the
    value's send is over, and its memory is freed without a wait. ``Program.proves`` lists these pairs. What
    nothing proves waits for its WAIT_SEND, or for the end of the step.

    Args:
        program: what this rank does.
        step: the call, with the kinds of its microbatches and what travels for each.
        transport: this rank's end.
        devices: where each stage lives.
        proves: for each message that arrives, the sends that are over by then.
    """

    def __init__(
        self,
        program: Program,
        step: StepState,
        transport: Transport,
        devices: Mapping[int, torch.device],
        proves: Mapping[Action, Sequence[Action]],
    ) -> None:
        self._transport, self._devices, self._proves = transport, devices, proves
        self._kinds, self._flows = step.agreement.kinds, step.agreement.flows
        self._tags = 2 * program.schedule.stages**2
        self._arriving: dict[Action, Arrival | None] = {}
        self._leaving: dict[Action, tuple[int, Sending]] = {}
        self._described: list[Sending] = []
        self._queued: defaultdict[tuple[int, int, int], deque[Instruction]] = defaultdict(deque)

    def wire(self, instruction: Instruction) -> Wire:
        """The wire of a message."""
        wire: Wire = self._flows[instruction.microbatch].wire_of(instruction.action)
        return wire

    def _tag(self, wire: Wire, kind: Kind) -> int:
        return FIRST_TAG + kind.number * self._tags + wire.number

    # ---- sends

    def send_values(self, instruction: Instruction, wire: Wire, values: Sequence[Any]) -> None:
        """Send the values of a wire's edges."""
        leaves, tree = flatten(values[0] if len(values) == 1 else values)
        layouts = self._kinds[instruction.microbatch].layouts
        if wire.number not in layouts:
            self._describe(instruction, wire, Layout(tree, tuple(map(_layout, leaves))))
        self._send(instruction, wire, leaves, layouts[wire.number])

    def send_gradients(
        self, instruction: Instruction, wire: Wire, parts: Sequence[Sequence[Tensor | None]]
    ) -> None:
        """Send the gradients that each of a wire's edges has; None for those that are missing.

        If some are missing in the first message, each carries flags that say which. A missing one travels as
        zeros of the forward value's size.
        """
        kind, leaves = self._kinds[instruction.microbatch], [g for part in parts for g in part]
        if wire.number not in kind.layouts:
            layouts: list[Any] = []
            for (edge, _), part in zip(wire.edges, parts, strict=True):
                layouts += kind.missing.get(edge.value) or map(gradient_layout, part)
            if any(gradient is None for gradient in leaves):
                flags = torch.empty(len(layouts), dtype=torch.uint8, device="cpu")
                layouts = [_FLAGS, layout_of(flags), *layouts]
            self._describe(instruction, wire, Layout(flatten([0])[1], tuple(layouts)))
        layout = kind.layouts[wire.number]
        if layout.leaves[:1] == (_FLAGS,):
            there = [gradient is not None for gradient in leaves]
            flags = torch.tensor(there, dtype=torch.uint8, device="cpu")
            device = self._devices[instruction.stage]
            self._send(instruction, wire, [_FLAGS, flags.to(device), *leaves], layout)
        else:
            self._send(instruction, wire, leaves, layout)

    def _describe(self, instruction: Instruction, wire: Wire, layout: Layout) -> None:
        kind = self._kinds[instruction.microbatch]
        kind.layouts[wire.number] = layout
        tag = self._tag(wire, kind)
        self._described += self._transport.describe(wire.peer, tag, layout.describe())

    def _send(
        self, instruction: Instruction, wire: Wire, leaves: Sequence[Any], layout: Layout
    ) -> None:
        action, device = instruction.action, self._devices[instruction.stage]
        tensors = _checked(action, leaves, layout, device)
        if tensors:
            tag = self._tag(wire, self._kinds[instruction.microbatch])
            sending = self._transport.send(wire.peer, tag, tensors, wire.channel[2])
            if sending is not LEFT:
                self._leaving[action] = wire.peer, sending

    def wait_sent(self, instruction: Instruction) -> None:
        """Wait until the message that a WAIT_SEND is about has left."""
        send = counterpart(instruction.action)
        if send in self._leaving:
            peer, sending = self._leaving.pop(send)
            self._transport.activity.wait(str(instruction.action), peer)
            sending.wait()

    # ---- receives

    def receive(self, instruction: Instruction) -> None:
        """Start to receive if the layout is known; otherwise queue until it is."""
        wire = self.wire(instruction)
        if not wire.edges:
            return
        queue = self._queued[wire.channel]
        self._arriving[instruction.action] = None
        if queue or wire.number not in self._kinds[instruction.microbatch].layouts:
            queue.append(instruction)
        else:
            self._post(instruction, wire)

    def _post(self, instruction: Instruction, wire: Wire) -> None:
        kind = self._kinds[instruction.microbatch]
        tensors = kind.layouts[wire.number].tensors
        if tensors:
            tag, direction = self._tag(wire, kind), wire.channel[2]
            arrival = self._transport.post(wire.peer, tag, tensors, direction)
            self._arriving[instruction.action] = arrival

    def take(self, instruction: Instruction) -> tuple[Wire, list[Any], Any] | None:
        """Wait for a message.

        Returns:
            Its wire; its leaves, None for missing gradients; and how they are put together. None if nothing
            was to be received.
        """
        action, transport = instruction.action, self._transport
        if action not in self._arriving:
            return None
        wire = self.wire(instruction)
        transport.activity.wait(str(action), wire.peer)
        queue = self._queued[wire.channel]
        while instruction in queue:
            first = queue.popleft()
            before, kind = self.wire(first), self._kinds[first.microbatch]
            if before.number not in kind.layouts:
                text = transport.described(before.peer, self._tag(before, kind))
                kind.layouts[before.number] = Layout.read(text)
            self._post(first, before)
        arrival = self._arriving.pop(action)
        layout = self._kinds[instruction.microbatch].layouts[wire.number]
        came = iter(arrival.take() if arrival is not None else ())
        leaves = [
            _rebuilt(next(came), leaf) if isinstance(leaf, TensorLayout) else leaf
            for leaf in layout.leaves
        ]
        for send in self._proves.get(action, ()):
            if send in self._leaving:
                _, sending = self._leaving.pop(send)
                sending.used()
        if leaves[:1] == [_FLAGS]:
            flags, gradients = leaves[1].tolist(), leaves[2:]
            leaves = [g if there else None for there, g in zip(flags, gradients, strict=True)]
        return wire, leaves, layout.tree

    def end(self) -> None:
        """End a step: wait until everything that was sent has left.

        Raises:
            MessageError: something arrived that no action has used.
        """
        for action, (peer, sending) in self._leaving.items():
            self._transport.activity.wait(f"{action} to leave", peer)
            sending.wait()
        for sending in self._described:
            sending.wait()
        self._transport.settle()
        if self._arriving:
            unused = ", ".join(map(str, self._arriving))
            raise MessageError(f"no action used what arrived with {unused}")


# ---- layouts


def _layout(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if type(leaf) is Tensor or isinstance(leaf, torch.nn.Parameter):
        return layout_of(leaf)
    # A pending collective's result no longer requires grad once it has been waited for.
    learns = leaf.requires_grad
    local, sharding = take_apart(arrived(leaf))
    return layout_of(local)._replace(strides=None, learns=learns, sharding=sharding)


def gradient_layout(leaf: Any) -> Any:
    """The layout of a gradient of a tensor like this."""
    return _layout(leaf)._replace(strides=None, learns=False)


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
