"""The page `docs/benchmarks.md`: every ratio that `make bench` has measured, written from its JSON files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

_TOP = """# Benchmarks

`make bench` writes the figures on this page. Each ratio is Penstock's time or memory divided by that of a
baseline: below 1, Penstock takes less. Both take turns in one run, so that a machine whose speed drifts is
fair to both. A ratio is the median over the rounds (and the interquartile range). The machine has two CPU
cores and no GPU.

"""
_PEER = "torch's package"
_TINY = "tiny, {}, against {}, time"
_REMEMBERED: dict[str, list[str | tuple[str, str]]] = {
    "A step of a small GPT, two processes, 1F1B": [f"gpt, 1F1B, against {_PEER}, time"],
    "A step that is all overhead, two processes, 1F1B; ZB-V": [
        _TINY.format("1F1B", _PEER),
        _TINY.format("ZB-V", _PEER),
    ],
    "The same without Unix sockets for small messages": [
        (_TINY.format("1F1B", "Penstock without sockets"), _TINY.format("1F1B", _PEER)),
        (_TINY.format("ZB-V", "Penstock without sockets"), _TINY.format("ZB-V", _PEER)),
    ],
    "Peak memory of a step above weights and gradients, ZB-H1, rank 0; rank 1": [
        f"ZB-H1, rank 0, against {_PEER}",
        f"ZB-H1, rank 1, against {_PEER}",
    ],
    "A step of two by two replicas, large layers": [f"large, against {_PEER}"],
    "An epoch of a larger model in one process, baseline the unmodified Lightning; transformers' Trainer": [
        "Lightning, large",
        "transformers' Trainer, large",
    ],
}
"""What the page opens with: each row's name, and the rows of sections it comes from; of two rows together,
the quotient of their baselines."""
_COLUMNS = "| | ratio (range) | Penstock | baseline |\n|---|---|---|---|\n"
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
    cells = [line.strip("| ").split(" | ") for line in text.splitlines()]
    rows = {row[0]: row for row in cells if len(row) == 4}
    lines = [
        f"| {what} | {'; '.join(_cell(source, rows) for source in sources)} |\n"
        for what, sources in _REMEMBERED.items()
        if all(name in rows for source in sources for name in _names(source))
    ]
    top = "| | Penstock ÷ `torch.distributed.pipelining`, or the baseline named |\n|---|---|\n"
    return f"{top}{''.join(lines)}\n" if lines else ""


def _names(source: str | tuple[str, str]) -> tuple[str, ...]:
    return source if isinstance(source, tuple) else (source,)


def _cell(source: str | tuple[str, str], rows: Mapping[str, list[str]]) -> str:
    if isinstance(source, tuple):
        above, below = (float(rows[name][3].split()[0]) for name in source)
        return f"{above / below:.2f}"
    # A ratio of bytes has no range.
    return re.sub(r"^(\S+) \(\1 to \1\)", r"\1", rows[source][1])


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
