"""The memory that a process needs to fill one stage of a large model from files, beside the stage's weights.

It is a program of its own, so that nothing else counts. It prints the ratio.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from penstock._engine.weights import load_partition, parameters_on_meta
from penstock.partition import partition

LAYERS, WIDTH, STAGES = 4, 1024, 2


class Block(nn.Module):
    """A residual block of two large products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        change: Tensor = self.down(torch.relu(self.up(self.norm(hidden))))
        return hidden + change


def make() -> nn.Module:
    """A model without data."""
    with parameters_on_meta():
        return nn.Sequential(*(Block(WIDTH) for _ in range(LAYERS)))


def measure(folder: str) -> float:
    """Cut the model, and fill one stage from the folder."""
    cut = partition(make(), STAGES)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    load_partition(cut, [1], folder)
    share = sum(tensor.nbytes for tensor in cut.modules[1].parameters())
    return (memory("VmHWM") - before) / share


def write(model: nn.Module, folder: Path) -> None:
    """Write ones in place of its weights, layer by layer."""
    homes: dict[str, str] = {}
    for index, block in enumerate(model.children()):
        file = f"layer{index}.safetensors"
        weights = {f"{index}.{name}": torch.ones(t.shape) for name, t in block.named_parameters()}
        save_file(weights, folder / file)
        homes |= dict.fromkeys(weights, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))


def memory(what: str) -> int:
    """Bytes of this process: held now (VmRSS), or the most since the peak was cleared (VmHWM)."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(str(measure(sys.argv[1])))
