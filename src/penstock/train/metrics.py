"""What one step measured, as a value, a line of JSON and a line for people."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


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
        clocks: how the bubble was found: ``"measured"`` on the clocks of the ranks, or ``"replayed"`` from
            measured durations where the ranks of one process took turns.
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    seconds: float
    tokens_per_second: float
    memory: int | None = None
    bubble: float | None = None
    clocks: str | None = None

    def as_json(self) -> dict[str, Any]:
        """The numbers that were measured, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def progress(self) -> str:
        """How well and how fast it learns."""
        return (
            f"loss {self.loss:.6f}  {self.tokens_per_second:,.0f} tokens/s  "
            f"gradient norm {self.gradient_norm:.3f}"
        )

    @property
    def usage(self) -> str:
        """How it uses the machine; empty on a step without a measurement."""
        if self.memory is None or self.bubble is None:
            return ""
        return f"memory {self.memory / 1e6:,.0f} MB  bubble {self.bubble:.1%} {self.clocks}"

    def __str__(self) -> str:
        return f"{self.progress}  {self.usage}".rstrip()
