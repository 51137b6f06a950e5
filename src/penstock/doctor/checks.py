"""Whether a small pipeline gives the numbers of one process, also through a save and a load."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor, nn

from penstock.checkpoint import Checkpoints
from penstock.errors import PenstockError
from penstock.pipeline import Pipeline
from penstock.testing import Case, judge

TOLERANCE = 1e-9
"""The largest difference of numbers near 1 in float64."""
STEPS = 3


class SkipBlock(nn.Module):
    """A block with a skip."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.linear = nn.Linear(width, width, dtype=dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute the block."""
        changed: Tensor = self.linear(self.norm(hidden)).tanh()
        return hidden + changed


def small_model(blocks: int, width: int, dtype: torch.dtype) -> nn.Sequential:
    """A model with the same weights in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*(SkipBlock(width, dtype) for _ in range(blocks)))


@dataclass(frozen=True)
class Check:
    """Something that was tried.

    Args:
        name: what, in words.
        problem: what is wrong; empty if it is right.
    """

    name: str
    problem: str = ""


class SmallPipeline:
    """A small pipeline in float64, and the plain loop.

    Args:
        ranks: the ranks of the pipeline.
        device: where its stages are.
        group: the process group of the ranks, if it is not that of all processes.
    """

    def __init__(self, ranks: int, device: torch.device, group: Any) -> None:
        model = small_model(2 * ranks, 32, torch.float64).to(device)
        batch = torch.linspace(-1, 1, 8 * 32, dtype=torch.float64, device=device).view(8, 32)
        self._case = Case(model, [batch], batch.flip(0), nn.functional.mse_loss)
        self._device = device
        self.pipe = Pipeline(
            small_model(2 * ranks, 32, torch.float64), schedule="ZB-H1", ranks=ranks, microbatches=4,
            loss_fn=nn.functional.mse_loss, device=device, mesh=group,
        )  # fmt: skip

    def _difference(self) -> float:
        """The largest difference of loss, output and gradients from the plain loop, over all ranks."""
        case = self._case
        verdict = judge(case, self.pipe)
        self.pipe.zero_grad()
        outputs = self.pipe.predict(*case.args)
        with torch.no_grad():
            expected = case.model(*case.args)
        output = float((outputs.to(self._device) - expected).abs().max())
        mine = max(output, *verdict.differences().values())
        most: float = max(self.pipe.job.meet(lambda: mine))
        return most

    def step(self) -> Check:
        """A step with backward in halves."""
        most = self._difference()
        name = f"a pipeline of {self.pipe.schedule.ranks} ranks computes what one process computes"
        wrong = f"a number differs by {most:.1e} from that of one process"
        return Check(name, "" if most <= TOLERANCE else wrong)

    def folder(self, folder: Path) -> Check:
        """Tell whether all ranks see one folder."""
        name = f"all ranks see {folder}"
        with self._within(folder) as inside:
            try:
                Checkpoints(inside).check_shared(self.pipe)
            except (PenstockError, OSError) as error:
                return Check(name, str(error))
        return Check(name)

    def save(self, folder: Path) -> Check:
        """A save, other weights, and a load."""
        name = "a checkpoint is saved and loaded"
        try:
            with self._within(folder) as inside:
                Checkpoints(inside).save(1, pipe=self.pipe)
                for tensor in self.pipe.weights.here.state_dict().values():
                    tensor.detach().fill_(0.5)
                Checkpoints(inside).load(pipe=self.pipe)
        except (PenstockError, OSError) as error:
            return Check(name, str(error))
        most = self._difference()
        wrong = f"after a save and a load, a number differs by {most:.1e}"
        return Check(name, "" if most <= TOLERANCE else wrong)

    @contextmanager
    def _within(self, folder: Path) -> Iterator[Path]:
        """A folder of its own inside another, the same for all ranks, which is removed at the end."""
        name = f"penstock-doctor-{uuid4().hex[:8]}"
        inside = folder / self.pipe.job.meet(lambda: name)[0]
        if self.pipe.is_main_process:
            with suppress(OSError):
                inside.mkdir(parents=True)
        self.pipe.job.meet(lambda: None)
        try:
            yield inside
        finally:
            self.pipe.job.meet(lambda: None)
            shutil.rmtree(inside, ignore_errors=True)
