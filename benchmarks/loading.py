"""The memory that a rank needs to fill its stage of a large model from files, beside its share."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from penstock.partition.traced import Cuts, Point, cut_traced
from safetensors.torch import save_file
from torch import Tensor, nn

from penstock.weights import load_partition, parameters_on_meta

STAGES = 4


class Block(nn.Module):
    """A residual block of two large products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """The block's output."""
        change: Tensor = self.down(torch.relu(self.up(self.norm(hidden))))
        return hidden + change


def compare(rounds: int) -> dict[str, Any]:
    """Measure in a process of its own, so that nothing else counts."""
    del rounds
    command = [sys.executable, "-m", "benchmarks.loading"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    print(
        f"loading: a rank's share is {found['share'] / 1e6:.0f} MB of {found['whole'] / 1e6:.0f} MB, "
        f"its peak {found['peak'] / 1e6:.0f} MB ({found['peak_over_share']:.3f} of the share)"
    )
    return found


def measure(layers: int, width: int) -> dict[str, Any]:
    """Write a model layer by layer, cut it without data, and fill one stage."""
    with parameters_on_meta():
        model = nn.Sequential(*(Block(width) for _ in range(layers)))
    points = tuple(Point(str(layers * stage // STAGES)) for stage in range(1, STAGES))
    partition = cut_traced(model, (torch.empty(2, width),), cuts=Cuts(points)).partition
    with tempfile.TemporaryDirectory() as folder:
        _write(model, Path(folder))
        _start_counting()
        before = _peak()
        load_partition(partition, [1], folder)
        peak = _peak() - before
    share = _bytes(partition.modules[1])
    return {
        "whole": _bytes(model),
        "share": share,
        "peak": peak,
        "peak_over_share": peak / share,
    }


def _bytes(module: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in module.parameters())


def _write(model: nn.Module, folder: Path) -> None:
    where: dict[str, str] = {}
    for index, block in enumerate(model.children()):
        file = f"layer{index}.safetensors"
        own = {f"{index}.{name}": torch.ones(t.shape) for name, t in block.named_parameters()}
        save_file(own, folder / file)
        where |= dict.fromkeys(own, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def _start_counting() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=1024)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(measure(given.layers, given.width)))
