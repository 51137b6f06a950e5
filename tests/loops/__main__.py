"""Programs as users write them, unmodified and as pipelines, side by side.

``python -m tests.loops [--only TEXT] [--layouts one two 2x2] [--to FILE]``

Each program runs unmodified, then as a pipeline in one process, in two, and in two replicas of two. A row
of the table has the largest difference of losses, metrics and weights, or the sentence of the refusal, and
what was warned of. Two replicas are held against one process, and if they differ from it, as those of DDP do
where a loss is no mean over samples, against the library's own data parallelism in two.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import re
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
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
CLOSE = 1e-4
"""Differences above this are shown with the name of the number."""
LAYOUTS = {"one": 1, "two": 2, "2x2": 4}


_MODULES = {"own loop": "own", "Lightning": "lit", "Trainer": "hugging", "Accelerate": "hugging"}


def load(names: str = "") -> None:
    """Import the programs of a kind, or all; the libraries that they need take long."""
    kind = names.partition(":")[0]
    for module in [_MODULES[kind]] if kind in _MODULES else dict.fromkeys(_MODULES.values()):
        import_module(f"tests.loops.{module}")


def run(name: str, cut: bool, rank: int, processes: int, folder: Path, replicas: int = 1) -> str:
    """Run a program and save what it gives; returns what it was refused or failed with, or nothing."""
    warnings.simplefilter("ignore")
    for quiet in ("lightning.pytorch", "transformers", "accelerate"):
        logging.getLogger(quiet).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    ranks = RANKS if cut else 1
    replicas = max(replicas, processes // ranks)
    setting = Setting(cut, processes, replicas, rank // ranks, folder)
    with launched(rank, processes), warned() as texts:
        try:
            outcome = PROGRAMS[name](setting).plain()
        except Exception as error:
            # A program would end here, and so tell the others.
            for pipe in [
                p for p in gc.get_objects() if type(p) is Pipeline and "_closed" in vars(p)
            ]:
                pipe.close(error)
            kind = "refused" if isinstance(error, PenstockError) else "failed"
            text = " ".join(str(error).split())
            return f"{kind} {type(error).__name__}: {text}"
    if rank == 0:
        torch.save({**outcome, "warnings": texts}, folder / "outcome")
    return ""


@contextmanager
def warned() -> Iterator[list[str]]:
    """A context that collects what Penstock warns of."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)

    def emit(record: logging.LogRecord) -> None:
        texts.append(record.getMessage())
        print(record.getMessage(), file=sys.stderr)

    handler.emit = emit  # type: ignore[method-assign]
    logger = logging.getLogger("penstock")
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


def in_worker(group: Any, name: str, folder: str, cut: bool) -> str:
    """A worker's task."""
    load(name)
    return run(name, cut, dist.get_rank(), dist.get_world_size(), Path(folder))


def in_processes(pool: WorkerPool, processes: int, name: str, folder: Path, cut: bool) -> str:
    """What a program in several processes was refused with, if it was."""
    task = "tests.loops.__main__:in_worker"
    try:
        texts = pool.run(task, processes, 150.0, name=name, folder=str(folder), cut=cut)
    except WorkerError as error:
        # A process that waits in another library's call cannot raise: it says why, and ends.
        ended = re.search("penstock: .* ends itself: (.*)", text := str(error))
        return f"refused, {ended[1]}" if ended else "failed: " + " ".join(text.split())[-250:]
    told = [text for text in texts if text]
    causes = [text for text in told if "PeerFailed" not in text]
    text = (causes or told or [""])[0]
    return f"on {len(told)} of {len(texts)} ranks: {text}" if 0 < len(told) < len(texts) else text


def gap(mine: Any, theirs: Any) -> float:
    """The largest difference of two tensors, relative to numbers above 1; nan only equals nan."""
    a, b = torch.as_tensor(mine).double(), torch.as_tensor(theirs).double()
    if a.shape != b.shape:
        return math.inf
    same = (a == b) | (a.isnan() & b.isnan())
    gaps = ((a - b).abs() / b.abs().clamp(min=1)).nan_to_num(math.inf).masked_fill(same, 0.0)
    return float(gaps.max()) if gaps.numel() else 0.0


def difference(folder: Path, plain: dict[str, Any]) -> tuple[str, float]:
    """The largest differences of losses, metrics and weights, in words, and the largest of all."""
    outcome = torch.load(folder / "outcome", weights_only=False)
    cells, largest = [], 0.0
    for what in ("losses", "metrics", "weights"):
        mine, theirs = outcome[what], plain[what]
        if what == "losses":
            mine, theirs = {"": mine}, {"": theirs}
        gaps = {key: gap(mine[key], theirs[key]) for key in theirs.keys() & mine.keys()}
        worst = max(gaps, key=lambda key: gaps[key], default="")
        most = gaps.get(worst, 0.0)
        cells.append(f"{most:.0e}" + (f" ({worst})" if most > CLOSE else ""))
        if apart := sorted(mine.keys() ^ theirs.keys()):
            cells.append(f"names differ: {apart[:3]}")
        largest = max(largest, most, math.inf if apart else 0.0)
    warned = "".join(f"; warned: {text}" for text in outcome["warnings"])
    return " / ".join(cells) + warned, largest


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
    sizes = {layout: LAYOUTS[layout] for layout in {"two", *options.layouts} - {"one"}}
    pools = {layout: WorkerPool(size) for layout, size in sizes.items()}
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


class Row:
    """One row of the table: a program beside the unmodified one.

    Args:
        name: of the program.
        pools: the processes, by layout.
        base: a folder for files.
    """

    def __init__(self, name: str, pools: dict[str, WorkerPool], base: str) -> None:
        self._name, self._pools, self._base = name, pools, Path(base)
        self._plain: dict[int, Any] = {}

    def cell(self, layout: str) -> str:
        """What became of the program in a layout."""
        processes = LAYOUTS[layout]
        (folder := self._base / layout).mkdir()
        try:
            one = self._reference(1)
            if processes == 1:
                text = run(self._name, True, 0, 1, folder)
            else:
                text = in_processes(self._pools[layout], processes, self._name, folder, cut=True)
            if text:
                return text[:LONGEST]
            text, worst = difference(folder, one)
            if worst <= CLOSE or processes == RANKS or processes == 1:
                return text
            other, gap = difference(folder, self._reference(processes // RANKS))
        except RuntimeError as error:
            return f"unmodified: {error}"[:LONGEST]
        return f"{other} (of two processes)" if gap < worst else text

    def _reference(self, replicas: int) -> dict[str, Any]:
        """What the unmodified program gives."""
        if replicas not in self._plain:
            (folder := self._base / f"plain{replicas}").mkdir()
            if replicas > 1 and not self._name.startswith("own"):
                text = in_processes(self._pools["two"], replicas, self._name, folder, cut=False)
            else:
                text = run(self._name, False, 0, 1, folder, replicas)
            self._plain[replicas] = text or torch.load(folder / "outcome", weights_only=False)
        found: str | dict[str, Any] = self._plain[replicas]
        if isinstance(found, str):
            raise RuntimeError(found)
        return found


def compare(name: str, layouts: list[str], pools: dict[str, WorkerPool]) -> str:
    """One row of the table."""
    began = time.monotonic()
    with TemporaryDirectory() as base:
        row = Row(name, pools, base)
        cells = [row.cell(layout) for layout in layouts]
    if len(set(cells)) == 1 and cells[0].startswith("refused"):
        cells = [cells[0], *['"'] * (len(cells) - 1)]
    return f"| {name} | {' | '.join(cells)} | {time.monotonic() - began:.0f} s |"


if __name__ == "__main__":
    main()
