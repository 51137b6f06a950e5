"""A meter of operations: what they compute and move, and the memory they leave allocated."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from penstock._engine.values import flatten, storage_key
from penstock.errors import UsageError
from penstock.partition.names import COLLECTIVES, FakeTensor
from penstock.partition.work import formula_of

Operation = tuple[float, float, str]
"""The floating-point operations of an operation, the bytes it moves and its dtype."""

_ATEN = torch.ops.aten
_NO_WORK = {_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty}
"""Operations that only allocate memory."""


class Meter(TorchDispatchMode):
    """A mode that counts the work of all operations and the bytes of all memory they allocate.

    Attributes:
        work: how often each operation has run.
        flops: the floating-point operations of products, convolutions and attention.
        live: the bytes that were allocated in the mode and not freed yet.
        peak: the largest ``live`` since ``reset_peak``.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work: Counter[Operation] = Counter()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.flops = 0.0
        self.live = 0
        self.peak = 0

    def reset_peak(self) -> None:
        """Restart ``peak`` from ``live``."""
        self.peak = self.live

    def allocated(self, key: int) -> bool:
        """Tell whether memory, by its ``storage_key``, was allocated in the mode and is not freed."""
        return key in self._storages

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and note what it did.

        Raises:
            UsageError: it communicates with other processes, which are not at this place and would not join.
        """
        if func.namespace in COLLECTIVES and not _is_fake((args, kwargs)):
            raise UsageError(
                f"the model's code communicates ({func}), and its costs are measured in one process, which "
                "would wait for the others; name a schedule in place of schedule='auto', or give a plan by "
                "penstock.plan.predict, which sends nothing"
            )
        result = func(*args, **(kwargs or {}))
        if func.namespace == "prim":
            return result
        results = _tensors(result)
        known = {storage_key(tensor) for tensor in _tensors(args)}
        new = [tensor for tensor in results if storage_key(tensor) not in known]
        for tensor in new:
            self._count(tensor)
        # An operation that returns nothing new and changes nothing makes a view, which is no work.
        if (new or func._schema.is_mutable) and func._overloadpacket not in _NO_WORK:
            self._work(func, args, kwargs or {}, result, results)
        return result

    def _count(self, tensor: Tensor) -> None:
        key = storage_key(tensor)
        if key < 0 or key in self._storages:
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes()

        def free(_: Any) -> None:
            del self._storages[key]
            self.live -= size

        self._storages[key] = weakref.ref(storage, free)
        self.live += size
        self.peak = max(self.peak, self.live)

    def _work(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
        results: list[Tensor],
    ) -> None:
        formula = formula_of(func)
        flops = formula(*args, **kwargs, out_val=result) if formula else 0
        self.flops += flops
        operands = [*_tensors(args), *results]
        moved = sum(tensor.nbytes for tensor in operands)
        dtype = operands[0].dtype if operands else torch.float32
        self.work[flops, moved, str(dtype).removeprefix("torch.")] += 1


def _is_fake(value: Any) -> bool:
    return any(isinstance(tensor, FakeTensor) for tensor in _tensors(value))


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]


# ---- attention


class FusedAttention(TorchFunctionMode):
    """A mode without dropout in attention, so that the CPU has a fused kernel, as a GPU has."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Change calls of attention, and pass on all others."""
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            args, kwargs = (*args[:4], 0.0, *args[5:])[: len(args)], {**kwargs, "dropout_p": 0.0}
            if len(args) > 4:
                del kwargs["dropout_p"]
        return func(*args, **kwargs)
