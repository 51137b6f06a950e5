"""Memory of the CPU for messages, used again from step to step.

On a GPU, torch's allocator does the same, and knows which streams still use what. For the CPU it has none:
large memory is the system's each time, and each of its pages costs a fault.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

KEPT = 8
"""For so many calls memory is kept that none of them has used."""
_uses: Any = torch._C._storage_Use_Count
"""How many tensors, storages of Python and graphs hold a memory; no public name says so (torch 2.13)."""
_OURS = 2
"""How many of these are ours."""


class Buffers:
    """Buffers for messages; one is handed out again once nothing else holds its memory.

    So a call that looks like one before makes no new ones.

    Attributes:
        made: how many it has made so far.
    """

    def __init__(self) -> None:
        self.made, self._calls = 0, 0
        self._held: defaultdict[Any, list[list[Any]]] = defaultdict(list)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor, whose numbers are anything."""
        held = self._held[shape, dtype, torch.is_inference_mode_enabled()]
        for buffer in held:
            tensor, storage, _ = buffer
            if _uses(storage._cdata) == _OURS:
                break
        else:
            self.made += 1
            tensor = torch.empty(shape, dtype=dtype, device="cpu")
            buffer = [tensor, tensor.untyped_storage(), 0]
            held.append(buffer)
        buffer[2] = self._calls
        alias: Tensor = tensor.detach()
        return alias

    def bytes(self, size: int) -> Tensor:
        """A row of bytes."""
        return self.take((size,), torch.uint8)

    def rest(self) -> None:
        """Note the end of a call, and free what none has used for a while."""
        self._calls += 1
        for key, held in [*self._held.items()]:
            held[:] = [buffer for buffer in held if self._calls - buffer[2] <= KEPT]
            if not held:
                del self._held[key]
