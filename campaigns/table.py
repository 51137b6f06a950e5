"""The table that a campaign reports: a row for each case, printed as it ends, and counts at the end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

LONGEST = 600
"""Letters of a cell that are shown."""


class Row(NamedTuple):
    """What became of a case.

    Attributes:
        name: of the case.
        verdict: one word, or a few.
        cells: what the campaign's columns say besides.
    """

    name: str
    verdict: str
    cells: tuple[object, ...] = ()


class Table:
    """A table in markdown.

    Args:
        columns: the titles of what a row says besides its name, verdict and time.
        bad: verdicts by which the campaign fails.
        to: a file that rows are appended to. Its cases need not run again.
    """

    def __init__(
        self, columns: Sequence[str], bad: Collection[str], to: Path | None = None
    ) -> None:
        self._bad, self._to = bad, to
        self._known = to.read_text(encoding="utf-8") if to is not None and to.exists() else ""
        self._verdicts: Counter[str] = Counter()
        self._began = self._latest = time.monotonic()
        titles = ("case", "verdict", *columns, "time")
        self._write(*titles, new=not self._known)
        self._write(*["---"] * len(titles), new=not self._known)

    def __contains__(self, name: str) -> bool:
        """Whether the file has a row of this case."""
        return f"| {name} |" in self._known

    def add(self, row: Row) -> None:
        """Print a row, with the seconds since the one before."""
        now = time.monotonic()
        self._verdicts[row.verdict] += 1
        self._write(row.name, row.verdict, *row.cells, f"{now - self._latest:.1f} s")
        self._latest = now

    def close(self) -> int:
        """Print how many cases ended how; returns 1 if any is bad, else 0."""
        counts = ", ".join(f"{count} {verdict}" for verdict, count in self._verdicts.most_common())
        bad = sum(self._verdicts[verdict] for verdict in self._bad)
        print(f"\n{counts or 'no case'}; {bad} bad, in {time.monotonic() - self._began:.0f} s")
        return int(bad > 0)

    def _write(self, *cells: object, new: bool = True) -> None:
        texts = [" ".join(str(cell).split()).replace("|", "/")[:LONGEST] for cell in cells]
        line = f"| {' | '.join(texts)} |"
        print(line, flush=True)
        if self._to is not None and new:
            with self._to.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
