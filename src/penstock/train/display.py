"""What was measured in a step, and how a run shows that on a terminal and elsewhere."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from penstock.plan import DEVICES


@dataclass(frozen=True)
class StepMetrics:
    """The numbers of one step.

    Args:
        step: counted from 1.
        time: when it ended, in seconds since 1970.
        rank: the rank that measured it.
        loss: mean training loss in nats per byte.
        gradient_norm: the norm of the gradients before clipping.
        learning_rate: the learning rate of the step.
        seconds: wall time of the step.
        tokens_per_second: bytes of text per second.
        memory: peak bytes of the process that holds most.
        mfu: the share of the devices' peak arithmetic that the model's own operations use; None if the peak
            is not known.
        bubble: idle share of the ranks' time, 0 to 1; on a GPU, where recording slows a step down, only for
            the steps that are shown.
        clocks: how the bubble was found: ``"measured"`` on the clocks of the ranks, or ``"replayed"`` from
            measured durations where the ranks of one process took turns.
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

    def as_json(self) -> dict[str, Any]:
        """The numbers that were measured, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        bubble = "" if self.bubble is None else f"  bubble {self.bubble:.1%} {self.clocks}"
        mfu = "" if self.mfu is None else f"  MFU {self.mfu:.1%}"
        return (
            f"loss {self.loss:.6f}  {self.tokens_per_second:,.0f} tokens/s  "
            f"gradient norm {self.gradient_norm:.3f}  memory {self.memory / 1e6:,.0f} MB{bubble}{mfu}"
        )


def peak_flops(device: torch.device) -> float | None:
    """The floating-point operations per second that a device can do at most; None if that is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device).lower().replace("rtx ", "rtx").replace("geforce ", "")
    if "pcie" in name:
        return None  # slower than the cards of the same name that the table has
    dtype = "float32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    known = (one for one in DEVICES.values() if re.search(rf"\b{one.name}\b", name))
    return next((one.flops[dtype] for one in known), None)


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

    def step(self, metrics: StepMetrics) -> None:
        """Show the numbers of one step."""
        self._latest = str(metrics)
        self._bar.update(self._task, completed=metrics.step)
        if not self._console.is_terminal and self.shows(metrics.step):
            width = len(str(self._steps))
            say(self._console, f"step {metrics.step:>{width}}/{self._steps}  {metrics}")


def say(console: Console, text: str) -> None:
    """Print a line as it is: no wrapping, no markup, no colours by content."""
    console.print(Text(text), soft_wrap=True)
