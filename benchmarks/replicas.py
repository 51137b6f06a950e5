"""One training step of two by two replicas: averages that overlap, against DistributedDataParallel.

All run the same stages in four gloo processes, two replicas of two ranks, 1F1B. Beside ours, each stage is in
torch's DistributedDataParallel, whose reducer runs in the backward of the last microbatch: once in
torch.distributed.pipelining, and once in a loop by hand as one would write it for these stages and nothing
else, where nothing is checked, watched or agreed on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining as peer
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from benchmarks.pairs import Ratios, take_turns
from penstock import Pipeline, PipelineStage
from penstock.testing import WorkerPool

CASES = {"small": (64, 4, 2), "large": (768, 16, 1)}
"""The width of a layer, the samples of a microbatch, and how many steps make a time."""
LAYERS, MICROBATCHES = 4, 4


def stage_of(width: int, rank: int) -> nn.Module:
    """A rank's stage: some linear layers."""
    torch.manual_seed(rank)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers)


class ByHand:
    """1F1B over two ranks, with the stage in DistributedDataParallel.

    Args:
        stage: this rank's stage.
        mesh: two replicas by two ranks.
        batch: the batch of this replica; it is also the target.
    """

    def __init__(self, stage: nn.Module, mesh: Any, batch: Tensor) -> None:
        self._rank = mesh.get_local_rank("pp")
        self._stage = DistributedDataParallel(stage, process_group=mesh.get_group("dp"))
        self._wire = mesh.get_group("pp")._get_backend(torch.device("cpu"))
        self._parts = batch.chunk(MICROBATCHES)
        self._sent: list[tuple[Any, Tensor]] = []

    def step(self) -> None:
        """Forward and backward of the batch."""
        self._first() if self._rank == 0 else self._last()
        for ticket, _ in self._sent:
            ticket.wait()
        self._sent.clear()

    def _forward(self, value: Tensor) -> Any:
        with self._stage.no_sync():
            return self._stage(value)

    def _backward(self, number: int, output: Tensor, gradient: Tensor | None = None) -> None:
        """Only the last microbatch reduces; as in torch's package, the reducer is told so before."""
        with self._stage.no_sync():
            if number == MICROBATCHES - 1:
                self._stage.require_backward_grad_sync = True
                self._stage.reducer.prepare_for_backward([])
            output.backward(gradient)

    def _first(self) -> None:
        made: dict[int, Tensor] = {}
        for number in range(MICROBATCHES + 1):
            if number < MICROBATCHES:
                made[number] = self._forward(self._parts[number])
                self._send(made[number].detach())
            if number > 0:
                gradient = self._receive()
                self._backward(number - 1, made.pop(number - 1), gradient)

    def _last(self) -> None:
        for number in range(MICROBATCHES):
            value = self._receive().requires_grad_()
            loss = mse_loss(self._forward(value), self._parts[number]) / MICROBATCHES
            self._backward(number, loss)
            assert value.grad is not None
            self._send(value.grad)

    def _send(self, tensor: Tensor) -> None:
        self._sent.append((self._wire.send([tensor], 1 - self._rank, 0), tensor))

    def _receive(self) -> Tensor:
        into = torch.empty_like(self._parts[0])
        self._wire.recv([into], 1 - self._rank, 0).wait()
        return into


def peer_step(stage: nn.Module, mesh: Any, batch: Tensor) -> Callable[[], object]:
    """A step of torch.distributed.pipelining, with the stage in DistributedDataParallel."""
    rank, pp = mesh.get_local_rank("pp"), mesh.get_group("pp")
    wrapped = DistributedDataParallel(stage, process_group=mesh.get_group("dp"))
    placed = peer.PipelineStage(wrapped, rank, 2, torch.device("cpu"), group=pp)
    schedule = peer.Schedule1F1B(placed, MICROBATCHES, mse_loss)
    return partial(schedule.step, batch) if rank == 0 else partial(schedule.step, target=batch)


def measure(group: Any, case: str, rounds: int) -> dict[str, Any]:
    """A worker's task: times in seconds per step, and how far the two ways' gradients are apart."""
    width, samples, repeats = CASES[case]
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    rank = mesh.get_local_rank("pp")
    torch.manual_seed(100 + mesh.get_local_rank("dp"))
    batch = torch.randn(MICROBATCHES * samples, width)
    mine, plain, third = (stage_of(width, rank) for _ in range(3))
    hand, torchs = ByHand(plain, mesh, batch), peer_step(third, mesh, batch)
    pipe = Pipeline.from_stages(
        [PipelineStage(mine, rank, 2)], schedule="1F1B", microbatches=MICROBATCHES, mesh=mesh,
        replicas="dp", loss_fn=mse_loss,
    )  # fmt: skip

    def cleared(module: nn.Module, step: Any) -> None:
        module.zero_grad(set_to_none=False)
        step()

    ways = {
        "ours": partial(cleared, mine, partial(pipe.step, batch, target=batch)),
        "hand": partial(cleared, plain, hand.step),
        "peer": partial(cleared, third, torchs),
    }
    for way in ways.values():
        way()
        way()
    gaps = [
        (a.grad - b.grad).abs().max()
        for other in (plain, third)
        for a, b in zip(mine.parameters(), other.parameters(), strict=True)
        if a.grad is not None and b.grad is not None
    ]
    gap = float(max(gaps))
    times = take_turns(ways, rounds, repeats)
    pipe.close()
    return {"gap": gap, **{name: of.elapsed for name, of in times.items()}}


def compare(rounds: int) -> dict[str, Any]:
    """All cases, printed, and as JSON data."""
    figures: dict[str, Any] = {}
    with WorkerPool(4) as workers:
        for case in CASES:
            replies = workers.run(
                "benchmarks.replicas:measure", 4, timeout=1200, case=case, rounds=rounds
            )
            gap = max(reply["gap"] for reply in replies)
            if gap > 1e-5:
                raise AssertionError(f"the gradients of the two ways differ by {gap}")
            for other, title in (("peer", "torch's package"), ("hand", "a loop by hand")):
                ratios = Ratios(replies[0]["ours"], replies[0][other])
                print(f"step of 2 x 2 replicas, {case}: {ratios.told(title)}")
                figures[f"{case}, against {title}"] = ratios.to_json()
    return figures
