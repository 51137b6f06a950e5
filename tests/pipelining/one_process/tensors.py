"""What tensors are, and values as texts and lists."""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.pipelining.one_process.common import Names, alone, refused


def body_tensors_are_described(p: Names) -> None:
    u, x = p._utils, torch.ones(2, 3, requires_grad=True)
    meta = u.extract_tensor_meta(x)
    assert (meta.shape, meta.stride, meta.dtype, meta.requires_grad) == (
        torch.Size([2, 3]),
        (3, 1),
        torch.float32,
        True,
    )
    again = meta.to_tensor("cpu")
    assert u.extract_tensor_meta(again) == meta
    assert u.extract_tensor_metas(None) is None
    assert u.extract_tensor_metas((x, None), allow_none=True) == (meta, None)
    refused(u.PipeliningMetadataError, lambda: u.extract_tensor_metas((x, None)))
    assert u.validate_metadata("x", meta, x.detach()) == []
    assert len(u.validate_metadata("x", meta, torch.ones(2, 4))) == 2
    wrong = torch.ones(2, 3, dtype=torch.float64)
    assert u.validate_metadata("x", meta, wrong) == [
        "dtype mismatch: torch.float32 vs torch.float64"
    ]
    call = functools.partial(u.validate_metadata, "the input", meta, wrong)
    said = refused(u.PipeliningMetadataError, lambda: call(raise_on_mismatch=True))
    assert said == "the input: dtype mismatch: torch.float32 vs torch.float64"
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call(warn_on_mismatch=True)
    assert len(seen) == 1
    check = u.validate_tensors_metadata
    assert check("all", (meta, None), (x, None)) == []
    refused(u.PipeliningMetadataError, lambda: check("all", (meta,), (x, x)))
    refused(u.PipeliningMetadataError, lambda: check("all", (meta, None), (x, x)))
    assert len(check("all", (meta, meta), (x, None), raise_on_mismatch=False)) == 1
    assert u.to_local_if_dtensor(x) is x
    assert not u.to_local_if_dtensor(x, detach=True).requires_grad


def body_examples_are_tensors(p: Names) -> None:
    u, x, y = p._utils, torch.ones(2), torch.ones(2, requires_grad=True)
    tuples = u.validate_and_normalize_to_tuple
    assert tuples(None) is None
    assert tuples(x)[0] is x
    assert [type(value) for value in tuples([x, y])] == [Tensor, Tensor]
    assert tuples((x, None), allow_none=True)[1] is None
    for wrong in ((x, None), (x, 3), "x"):
        refused(u.PipeliningMetadataError, lambda wrong=wrong: tuples(wrong))
    pairs = u.validate_static_arg_grad_correspondence
    pairs(0, (x, y), (None, x), True)
    refused(u.PipeliningMetadataError, lambda: pairs(0, (x,), (x,), True))
    said = refused(u.PipeliningMetadataError, lambda: pairs(1, (x, y), (None,), False))
    assert "Stage 1" in said
    with alone():
        for options in ({"input_args": ("a",)}, {"input_args": x, "output_args": 3}):
            make = functools.partial(p.PipelineStage, nn.Linear(2, 2), 0, 1, torch.device("cpu"))
            refused(u.PipeliningMetadataError, lambda make=make, o=options: make(**o))


def body_sharded_tensors_are_described(p: Names) -> None:
    with alone():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        made = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
        meta = p._utils.extract_tensor_meta(made)
        assert (meta.global_shape, meta.shape) == (torch.Size([4, 2]), torch.Size([4, 2]))
        assert (meta.placements, meta.mesh_dim_names) == ((Shard(0),), ("tp",))
        assert p._utils.validate_metadata("x", meta, made) == []
        other = made.redistribute(mesh, [Replicate()])
        assert any("placements" in text for text in p._utils.validate_metadata("x", meta, other))
        assert len(p._utils.validate_metadata("x", meta, torch.ones(4, 2))) >= 1
        assert type(p._utils.to_local_if_dtensor(made)) is Tensor
        refused(RuntimeError, lambda: p._utils._TensorMeta.from_tensor(made))


def body_values_as_texts(p: Names) -> None:
    shown = p._debug.map_debug_info(([torch.ones(2, requires_grad=True)], {"k": 3}))
    assert shown == (["Tensor(torch.Size([2]), grad=True, dtype=torch.float32)"], {"k": "3"})


def body_flat_arguments(p: Names) -> None:
    x = torch.ones(2, requires_grad=True)
    given = (x * 2, {"k": [3, torch.ones(1)]})
    flat = p._utils.flatten_args(given)
    assert [type(value) for value in flat] == [Tensor, int, Tensor]
    for call in (p._utils.flatten_args_detach, lambda a: p._utils.flatten_args(a, detach=True)):
        again, values = call(given)
        assert again[0] is values[0]
        assert again[1]["k"][1] is values[2]
        assert values[0].is_leaf
        assert [values[0].requires_grad, values[2].requires_grad] == [True, False]
    info = p._utils.PipeInfo(graph=torch.fx.Graph(), num_stages=2, has_loss_and_backward=False)
    assert info.num_stages == 2
