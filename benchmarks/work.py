"""What the benches of steps run: a model's stages with a batch, and a pipeline of them of either kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage as PeerStage
from torch.distributed.pipelining import Schedule1F1B as Peer1F1B
from torch.distributed.pipelining import ScheduleGPipe as PeerGPipe
from torch.distributed.pipelining import ScheduleInterleaved1F1B as PeerInterleaved
from torch.distributed.pipelining import ScheduleInterleavedZeroBubble as PeerZeroBubble
from torch.distributed.pipelining import ScheduleZBVZeroBubble as PeerZBV

from penstock import Pipeline, PipelineStage
from penstock.schedule import build
from penstock.train.model import GPT, even_stages, next_byte_loss

RANKS = 2
DEPTH = 4
"""Blocks of a GPT, and layers of a tiny model: shared by two or four stages."""


@dataclass(frozen=True)
class Work:
    """A model in stages, and what one step of it takes.

    Args:
        stages: all of them, in order.
        batch: the model's argument.
        target: what the loss compares with.
        loss: the function.
        microbatches: into how many parts the batch goes.
    """

    stages: Sequence[nn.Module]
    batch: Tensor
    target: Tensor
    loss: Callable[..., Tensor]
    microbatches: int

    def held(self, placement: Sequence[int], rank: int) -> list[int]:
        """The stages of a rank."""
        return [stage for stage, home in enumerate(placement) if home == rank]

    def to(self, device: torch.device) -> Work:
        """The same on a device."""
        stages = [stage.to(device) for stage in self.stages]
        batch, target = self.batch.to(device), self.target.to(device)
        return replace(self, stages=stages, batch=batch, target=target)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for stage in self.stages:
            stage.zero_grad()

    def cleared(self, step: Callable[[], object]) -> Callable[[], None]:
        """A step that drops its gradients."""

        def run() -> None:
            step()
            self.zero_grad()

        return run


def gpt(stages: int, microbatches: int = 8) -> Work:
    """A GPT of width 256 with 4 blocks, sequences of 128, microbatches of 2."""
    torch.manual_seed(0)
    model = GPT(layers=DEPTH, width=256, heads=4, sequence=128)
    parts = [
        nn.Sequential(*(model.get_submodule(path) for path in paths))
        for paths in even_stages(DEPTH, stages)
    ]
    tokens = torch.randint(0, 256, (2 * microbatches, 129))
    return Work(parts, tokens[:, :-1], tokens[:, 1:], next_byte_loss, microbatches)


def tiny(stages: int, microbatches: int = 64) -> Work:
    """Stages so small that only the runtime is measured: Linear 16 x 16, microbatches of 1."""
    torch.manual_seed(0)
    parts = [nn.Linear(16, 16) for _ in range(stages)]
    batch = torch.randn(microbatches, 16)
    return Work(parts, batch, torch.zeros(microbatches, 16), nn.functional.mse_loss, microbatches)


WORKS: dict[str, Callable[..., Work]] = {"gpt": gpt, "tiny": tiny}
SCHEDULES = {"1F1B": RANKS, "Interleaved1F1B": 2 * RANKS, "ZB-H1": RANKS, "ZB-V": 2 * RANKS}
"""The schedules, and how many stages each takes."""
PEERS: dict[str, Any] = {
    "GPipe": PeerGPipe,
    "1F1B": Peer1F1B,
    "Interleaved1F1B": PeerInterleaved,
    "ZB-H1": PeerZeroBubble,
    "ZB-V": PeerZBV,
}
"""What the peer calls them; its nearest to ZB-H1 is its interleaved one, with one stage on each rank."""


def placement(schedule: str) -> tuple[int, ...]:
    """The rank of each stage."""
    return build(schedule, ranks=RANKS, microbatches=2 * RANKS).placement.rank_of


def ours(work: Work, schedule: str, group: Any) -> Pipeline:
    """A pipeline of this rank's stages, or of all where there is no group."""
    home = placement(schedule)
    held = range(len(home)) if group is None else work.held(home, group.rank())
    return Pipeline.from_stages(
        [PipelineStage(work.stages[index], index, len(home)) for index in held],
        schedule=schedule,
        microbatches=work.microbatches,
        loss_fn=work.loss,
        mesh=group,
    )


class Peer:
    """The peer's pipeline of this rank's stages."""

    def __init__(self, work: Work, schedule: str, group: Any) -> None:
        home = placement(schedule)
        held = work.held(home, group.rank())
        self.stages = [
            PeerStage(work.stages[index], index, len(home), work.batch.device, group=group)
            for index in held
        ]
        self._arguments = (work.batch,) if 0 in held else ()
        self._target = work.target if len(home) - 1 in held else None
        stages = self.stages[0] if schedule in ("GPipe", "1F1B") else self.stages
        self._schedule = PEERS[schedule](stages, work.microbatches, work.loss)

    def step(self) -> None:
        """Forward and backward of the batch."""
        self._schedule.step(*self._arguments, target=self._target, return_outputs=False)
