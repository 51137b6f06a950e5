"""Counts what would make the host wait for a GPU: reading numbers from tensors, and copies to the CPU."""

from __future__ import annotations

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

import penstock
from penstock import Pipeline
from tests.catalogue.cases import CASES, pipeline

HOME = str(Path(penstock.__file__).parent)
READS = frozenset(
    getattr(Tensor, name)
    for name in ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__")
)


class Waits(TorchFunctionMode):
    """Counts reads of tensors by their place in Penstock."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Count a read."""
        if function in READS:
            ours = [f for f in traceback.extract_stack() if f.filename.startswith(HOME)]
            file = Path(ours[-1].filename) if ours else Path("elsewhere")
            if file.parent.name != "transport":  # what travels over gloo is on the CPU
                self.places[f"{file.name}, {ours[-1].name if ours else 'no function of ours'}"] += 1
        return function(*args, **(kwargs or {}))


def count(pipe: Pipeline, args: Any, target: Any) -> dict[str, int]:
    """The reads of a later step by place."""
    for _ in range(2):  # the first steps plan, and ask the loss what it is
        pipe.step(*args, target=target)
    with Waits() as waits:
        pipe.step(*args, target=target)
    return dict(waits.places)


def of_two_counts(group: Any, case: str, schedule: str) -> list[dict[str, int]]:
    """A worker's task: the reads of a step of four microbatches, and of one of eight."""
    of = CASES[case]()
    counts = []
    for microbatches in (4, 8):
        options: dict[str, Any] = {
            "schedule": schedule,
            "microbatches": microbatches,
            "mesh": group,
        }
        with pipeline(of, None, ranks=2, **options) as pipe:
            counts.append(count(pipe, of.args, of.target))
    return counts
