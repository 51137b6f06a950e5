"""What was measured in a step, and how a run shows that on a terminal and elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

Metrics = Mapping[str, Any]
"""The numbers of a step as the run folder keeps them, by name; see docs/watching.md."""


def summary(metrics: Metrics) -> str:
    """The numbers that a person wants to see of a step, in a line."""
    words = [
        f"loss {metrics['loss']:.6f}",
        f"{metrics['tokens_per_second']:,.0f} tokens/s",
        f"gradient norm {metrics['gradient_norm']:.3f}",
        f"memory {metrics['memory'] / 1e6:,.0f} MB",
    ]
    if metrics.get("bubble") is not None:
        words.append(f"bubble {metrics['bubble']:.1%} {metrics['clocks']}")
    if metrics.get("mfu") is not None:
        words.append(f"MFU {metrics['mfu']:.1%}")
    return "  ".join(words)


class Display:
    """Shows the steps of a run: on a terminal as a bar that refreshes, elsewhere some of them as lines.

    Args:
        console: where to print.
        steps: how many steps there will be.
        every: how many steps there are between two lines.
    """

    def __init__(self, console: Console, steps: int, every: int) -> None:
        self._console, self._steps, self._every = console, steps, every
        self._latest = "the first step …"
        self._bar = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("run,"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            expand=True,
        )
        self._task = self._bar.add_task("train", total=steps)

    def running(self) -> AbstractContextManager[object]:
        """Keep the bar at the bottom of a terminal until the steps are over."""
        if not self._console.is_terminal:
            return nullcontext()
        return Live(console=self._console, get_renderable=self._render)

    def _render(self) -> RenderableType:
        return Group(self._bar, Text(self._latest))

    def shows(self, step: int) -> bool:
        """Whether a step has a line of its own: now and then, and at the end."""
        return step % self._every == 0 or step == self._steps

    def step(self, metrics: Metrics) -> None:
        """Show the numbers of one step."""
        step, self._latest = metrics["step"], summary(metrics)
        self._bar.update(self._task, completed=step)
        if not self._console.is_terminal and self.shows(step):
            say(
                self._console, f"step {step:>{len(str(self._steps))}}/{self._steps}  {self._latest}"
            )


def say(console: Console, text: str) -> None:
    """Print a line as it is: no wrapping, no markup, no colours by content."""
    console.print(Text(text), soft_wrap=True)
