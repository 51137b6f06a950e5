"""Count the bytes of the tensors that are alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Remembers, weakly, every storage that an operation returns while the mode is held."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._storages[storage.data_ptr()] = weakref.ref(storage)
        return result

    def count(self, without: Iterable[Tensor | None]) -> int:
        """Returns the bytes that are alive, less those of some tensors."""
        skipped = {t.untyped_storage().data_ptr() for t in without if t is not None}
        alive = {at: storage for at, ref in self._storages.items() if (storage := ref())}
        return sum(s.nbytes() for at, s in alive.items() if at not in skipped)
