"""Watch operations: how long a device would take for them, and what they leave in memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from penstock.plan.devices import Device

_ATEN = torch.ops.aten
_NO_WORK = {_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty}
"""Operations that only take memory."""


class Meter(TorchDispatchMode):
    """While it is held, counts the work of all operations and the bytes of all memory that they take.

    Args:
        device: whose time is counted; by default none is.

    Attributes:
        seconds: that the device would take for what was done so far.
        flops: of products, convolutions and attention.
        live: bytes that were taken while the meter was held, and not given back yet.
        peak: the most of them at any time since :meth:`reset_peak`.
    """

    def __init__(self, device: Device | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.seconds = 0.0
        self.flops = 0.0
        self.live = 0
        self.peak = 0

    def reset_peak(self) -> None:
        """Let :attr:`peak` start from what is alive now."""
        self.peak = self.live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Let an operation run, and note what it did."""
        result = func(*args, **(kwargs or {}))
        if func.namespace == "prim":
            return result
        made = list(_tensors(result))
        given = {storage_key(tensor) for tensor in _tensors(args)}
        new = [tensor for tensor in made if storage_key(tensor) not in given]
        for tensor in new:
            self._take(tensor)
        # What gives nothing new and changes nothing is a view.
        if (new or func._schema.is_mutable) and func._overloadpacket not in _NO_WORK:
            self._work(func, args, kwargs or {}, result, made)
        return result

    def _take(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage_key(tensor), storage.nbytes()
        if key in self._storages:
            return

        def given_back(_: Any) -> None:
            del self._storages[key]
            self.live -= size

        self._storages[key] = weakref.ref(storage, given_back)
        self.live += size
        self.peak = max(self.peak, self.live)

    def _work(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any, made: Any
    ) -> None:
        if self._device is None:
            return
        packet = func._overloadpacket
        flops = 0
        if packet in _ATTENTION:
            flops = _ATTENTION[packet](*args)
        elif packet in flop_registry:
            count = cast("Any", flop_registry)[packet]
            flops = count(*args, **kwargs, out_val=result)
        operands = list(_tensors(args))
        moved = sum(tensor.nbytes for tensor in (*operands, *made))
        kind = (operands or made or [torch.empty(0)])[0].dtype
        self.flops += flops
        self.seconds += self._device.seconds(flops, moved, str(kind).removeprefix("torch."))


def storage_key(tensor: Tensor) -> int:
    """A number for the memory of a tensor, as long as that lives; also of one without data."""
    # The only thing that tells two storages without data apart: both are at address 0.
    return int(tensor.untyped_storage()._cdata)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


# ---- attention: the fused one of the CPU, which has a form without data; torch's counter does not know it


class FusedAttention(TorchFunctionMode):
    """While it is held, attention without data is the fused one, as where there is data.

    On the meta device torch would choose the one that writes all scores down.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer a call of attention; let all others be."""
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return _fused(*args, **(kwargs or {}))


def _fused(  # noqa: PLR0913 - as torch's attention
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    mask = attn_mask.to(query.dtype) if attn_mask is not None else None
    found: Tensor = _ATEN._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
    )[0]
    return found


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> int:
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.shape[-2] * (width + value.shape[-1])


def _attention_backward(_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> int:
    """Five products where forward has two: the scores are computed again."""
    return _attention(query, key, value) * 5 // 2


_ATTENTION: dict[Any, Callable[..., int]] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def shapes(values: Sequence[Any]) -> tuple[Any, ...]:
    """What tells calls apart by what they cost: shapes, types and plain values."""
    return tuple(map(_shape, values))


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    if isinstance(value, tuple | list):
        return tuple(map(_shape, value))
    if isinstance(value, Mapping):
        return tuple((name, _shape(item)) for name, item in value.items())
    return value if isinstance(value, int | float | str | bool | None) else type(value)
