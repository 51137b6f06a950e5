"""What holds on CPUs holds on a GPU: gradients, random numbers, memory; and the CPU runs ahead."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import _backward as peer
from torch.nn import functional

from penstock import Microbatches, Pipeline, PipelineStage
from penstock.testing import Case, WorkerPool, judge
from tests.catalogue.models import Attention
from tests.device import HAS_DEVICE, device_of_rank

# Where there is none, the tests of numbers show on the CPU that they hold there.
GPU = device_of_rank(0) if HAS_DEVICE else "cpu"
ON_CUDA = torch.device(GPU).type == "cuda"
SCHEDULES = ("1F1B", "ZB-V")
WIDTH, TOKENS, MICROBATCHES = 8, 16, 8


class Tied(nn.Module):
    """Dropout between layers, and a weight that the first and the last stage share."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.5)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Any:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = functional.dropout(block(hidden), 0.1, self.training) + hidden
        return self.head(hidden)


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def case_on(device: str) -> Case:
    """The same weights and tokens in every process."""
    torch.manual_seed(0)
    tokens = torch.randint(0, TOKENS, (16, 6)).to(device)
    parts, targets = tokens.chunk(MICROBATCHES), tokens.roll(1).chunk(MICROBATCHES)
    return Case(Tied().double().to(device), [Microbatches(parts)], targets, loss_fn)


def differences(
    group: Any = None, *, device: str, schedule: str, backend: str | None = None
) -> dict[str, float]:
    """How far a pipeline is from a plain loop after two steps, by what lives in this process.

    In the second step every rank knows what arrives, and receives it ahead. This is a worker's task too, with
    a group of its own if it names a backend.
    """
    device = device.format(rank=0 if group is None else dist.get_rank(group))
    if backend is not None:
        group = dist.new_group(backend=backend)
    case = case_on(device)
    with Pipeline(
        copy.deepcopy(case.model), schedule=schedule, ranks=2, loss_fn=loss_fn, device=device, seed=5,
        mesh=group,
    ) as pipe:  # fmt: skip
        gaps = judge(case, pipe, steps=2).differences()
    if backend is not None:
        dist.destroy_process_group(group)
    return gaps


@pytest.fixture(scope="module")
def pair() -> Iterator[WorkerPool]:
    """Two processes; the groups of these tests are of all processes of a pool."""
    with WorkerPool(2) as pool:
        yield pool


def check_ranks(replies: list[dict[str, float]]) -> None:
    """Each rank has the loss of a plain loop, and the gradients of its weights; all have some rank."""
    assert max(gap for reply in replies for gap in reply.values()) < 1e-9
    gradients = {f"gradient: {name}" for name, _ in Tied().named_parameters()}
    assert {"loss", *gradients} <= {name for reply in replies for name in reply}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_ranks_on_one_gpu_equal_a_plain_loop_with_dropout(schedule: str) -> None:
    check_ranks([differences(device=GPU, schedule=schedule)])


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        pytest.param(GPU, None, id="one over gloo"),
        pytest.param(
            "cuda:{rank}", "nccl", id="one each over nccl",
            marks=pytest.mark.skipif(
                not ON_CUDA or torch.cuda.device_count() < 2, reason="needs two GPUs"
            ),
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_processes_with_gpus(
    pair: WorkerPool, schedule: str, device: str, backend: str | None
) -> None:
    options = {"device": device, "schedule": schedule, "backend": backend}
    check_ranks(pair.run(f"{__name__}:differences", 2, timeout=100, **options))


@pytest.mark.skipif(GPU == "cpu", reason="a CPU does not count its memory")
def test_between_the_halves_less_is_held_than_by_torch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Gated(256) for _ in range(4))).to(GPU)
    value = torch.randn(2, 128, 256, device=GPU, requires_grad=True)
    gradient = torch.ones_like(value)
    model(value).backward(gradient)  # weights have gradients already
    stage = PipelineStage(model, 0, 2)
    start = torch.accelerator.memory_allocated()
    stage.forward(0, [value])
    stage.backward_input(0, [gradient])
    ours = torch.accelerator.memory_allocated() - start
    stage.backward_weight(0)
    start = torch.accelerator.memory_allocated()
    state = peer.stage_backward_input([model(value)], [gradient], [value], model.parameters())
    torchs = torch.accelerator.memory_allocated() - start
    del state
    assert ours < 0.7 * torchs


class Gated(Attention):
    """Attention, and a product of two halves of a layer, which no weight's gradient needs."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.gate_up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, value: Tensor) -> Any:  # type: ignore[override]
        value = super().forward(value)
        gate, up = self.gate_up(functional.rms_norm(value, value.shape[-1:])).chunk(2, dim=-1)
        return value + self.down(functional.silu(gate) * up)


def synchronisations(pipe: Pipeline, batch: Tensor, microbatches: int) -> int:
    """How often a step waits for the device, after a first one."""
    pipe.step(batch, target=batch, microbatches=microbatches)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            pipe.step(batch, target=batch, microbatches=microbatches)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in caught)


@pytest.mark.skipif(not ON_CUDA, reason="only CUDA warns of waits")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_microbatches_do_not_wait_for_the_device(schedule: str) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)) for _ in range(4)))
    pipe = Pipeline(
        model, schedule=schedule, ranks=2, microbatches=4, device=GPU, loss_fn=functional.mse_loss
    )
    batch = torch.ones(16, 8, device=GPU)
    few, many = (synchronisations(pipe, batch, count) for count in (4, 16))
    assert few == many
