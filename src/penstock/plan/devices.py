"""The table of devices: what each computes, holds and sends.

The table describes devices as their makers do: peak rates, memory and links. The share of a peak that a real
program reaches is its efficiency; the defaults are what large matrix products and copies commonly reach, and
users can change them.
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
        name: its name.
        flops: peak dense floating-point operations by dtype, such as ``{"bfloat16": 989.4e12}``.
        memory: the bytes of its memory.
        bandwidth: the bytes that its memory can read and write.
        node: the number of such devices in a machine; the link joins these, the network joins machines.
        link_bandwidth: bytes in one direction between two devices of a machine.
        link_latency: the latency of a message between two devices of a machine.
        network_bandwidth: bytes in one direction from a device to another machine.
        network_latency: the latency of a message to another machine.
        launch: the least time that an operation takes.
        compute_efficiency: the share of the peak that matrix products reach.
        memory_efficiency: the share of the bandwidth that other operations reach.
        pace: how long a piece of work took while all ranks of the machine did it too; 0 if not measured.
        alone: how long the same work took while the others waited; 0 if not measured.
        sources: the source of each number, by its name.
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
    pace: float = 0.0
    alone: float = 0.0
    sources: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if not self.flops or min(*self.flops.values(), self.bandwidth) <= 0:
            raise UsageError(f"{self.name}: flops= and bandwidth= must be above 0")
        for name in ("compute_efficiency", "memory_efficiency"):
            if not 0 < getattr(self, name) <= 1:
                raise UsageError(f"{name}={getattr(self, name)}: must be above 0, at most 1")

    def seconds(self, flops: float, moved: float, dtype: str) -> float:
        """The time of an operation: the longer of its arithmetic and memory time, at least ``launch``.

        Args:
            flops: the floating-point operations of its products and convolutions.
            moved: the bytes that it reads and writes.
            dtype: the type of its operands, such as ``"bfloat16"``.
        """
        peak = self.flops.get(dtype, min(self.flops.values()))
        computing = flops / (peak * self.compute_efficiency)
        moving = moved / (self.bandwidth * self.memory_efficiency)
        return max(computing, moving, self.launch)

    def slower(self, factor: float) -> Device:
        """The same device, on which all work takes so many times as long."""
        flops = {dtype: rate / factor for dtype, rate in self.flops.items()}
        bandwidth, pace = self.bandwidth / factor, self.pace * factor
        return replace(
            self, flops=flops, bandwidth=bandwidth, launch=self.launch * factor, pace=pace
        )

    def wire(self, devices: int) -> tuple[float, float]:
        """Latency and bandwidth of the slowest link among so many devices."""
        if devices <= self.node:
            return self.link_latency, self.link_bandwidth
        return self.network_latency, self.network_bandwidth


_NETWORK = "a 400 Gb/s InfiniBand NDR adapter for each device (NVIDIA ConnectX-7 data sheet)"
_LATENCY = "commonly seen with NCCL between two processes; not from a data sheet"
_LAUNCH = "commonly seen for kernels that PyTorch launches one by one; not from a data sheet"


def _nvidia(
    name: str,
    sheet: str,
    peaks: tuple[float, float, float],
    memory: float,
    bandwidth: float,
    link: float,
) -> Device:
    """A GPU by its data sheet: peaks in teraflops, memory in GB, bandwidth and link in GB/s.

    The peaks are for half precision, TF32 and float32; PyTorch computes in float32 unless TF32 is switched
    on. For a GPU without TF32, its peak is that of float32.
    """
    half, tf32, single = (float(round(peak * 1e12)) for peak in peaks)
    return Device(
        name,
        {"bfloat16": half, "float16": half, "tf32": tf32, "float32": single},
        memory * 1e9,
        bandwidth * 1e9,
        link_bandwidth=link * 1e9,
        sources={
            "flops": f"NVIDIA, {sheet}; dense, half of the figure with sparsity",
            "memory": f"NVIDIA, {sheet}",
            "bandwidth": f"NVIDIA, {sheet}",
            "link_bandwidth": f"NVIDIA, {sheet}; one direction, half of the total",
            "link_latency": _LATENCY,
            "network_bandwidth": _NETWORK,
            "network_latency": _LATENCY,
            "launch": _LAUNCH,
        },
    )


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _nvidia("v100", "V100 SXM2 data sheet, 2020", (125, 15.7, 15.7), 32, 900, 150),
        _nvidia("t4", "T4 data sheet, 2019; PCIe 3.0 x16 between devices", (65, 8.1, 8.1), 16, 320, 16),
        _nvidia("l4", "L4 data sheet, 2023; PCIe 4.0 x16 between devices", (121, 60, 30.3), 24, 300, 32),
        _nvidia(
            "l40s", "L40S data sheet, 2023; PCIe 4.0 x16 between devices",
            (362.05, 183, 91.6), 48, 864, 32,
        ),
        _nvidia(
            "rtx4090",
            "Ada GPU architecture white paper, 2022; products that accumulate in float32; PCIe 4.0 x16",
            (165.2, 82.6, 82.6), 24, 1008, 32,
        ),
        _nvidia("a100", "A100 80GB SXM data sheet, 2022", (312, 156, 19.5), 80, 2039, 300),
        _nvidia("h100-pcie", "H100 PCIe data sheet, 2022", (756, 378, 51), 80, 2000, 300),
        _nvidia("h100", "H100 SXM data sheet, 2023", (989.4, 494.7, 66.9), 80, 3352, 450),
        _nvidia("h200", "H200 SXM data sheet, 2024", (989.4, 494.7, 66.9), 141, 4800, 450),
        _nvidia(
            "b200", "DGX B200 data sheet, 2024, an eighth of its figures",
            (2250, 1125, 75), 180, 8000, 900,
        ),
    )
}  # fmt: skip
"""The table, by name. Efficiencies are the defaults of `Device`."""


def device_named(device: Device | str, **changes: float | None) -> Device:
    """A device of the table, or the given one, with some of its numbers changed.

    Args:
        device: a name, such as ``"h100"``, or a device.
        changes: numbers by their names, such as ``memory`` or ``compute_efficiency``; None changes nothing.

    Raises:
        UsageError: no device has that name, or a number is not valid.
    """
    if isinstance(device, str):
        known = DEVICES.get(device.lower().replace(" ", ""))
        if known is None:
            near = get_close_matches(device.lower(), DEVICES, n=1)
            hint = f"did you mean {near[0]!r}? The" if near else "the"
            raise UsageError(
                f"device={device!r}: not in the table of devices; {hint} table has {', '.join(DEVICES)}; "
                "for another give a penstock.plan.Device with its numbers"
            )
        device = known
    numbers: dict[str, Any] = {
        name: number for name, number in changes.items() if number is not None
    }
    return replace(device, **numbers)


def device_called(product: str) -> Device | None:
    """The device of the table for a driver's name, such as ``"NVIDIA H100 PCIe"``; None if there is none."""
    words = product.lower().replace("-", " ").replace("rtx ", "rtx").split()
    matches = [d for d in DEVICES.values() if set(d.name.split("-")) <= set(words)]
    # "h100-pcie" before "h100".
    return max(matches, key=lambda device: len(device.name), default=None)
