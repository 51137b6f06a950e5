"""What a person sees of a run."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from penstock.train.display import Display, say

BARE: dict[str, Any] = {
    "step": 7,
    "loss": 2.5,
    "gradient_norm": 0.25,
    "tokens_per_second": 12345.6,
    "memory": 256_000_000,
}
MEASURED = {
    **BARE, "step": 10, "memory": 512_000_000, "bubble": 0.25, "clocks": "replayed", "mfu": 0.314
}  # fmt: skip


def shown(*steps: dict[str, Any], terminal: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=80, color_system=None)
    display = Display(console, steps=500, every=10)
    with display.running():
        for metrics in steps:
            display.step(metrics)
    return out.getvalue()


def test_plain_output_has_a_line_for_some_steps() -> None:
    assert shown(BARE, MEASURED, {**BARE, "step": 500}) == (
        "step  10/500  loss 2.500000  12,346 tokens/s  gradient norm 0.250  "
        "memory 512 MB  bubble 25.0% replayed  MFU 31.4%\n"
        "step 500/500  loss 2.500000  12,346 tokens/s  gradient norm 0.250  memory 256 MB\n"
    )


def test_a_terminal_gets_lines_that_refresh() -> None:
    assert "the first step …" in shown(terminal=True)
    refreshed = shown(BARE, terminal=True)
    assert "\x1b[" in refreshed
    assert "step 7/500" in refreshed
    assert "loss 2.500000" in refreshed


def test_text_is_printed_as_it_is() -> None:
    out = io.StringIO()
    say(Console(file=out, width=80), "[red]" + "x" * 200)
    assert out.getvalue() == "[red]" + "x" * 200 + "\n"
