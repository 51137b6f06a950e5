"""How much of our own Python runs: calls per stage and microbatch, per step, and frames above a forward.

Unlike times, these counts are the same on every machine.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Pipeline

SOURCES = str(Path(penstock.__file__).parent)
FEW, MANY = 8, 16


def is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(SOURCES)


def tiny(schedule: str, microbatches: int) -> Pipeline:
    """A Linear layer for each stage."""
    ranks = 2 if schedule == "ZB-V" else 4
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    loss = nn.functional.mse_loss
    return Pipeline(model, schedule=schedule, ranks=ranks, microbatches=microbatches, loss_fn=loss)


def count_calls(schedule: str, microbatches: int) -> int:
    """How many of our functions a step calls, once it knows its arguments."""
    pipe, batch = tiny(schedule, microbatches), torch.randn(2 * microbatches, 4)
    for _ in range(2):
        pipe.step(batch, target=batch)
    calls = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and is_ours(frame)

    sys.setprofile(count)
    try:
        pipe.step(batch, target=batch)
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.whole
@pytest.mark.parametrize(("schedule", "most"), [("1F1B", 35), ("ZB-H1", 60), ("ZB-V", 60)])
def test_calls_for_each_stage_and_microbatch_and_for_each_step(schedule: str, most: int) -> None:
    few, many = count_calls(schedule, FEW), count_calls(schedule, MANY)
    slope = (many - few) / (MANY - FEW)
    assert slope / 4 <= most
    assert few - slope * FEW <= 315


class Probe(nn.Linear):
    """Notes how many of our frames are above its forward."""

    frames: int

    def forward(self, input: Tensor) -> Tensor:
        frame, self.frames = sys._getframe(), 0
        while frame.f_back is not None:
            frame = frame.f_back
            self.frames += is_ours(frame)
        return super().forward(input)


def test_frames_between_a_step_and_the_authors_forward() -> None:
    probe = Probe(4, 4)
    model = nn.Sequential(nn.Linear(4, 4), probe, nn.Linear(4, 4))
    pipe = Pipeline(model, ranks=3, microbatches=2, loss_fn=nn.functional.mse_loss)
    pipe.step(torch.randn(4, 4), target=torch.randn(4, 4))
    assert probe.frames <= 8
