"""What was measured in a step, and how a run shows that on a terminal and elsewhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

# ---- what was measured in a step: as a value, as a line of JSON, and as a line of text


PEAKS: Mapping[str, tuple[float, float]] = {
    "V100": (15.7, 15.7),
    "T4": (8.1, 8.1),
    "L4": (30.3, 60.0),
    "A100": (19.5, 156.0),
    "H100 PCIe": (51.0, 378.0),
    "H100": (67.0, 494.0),
    "H200": (67.0, 494.0),
}
"""Peak dense teraflops of GPUs by a part of their name: in float32, and in TF32 if they have that."""


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
    """The floating-point operations per second that a device can do at most; None if that is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    tensor_float = torch.get_float32_matmul_precision() != "highest"
    found = (peaks for part, peaks in PEAKS.items() if re.search(rf"\b{part}\b", name))
    peaks = next(found, None)
    return None if peaks is None else peaks[tensor_float] * 1e12


# ---- how a run is shown


_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 16


class Display(Protocol):
    """Shows the steps of a run while it goes on."""

    def running(self) -> AbstractContextManager[object]:
        """A context around the steps."""

    def step(self, metrics: StepMetrics) -> None:
        """Take the numbers of one step."""


class PlainDisplay:
    """Prints a line for each step that is to be shown.

    Args:
        console: where to print.
        steps: how many steps there will be.
    """

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps

    def running(self) -> AbstractContextManager[object]:
        """Nothing to set up."""
        return nullcontext()

    def step(self, metrics: StepMetrics) -> None:
        """Print the step if it is to be shown."""
        if metrics.shown:
            say(self._console, step_line(metrics, self._steps))


class LiveDisplay:
    """A progress bar, the last numbers and the course of the loss, refreshed in place.

    Args:
        console: a terminal.
        steps: how many steps there will be.
    """

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._steps = steps
        self._latest: StepMetrics | None = None
        self._losses: list[float] = []
        self._usage = ""
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("run,"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            expand=True,
        )
        self._task = self._progress.add_task("train", total=steps)

    def running(self) -> AbstractContextManager[object]:
        """Keep the lines at the bottom of the terminal until the steps are over."""
        return Live(console=self._console, get_renderable=self._render, refresh_per_second=4)

    def step(self, metrics: StepMetrics) -> None:
        """Show the step; the usage is that of the last step for which all of it was measured."""
        self._latest = metrics
        self._usage = metrics.usage if metrics.shown or not self._usage else self._usage
        self._losses.append(metrics.loss)
        self._progress.update(self._task, completed=metrics.step)

    def _render(self) -> RenderableType:
        numbers = "the first step …" if self._latest is None else self._latest.progress
        course = Text(sparkline(self._losses, _HISTORY), style="cyan").append(f"  {self._usage}")
        return Group(self._progress, Text(numbers), course)


def make_display(console: Console, steps: int) -> Display:
    """The display that suits where the output goes."""
    return (LiveDisplay if console.is_terminal else PlainDisplay)(console, steps)


def step_line(metrics: StepMetrics, steps: int) -> str:
    """A step as one line of text."""
    return f"step {metrics.step:>{len(str(steps))}}/{steps}  {metrics}"


def say(console: Console, text: str) -> None:
    """Print a line as it is: no wrapping, no markup, no colours by content."""
    console.print(Text(text), soft_wrap=True)


def sparkline(values: list[float], width: int) -> str:
    """The course of ``values`` as at most ``width`` bars, each for the mean of some of them."""
    if not values:
        return ""
    count = min(width, len(values))
    borders = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(borders)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / ((high - low) or 1.0)
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)
