"""What one step measured, as a value, a line of JSON and a line for people."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True)
class StepMetrics:
    """The numbers of one step.

    Args:
        step: counted from 1.
        loss: mean training loss in nats a byte.
        gradient_norm: before clipping.
        learning_rate: that the step used.
        seconds: wall time of the step.
        tokens_per_second: bytes of text a second.
        memory: peak bytes of the process that holds most; None on steps without a measurement.
        bubble: idle share of the ranks' time, 0 to 1; None on steps without a measurement.
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    seconds: float
    tokens_per_second: float
    memory: int | None = None
    bubble: float | None = None

    def as_json(self) -> dict[str, Any]:
        """The numbers that were measured, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        return "  ".join(self._parts())

    def _parts(self) -> Iterator[str]:
        yield f"loss {self.loss:.6f}"
        yield f"{self.tokens_per_second:,.0f} tokens/s"
        yield f"gradient norm {self.gradient_norm:.3f}"
        if self.memory is not None:
            yield f"memory {self.memory / 1e6:,.0f} MB"
        if self.bubble is not None:
            yield f"bubble {self.bubble:.1%}"


def peak_memory(device: torch.device) -> int:
    """Peak bytes so far: of the allocator on a GPU, else resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT
