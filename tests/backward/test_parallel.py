"""Parameters that torch.distributed shards or watches give right gradients."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from penstock.backward import SplitBackward

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    path: Path = tmp_path_factory.mktemp("pending") / "file"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


def waiting(model: nn.Module, plain: nn.Module) -> int:
    """Compares two microbatches with plain backward; returns the uses that waited."""
    value = torch.randn(4, 6, requires_grad=True)
    split = SplitBackward(model)
    for _ in range(2):
        model.zero_grad()
        plain.zero_grad()
        _, pending = split.input_half(model(value).square().sum(), None, [value])
        count = len(pending)
        split.weight_half(pending)
        plain(value).square().sum().backward()
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(whole(mine.grad), other.grad)
    return count


def whole(grad: Tensor | None) -> Tensor | None:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def test_tensor_parallel_weights_do_not_wait() -> None:
    model = make()
    styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    sharded = parallelize_module(copy.deepcopy(model), init_device_mesh("cpu", (1,)), styles)
    assert waiting(sharded, model) == 0


def test_fully_sharded_weights_do_not_wait(caplog: pytest.LogCaptureFixture) -> None:
    model = make()
    sharded = copy.deepcopy(model)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    with caplog.at_level(logging.INFO, "penstock"):
        assert waiting(sharded, model) == 0
    assert "FSDP" in caplog.text


@pytest.mark.parametrize("option", ["", "find_unused_parameters", "static_graph"])
def test_replicated_weights_wait_unless_the_graph_is_looked_at(option: str) -> None:
    model = make()
    options: dict[str, Any] = {option: True} if option else {}
    replica = DistributedDataParallel(copy.deepcopy(model), **options)
    assert waiting(replica, model) == (0 if option else 2)
