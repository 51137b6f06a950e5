"""Stages that are compiled, or whose parameters torch.distributed shards or watches."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from penstock._engine.compiled import graphs_kept
from penstock.backward import SplitBackward
from penstock.pipelining._backward import stage_backward_input, stage_backward_weight
from tests.backward.graphs import linear, x

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module", autouse=True)
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    path = tmp_path_factory.mktemp("pending") / "file"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def tensor_parallel(model: nn.Module) -> nn.Module:
    styles = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (1,)), styles)


def sharded(model: nn.Module) -> nn.Module:
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="aot_eager")


def compiled_in_part(model: Any) -> nn.Module:
    return nn.Sequential(compiled(model[:2]), model[2])


WRAPPERS: dict[str, tuple[Callable[[nn.Module], nn.Module], int, str]] = {
    "tensor parallel": (tensor_parallel, 0, ""),
    "fully sharded": (sharded, 0, "FSDP reduces its gradients in the inputs' half"),
    "replicated": (DistributedDataParallel, 2, ""),
    "replicated, unused": (
        lambda model: DistributedDataParallel(model, find_unused_parameters=True), 0, "searches the graph",
    ),
    "replicated, static": (
        lambda model: DistributedDataParallel(model, static_graph=True), 0, "searches the graph",
    ),
    "compiled": (compiled, 1, ""),
    "compiled in part": (compiled_in_part, 2, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", WRAPPERS)
def test_gradients_are_right_and_wait_where_they_can(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.compiler.reset()
    wrap, waiting, says = WRAPPERS[name]
    plain, value = nn.Sequential(linear(8), nn.Tanh(), nn.Linear(8, 6).double()), x()
    model = wrap(copy.deepcopy(plain))
    split = SplitBackward(model)
    with caplog.at_level(logging.INFO, "penstock"):
        for _ in range(2):
            # Equal graphs may have been compiled before, and torch's cache on disk does not hold what is cut.
            with graphs_kept():
                loss = model(value).square().sum()
            _, pending = split.input_half(loss, None, [value])
            assert len(pending) == waiting
            split.weight_half(pending)
            plain(value).square().sum().backward()
            for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
                grad = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
                torch.testing.assert_close(grad, other.grad)
    assert says in caplog.text


def test_what_is_compiled_is_in_the_first_half_of_the_functions() -> None:
    torch.compiler.reset()
    plain, value = nn.Sequential(linear(8), nn.Tanh(), nn.Linear(8, 6).double()), x()
    model = compiled_in_part(copy.deepcopy(plain))
    with graphs_kept():
        loss, weights = model(value).square().sum(), list(model.parameters())
    (gradient,), groups = stage_backward_input([loss], None, [value], weights)
    assert len(groups[0]["grads"]) == 4, "all are there at once"
    actual = [gradient, *stage_backward_weight(weights, groups)]
    expected = torch.autograd.grad(plain(value).square().sum(), [value, *plain.parameters()])
    torch.testing.assert_close(actual, list(expected))
