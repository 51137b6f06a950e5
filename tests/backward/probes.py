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


def storages_of(values: Any) -> dict[int, torch.UntypedStorage]:
    dense = (t for t in tree_leaves(values) if isinstance(t, Tensor) and t.layout == torch.strided)
    return {id(storage): storage for storage in (t.untyped_storage() for t in dense)}


class Probe(TorchDispatchMode):
    """Counts the operations that run, and remembers, weakly, every storage that they return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        result = func(*args, **(kwargs or {}))
        made = storages_of(result)
        self._storages |= {key: weakref.ref(storage) for key, storage in made.items()}
        return result

    def __enter__(self) -> Probe:
        gc.disable()  # what is freed is freed without the garbage collector
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
        skipped = storages_of(list(besides))
        storages = {id(storage): storage for ref in self._storages.values() if (storage := ref())}
        return sum(s.nbytes() for key, s in storages.items() if key not in skipped)
