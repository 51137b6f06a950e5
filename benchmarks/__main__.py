"""``python -m benchmarks``: measure, print, and write ``bench-results/*.json`` and ``docs/benchmarks.md``."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import penstock
from benchmarks import (
    backward,
    cut,
    gpu,
    inside,
    loops,
    memory,
    overlap,
    page,
    plan,
    replicas,
    schedules,
    steps,
)
from penstock.doctor.rates import processor

BENCHES: dict[str, Callable[[int], dict[str, Any]]] = {
    "steps": steps.compare,
    "schedules": schedules.compare,
    "inside": inside.compare,
    "backward": backward.compare,
    "memory": memory.compare,
    "overlap": overlap.compare,
    "cut": cut.compare,
    "plan": plan.compare,
    "replicas": replicas.compare,
    "loops": loops.compare,
    "gpu": gpu.compare,
}


def main() -> None:
    """Run the benches that are named, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"which: {', '.join(BENCHES)}; by default all")
    parser.add_argument("--rounds", type=int, default=20, help="paired times per figure")
    parser.add_argument("--output", type=Path, default=Path("bench-results"))
    parser.add_argument("--page", type=Path, default=Path("docs/benchmarks.md"))
    chosen = parser.parse_args()
    unknown = sorted(set(chosen.names) - set(BENCHES))
    if unknown or chosen.rounds < 2:
        parser.error(f"unknown {unknown}" if unknown else "--rounds must be at least 2")
    torch.set_num_threads(1)
    # On a CPU the bench of GPUs tells nothing that others do not.
    there = BENCHES if torch.cuda.is_available() else [name for name in BENCHES if name != "gpu"]
    for name in chosen.names or there:
        _run(name, chosen.rounds, chosen.output)
        page.write(chosen.output / f"{name}.json", chosen.page)


def _run(name: str, rounds: int, folder: Path) -> None:
    report = {"machine": _machine(), "rounds": rounds, "figures": BENCHES[name](rounds)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n")


def _machine() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else processor()
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{device}, {os.cpu_count()} cores, {versions}, Penstock {penstock.__version__}"


if __name__ == "__main__":
    main()
