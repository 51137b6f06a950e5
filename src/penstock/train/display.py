"""How a run shows itself: one line that refreshes on a terminal, plain lines elsewhere."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from penstock.train.metrics import StepMetrics

_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 16


class Display(Protocol):
    """Shows the steps while they are made."""

    def running(self) -> AbstractContextManager[object]:
        """A context around the steps."""

    def step(self, metrics: StepMetrics) -> None:
        """Take the numbers of one step."""


class PlainDisplay:
    """A line for each step that is to be shown.

    Args:
        console: where to write.
        steps: how many there will be.
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
        steps: how many there will be.
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
        """Show the step; its use of the machine keeps its last value where it did not measure all of it."""
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
    """The course of ``values`` in at most ``width`` bars, each the mean of its share."""
    if not values:
        return ""
    count = min(width, len(values))
    borders = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(borders)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / ((high - low) or 1.0)
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)
