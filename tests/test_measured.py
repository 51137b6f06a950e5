"""The page of measured figures is written from what the benches measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import page
from benchmarks.pairs import Ratios

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"


def test_a_bench_writes_its_own_section_of_the_page(tmp_path: Path) -> None:
    written = tmp_path / "measured.md"

    def measure(bench: str, figures: dict[str, Any]) -> list[str]:
        report = {"machine": "a laptop", "rounds": 4, "figures": figures}
        (tmp_path / f"{bench}.json").write_text(json.dumps(report))
        page.write(tmp_path / f"{bench}.json", written)
        return written.read_text(encoding="utf-8").splitlines()

    slow = Ratios([0.002, 0.002, 0.004, 0.004], [0.001] * 4).to_json()
    fast = Ratios([0.001] * 4, [0.002] * 4).to_json()
    assert "| 1F1B | 3.00 (2.00 to 4.00) | 3.00 ms | 1.00 ms |" in measure("inside", {"1F1B": slow})
    both = measure("replicas", {"small": fast})
    assert "| small | 0.50 (0.50 to 0.50) | 1.00 ms | 2.00 ms |" in both
    again = measure("inside", {"1F1B": fast})
    assert len(again) == len(both)
    assert sum("0.50 (0.50 to 0.50)" in line for line in again) == 2
    assert measure("plan", {"no ratio": 1}) == again


def test_the_page_opens_with_what_a_reader_remembers(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = [line for line in text.split("## ")[0].splitlines() if line.startswith("| A ")]
    assert len(rows) == 3
    # They are taken from the page's own sections.
    (written := tmp_path / "measured.md").write_text(text, encoding="utf-8")
    slow = Ratios([0.002, 0.004], [0.001] * 2).to_json()
    figures = {"large, against torch's package": slow}
    report = {"machine": "a laptop", "rounds": 2, "figures": figures}
    (tmp_path / "replicas.json").write_text(json.dumps(report))
    page.write(tmp_path / "replicas.json", written)
    top = written.read_text(encoding="utf-8").split("## ")[0]
    assert "| A step of two by two replicas, large layers | 3.00 (1.50 to 4.50) |" in top
    assert set(rows) - {*top.splitlines()} == {rows[-1]}
