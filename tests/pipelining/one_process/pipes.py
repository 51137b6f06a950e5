"""Models that are traced and cut."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.pipelining.one_process.common import Layers, Mlp, Names, refused


class Split(nn.Module):
    """Parameters of its own, a buffer, and cuts in its code."""

    shift: Tensor

    def __init__(self, split: Any) -> None:
        super().__init__()
        self.split = [split]
        self.first = nn.Parameter(torch.randn(8, 8) / 8)
        self.second = nn.Parameter(torch.randn(8, 8) / 8)
        self.lin0, self.lin1 = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("shift", torch.randn(8))

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
    model, x, y = Split(p.pipe_split), torch.randn(4, 8), torch.randn(4, 8)
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
    stages = [p._IR.get_submod_name(i) for i in range(3)]
    assert [name for name, _ in pipe.split_gm.named_children()] == stages
    refused(ValueError, lambda: pipe.get_stage_module(3))


def body_a_pipe_with_names(p: Names) -> None:
    model, x, y = Split(p.pipe_split), torch.randn(4, 8), torch.randn(4, 8)
    args, kwargs = p.microbatch.split_args_kwargs_into_chunks(
        (x,),
        {"y": y},
        4,
        p.microbatch.TensorChunkSpec.from_tuple((0,)),
        p.microbatch.TensorChunkSpec.from_dict({"y": 0}),
    )
    pipe = p.pipeline(model, mb_args=args[0], mb_kwargs=kwargs[0])
    torch.testing.assert_close(pipe(args[1][0], y=kwargs[1]["y"])[0], model(x[1:2], y[1:2]))


def body_layers_stay_where_they_are(p: Names) -> None:
    model = Layers()
    pipe = p.pipeline(model, (torch.randn(2, 8),), split_spec={"layers.3": p.SplitPoint.BEGINNING})
    found = [[n for n, _ in pipe.get_stage_module(i).layers.named_children()] for i in range(2)]
    assert found == [["0", "1", "2"], ["3", "4", "5"]]


def body_annotated_models(p: Names) -> None:
    model, x = Layers(), torch.randn(2, 8)
    wanted = model(x)
    points = p._IR.PipeSplitWrapper.SplitPoint
    p._IR.annotate_split_points(model, {"layers.2": points.BEGINNING, "layers.3.net1": points.END})
    torch.testing.assert_close(model(x), wanted)
    pipe = p.Pipe.from_tracing(model, (x,))
    assert pipe.num_stages == 3
    torch.testing.assert_close(pipe(x)[0], wanted)
    annotate = p._IR.annotate_split_points
    refused(AttributeError, lambda: annotate(model, {"blocks.1": points.END}))
    spec = {"blocks.1": points.END}
    refused(AttributeError, lambda: p.pipeline(Layers(), (x,), split_spec=spec))


def body_a_policy(p: Names) -> None:
    mark = p._IR.aten_pipe_split_alias

    def halve(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
        calls = [n for n in graph.graph.nodes if "linear" in n.name]
        with graph.graph.inserting_before(calls[len(calls) // 2]):
            graph.graph.call_function(mark, (), {})
        graph.recompile()
        return graph

    model, x = Layers(), torch.randn(2, 8)
    pipe = p.pipeline(model, (x,), split_policy=halve)
    assert pipe.num_stages == 2
    torch.testing.assert_close(pipe(x)[0], model(x))


def body_sequences(p: Names) -> None:
    ir, x = p._IR, torch.randn(2, 8)
    chain = nn.Sequential(Mlp(), Mlp(), Mlp())
    pipe = ir.Pipe.from_tracing(ir.PipeSequential.from_sequential(chain), (x,))
    assert pipe.num_stages == 3
    torch.testing.assert_close(pipe(x)[0], chain(x))


def body_models_that_cannot_be_traced(p: Names) -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            p.pipe_split()
            return x if x.sum() > 0 else -x

    refused(RuntimeError, lambda: p.pipeline(Branches(), (torch.ones(2),)))
    both = {"split_spec": {}, "split_policy": lambda module: module}
    refused(ValueError, lambda: p.pipeline(Mlp(), (torch.ones(2, 8),), **both))
