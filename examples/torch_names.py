"""The same script for torch's pipelining and for Penstock's.

torchrun --standalone --nproc-per-node 2 examples/torch_names.py --package torch
torchrun --standalone --nproc-per-node 2 examples/torch_names.py --package penstock
python examples/torch_names.py --package penstock     # all stages in one process
"""

import argparse
import os
from importlib import import_module

import torch
import torch.distributed as dist
from torch import Tensor, nn

PACKAGES = {"torch": "torch.distributed.pipelining", "penstock": "penstock.pipelining"}
WIDTH, STAGES, STEPS = 16, 4, 5


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def train(package: str, rank: int, ranks: int) -> None:
    pipelining = import_module(PACKAGES[package])
    torch.manual_seed(0)
    blocks = [block() for _ in range(STAGES)]
    mine = range(rank, STAGES, ranks)
    device = torch.device("cpu")
    stages = [pipelining.PipelineStage(blocks[i], i, STAGES, device) for i in mine]
    schedule = pipelining.ScheduleInterleaved1F1B(stages, n_microbatches=4, loss_fn=loss_fn)
    optimizer = torch.optim.SGD([p for i in mine for p in blocks[i].parameters()], lr=0.5)

    x, target = torch.randn(32, WIDTH), torch.zeros(32, WIDTH)
    for step in range(STEPS):
        losses: list[Tensor] = []
        args = (x,) if stages[0].is_first else ()
        if stages[-1].is_last:
            schedule.step(*args, target=target, losses=losses)
            print(f"step {step}  loss {torch.stack(losses).mean().item():.6f}")
        else:
            schedule.step(*args)
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a few steps with either package.")
    parser.add_argument("--package", choices=PACKAGES, default="penstock")
    package = parser.parse_args().package
    torch.set_num_threads(1)
    if "RANK" not in os.environ:
        train(package, 0, 1)
        return
    dist.init_process_group("gloo")
    train(package, dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
