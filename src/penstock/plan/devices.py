"""Devices that costs can be predicted for, as their makers describe them: peak rates, memory and links.

What a real program reaches of a peak is its efficiency; the defaults below are what large matrix products
and copies commonly reach, and a user who knows better says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from penstock.errors import UsageError


@dataclass(frozen=True)
class Device:
    """A device in numbers; times in seconds, rates per second.

    Args:
        name: what it is called.
        flops: peak floating-point operations by dtype, dense, such as ``{"bfloat16": 989.4e12}``.
        memory: bytes.
        bandwidth: bytes that its memory reads and writes.
        node: how many of them one machine holds; these are joined by its link, machines by the network.
        link_bandwidth: bytes in one direction between two devices of a machine.
        link_latency: of a message between them.
        network_bandwidth: bytes in one direction that a device has to another machine.
        network_latency: of a message to another machine.
        launch: the least that an operation takes.
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
            flops: of its products and convolutions.
            moved: bytes that it reads and writes.
            dtype: of its operands, such as ``"bfloat16"``.
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
_LATENCY = "commonly seen with NCCL between two processes; not of a data sheet"
_LAUNCH = "commonly seen for kernels that PyTorch launches one by one; not of a data sheet"


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
    """Peaks by dtype; float32 is what PyTorch does unless it is told to use tf32."""
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
            "DGX B200 data sheet, 2024, an eighth of it",
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
        changes: numbers by their names, such as ``memory`` or ``compute_efficiency``; 0 leaves one.

    Raises:
        UsageError: there is none of that name.
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
