"""The host does not wait for a device more often where there are more microbatches.

It would where it reads numbers from tensors or copies them to the CPU, which is counted here.
"""

from __future__ import annotations

import sys
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
from tests import played
from tests.gpu.test_gpu import TOKENS, Tied, loss_fn
from tests.processes import run_program

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

    def within(self, file: str) -> int:
        """The reads in a file."""
        return sum(count for place, count in self.places.items() if place.startswith(file))


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


def in_one_process(device: str, nonfinite: Any) -> list[int]:
    """The reads of numbers in a later step, and in asking for its loss twice."""
    torch.manual_seed(0)
    tokens = torch.randint(0, TOKENS, (16, 6), device="cpu").to(device)
    loss, counts = penstock.Loss(loss_fn, nonfinite=nonfinite), []
    with Pipeline(Tied(), ranks=2, microbatches=4, loss_fn=loss, device=device) as pipe:
        for _ in range(2):
            assert pipe.step(tokens, target=tokens).finite
        with Waits() as waits:
            result = pipe.step(tokens, target=tokens)
        counts.append(waits.within("result.py"))
        with Waits() as waits:
            assert result.loss == result.loss
        counts.append(waits.within("result.py"))
    return counts


def test_one_process_reads_its_numbers_once_or_when_they_are_asked_for() -> None:
    assert in_one_process("cpu", "stop") == [1, 0]
    assert in_one_process("cpu", "warn") == [1, 0]
    # In a process of its own, since a device is registered for good.
    ended = run_program(sys.executable, "-m", __name__)
    assert ended.out.split("\n")[:2] == ["[1, 0]", "[0, 1]"], ended


@pytest.mark.parametrize("schedule", ["1F1B", "ZB-V"])
def test_a_step_reads_as_often_for_any_number_of_microbatches(
    workers: WorkerPool, schedule: str
) -> None:
    for few, many in workers.run(f"{__name__}:of_two_counts", 2, 60.0, schedule=schedule):
        assert few == many
        assert sum(few.values()) <= 10, few


if __name__ == "__main__":
    played.register()
    for nonfinite in ("stop", "warn"):
        sys.stdout.write(f"{in_one_process(played.NAME, nonfinite)}\n")
