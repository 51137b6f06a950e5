"""Models that are traced and cut."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.pipelining.either import WIDTH, Layer, Names, refused


class Split(nn.Module):
    """Parameters of its own, a buffer, and cuts in its code."""

    shift: Tensor

    def __init__(self, split: Any) -> None:
        super().__init__()
        self.split = [split]
        self.first = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.second = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.lin0, self.lin1 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        x = torch.mm(x, self.first)
        skip = x
        x = torch.relu(x if y is None else x + y)
        self.split[0]()
        x = torch.mm(x, self.first) + self.shift
        x = self.lin0(x)
        self.split[0]()
        return torch.relu(self.lin1(torch.mm(x, self.second)) + skip)


def body_a_pipe(p: Names) -> None:
    torch.manual_seed(0)
    model, x, y = Split(p.pipe_split), torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    pipe = p.pipeline(model, mb_args=(x, y))
    assert isinstance(pipe, p.Pipe)
    assert pipe.num_stages == 3
    torch.testing.assert_close(pipe(x, y)[0], model(x, y))
    names = [set(pipe.get_stage_module(i).state_dict()) for i in range(3)]
    assert set.union(*names) == set(model.state_dict())
    assert pipe.replicated_params == [{"submod_pp_0": "first", "submod_pp_1": "first"}]
    info = pipe.info()
    assert (info.num_stages, info.has_loss_and_backward) == (3, False)
    assert {n.op for n in info.graph.nodes} >= {"placeholder", "output"}
    stages = [f"submod_pp_{i}" for i in range(3)]
    assert [name for name, _ in pipe.split_gm.named_children()] == stages
    refused(ValueError, lambda: pipe.get_stage_module(3))


def body_models_that_cannot_be_traced(p: Names) -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            p.pipe_split()
            return x if x.sum() > 0 else -x

    refused(RuntimeError, lambda: p.pipeline(Branches(), (torch.ones(2),)))
    both = {"split_spec": {}, "split_policy": lambda module: module}
    refused(ValueError, lambda: p.pipeline(Layer(), (torch.ones(2, WIDTH),), **both))
