"""Stages made and placed by hand, with a value that skips a stage; each process makes only its own.

python examples/hand_placed.py
torchrun --standalone --nproc-per-node 3 examples/hand_placed.py
"""

import os

import torch
from torch import nn

import penstock
from penstock.schedule import Edge


class Encode(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        hidden = torch.tanh(self.layer(x))
        return {"hidden": hidden, "scale": hidden.norm(dim=-1, keepdim=True)}


class Join(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, deep, scale):
        return self.layer(deep) * scale


# Stage 0 makes two values; one goes to the next stage, the other to the last.
EDGES = [Edge("hidden", 0, (1,)), Edge("scale", 0, (2,)), Edge("deep", 1, (2,))]
MAKERS = [Encode, lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()), Join]

rank = os.environ.get("RANK")
held = range(3) if rank is None else [int(rank)]
stages = []
for index in held:
    torch.manual_seed(index)
    stages.append(penstock.PipelineStage(MAKERS[index](), index, 3))

x = torch.linspace(-1, 1, 96).reshape(12, 8)
with penstock.Pipeline.from_stages(
    stages, schedule="1F1B", microbatches=4, edges=EDGES, loss_fn=nn.functional.mse_loss
) as pipe:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.02)
    for step in range(10):
        # The first rank needs the batch and the last one the target; all may pass both.
        result = pipe.step(x, target=x.sum(1, keepdim=True))
        optimizer.step()
        pipe.zero_grad()
        if pipe.is_main_process:
            print(f"step {step + 1:2}  loss {result.loss:.5f}")
