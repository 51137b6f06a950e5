"""What one forward saves for its backward, moved to the host and back.

Autograd's hooks on saved tensors put a :class:`SavedTensor` in the place of each tensor. So the graph holds
no memory of its own, and a copy frees the device's unless somebody else holds it, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from penstock._engine.values import storage_key
from penstock.errors import StageError, UsageError


class SavedTensor:
    """A tensor that a graph has saved, on the device or away.

    Attributes:
        tensor: the tensor; None while its memory is on the host.
        changed: whether it was changed in place after the graph had saved it.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor.detach()
        self.key = storage_key(tensor)
        self.changed = False
        self._dtype, self._version = tensor.dtype, tensor._version
        self._place = (tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))

    def leave(self) -> None:
        """Let the memory go, which is on the host."""
        self.changed = self._is_changed()
        self.tensor = None

    def return_to(self, memory: Tensor) -> None:
        """Lie in memory on the device again."""
        self.tensor = memory.new_empty(0, dtype=self._dtype).set_(
            memory.untyped_storage(), *self._place
        )
        self._version = self.tensor._version

    def _is_changed(self) -> bool:
        return self.changed or (self.tensor is not None and self.tensor._version != self._version)

    def read(self) -> Tensor:
        """The tensor, as the graph needs it.

        Raises:
            UsageError: it is on the host.
            StageError: it was changed in place.
        """
        if self.tensor is None:
            raise UsageError(
                "backward needs activations that are on the host; run the RELOAD of this stage and "
                "microbatch before it"
            )
        if self._is_changed():
            raise StageError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: a tensor of shape {list(self.tensor.shape)}"
            )
        return self.tensor


class OffloadedForward:
    """A context for one forward, whose activations can then be moved to the host and back.

    Args:
        stays: tensors that never leave: weights, buffers, the batch.
        device: where the forward runs.
    """

    def __init__(self, stays: Iterable[Tensor], device: torch.device) -> None:
        self._stays = {storage_key(tensor) for tensor in stays if has_storage(tensor)}
        self._device = device
        # What the graph drops before it leaves is not moved.
        self._saved: WeakSet[SavedTensor] = WeakSet()
        self._memory: dict[int, Tensor] = {}
        self._arrived: Any = None
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> None:
        self._hooks.__enter__()

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> Any:
        base = tensor._base if tensor._is_view() else tensor
        movable = has_storage(tensor) and not isinstance(base, nn.Parameter)
        if not movable or tensor.device != self._device or storage_key(tensor) in self._stays:
            # Another tensor object, since an output that its own graph holds would never be freed.
            return tensor.detach()
        saved = SavedTensor(tensor)
        self._saved.add(saved)
        return saved

    def offload(self, leaves: Sequence[Tensor]) -> None:
        """Move what the graph has saved to the host, each memory once.

        Args:
            leaves: the leaves of the forward's arguments. Only the graph reads their numbers.
        """
        memories = {s.key: s.tensor.untyped_storage() for s in self._saved if s.tensor is not None}
        with _beside(self._device) as stream:
            for key, storage in memories.items():
                device = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
                pinned = stream is not None
                size = storage.nbytes()
                host = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
                self._memory[key] = host.copy_(device, non_blocking=pinned)
                if stream is not None:
                    device.record_stream(stream)
        for saved in self._saved:
            saved.leave()
        for leaf in leaves:
            if type(leaf) is Tensor and storage_key(leaf) not in self._stays:
                leaf.data = leaf.new_empty(()).expand(leaf.shape)

    def reload(self) -> None:
        """Bring it back; :meth:`wait` waits until it is there."""
        sizes = {key: host.numel() for key, host in self._memory.items()}
        # Memory of the device's usual stream, which the other may write once this one has come so far.
        memory = {
            key: torch.empty(size, dtype=torch.uint8, device=self._device)
            for key, size in sizes.items()
        }
        with _beside(self._device) as stream:
            for key, device in memory.items():
                device.copy_(self._memory[key], non_blocking=stream is not None)
            self._arrived = None if stream is None else stream.record_event()
        for saved in self._saved:
            saved.return_to(memory[saved.key])
        self._memory.clear()

    def wait(self) -> None:
        """Let what follows on the device wait for the way back."""
        if self._arrived is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._arrived)


def _unpack(packed: Any) -> Tensor:
    tensor: Tensor = packed.read() if isinstance(packed, SavedTensor) else packed
    return tensor


def has_storage(tensor: Tensor) -> bool:
    """Tell whether a tensor is a strided one whose memory can be copied as bytes."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    return plain and not tensor.is_meta and not tensor.is_quantized


_streams: dict[torch.device, torch.Stream] = {}


@contextmanager
def _beside(device: torch.device) -> Iterator[Any]:
    """A context on a stream of its own, which begins after what was queued; None on a CPU."""
    if device.type == "cpu":
        yield None
        return
    if device not in _streams:
        _streams[device] = torch.Stream(device=device)
    stream = _streams[device]
    stream.wait_stream(torch.accelerator.current_stream(device))
    with stream:
        yield stream
