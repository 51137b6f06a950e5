"""What a person sees of a run."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from penstock.train.display import (
    LiveDisplay,
    PlainDisplay,
    StepMetrics,
    make_display,
    say,
    sparkline,
    step_line,
)

BARE = StepMetrics(
    step=7,
    time=1.7e9,
    rank=0,
    loss=2.5,
    gradient_norm=0.25,
    learning_rate=1e-3,
    seconds=0.5,
    tokens_per_second=12345.6,
    memory=256_000_000,
)
MEASURED = replace(
    BARE, step=10, loss=2.25, memory=512_000_000, bubble=0.25, clocks="replayed", shown=True
)


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=80, color_system=None), out


def test_a_step_is_one_line() -> None:
    assert step_line(MEASURED, 500) == (
        "step  10/500  loss 2.250000  12,346 tokens/s  gradient norm 0.250  "
        "memory 512 MB  bubble 25.0% replayed"
    )


def test_a_step_tells_only_what_it_measured() -> None:
    assert str(BARE).endswith("gradient norm 0.250  memory 256 MB")
    assert not {"bubble", "mfu", "clocks", "shown"} & set(BARE.as_json())
    assert str(replace(MEASURED, mfu=0.314)).endswith("replayed  MFU 31.4%")
    assert MEASURED.as_json()["bubble"] == 0.25


def test_plain_output_shows_measured_steps_whole() -> None:
    to, out = console(terminal=False)
    display = make_display(to, 500)
    with display.running():
        display.step(BARE)
        display.step(MEASURED)
    assert isinstance(display, PlainDisplay)
    assert out.getvalue() == step_line(MEASURED, 500) + "\n"


def test_a_terminal_gets_lines_that_refresh() -> None:
    to, out = console(terminal=True)
    display = make_display(to, 500)
    with display.running():
        display.step(MEASURED)
        display.step(BARE)
    assert isinstance(display, LiveDisplay)
    shown = out.getvalue()
    assert "\x1b[" in shown
    assert "step 7/500" in shown
    assert "loss 2.500000" in shown


def test_the_live_line_keeps_the_last_measurement() -> None:
    to, out = console(terminal=True)
    display = LiveDisplay(to, 500)
    with display.running():
        display.step(MEASURED)
        display.step(BARE)
    assert "memory 512 MB" in out.getvalue()
    assert "bubble 25.0% replayed" in out.getvalue()


def test_the_live_line_before_the_first_step() -> None:
    to, out = console(terminal=True)
    with LiveDisplay(to, 500).running():
        pass
    assert "the first step …" in out.getvalue()


def test_say_takes_text_as_it_is() -> None:
    to, out = console(terminal=False)
    say(to, "[red]" + "x" * 200)
    assert out.getvalue() == "[red]" + "x" * 200 + "\n"


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        ([], ""),
        ([1.0], "▁"),
        ([3.0, 2.0, 1.0], "█▅▁"),
        ([2.0, 2.0], "▁▁"),
        ([4.0, 2.0, 1.0, 1.0], "█▁"),
    ],
)
def test_sparkline(values: list[float], drawn: str) -> None:
    assert sparkline(values, 3 if len(values) < 4 else 2) == drawn
