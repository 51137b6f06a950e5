"""Look at what a backward pass does: the operations it runs and the memory it keeps."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MATMULS = {"mm", "addmm", "bmm", "baddbmm"}


class OperationCounter(TorchDispatchMode):
    """Counts the operations that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def matmuls(self) -> int:
        return sum(self.counts[name] for name in MATMULS)


class StorageProbe(TorchDispatchMode):
    """Remembers, weakly, every storage that an operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                storage = leaf.untyped_storage()
                self._storages[id(storage)] = weakref.ref(storage)
        return result

    def alive(self, known: Iterable[Tensor | None] = ()) -> int:
        """Returns the bytes that are alive, less those of ``known``."""
        dense = [t for t in known if t is not None and t.layout == torch.strided]
        skipped = {id(tensor.untyped_storage()) for tensor in dense}
        storages = {id(storage): storage for ref in self._storages.values() if (storage := ref())}
        return sum(s.nbytes() for key, s in storages.items() if key not in skipped)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
