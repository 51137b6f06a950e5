"""Two pipelines side by side, each on half of the batch, and each stage's weights sharded over the two.

python examples/mesh.py
torchrun --standalone --nproc-per-node 4 examples/mesh.py
"""

import os

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import penstock

RANKS, REPLICAS = 2, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, hidden):
        return hidden + self.down(torch.tanh(self.up(hidden)))


torch.manual_seed(0)
model = nn.Sequential(*[Block() for _ in range(4)])
batch = torch.linspace(-1, 1, 16 * 16).reshape(16, 16)
target = batch.roll(1, 1)
sharing = {}

if "RANK" in os.environ:
    mesh = init_device_mesh("cpu", (REPLICAS, RANKS), mesh_dim_names=("dp", "pp"))

    def wrap(module, stage):
        for block in module.children():
            fully_shard(block, mesh=mesh["dp"])
        return fully_shard(module, mesh=mesh["dp"])

    # Each replica has its own samples; Penstock adds the losses up over both.
    replica = mesh.get_local_rank("dp")
    batch, target = batch.chunk(REPLICAS)[replica], target.chunk(REPLICAS)[replica]
    sharing = {"mesh": mesh, "replicas": "dp", "wrap": wrap}

with penstock.Pipeline(
    model, schedule="1F1B", stages=RANKS, microbatches=4, loss_fn=nn.functional.mse_loss, **sharing
) as pipe:
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    for step in range(10):
        result = pipe.step(batch, target=target)
        norm = pipe.clip_grad_norm_(1.0)
        optimizer.step()
        pipe.zero_grad()
        if pipe.is_main_process:
            print(f"step {step + 1:2}  loss {result.loss:.5f}  gradient norm {norm:.4f}")
    weights = pipe.weights.state_dict(full=True)
    if pipe.is_main_process:
        # Under the names of the model as it was before it was cut and sharded, and whole.
        print(
            f"{len(weights)} tensors, such as 3.down.weight {list(weights['3.down.weight'].shape)}"
        )
