"""Look at what a backward pass does: the operations it runs and the memory it keeps."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Probe(TorchDispatchMode):
    """Counts the operations that run, and remembers, weakly, every storage that they return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                storage = leaf.untyped_storage()
                self._storages[id(storage)] = weakref.ref(storage)
        return result

    def __enter__(self) -> Probe:
        # What is freed is freed without the garbage collector.
        gc.disable()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        gc.enable()

    @property
    def products(self) -> int:
        """How many matrix products have run."""
        return sum(self.counts[name] for name in ("mm", "addmm", "bmm", "baddbmm"))

    def alive(self, besides: Iterable[Tensor | None]) -> int:
        """The bytes that are alive, less those of some tensors."""
        dense = [t for t in besides if t is not None and t.layout == torch.strided]
        skipped = {id(tensor.untyped_storage()) for tensor in dense}
        storages = {id(storage): storage for ref in self._storages.values() if (storage := ref())}
        return sum(s.nbytes() for key, s in storages.items() if key not in skipped)
