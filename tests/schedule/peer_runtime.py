"""A rank of torch's own runtime, which runs files: ``peer_runtime.py folder``, once per rank.

Each file is run for one step, and the gradients are compared with those of the same model in one process.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as peer

from penstock.schedule import load

MICROBATCHES = 8


def run(file: Path, rank: int) -> None:
    """Run a file for one step, and check the gradients of this rank's stages."""
    schedule = load(file)
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(schedule.stages)]
    batch = torch.randn(MICROBATCHES, 4)
    nn.Sequential(*modules)(batch).square().sum().backward()
    expected = [[p.grad for p in module.parameters()] for module in modules]
    nn.Sequential(*modules).zero_grad()
    mine = schedule.placement.stages_on(rank)
    device = torch.device("cpu")
    stages = [PipelineStage(modules[i], i, schedule.stages, device) for i in mine]
    for stage in stages:
        stage.stage_index_to_group_rank = dict(enumerate(schedule.placement.rank_of))
    runtime = peer._PipelineScheduleRuntime(
        stages, MICROBATCHES, lambda output, _: output.square().sum(), scale_grads=False
    )
    runtime._load_csv(str(file), format="compute_comms")
    first, last = 0 in mine, schedule.stages - 1 in mine
    target = {"target": torch.zeros(MICROBATCHES, 1)} if last else {}
    runtime.step(*([batch] if first else []), **target)
    for index in mine:
        gradients = [p.grad for p in modules[index].parameters()]
        torch.testing.assert_close(gradients, expected[index])


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for path in sorted(Path(sys.argv[1]).glob("*.csv")):
        run(path, dist.get_rank())
    dist.destroy_process_group()
