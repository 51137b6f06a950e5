"""The host does not wait for a device more often where there are more microbatches.

It would where it reads numbers from tensors or copies them to the CPU, which is counted here.
"""

from __future__ import annotations

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import penstock
from penstock import Pipeline
from penstock.testing import WorkerPool
from tests.gpu.test_gpu import TOKENS, Tied, loss_fn

pytestmark = pytest.mark.on_cpu("plays a GPU's transfers itself")
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
        if function in READS:
            ours = [f for f in traceback.extract_stack() if f.filename.startswith(HOME)]
            file = Path(ours[-1].filename) if ours else Path("elsewhere")
            if file.parent.name != "transport":  # what travels over gloo is on the CPU
                self.places[f"{file.name}, {ours[-1].name if ours else 'no function of ours'}"] += 1
        return function(*args, **(kwargs or {}))


def of_two_counts(group: Any, schedule: str) -> list[dict[str, int]]:
    """A worker's task: the reads of a later step of four microbatches, and of one of eight."""
    torch.manual_seed(0)
    tokens, counts = torch.randint(0, TOKENS, (16, 6)), []
    for microbatches in (4, 8):
        with Pipeline(
            Tied(), schedule=schedule, microbatches=microbatches, mesh=group, loss_fn=loss_fn
        ) as pipe:
            for _ in range(2):  # the first steps plan, and ask the loss what it is
                pipe.step(tokens, target=tokens)
            with Waits() as waits:
                pipe.step(tokens, target=tokens)
        counts.append(dict(waits.places))
    return counts


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-V"])
def test_a_step_reads_as_often_for_any_number_of_microbatches(
    workers: WorkerPool, schedule: str
) -> None:
    for few, many in workers.run(f"{__name__}:of_two_counts", 2, 60.0, schedule=schedule):
        assert few == many
        assert sum(few.values()) <= 10, few
