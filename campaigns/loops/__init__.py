"""Training loops as users write them: each unmodified against pipelined.

Each program runs unmodified, then as a pipeline in one process, in two, and in two replicas of two. A cell
has the largest difference of losses, metrics and weights, or the sentence of the refusal, and what was warned
of. Two replicas are held against one process, and if they differ from it, as those of DDP do where a loss is
no mean over samples, against the library's own data parallelism in two.
"""

from __future__ import annotations

import gc
import io
import logging
import math
import re
import sys
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from campaigns.loops.setting import PROGRAMS, RANKS, Setting
from campaigns.run import Campaign, Rows
from campaigns.table import Row
from penstock import Pipeline
from penstock.errors import PenstockError
from penstock.testing import WorkerPool
from penstock.testing.workers import WorkerError
from tests.integrations.accelerated import launched

CLOSE = 1e-4
"""Differences above this are shown with the name of the number, and count."""
CLOSE_IN_HALF = 0.1
"""What counts in programs in half precision, whose names say so."""
LAYOUTS = {"one": 1, "two": 2, "2x2": 4}
MODULES = {"own loop": "own", "Lightning": "lit", "Trainer": "hugging", "Accelerate": "hugging"}
TOGETHER = 150.0
"""Seconds for a program in several processes."""


def load(name: str = "") -> None:
    """Import the programs of a name's kind, or all; the libraries that they need take long."""
    kind = name.partition(":")[0]
    for module in [MODULES[kind]] if kind in MODULES else dict.fromkeys(MODULES.values()):
        import_module(f"campaigns.loops.{module}")


# ---- one run of a program


def run(name: str, cut: bool, rank: int, processes: int, folder: Path, replicas: int = 1) -> str:
    """Run a program and save what it gives; returns what it was refused or failed with, or nothing."""
    warnings.simplefilter("ignore")
    for quiet in ("lightning.pytorch", "transformers", "accelerate"):
        logging.getLogger(quiet).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    ranks = RANKS if cut else 1
    replicas = max(replicas, processes // ranks)
    setting = Setting(cut, processes, replicas, rank // ranks, folder)
    # What a library prints would stand in the middle of the table.
    with launched(rank, processes), redirect_stdout(io.StringIO()), warned() as texts:
        try:
            outcome = PROGRAMS[name](setting).plain()
        except Exception as error:
            # A program would end here, and so tell the others.
            for pipe in [
                p for p in gc.get_objects() if type(p) is Pipeline and "_closed" in vars(p)
            ]:
                pipe.close(error)
            kind = "refused" if isinstance(error, PenstockError) else "failed"
            return f"{kind} {type(error).__name__}: {error}"
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
    task = f"{__name__}:in_worker"
    try:
        texts = pool.run(task, processes, TOGETHER, name=name, folder=str(folder), cut=cut)
    except WorkerError as error:
        # A process that waits in another library's call cannot raise: it says why, and ends.
        ended = re.search("penstock: .* ends itself: (.*)", text := str(error))
        return f"refused, {ended[1]}" if ended else f"failed: {text[-250:]}"
    said = [text for text in texts if text]
    causes = [text for text in said if "PeerFailed" not in text]
    text = (causes or said or [""])[0]
    return f"{text} (on {len(said)} of {len(texts)} ranks)" if 0 < len(said) < len(texts) else text


# ---- the comparison


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
    warnings = "".join(f"; warned: {text}" for text in outcome["warnings"])
    return " / ".join(cells) + warnings, largest


class Comparison:
    """One program beside the unmodified one.

    Args:
        name: of the program.
        pools: the processes, by layout.
        base: a folder for files.
    """

    def __init__(self, name: str, pools: dict[str, WorkerPool], base: str) -> None:
        self._name, self._pools, self._base = name, pools, Path(base)
        self._plain: dict[int, Any] = {}

    def in_layout(self, layout: str) -> tuple[str, str]:
        """The verdict on the program in a layout, and what differs or was said."""
        processes = LAYOUTS[layout]
        (folder := self._base / layout).mkdir()
        try:
            one = self._reference(1)
            if processes == 1:
                text = run(self._name, True, 0, 1, folder)
            else:
                text = in_processes(self._pools[layout], processes, self._name, folder, cut=True)
            if text:
                return text.split(maxsplit=1)[0].rstrip(",:"), text
            text, worst = difference(folder, one)
            if worst > CLOSE and processes > RANKS:
                other, less = difference(folder, self._reference(processes // RANKS))
                if less < worst:
                    text, worst = f"{other} (of two processes)", less
        except RuntimeError as error:
            return "void", f"unmodified: {error}"
        close = CLOSE_IN_HALF if "16" in self._name else CLOSE
        return "right" if worst <= close else "differs", text

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


# ---- the table

WORST = ("failed", "differs", "void", "refused", "right")


def rows_of(name: str, layouts: list[str], pools: dict[str, WorkerPool]) -> Iterator[Row]:
    """One row: the worst of the verdicts, and what was found in each layout."""
    with TemporaryDirectory() as base:
        comparison = Comparison(name, pools, base)
        pairs = [comparison.in_layout(layout) for layout in layouts]
    cells = [text for _, text in pairs]
    if len(set(cells)) == 1 and pairs[0][0] == "refused":
        cells[1:] = ['"'] * (len(cells) - 1)
    found = dict(zip(layouts, cells, strict=True))
    verdict = min((verdict for verdict, _ in pairs), key=WORST.index)
    yield Row(name, verdict, tuple(found.get(layout, "") for layout in LAYOUTS))


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--layouts", nargs="*", default=[*LAYOUTS], choices=LAYOUTS)


def cases(options: Namespace) -> Generator[tuple[str, Rows]]:
    load(options.only)
    with ExitStack() as stack:
        sizes = {layout: LAYOUTS[layout] for layout in {"two", *options.layouts} - {"one"}}
        pools = {layout: stack.enter_context(WorkerPool(size)) for layout, size in sizes.items()}
        for name in PROGRAMS:
            yield name, partial(rows_of, name, options.layouts, pools)


CAMPAIGN = Campaign(
    cases,
    columns=("one process", "two", "2 x 2"),
    bad=("failed", "differs", "void"),
    options=add_options,
)
