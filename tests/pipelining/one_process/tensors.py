"""Examples of arguments, and values as texts and lists."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tests.pipelining.one_process.common import Names, alone, refused


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
