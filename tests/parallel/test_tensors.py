"""Norms of tensors that are spread over a mesh."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from penstock._engine.parallel import global_norms, local_part, whole, with_local
from penstock.testing import WorkerPool

ORDERS = (2.0, 1.0, 3.5, 0.0, math.inf, -math.inf, -1.0)


def tensors() -> list[Tensor]:
    """The last has fewer rows than there are processes in some meshes."""
    torch.manual_seed(0)
    shapes = [(6, 4), (5, 3), (7,), (4, 4), (1, 3)]
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


PLACEMENTS: list[list[Placement]] = [
    [Shard(0), Replicate()],
    [Replicate(), Shard(0)],
    [Shard(0), Shard(0)],
    [Replicate(), Replicate()],
    [Shard(0), Replicate()],
]


def expected(order: float) -> list[float]:
    return [float(torch.linalg.vector_norm(tensor, order)) for tensor in tensors()]


@pytest.mark.parametrize("order", ORDERS)
def test_plain_tensors(order: float) -> None:
    torch.testing.assert_close(global_norms(tensors(), order).tolist(), expected(order))
    assert global_norms([], order).shape == (0,)


def test_sparse_and_half_precision() -> None:
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 2]]), torch.tensor([3.0, 1.0, 3.0]), (4,), check_invariants=True
    )
    half = torch.full((1000,), 1.001, dtype=torch.bfloat16)
    norms = global_norms([sparse, half], 2.0)
    assert norms[0] == 5.0
    assert norms[1] == pytest.approx(math.sqrt(float(half.double().square().sum())), rel=1e-6)


def test_a_plain_tensor_is_its_own_part() -> None:
    one = tensors()[0]
    assert torch.equal(local_part(one), one)
    assert with_local(one, one) is one


def spread(group: Any) -> dict[str, Any]:
    """A worker's task: the norms of tensors that are cut along neither, one or both dimensions."""
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
    sharded = [
        distribute_tensor(tensor, mesh, placements)
        for tensor, placements in zip(tensors(), PLACEMENTS, strict=True)
    ]
    summed = DTensor.from_local(tensors()[0] / 2, mesh, [Partial(), Replicate()])
    return {
        "norms": [global_norms([*sharded, tensors()[1]], order).tolist() for order in ORDERS],
        "apart": [global_norms(sharded, order, apart=True).tolist() for order in ORDERS],
        "sums": [float(global_norms([summed], order)) for order in ORDERS],
        "whole": [bool(torch.equal(whole(a), b)) for a, b in zip(sharded, tensors(), strict=True)],
        "same": all(
            bool(torch.equal(whole(with_local(a, local_part(a))), whole(a))) for a in sharded
        ),
    }


def test_shards_count_once_and_copies_not_at_all(workers: WorkerPool) -> None:
    for answer in workers.run(f"{__name__}:spread", 4, 60.0):
        for order, norms, apart in zip(ORDERS, answer["norms"], answer["apart"], strict=True):
            assert apart == pytest.approx(expected(order))
            each = torch.tensor([*expected(order), expected(order)[1]])
            total = torch.linalg.vector_norm(torch.tensor(norms), order)
            torch.testing.assert_close(total, torch.linalg.vector_norm(each, order))
        assert answer["sums"] == pytest.approx([expected(order)[0] for order in ORDERS])
        assert answer["whole"] == [True] * 5
        assert answer["same"]
