"""Devices in numbers, and a meter of the time and memory that operations take on one.

Devices are described as their makers do: peak rates, memory and links. The share of a peak that a real
program reaches is its efficiency; the defaults are what large matrix products and copies commonly reach, and
a user who knows better can say so.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from penstock.errors import UsageError
from penstock.partition.calls.inference import memory_of

# ---- devices for which costs can be predicted


@dataclass(frozen=True)
class Device:
    """A device in numbers; times in seconds, rates per second.

    Args:
        name: its name.
        flops: peak dense floating-point operations by dtype, such as ``{"bfloat16": 989.4e12}``.
        memory: how many bytes it has.
        bandwidth: how many bytes its memory can read and write.
        node: how many of these devices a machine has; the link joins these, the network joins machines.
        link_bandwidth: bytes in one direction between two devices of a machine.
        link_latency: the latency of a message between these.
        network_bandwidth: bytes in one direction from a device to another machine.
        network_latency: the latency of a message to another machine.
        launch: the least time that an operation takes.
        compute_efficiency: the share of the peak that matrix products reach.
        memory_efficiency: the share of the bandwidth that other operations reach.
        sources: where the numbers are from, by their names.
    """

    name: str
    flops: Mapping[str, float]
    memory: float
    bandwidth: float
    node: int = 8
    link_bandwidth: float = 32e9
    link_latency: float = 10e-6
    network_bandwidth: float = 50e9
    network_latency: float = 20e-6
    launch: float = 4e-6
    compute_efficiency: float = 0.7
    memory_efficiency: float = 0.8
    sources: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        for name in ("compute_efficiency", "memory_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise UsageError(f"{name}={getattr(self, name)}: must be above 0, at most 1")

    def seconds(self, flops: float, moved: float, dtype: str) -> float:
        """How long an operation takes: as long as its arithmetic or its memory needs, whichever is longer.

        Args:
            flops: the floating-point operations of its products and convolutions.
            moved: the bytes that it reads and writes.
            dtype: the type of its operands, such as ``"bfloat16"``.
        """
        peak = self.flops.get(dtype, min(self.flops.values()))
        computing = flops / (peak * self.compute_efficiency)
        moving = moved / (self.bandwidth * self.memory_efficiency)
        return max(computing, moving, self.launch)

    def wire(self, devices: int) -> tuple[float, float]:
        """Latency and bandwidth of the slowest link among so many devices."""
        if devices <= self.node:
            return self.link_latency, self.link_bandwidth
        return self.network_latency, self.network_bandwidth


_NVIDIA = "NVIDIA, "
_NETWORK = "a 400 Gb/s InfiniBand NDR adapter for each device (NVIDIA ConnectX-7 data sheet)"
_LATENCY = "commonly seen with NCCL between two processes; not from a data sheet"
_LAUNCH = "commonly seen for kernels that PyTorch launches one by one; not from a data sheet"


def _nvidia(
    name: str, sheet: str, flops: Mapping[str, float], memory: float, bandwidth: float, link: float
) -> Device:
    return Device(
        name,
        flops,
        memory,
        bandwidth,
        link_bandwidth=link,
        sources={
            "flops": f"{_NVIDIA}{sheet}; dense, half of the figure with sparsity",
            "memory": f"{_NVIDIA}{sheet}",
            "bandwidth": f"{_NVIDIA}{sheet}",
            "link_bandwidth": f"{_NVIDIA}{sheet}; one direction, half of the total",
            "link_latency": _LATENCY,
            "network_bandwidth": _NETWORK,
            "network_latency": _LATENCY,
            "launch": _LAUNCH,
        },
    )


def _types(half: float, tf32: float, single: float) -> dict[str, float]:
    """Peaks by dtype; PyTorch computes in float32 unless it is told to use tf32."""
    return {"bfloat16": half, "float16": half, "tf32": tf32, "float32": single}


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _nvidia(
            "a100",
            "A100 80GB SXM data sheet, 2022",
            _types(312e12, 156e12, 19.5e12),
            80e9,
            2039e9,
            300e9,
        ),
        _nvidia(
            "h100",
            "H100 SXM data sheet, 2023",
            _types(989.4e12, 494.7e12, 66.9e12),
            80e9,
            3352e9,
            450e9,
        ),
        _nvidia(
            "h200",
            "H200 SXM data sheet, 2024",
            _types(989.4e12, 494.7e12, 66.9e12),
            141e9,
            4800e9,
            450e9,
        ),
        _nvidia(
            "b200",
            "DGX B200 data sheet, 2024, an eighth of its figures",
            _types(2250e12, 1125e12, 75e12),
            180e9,
            8000e9,
            900e9,
        ),
        _nvidia(
            "l40s",
            "L40S data sheet, 2023; PCIe 4.0 x16 between devices",
            _types(362.05e12, 183e12, 91.6e12),
            48e9,
            864e9,
            32e9,
        ),
        _nvidia(
            "rtx4090",
            "Ada GPU architecture white paper, 2022; products that accumulate in float32; PCIe 4.0 x16",
            _types(165.2e12, 82.6e12, 82.6e12),
            24e9,
            1008e9,
            32e9,
        ),
    )
}
"""The table, by name. Efficiencies are the defaults of :class:`Device`."""


def device_named(device: Device | str, **changes: float) -> Device:
    """A device of the table, or the given one, with some of its numbers changed.

    Args:
        device: a name, such as ``"h100"``, or a device.
        changes: numbers by their names, such as ``memory`` or ``compute_efficiency``; 0 changes nothing.

    Raises:
        UsageError: no device has that name.
    """
    if isinstance(device, str):
        found = DEVICES.get(device.lower().replace(" ", ""))
        if found is None:
            near = get_close_matches(device.lower(), DEVICES, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UsageError(
                f"device={device!r}: not in the table of devices; {hint}There are {', '.join(DEVICES)}; "
                "for another give a penstock.plan.Device with its numbers"
            )
        device = found
    known: dict[str, Any] = {name: number for name, number in changes.items() if number}
    return replace(device, **known)


# ---- a meter of operations: how long a device would take for them, and what they leave in memory


_ATEN = torch.ops.aten
_NO_WORK = {_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty}
"""Operations that only allocate memory."""


class Meter(TorchDispatchMode):
    """A mode that counts the work of all operations and the bytes of all memory that they allocate.

    Args:
        device: the device whose time is counted; by default no time is.

    Attributes:
        seconds: the time that the device would take for what was done so far.
        flops: the floating-point operations of products, convolutions and attention.
        live: the bytes that were allocated in the mode and are not freed yet.
        peak: the most of these at any time since :meth:`reset_peak`.
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
        """Run an operation, and note what it did."""
        result = func(*args, **(kwargs or {}))
        if func.namespace == "prim":
            return result
        made = list(_tensors(result))
        given = {memory_of(tensor) for tensor in _tensors(args)}
        new = [tensor for tensor in made if memory_of(tensor) not in given]
        for tensor in new:
            self._take(tensor)
        # An operation that returns nothing new and changes nothing makes a view, which is no work.
        if (new or func._schema.is_mutable) and func._overloadpacket not in _NO_WORK:
            self._work(func, args, kwargs or {}, result, made)
        return result

    def _take(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = memory_of(tensor), storage.nbytes()
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


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


# ---- attention: the fused kernel of the CPU, which runs without data; torch's counter does not know it


class FusedAttention(TorchFunctionMode):
    """A mode in which attention without data is the fused one, as it would be with data.

    On the meta device torch would choose the one that stores all scores.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer calls of attention, and pass on all others."""
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
    """Five products where forward has two, since the scores are computed again."""
    return _attention(query, key, value) * 5 // 2


_ATTENTION: dict[Any, Callable[..., int]] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def shapes(values: Sequence[Any]) -> tuple[Any, ...]:
    """What determines the cost of a call: shapes, types and plain values."""
    return tuple(map(_shape, values))


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    if isinstance(value, tuple | list):
        return tuple(map(_shape, value))
    if isinstance(value, Mapping):
        return tuple((name, _shape(item)) for name, item in value.items())
    return value if isinstance(value, int | float | str | bool | None) else type(value)
