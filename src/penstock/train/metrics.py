"""What one step measured, as a value, a line of JSON and a line for people."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

PEAKS: Mapping[str, tuple[float, float]] = {
    "V100": (15.7, 15.7),
    "T4": (8.1, 8.1),
    "L4": (30.3, 60.0),
    "A100": (19.5, 156.0),
    "H100 PCIe": (51.0, 378.0),
    "H100": (67.0, 494.0),
    "H200": (67.0, 494.0),
}
"""Peak teraflops of GPUs by a part of their name: in float32, and in TF32 where they have it, dense."""


@dataclass(frozen=True)
class StepMetrics:
    """The numbers of one step.

    Args:
        step: counted from 1.
        time: when it ended, in seconds since 1970.
        rank: the rank that measured it.
        loss: mean training loss in nats per byte.
        gradient_norm: before clipping.
        learning_rate: that the step used.
        seconds: wall time of the step.
        tokens_per_second: bytes of text per second.
        memory: peak bytes of the process that holds most.
        mfu: the share of the devices' peak arithmetic that the model's own operations took; None where the
            peak is not known.
        bubble: idle share of the ranks' time, 0 to 1; on a GPU, where recording slows a step down, only of
            the steps that are shown.
        clocks: how the bubble was found: ``"measured"`` on the clocks of the ranks, or ``"replayed"`` from
            measured durations where the ranks of one process took turns.
        shown: whether it is one of those that are printed.
    """

    step: int
    time: float
    rank: int
    loss: float
    gradient_norm: float
    learning_rate: float
    seconds: float
    tokens_per_second: float
    memory: int
    mfu: float | None = None
    bubble: float | None = None
    clocks: str | None = None
    shown: bool = False

    def as_json(self) -> dict[str, Any]:
        """The numbers that were measured, by name."""
        numbers = asdict(self)
        del numbers["shown"]
        return {name: value for name, value in numbers.items() if value is not None}

    @property
    def progress(self) -> str:
        """How well and how fast it learns."""
        return (
            f"loss {self.loss:.6f}  {self.tokens_per_second:,.0f} tokens/s  "
            f"gradient norm {self.gradient_norm:.3f}"
        )

    @property
    def usage(self) -> str:
        """How it uses the machine."""
        said = [f"memory {self.memory / 1e6:,.0f} MB"]
        if self.bubble is not None:
            said.append(f"bubble {self.bubble:.1%} {self.clocks}")
        if self.mfu is not None:
            said.append(f"MFU {self.mfu:.1%}")
        return "  ".join(said)

    def __str__(self) -> str:
        return f"{self.progress}  {self.usage}"


def peak_flops(device: torch.device) -> float | None:
    """The most floating-point operations per second that a device can do; None where that is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    tensor_float = torch.get_float32_matmul_precision() != "highest"
    found = (peaks for part, peaks in PEAKS.items() if re.search(rf"\b{part}\b", name))
    peaks = next(found, None)
    return None if peaks is None else peaks[tensor_float] * 1e12
