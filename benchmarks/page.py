"""The page `docs/benchmarks.md`: every ratio that `make bench` has measured, written from its JSON files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

_TOP = """# Measured

`make bench` writes this page: nobody edits its figures. Each ratio is Penstock's time or memory over that of
what stands beside it. Both take turns in one run, so that a machine whose speed drifts is fair to both.
Below 1, Penstock takes less. A ratio is the median of the rounds; half of them lie within its range.

"""
_BETWEEN = "memory, SwiGLU and RMSNorm{}, between the halves, beside torch's package"
_REMEMBERED = {
    "A step that is all overhead, two processes, 1F1B": [
        "tiny, 1F1B, beside torch's package, time"
    ],
    "The same, ZB-V": ["tiny, ZB-V, beside torch's package, time"],
    "A step of a small GPT, two processes, 1F1B": ["gpt, 1F1B, beside torch's package, time"],
    "Both halves of a backward pass, width 256": ["time, width 256, I + W beside torch's package"],
    "Memory between the halves, SwiGLU block; the same under activation checkpointing": [
        _BETWEEN.format(""),
        _BETWEEN.format(", checkpointed"),
    ],
    "A step of two by two replicas, large layers": ["large, beside torch's package"],
}
"""What the page opens with: figures that a reader remembers, each with its rows. README.md has them too."""
_COLUMNS = "| | ratio (range) | Penstock | beside it |\n|---|---|---|---|\n"
_UNITS = {"seconds": (1e3, "ms"), "bytes": (2**-20, "MiB")}


def write(results: Path, page: Path) -> None:
    """Write the section of one bench, if it measured ratios; the other sections stay.

    Args:
        results: the bench's JSON file, named after it.
        page: the page.
    """
    report = json.loads(results.read_text(encoding="utf-8"))
    rows = [_row(*one) for one in _ratios(report["figures"])]
    if not rows:
        return
    sections = _sections(page.read_text(encoding="utf-8")) if page.exists() else {}
    title = (import_module(f"benchmarks.{results.stem}").__doc__ or "").splitlines()[0].rstrip(".")
    command = f'`make bench ARGS="{results.stem} --rounds {report["rounds"]}"`'
    sections[title] = f"{command}, on {report['machine']}.\n\n{_COLUMNS}{''.join(rows)}"
    text = "\n".join(f"## {title}\n\n{text}" for title, text in sorted(sections.items()))
    page.write_text(_TOP + _remembered(text) + text, encoding="utf-8")


def _remembered(text: str) -> str:
    """The table of what a reader remembers, from the rows of a text."""
    cells = [line.removeprefix("| ").split(" | ") for line in text.splitlines()]
    # A ratio of bytes has no range.
    ratios = {
        row[0]: re.sub(r"^(\S+) \(\1 to \1\)", r"\1", row[1]) for row in cells if len(row) > 1
    }
    lines = [
        f"| {what} | {'; '.join(ratios[row] for row in rows)} |\n"
        for what, rows in _REMEMBERED.items()
        if ratios.keys() >= {*rows}
    ]
    return f"| | Penstock ÷ torch's package |\n|---|---|\n{''.join(lines)}\n" if lines else ""


def _sections(text: str) -> dict[str, str]:
    parts = (part.partition("\n\n") for part in text.split("## ")[1:])
    return {title: body.rstrip("\n") + "\n" for title, _, body in parts}


def _ratios(figures: Any, *names: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """All records with a ratio, with their names."""
    if isinstance(figures, dict):
        if "ratio" in figures:
            yield ", ".join(names), figures
        else:
            for name, inner in figures.items():
                yield from _ratios(inner, *names, name)


def _row(name: str, record: Mapping[str, Any]) -> str:
    ratio, (low, high) = record["ratio"]["median"], record["ratio"]["quartiles"]
    unit = next(unit for unit in _UNITS if f"ours_{unit}" in record)
    factor, symbol = _UNITS[unit]
    ours, peer = (f"{factor * record[f'{who}_{unit}']:.2f} {symbol}" for who in ("ours", "peer"))
    return f"| {name} | {ratio:.2f} ({low:.2f} to {high:.2f}) | {ours} | {peer} |\n"
