"""The page of measured figures is written from what the benches measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("benchmarks")
from benchmarks import page
from benchmarks.pairs import Ratios


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
