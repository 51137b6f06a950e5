"""Chunks under torch's names, beside torch's own."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree

from penstock.pipelining import microbatch as ours

theirs: Any = import_module("torch.distributed.pipelining.microbatch")
X = torch.arange(24.0).reshape(6, 4)
NESTED = ((X, [X + 1, {"a": X + 2}]), {"flag": True, "mask": X > 3, "none": None})


def same(mine: Any, peer: Any) -> None:
    left, form = pytree.tree_flatten(mine)
    right, other = pytree.tree_flatten(peer)
    assert form == other
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 6, 9])
def test_splitting(chunks: int) -> None:
    args, kwargs = NESTED
    same(
        ours.split_args_kwargs_into_chunks(args, kwargs, chunks),
        theirs.split_args_kwargs_into_chunks(args, kwargs, chunks),
    )


def specs(module: Any) -> Any:
    return (
        module.TensorChunkSpec.from_tuple((0, 1)),
        {**module.TensorChunkSpec.from_dict({"b": 1}), "c": module._Replicate},
    )


def test_splitting_by_specs() -> None:
    args, kwargs = (X, X), {"b": X, "c": X}
    same(
        ours.split_args_kwargs_into_chunks(args, kwargs, 2, *specs(ours)),
        theirs.split_args_kwargs_into_chunks(args, kwargs, 2, *specs(theirs)),
    )


def test_merging() -> None:
    chunks = [(X[:2], {"s": torch.tensor(1.0)}, 3), (X[2:], {"s": torch.tensor(2.0)}, 3)]
    for module in (ours, theirs):
        spec = (module.TensorChunkSpec(0), {"s": module.sum_reducer}, None)
        merged = module.merge_chunks(chunks, spec)
        same(merged, (X, {"s": torch.tensor(3.0)}, 3))
    same(ours.merge_chunks([X[:1], X[1:]], None), theirs.merge_chunks([X[:1], X[1:]], None))


@pytest.mark.parametrize("module", [ours, theirs], ids=["ours", "theirs"])
def test_what_cannot_be_split_or_merged(module: Any) -> None:
    with pytest.raises(AssertionError):
        module._split_tensor(X, module.TensorChunkSpec(0), 7)
    with pytest.raises(ValueError, match="spec"):
        module.merge_chunks([(X, X)], (module.TensorChunkSpec(0),))
    with pytest.raises(AssertionError):
        module.merge_chunks([(1,), (2,)], (3,))
    mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=0)
    cut, copied = (
        DTensor.from_local(X, mesh, [at], run_check=False) for at in (Shard(0), Replicate())
    )
    for mixed, says in (([cut, copied], "placement mismatch"), ([cut, X], "mix")):
        with pytest.raises(AssertionError, match=says):
            module.merge_chunks(mixed, None)
