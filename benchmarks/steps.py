"""One training step on two gloo processes: Penstock and the peer, in the same processes, in turn."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage as PeerStage
from torch.distributed.pipelining import Schedule1F1B as Peer1F1B

from benchmarks.pairs import Ratios, alternate
from penstock import Pipeline, PipelineStage
from penstock.testing import WorkerPool
from penstock.train.model import GPT, Shape, cut, next_byte_loss

RANKS = 2


def measure(group: Any, case: str, rounds: int, repeats: int) -> dict[str, list[float]]:
    """A worker's task: paired times of one case, in seconds per step."""
    stage, batch, target, loss, microbatches = CASES[case](group.rank())
    ours = Pipeline.from_stages(
        [PipelineStage(stage, group.rank(), RANKS)],
        schedule="1F1B",
        microbatches=microbatches,
        loss_fn=loss,
        group=group,
    )
    peer = Peer1F1B(
        PeerStage(stage, group.rank(), RANKS, torch.device("cpu"), group=group), microbatches, loss
    )

    def run_ours() -> None:
        ours.step(batch, target=target)
        ours.zero_grad()

    def run_peer() -> None:
        arguments = (batch,) if group.rank() == 0 else ()
        wanted = target if group.rank() == RANKS - 1 else None
        peer.step(*arguments, target=wanted, return_outputs=False)
        stage.zero_grad()

    run_ours()
    run_peer()
    first, second = alternate(run_ours, run_peer, rounds, repeats)
    return {"ours": first, "peer": second}


Prepared = tuple[nn.Module, Tensor, Tensor, Any, int]


def gpt(rank: int) -> Prepared:
    """A GPT of width 256 with 2 blocks a stage, sequences of 128, 8 microbatches of 2."""
    shape = Shape(layers=2 * RANKS, width=256, heads=4, sequence=128)
    model = GPT(shape)
    paths = cut(shape.layers, RANKS)[rank]
    stage = nn.Sequential(*(model.get_submodule(path) for path in paths))
    tokens = torch.randint(0, 256, (16, 129), generator=torch.Generator().manual_seed(0))
    return stage, tokens[:, :-1], tokens[:, 1:], next_byte_loss, 8


def tiny(rank: int) -> Prepared:
    """A stage so small that only the runtime is measured: Linear 16 x 16, 64 microbatches."""
    torch.manual_seed(rank)
    stage = nn.Linear(16, 16)
    batch = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    return stage, batch, torch.zeros(64, 16), nn.functional.mse_loss, 64


CASES = {"gpt": gpt, "tiny": tiny}
AIMS = {"gpt": 1.0, "tiny": 0.8}


def compare(rounds: int) -> dict[str, Any]:
    """Both cases, printed, and as JSON data."""
    found: dict[str, Any] = {}
    with WorkerPool(RANKS) as workers:
        for case, repeats in (("gpt", 1), ("tiny", 5)):
            answers = workers.run(
                "benchmarks.steps:measure",
                RANKS,
                timeout=600,
                case=case,
                rounds=rounds,
                repeats=repeats,
            )
            ratios = Ratios(answers[0]["ours"], answers[0]["peer"])
            print(f"step, 1F1B, {case:5}: {ratios}; aim {AIMS[case]}")
            found[case] = {"aim": AIMS[case], **ratios.to_json()}
    return found
