"""Parts of a batch, examples of arguments, and values as texts and lists."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention.flex_attention import create_block_mask

from tests.pipelining.either import Names, alone, refused


def body_parts_of_a_leaf_keep_gradients(p: Names) -> None:
    x = torch.ones(4, 2, requires_grad=True)
    parts = p.microbatch._split_tensor(x, p.microbatch.TensorChunkSpec(0), 2)
    (parts[0] * 3).sum().backward()
    assert torch.equal(parts[0].grad, torch.full((2, 2), 3.0))


def body_split_by_hand(p: Names) -> None:
    m = p.microbatch
    assert isinstance(m.sum_reducer, m._LossReducer)
    assert issubclass(m._LossReducer, m._CustomReducer)
    largest = m._CustomReducer(torch.tensor(0.0), torch.maximum)
    assert m.merge_chunks([torch.tensor(2.0), torch.tensor(5.0)], largest) == 5
    assert m.merge_chunks([(torch.tensor(2.0),), (torch.tensor(5.0),)], (m.sum_reducer,)) == (7,)
    assert str(m.TensorChunkSpec(2)) == "TensorChunkSpec(2)"


def body_block_masks(p: Names) -> None:
    m = p.microbatch

    def after(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (kv >= b)

    mask = create_block_mask(after, 5, None, 8, 8, device="cpu", BLOCK_SIZE=4)
    parts = m._split_block_mask(mask, 2)
    assert [part.kv_num_blocks.size(0) for part in parts] == [3, 2]
    assert torch.equal(torch.cat([part.to_dense() for part in parts]), mask.to_dense())
    one = create_block_mask(after, None, None, 8, 8, device="cpu", BLOCK_SIZE=4)
    assert len(m._split_block_mask(one, 3)) == 3
    refused(AssertionError, lambda: m._split_block_mask(mask, 6))


def body_examples_are_tensors(p: Names) -> None:
    u, x, y = p._utils, torch.ones(2), torch.ones(2, requires_grad=True)
    tuples = u.validate_and_normalize_to_tuple
    assert tuples(None) is None
    assert tuples(x)[0] is x
    assert [type(value) for value in tuples([x, y])] == [Tensor, Tensor]
    assert tuples((x, None), allow_none=True)[1] is None
    for wrong in ((x, None), (x, 3), "x"):
        refused(u.PipeliningMetadataError, lambda wrong=wrong: tuples(wrong))
    with alone():
        for options in ({"input_args": ("a",)}, {"input_args": x, "output_args": 3}):
            make = functools.partial(p.PipelineStage, nn.Linear(2, 2), 0, 1, torch.device("cpu"))
            refused(u.PipeliningMetadataError, lambda make=make, o=options: make(**o))


def body_flat_arguments(p: Names) -> None:
    x = torch.ones(2, requires_grad=True)
    given = (x * 2, {"k": [3, torch.ones(1)]})
    flat = p._utils.flatten_args(given)
    assert [type(value) for value in flat] == [Tensor, int, Tensor]
    if True:
        again, values = p._utils.flatten_args(given, detach=True)
        assert again[0] is values[0]
        assert again[1]["k"][1] is values[2]
        assert values[0].is_leaf
        assert [values[0].requires_grad, values[2].requires_grad] == [True, False]
    info = p._utils.PipeInfo(graph=torch.fx.Graph(), num_stages=2, has_loss_and_backward=False)
    assert info.num_stages == 2


def body_what_tensors_look_like(p: Names) -> list[Any]:
    u = p._utils
    x = torch.ones(2, 4, requires_grad=True)
    mesh = DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("tp",), _init_backend=False, _rank=0)
    spread = DTensor.from_local(x.detach(), mesh, [Shard(0)], run_check=False)
    plain, sharded = u.extract_tensor_meta(x), u.extract_tensor_meta(spread)
    refused(u.PipeliningMetadataError, lambda: u._TensorMeta.from_tensor(spread))
    again = sharded.to_dtensor("cpu", mesh)
    same = [again.shape, again.placements, again.to_local().shape]
    assert same == [spread.shape, spread.placements, x.shape]
    assert sharded.mesh_cache_key == (("tp",), mesh._layout)
    assert plain.to_tensor("cpu").requires_grad
    wider = u.extract_tensor_meta(torch.ones(2, 5))
    check = functools.partial(u.validate_metadata, "the input", plain)
    refused(u.PipeliningMetadataError, lambda: check(wider, raise_on_mismatch=True))
    with pytest.warns(UserWarning, match="Metadata mismatch"):
        check(wider, warn_on_mismatch=True)
    kinds = [len(check(other)) > 0 for other in (sharded, x.double(), x.t(), x.detach())]
    return [*kinds, check(wider), sharded.get_diff(u.extract_tensor_meta(spread))]
