"""What holds on CPUs holds on a GPU: gradients, random numbers, memory; and the CPU runs ahead."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import _backward as peer

from penstock import Pipeline, PipelineStage
from penstock.testing import WorkerPool
from tests.backward.graphs import TransformerBlock
from tests.device import HAS_DEVICE, device_of_rank
from tests.gpu import steps

# Where there is none, the tests of numbers show on the CPU that they hold there.
GPU = device_of_rank(0) if HAS_DEVICE else "cpu"
ON_CUDA = torch.device(GPU).type == "cuda"
SCHEDULES = ("1F1B", "ZB-V")
TASK = "tests.gpu.steps:differences"


@pytest.fixture(scope="module")
def pair() -> Iterator[WorkerPool]:
    """Two processes; the groups of these tests are of all processes of a pool."""
    with WorkerPool(2) as pool:
        yield pool


def check_ranks(replies: list[dict[str, float]]) -> None:
    """Each rank has the loss of a plain loop, and the gradients of its weights; all have some rank."""
    assert max(gap for reply in replies for gap in reply.values()) < 1e-9
    weights = [name for name, _ in steps.Tied().named_parameters()]
    gradients = {f"gradient: {name}" for name in weights}
    assert {"loss", *gradients} <= {name for reply in replies for name in reply}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_ranks_on_one_gpu_equal_a_plain_loop_with_dropout(schedule: str) -> None:
    check_ranks([steps.differences(device=GPU, schedule=schedule)])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_processes_share_a_gpu_over_gloo(pair: WorkerPool, schedule: str) -> None:
    check_ranks(pair.run(TASK, 2, timeout=100, device=GPU, schedule=schedule))


@pytest.mark.skipif(not ON_CUDA or torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_processes_have_a_gpu_each_over_nccl(pair: WorkerPool, schedule: str) -> None:
    options = {"device": "cuda:{rank}", "schedule": schedule, "backend": "nccl"}
    check_ranks(pair.run(TASK, 2, timeout=100, **options))


@pytest.fixture
def block() -> tuple[nn.Module, Tensor]:
    """Some blocks that have gradients already, and an input."""
    torch.manual_seed(0)
    model = nn.Sequential(*(TransformerBlock(256) for _ in range(4))).to(GPU)
    value = torch.randn(2, 128, 256, device=GPU, requires_grad=True)
    model(value).backward(torch.ones_like(value))
    return model, value


@pytest.mark.skipif(GPU == "cpu", reason="a CPU does not count its memory")
def test_between_the_halves_less_is_held_than_by_torch(block: tuple[nn.Module, Tensor]) -> None:
    model, value = block
    gradient = torch.ones_like(value)
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
    batch = torch.ones(16, 8, device=GPU)
    pipe = Pipeline(
        model,
        schedule=schedule,
        ranks=2,
        microbatches=4,
        device=GPU,
        loss_fn=nn.functional.mse_loss,
    )
    few, many = (synchronisations(pipe, batch, count) for count in (4, 16))
    assert few == many
