"""What checkpoints cost beside those of ``torch.distributed.checkpoint``.

Kills, full disks and damaged bytes are in ``tests/checkpoint/campaign.py``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from penstock import Checkpoints, Pipeline
from penstock.testing import WorkerPool

RANKS = 2


def cost(group: Any, rounds: int, layers: int, width: int, folder: str) -> dict[str, Any]:
    """A worker's task: seconds that a call held the training up, and until all was on the disk."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    pipe = Pipeline(model, schedule="1F1B", microbatches=2, loss_fn=_loss, mesh=group)
    optimizer = torch.optim.AdamW(pipe.parameters())
    x = torch.randn(4, width)
    pipe.step(x, target=x)
    optimizer.step()
    states: dict[str, Any] = {"pipe": pipe, "optimizer": optimizer}
    theirs = {"model": pipe.weights, "optimizer": pipe.weights.optimizer_state_dict(optimizer)}
    ours, beside = (
        Checkpoints(f"{folder}/a", keep=1),
        Checkpoints(f"{folder}/b", keep=1, asynchronous=True),
    )
    # On a machine without an accelerator it can pin nothing.
    stager = DefaultStager(StagingOptions(False, False, False, False))
    number = 0

    def place() -> str:
        return f"{folder}/c{number}"

    def torch_save() -> Any:
        state_dict_saver.save(theirs, checkpoint_id=place(), process_group=group)

    def torch_async(**options: Any) -> Any:
        return state_dict_saver.async_save(
            theirs, checkpoint_id=place(), process_group=group, **options
        )

    ways: dict[str, Callable[[], Any]] = {
        "ours": lambda: ours.save(number, **states) and None,
        "torch": torch_save,
        "ours, beside": lambda: beside.save(number, **states) and beside,
        "torch, beside": torch_async,
        "torch, beside, memory kept": lambda: torch_async(async_stager=stager),
    }
    found: dict[str, Any] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            number += 1
            pipe.job.agree(None)
            started = time.perf_counter()
            pending = way()
            stall = time.perf_counter() - started
            if pending is not None:
                pending.wait() if isinstance(pending, Checkpoints) else pending.result()
            pipe.job.agree(None)
            found[name].append([stall, time.perf_counter() - started])
            if pipe.is_main_process and not name.startswith("ours"):
                found["bytes, torch"] = sum(p.stat().st_size for p in Path(place()).iterdir())
                shutil.rmtree(place())
    if pipe.is_main_process:
        files = Path(folder, "a").glob("step-*/*")
        found["bytes, ours"] = sum(path.stat().st_size for path in files)
    for checkpoints in (ours, beside):
        checkpoints.close()
    pipe.close()
    return found


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def costs(rounds: int, layers: int = 16, width: int = 1024) -> dict[str, Any]:
    """Medians over rounds, of the slower rank."""
    with WorkerPool(RANKS) as workers, tempfile.TemporaryDirectory() as folder:
        answers = workers.run(
            "benchmarks.checkpoints:cost",
            RANKS,
            timeout=1800,
            rounds=rounds,
            layers=layers,
            width=width,
            folder=folder,
        )
    found: dict[str, Any] = {name: of for name, of in answers[0].items() if "bytes" in name}
    for name in answers[0].keys() - found.keys():
        # The first of each makes what later ones have: connections, memory.
        pairs = list(zip(*(answer[name][1:] for answer in answers), strict=True))
        stalls = [max(one[0] for one in pair) for pair in pairs]
        wholes = [max(one[1] for one in pair) for pair in pairs]
        found[name] = {"stall": statistics.median(stalls), "whole": statistics.median(wholes)}
    return found


def compare(rounds: int) -> dict[str, Any]:
    """The costs, printed, and as JSON data."""
    found: dict[str, Any] = {}
    found["costs"] = costs(min(rounds, 12))
    for name, figures in found["costs"].items():
        told = (
            f"{figures / 1e6:.1f} MB"
            if isinstance(figures, int)
            else f"stall {figures['stall'] * 1e3:.1f} ms, whole after {figures['whole'] * 1e3:.1f} ms"
        )
        print(f"checkpoints, {name}: {told}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    torch.set_num_threads(1)
    print(json.dumps(costs(parser.parse_args().rounds), indent=2))
