"""Programs as users write them, unmodified and as pipelines, side by side.

``python -m tests.loops [--only TEXT] [--layouts one two 2x2] [--to FILE]``

Each program runs unmodified, then as a pipeline in one process, in two, and in two replicas of two. A row
of the table has the largest difference of losses, metrics and weights, or the sentence of the refusal.
"""

from __future__ import annotations

import argparse
import gc
import logging
import time
import warnings
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from penstock import Pipeline
from penstock.errors import PenstockError
from penstock.testing import WorkerPool
from penstock.testing.workers import WorkerError
from tests.loops.setting import PROGRAMS, RANKS, Setting, launched

LONGEST = 400
"""Letters of a refusal that are shown."""
LAYOUTS = {"one": 1, "two": 2, "2x2": 4}


_MODULES = {"own loop": "own", "Lightning": "lit", "Trainer": "hugging", "Accelerate": "hugging"}


def load(names: str = "") -> None:
    """Import the programs of a kind, or all; the libraries that they need take long."""
    kind = names.partition(":")[0]
    for module in [_MODULES[kind]] if kind in _MODULES else dict.fromkeys(_MODULES.values()):
        import_module(f"tests.loops.{module}")


def run(name: str, cut: bool, rank: int, processes: int, folder: Path) -> str:
    """Run a program and save what it gives; returns what it was refused or failed with, or nothing."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    replicas = max(1, processes // RANKS)
    setting = Setting(cut, processes, replicas, rank // RANKS, folder)
    with launched(rank, processes):
        try:
            outcome = PROGRAMS[name](setting).plain()
        except Exception as error:
            # A program would end here, and so tell the others.
            for pipe in [one for one in gc.get_objects() if type(one) is Pipeline]:
                pipe.close(error)
            kind = "refused" if isinstance(error, PenstockError) else "failed"
            text = " ".join(str(error).split())
            return f"{kind} {type(error).__name__}: {text}"
    if rank == 0:
        torch.save(outcome, folder / "outcome")
    return ""


def in_worker(group: Any, name: str, folder: str) -> str:
    """A worker's task."""
    load(name)
    return run(name, True, dist.get_rank(), dist.get_world_size(), Path(folder))


def difference(folder: Path, plain: dict[str, Any]) -> list[str]:
    """The largest differences of losses, metrics and weights, relative to numbers above 1."""
    outcome = torch.load(folder / "outcome", weights_only=False)
    rows = []
    for what in ("losses", "metrics", "weights"):
        mine, theirs = outcome[what], plain[what]
        if what == "losses":
            mine, theirs = {"": mine}, {"": theirs}
        if mine.keys() != theirs.keys():
            apart = sorted(mine.keys() ^ theirs.keys())
            rows.append(f"names differ: {apart[:3]}")
            continue
        gaps = [0.0]
        for key, value in theirs.items():
            a, b = torch.as_tensor(mine[key]).double(), torch.as_tensor(value).double()
            if a.shape != b.shape:
                rows.append(f"{key}: shape {list(a.shape)}, not {list(b.shape)}")
                break
            if a.numel():
                gaps.append(float(((a - b).abs() / b.abs().clamp(min=1)).nan_to_num(0.0).max()))
        else:
            rows.append(f"{max(gaps):.0e}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="run programs whose name has this text")
    parser.add_argument("--layouts", nargs="*", default=[*LAYOUTS])
    parser.add_argument("--seconds", type=float, default=460.0, help="begin no program after this")
    parser.add_argument("--skip", default="", help="a table; programs that it has are left out")
    parser.add_argument("--to", default="", help="append rows to this file")
    options = parser.parse_args()
    load(options.only)
    done = Path(options.skip).read_text() if options.skip and Path(options.skip).exists() else ""
    started = time.monotonic()
    pools = {layout: WorkerPool(LAYOUTS[layout]) for layout in options.layouts if layout != "one"}
    try:
        for name in PROGRAMS:
            if options.only not in name or f"| {name} |" in done:
                continue
            if time.monotonic() - started > options.seconds:
                break
            row = compare(name, options.layouts, pools)
            print(row, flush=True)
            if options.to:
                with Path(options.to).open("a") as file:
                    file.write(row + "\n")
    finally:
        for pool in pools.values():
            pool.close()


def compare(name: str, layouts: list[str], pools: dict[str, WorkerPool]) -> str:
    """One row of the table."""
    began, cells = time.monotonic(), []
    with TemporaryDirectory() as base:
        folder = Path(base, "plain")
        folder.mkdir()
        said = run(name, False, 0, 1, folder)
        if said:
            return f"| {name} | unmodified: {said[:300]} |"
        plain = torch.load(folder / "outcome", weights_only=False)
        for layout in layouts:
            folder = Path(base, layout)
            folder.mkdir()
            if layout == "one":
                said = run(name, True, 0, 1, folder)
            else:
                try:
                    task = (
                        f"{__spec__.name}:in_worker"
                        if __spec__
                        else "tests.loops.__main__:in_worker"
                    )
                    saids = pools[layout].run(
                        task, LAYOUTS[layout], 90.0, name=name, folder=str(folder)
                    )
                    told = [one for one in saids if one]
                    causes = [one for one in told if "PeerFailed" not in one]
                    said = (causes or told or [""])[0]
                    if told and len(told) < len(saids):
                        said = f"on {len(told)} of {len(saids)} ranks: {said}"
                except WorkerError as error:
                    said = "failed: " + " ".join(str(error).split())[-250:]
            cells.append(said[:LONGEST] or " / ".join(difference(folder, plain)))
    if len(set(cells)) == 1 and cells[0].startswith("refused"):
        cells = [cells[0], *['"'] * (len(cells) - 1)]
    return f"| {name} | {' | '.join(cells)} | {time.monotonic() - began:.0f} s |"


if __name__ == "__main__":
    main()
