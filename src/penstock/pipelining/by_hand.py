"""A stage that the user drives call by call: what has arrived for it, and the messages that it exchanges."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp

from penstock.parallel import adapter_of, alone, gathered
from penstock.pipelining._utils import CallError, PipeliningMetadataError
from penstock.stage import PipelineStage as OwnStage
from penstock.values import TensorSpec, ValueSpec, flatten, infer_output

__all__ = ["ByHand", "P2POp", "Wires", "start", "start_by_peer", "wait_all"]

# ---- connections to the ranks of neighbouring stages


class Wires:
    """The process group of a pipeline, as one stage uses it.

    Args:
        group: the process group.
        rank: the rank of this process in it.
        rank_of: gives the rank of a stage.
        device: the device that messages are on.
    """

    def __init__(
        self, group: Any, rank: int, rank_of: Callable[[int], int], device: torch.device
    ) -> None:
        self._group, self._rank, self._rank_of, self._device = group, rank, rank_of, device

    def is_here(self, stage: int) -> bool:
        """Whether a stage is in this process."""
        return self._rank_of(stage) == self._rank

    def outgoing(self, tensor: Tensor, stage: int) -> P2POp:
        """A send to the rank of a stage."""
        return P2POp(dist.isend, tensor, group=self._group, group_peer=self._rank_of(stage))

    def incoming(self, buffer: Tensor, stage: int) -> P2POp:
        """A receive from the rank of a stage."""
        return P2POp(dist.irecv, buffer, group=self._group, group_peer=self._rank_of(stage))

    def tell(self, stage: int, spec: ValueSpec) -> None:
        """Send a stage the spec of what it will be sent."""
        text = json.dumps(spec.to_json()).encode()
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._device)
        size = torch.tensor([len(text)], device=self._device)
        for message in (size, data):
            dist.send(message, group=self._group, group_dst=self._rank_of(stage))

    def told(self, stage: int) -> ValueSpec:
        """Receive the spec of what a stage will send."""
        size = torch.zeros(1, dtype=torch.int64, device=self._device)
        dist.recv(size, group=self._group, group_src=self._rank_of(stage))
        data = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        dist.recv(data, group=self._group, group_src=self._rank_of(stage))
        return ValueSpec.from_json(json.loads(bytes(data.tolist()).decode()))


def start(p2p_ops: Sequence[P2POp], desc: str | None = None) -> list[Any]:
    """Start sends and receives, and return the work to wait for.

    Operations of one direction are started one by one: they cannot block each other, while NCCL would run a
    batch of them in sequence. Only a mixture could wait in a circle, and goes as a batch.
    """
    if len({one.op for one in p2p_ops}) == 1:
        return [one.op(one.tensor, None, one.group, one.tag, one.group_peer) for one in p2p_ops]
    return dist.batch_isend_irecv(list(p2p_ops)) if p2p_ops else []


def start_by_peer(p2p_ops: Sequence[P2POp], desc: str | None = None) -> dict[int, list[Any]]:
    """Start sends and receives peer by peer, in rank order, and return the work to wait for by peer."""
    peers = sorted({operation.peer for operation in p2p_ops})
    return {peer: start([one for one in p2p_ops if one.peer == peer]) for peer in peers}


def wait_all(work: Sequence[Any]) -> None:
    """Wait for communication."""
    for item in work:
        item.wait()


# ---- the stage

Gradients = tuple[Tensor | None, ...]


@dataclass
class _Left:
    """What microbatches have left behind, by microbatch."""

    inputs: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    arriving: dict[int, list[Tensor]] = field(default_factory=dict)
    arriving_back: dict[int, list[Tensor | None]] = field(default_factory=dict)


class ByHand:
    """Penstock's stage, with the messages to its neighbours.

    Args:
        own: the stage.
        wires: how it reaches the other stages.
        example: an example of its output for a microbatch; without one, the module is tried on empty
            tensors.
    """

    def __init__(self, own: OwnStage, wires: Wires, example: Any = None) -> None:
        self.own = own
        self._wires = wires
        self._example = example
        self._adapter = adapter_of(own.module, lambda: own.apart)
        self._adapted = False
        self._whole: set[int] = set()
        self._count = 0
        self._trains = False
        self._taken: ValueSpec | None = None
        self._given = ValueSpec.of(())
        self._left = _Left()

    # ---- what travels

    def prepare(self, count: int, args: Any, kwargs: Mapping[str, Any], *, trains: bool) -> Any:
        """Agree with the neighbours on what travels.

        Args:
            count: the number of microbatches.
            args: the arguments of the first stage; for others, the spec from the previous stage, if it is
                here.
            kwargs: keyword arguments.
            trains: whether gradients come back.

        Returns:
            The spec of the output, if the next stage is in this process.
        """
        self._count, self._trains = count, trains
        self._taken = self._find_taken(args)
        if self.own.is_last:
            return None
        self._given = self._find_given(self._taken, kwargs)
        self._given.check_travels(f"what stage {self.own.index} gives")
        following = self.own.index + 1
        if self._wires.is_here(following):
            return self._given
        self._wires.tell(following, self._given)
        return None

    def _find_taken(self, args: Any) -> ValueSpec:
        if self.own.is_first:
            return ValueSpec.of(tuple(args))
        found = args if isinstance(args, ValueSpec) else self._wires.told(self.own.index - 1)
        value = found.without_data()
        spec = ValueSpec.of(tuple(value) if isinstance(value, tuple | list) else (value,))
        return _with_gradients(spec, self._trains)

    def _find_given(self, taken: ValueSpec, kwargs: Mapping[str, Any]) -> ValueSpec:
        if self._example is None:
            named = ValueSpec.of(dict(kwargs)).without_data()
            arguments = ValueSpec.of((taken.without_data(), named))
            found = infer_output(alone(self.own.module), arguments, self.own.device)
        else:
            found = ValueSpec.of(self._example)
        return _with_gradients(found, self._trains)

    @property
    def prepared(self) -> bool:
        """Whether the stage knows what travels."""
        return self._taken is not None

    def _known(self) -> ValueSpec:
        if self._taken is None:
            raise CallError(
                f"stage {self.own.index} does not know yet what travels: its schedule must call "
                "_initialize_stage first"
            )
        return self._taken

    # ---- messages

    def receives(self, microbatch: int) -> list[P2POp]:
        """The receives that bring a microbatch's values."""
        taken, previous = self._known(), self.own.index - 1
        if self.own.is_first or self._wires.is_here(previous):
            return []
        buffers = [_buffer(spec, self.own.device) for spec in taken.tensors]
        pairs = zip(taken.tensors, buffers, strict=True)
        self._left.arriving[microbatch] = [spec.unpack(buffer) for spec, buffer in pairs]
        return [self._wires.incoming(buffer, previous) for buffer in buffers]

    def sends(self, microbatch: int) -> list[P2POp]:
        """The sends that take a microbatch's values to the next stage."""
        following = self.own.index + 1
        if self.own.is_last or self._wires.is_here(following):
            return []
        output = self._of(self._left.outputs, microbatch, "forward_one_chunk")
        found, expected = ValueSpec.of(output), self._given
        if told := expected.difference(found, gradients=False):
            raise PipeliningMetadataError(
                f"stage {self.own.index}, microbatch {microbatch}: its output, {told}"
            )
        pairs = zip(expected.tensors, flatten(output)[0], strict=True)
        data = [spec.pack(tensor) for spec, tensor in pairs]
        return [self._wires.outgoing(tensor, following) for tensor in data]

    def receives_back(self, microbatch: int) -> list[P2POp]:
        """The receives that bring the gradients of those values."""
        self._known()
        following = self.own.index + 1
        if not self._trains or self.own.is_last or self._wires.is_here(following):
            return []
        specs = self._given.tensors
        buffers = [_buffer(s, self.own.device) if s.requires_grad else None for s in specs]
        pairs = zip(specs, buffers, strict=True)
        self._left.arriving_back[microbatch] = [
            None if buffer is None else spec.unpack(buffer) for spec, buffer in pairs
        ]
        arriving = [buffer for buffer in buffers if buffer is not None]
        return [self._wires.incoming(buffer, following) for buffer in arriving]

    def sends_back(self, gradients: Sequence[Tensor | None]) -> list[P2POp]:
        """The sends that take the gradients of the arguments to the previous stage."""
        previous = self.own.index - 1
        if not self._trains or self.own.is_first or self._wires.is_here(previous):
            return []
        pairs = zip(self._known().tensors, gradients, strict=True)
        data = [
            _buffer(spec, self.own.device).zero_() if gradient is None else spec.pack(gradient)
            for spec, gradient in pairs
            if spec.requires_grad
        ]
        return [self._wires.outgoing(tensor, previous) for tensor in data]

    def take(self, microbatch: int, value: Any) -> None:
        """Take the output of the previous stage, which is in this process."""
        self._left.arriving[microbatch] = [tensor.detach() for tensor in flatten(value)[0]]

    def take_back(self, microbatch: int, gradients: Sequence[Tensor | None]) -> None:
        """Take the gradients from the next stage, which is in this process."""
        self._left.arriving_back[microbatch] = list(gradients)

    # ---- work

    def forward(self, microbatch: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the module: the first stage on ``args``, the others on what has arrived."""
        if self.prepared and not self.own.is_first:
            args = self._arrived(microbatch)
        if self._adapter is not None and self._trains:
            if not self._adapted:
                self._adapter.begin(self._count)
                self._adapted = True
            self._adapter.forward(microbatch)
        output = self.own.forward(microbatch, args, kwargs)
        if self.prepared:
            self._left.inputs[microbatch] = tuple(args)
            self._left.outputs[microbatch] = output
        return output

    def _arrived(self, microbatch: int) -> tuple[Any, ...]:
        taken, asked = self._known(), torch.is_grad_enabled()
        tensors = self._of(self._left.arriving, microbatch, "get_fwd_recv_ops")
        pairs = zip(tensors, taken.tensors, strict=True)
        found = [tensor.requires_grad_(spec.requires_grad and asked) for tensor, spec in pairs]
        return tuple(taken.fill(found))

    def backward(self, microbatch: int, loss: Tensor | None, *, full: bool) -> Gradients:
        """Run backward or its inputs' half.

        Returns the gradients of the tensors in the positional arguments.
        """
        roots = self._roots(microbatch, loss)
        if self._adapter is not None:
            self._adapter.backward(microbatch)
            if self._adapter.whole_backward and not full:
                full = True
                self._whole.add(microbatch)
        found = (self.own.backward if full else self.own.backward_input)(microbatch, roots)
        if full:
            self._done(microbatch)
        self._left.outputs.pop(microbatch, None)
        return tuple(found[: len(flatten(self._left.inputs.pop(microbatch, ()))[0])])

    def _roots(self, microbatch: int, loss: Tensor | None) -> Sequence[Tensor | None] | None:
        if not self.own.is_last:
            found: list[Tensor | None] = self._of(
                self._left.arriving_back, microbatch, "get_bwd_recv_ops"
            )
            return found
        if loss is None:
            raise CallError(
                f"backward of stage {self.own.index}, the last one, starts at loss=, which was not given"
            )
        self.own.start_from(microbatch, gathered(loss))
        return None

    def weight(self, microbatch: int) -> None:
        """The weights' half of backward. If the stage is sharded, the inputs' half has done it already."""
        if microbatch in self._whole:
            self._whole.remove(microbatch)
            return
        if self._adapter is not None:
            self._adapter.backward(microbatch)
        self.own.backward_weight(microbatch)
        self._done(microbatch)

    def _done(self, microbatch: int) -> None:
        if self._adapter is not None:
            self._adapter.done(microbatch)

    def finish(self) -> None:
        """Reduce gradients over replicas or shards, once per step."""
        if self._adapter is not None and self._adapted:
            self._adapted = False
            self._adapter.finish()

    def clear(self) -> None:
        """Drop what microbatches have left behind."""
        self._left = _Left()
        self._whole.clear()
        self.own.clear()

    def _of(self, left: dict[int, Any], microbatch: int, before: str) -> Any:
        if microbatch not in left:
            raise CallError(
                f"stage {self.own.index} has nothing for microbatch {microbatch}; {before} comes first"
            )
        return left[microbatch]


def _with_gradients(spec: ValueSpec, trains: bool) -> ValueSpec:
    tensors = [replace(one, requires_grad=one.requires_grad and trains) for one in spec.tensors]
    return replace(spec, tensors=tuple(tensors))


def _buffer(spec: TensorSpec, device: torch.device) -> Tensor:
    return spec.packed.empty(device)
