"""Weights streamed to an inference engine: each once and whole, never more than a bucket at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from penstock import Pipeline
from penstock.errors import PoisonedError, UsageError
from tests.processes import in_processes

TOKENS = torch.arange(40).view(8, 5)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 8)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        self.register_buffer("scale", torch.ones(3))
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.blocks(self.embed(tokens)))


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def trained(pipe: Pipeline, rows: slice = slice(None)) -> Pipeline:
    """Cut, and after a step, so that the weights are no longer the first ones."""
    pipe.cut(TOKENS[rows])
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    pipe.step(TOKENS[rows], target=TOKENS[rows])
    optimizer.step()
    return pipe


def assert_streams(pipe: Pipeline, to: Any, *, receives: bool) -> None:
    """All weights under the names of the model, with its numbers; also a worker's."""
    expected = pipe.weights.state_dict(full=True)
    expected.pop("head.weight", None)
    streamed = [(n, t.clone()) for n, t in pipe.weights.stream(300, to=to)]
    assert len(streamed) == len(dict(streamed)) == (10 if receives else 0)
    if receives and expected:
        torch.testing.assert_close(dict(streamed), expected, rtol=0, atol=0)


def test_one_process_has_all() -> None:
    model = Tied()
    pipe = Pipeline(model, ranks=2, microbatches=2, loss_fn=loss_fn)
    assert_streams(pipe, "main", receives=True)
    assert_streams(trained(pipe), "all", receives=True)
    copy = Tied()
    copy.load_state_dict(dict(pipe.weights.stream()), strict=False)
    torch.testing.assert_close(copy.state_dict(), model.state_dict())
    for options, name in (({"bucket_bytes": 0}, "bucket_bytes=0"), ({"to": "some"}, "to='some'")):
        with pytest.raises(UsageError, match=name):
            pipe.weights.stream(**options)


@in_processes(2)
def test_two_ranks(group: Any) -> None:
    pipe = Pipeline(Tied(), mesh=group, microbatches=2, loss_fn=loss_fn)
    assert_streams(pipe, "main", receives=pipe.is_main_process)
    trained(pipe)
    assert_streams(pipe, "main", receives=pipe.is_main_process)
    assert_streams(pipe, "all", receives=True)


@in_processes(4)
def test_two_replicas_of_two_ranks_that_are_sharded(group: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))

    def wrap(module: nn.Module, _: int) -> nn.Module:
        fully_shard(module, mesh=mesh["dp"])
        return module

    pipe = Pipeline(Tied(), mesh=mesh, replicas="dp", microbatches=2, loss_fn=loss_fn, wrap=wrap)
    half = mesh.get_local_rank("dp") * 4
    trained(pipe, slice(half, half + 4))
    assert_streams(pipe, "main", receives=pipe.is_main_process)
    assert_streams(pipe, "all", receives=True)


@in_processes(2)
def test_a_stream_that_is_left_after_its_first_weight_ends_the_pipeline(group: Any) -> None:
    pipe = trained(Pipeline(Tied(), mesh=group, microbatches=2, loss_fn=loss_fn))
    stream: Any = pipe.weights.stream(to="all")
    next(stream)
    stream.close()
    with pytest.raises(PoisonedError, match="left before its end"):
        pipe.step(TOKENS, target=TOKENS)
