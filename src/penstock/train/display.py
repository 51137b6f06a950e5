"""What a run prints on a terminal and in a log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from penstock._engine.values import bytes_as_text


def summary(metrics: Mapping[str, Any], steps: int) -> str:
    """The main numbers of a step, in one line; see docs/profiling.md for their names."""
    words = [
        f"step {metrics['step']:>{len(str(steps))}}/{steps}",
        f"loss {metrics['loss']:.6f}",
        f"{metrics['tokens_per_second']:,.0f} tokens/s",
        f"gradient norm {metrics['gradient_norm']:.3f}",
        f"memory {bytes_as_text(metrics['memory'])}",
    ]
    if metrics["bubble"] is not None:
        words.append(f"bubble {metrics['bubble']:.1%} {metrics['clocks']}")
    if metrics["mfu"] is not None:
        words.append(f"MFU {metrics['mfu']:.1%}")
    return "  ".join(words)


def say(console: Console, text: str) -> None:
    """Print a line as it is: no wrapping, no markup, no colours by content."""
    console.print(Text(text), soft_wrap=True)
