"""Overlapped pairs that a function runs: the numbers of F then B, and the halves at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from penstock import (
    PairBackward,
    PairForward,
    Pipeline,
    PipelineStage,
    overlap_collectives,
)
from penstock import schedule as ps
from penstock.errors import StageError, UsageError
from tests.pipeline.models import WIDTH, X, Y, assert_same_bits, chain, mean_loss, two_steps
from tests.processes import in_processes

SCHEDULE = ps.build("DualPipeV", ranks=2, microbatches=8)
PAIRS = len(SCHEDULE.pairs)


def metadata_of(node: Any) -> dict[str, Any]:
    """What code may leave at a node of the graph."""
    metadata: dict[str, Any] = node.metadata
    return metadata


class Layers(nn.Module):
    """Runs its layers one by one, and leaves at its output where each of them begins in the graph."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        torch.manual_seed(index)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
        self.layers = nn.ModuleList(layers).double()

    def forward(self, x: Tensor) -> Tensor:
        edges = [get_gradient_edge(x) if x.requires_grad else None]
        for layer in self.layers:
            x = layer(x)
            edges.append(get_gradient_edge(x) if x.requires_grad else None)
        if x.grad_fn is not None:
            metadata_of(x.grad_fn)["edges"] = edges
        return x


class Interleaved(Layers):
    """Runs a layer forward and a layer of the other microbatch backward, in turn."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.ran: list[str] = []

    def overlapped_forward_backward(
        self, forward: PairForward, backward: PairBackward
    ) -> tuple[Tensor, list[Tensor | None]]:
        assert forward.module is self
        (root,), gradient = backward.outputs, backward.output_grads[0]
        node: Any = root.node
        while "edges" not in metadata_of(node):  # above it is the loss
            node = node.next_functions[0][0]
        edges = metadata_of(node)["edges"]
        if node is not root.node:
            (gradient,) = torch.autograd.grad([root], [edges[-1]], [gradient])
        x: Tensor = forward.args[0]
        made = [get_gradient_edge(x) if x.requires_grad else None]
        layers: Any = backward.module.layers
        for ahead, place in zip(self.layers, (2, 1, 0), strict=True):
            x = ahead(x)
            made.append(get_gradient_edge(x))
            self.ran.append("F")
            weights = list(layers[place].parameters())
            ends = [end for end in (edges[place],) if end is not None]
            found = torch.autograd.grad([edges[place + 1]], [*weights, *ends], [gradient])
            for weight, part in zip(weights, found[:2], strict=True):
                weight.grad = part if weight.grad is None else weight.grad + part
            gradient = found[-1]
            self.ran.append("B")
        metadata_of(x.grad_fn)["edges"] = made
        return x, [gradient for _ in backward.inputs]


def stages(kind: type[Layers], indices: Sequence[int] = range(4)) -> list[PipelineStage]:
    return [PipelineStage(kind(index), index, 4) for index in indices]


def numbers(made: Sequence[PipelineStage], **options: Any) -> list[Tensor]:
    pipe = Pipeline.from_stages(made, schedule=SCHEDULE, loss_fn=mean_loss, **options)
    return two_steps(pipe)


def turns(made: Sequence[PipelineStage]) -> str:
    modules: list[Any] = [stage.module for stage in made]
    return "".join("".join(module.ran) for module in modules)


def test_a_function_of_the_module_interleaves_the_layers_of_both() -> None:
    made = stages(Interleaved)
    assert_same_bits(numbers(made), numbers(stages(Layers)))
    assert turns(made) == "FBFBFB" * PAIRS * 2


@in_processes(2)
def test_it_does_between_processes(group: Any) -> None:
    indices = SCHEDULE.placement.stages_on(group.rank())
    made = stages(Interleaved, indices)
    assert_same_bits(numbers(made, mesh=group), numbers(stages(Layers, indices), mesh=group))
    here = sum(isinstance(entry, ps.Overlap) for entry in SCHEDULE.programs[group.rank()])
    assert turns(made) == "FBFBFB" * here * 2


@pytest.mark.parametrize("recompute", [False, True])
def test_a_function_of_the_pipeline_overlaps_a_model_that_was_cut(recompute: bool) -> None:
    calls: list[tuple[nn.Module, nn.Module]] = []

    def overlap(forward: PairForward, backward: PairBackward) -> tuple[Any, Any]:
        calls.append((forward.module, backward.module))
        gradients = backward.run()
        return forward.run(), gradients

    def trained(*functions: Any) -> list[Tensor]:
        pipe = Pipeline(chain(8), schedule=SCHEDULE, loss_fn=mean_loss, recompute=recompute)
        for function in functions:
            pipe.on_overlap(function)
        losses = [torch.tensor(pipe.step(X, target=Y).loss) for _ in range(2)]
        pipe.evaluate(X, target=Y)
        return [*losses, *(p.grad for p in pipe.parameters())]  # type: ignore[list-item]

    assert_same_bits(trained(overlap), trained())
    assert_same_bits(trained(overlap_collectives), trained())
    assert len(calls) == 2 * PAIRS
    assert all(first is not second for first, second in calls)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_in_a_half_that_runs_in_turns_is_that_of_the_pair(where: str) -> None:
    """And the next step is run."""

    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.linear = nn.Linear(WIDTH, WIDTH).double()

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.linear(x)
            if where == "backward":
                output.register_hook(self.count)
            else:
                self.count(output)
            return output

        def count(self, _: Tensor) -> None:
            self.calls += 1
            if self.calls == 6:
                raise ZeroDivisionError(f"in the {where}")

    pipe = Pipeline(nn.Sequential(*chain(7), Fails()), schedule=SCHEDULE, loss_fn=mean_loss)
    pipe.on_overlap(overlap_collectives)
    with pytest.raises(StageError, match=f"overlap_collectives runs.*in the {where}"):
        pipe.step(X, target=Y)
    pipe.zero_grad()
    assert pipe.step(X, target=Y).finite


def test_hooks_and_a_recording_show_both_halves_at_the_same_time() -> None:
    pipe = Pipeline.from_stages(stages(Interleaved), schedule=SCHEDULE, loss_fn=mean_loss)
    ran = []
    pipe.on("*", before=lambda event: ran.append(event.action))
    timeline = pipe.step(X, target=Y, record=True).timeline
    assert sorted(ran) == sorted(action for rank in range(2) for action in SCHEDULE.actions(rank))
    assert timeline is not None
    assert timeline.overlapped == SCHEDULE.pairs
    pipe = Pipeline.from_stages(stages(Layers), schedule=SCHEDULE, loss_fn=mean_loss)
    timeline = pipe.step(X, target=Y, record=True).timeline
    assert timeline is not None
    assert timeline.overlapped == ()


def test_a_handle_removes_the_function() -> None:
    pipe = Pipeline.from_stages(stages(Layers), schedule=SCHEDULE, loss_fn=mean_loss)
    calls = []

    def overlap(forward: PairForward, backward: PairBackward) -> tuple[Any, Any]:
        calls.append(forward)
        return forward.run(), backward.run()

    with pipe.on_overlap(overlap):
        pipe.step(X, target=Y)
    pipe.step(X, target=Y)
    assert len(calls) == PAIRS
    with pytest.raises(UsageError, match="give it a function of a PairForward and a PairBackward"):
        pipe.on_overlap(3)  # type: ignore[arg-type]


def test_a_pair_whose_backward_is_an_I_runs_one_after_the_other() -> None:
    F, I, W = (partial(ps.Action, 0, op) for op in (ps.Op.F, ps.Op.I, ps.Op.W))  # noqa: E741
    program = (F(0), ps.Overlap(F(1), I(0)), W(0), I(1), W(1))
    made = PipelineStage(Interleaved(), 0, 1)
    schedule = ps.Schedule("pairs", ps.looped(1), 2, (program,))
    pipe = Pipeline.from_stages([made], schedule=schedule, loss_fn=mean_loss)
    pipe.step(X, target=Y)
    assert turns([made]) == ""


@pytest.mark.parametrize(
    ("returns", "says"),
    [
        (
            lambda f, b: f.run(),
            r"returned float64\[1, 4\], requires_grad; return the output of the forward",
        ),
        (lambda f, b: (f.run(), []), r"returned 0 as gradients of 1 backward.inputs"),
        (lambda f, b: (f.run(), None), r"returned NoneType as gradients of 1 backward.inputs"),
        (
            lambda f, b: (f.run(), [torch.zeros_like(b.inputs[0])]),
            "it has not run the backward from 1 of 1 backward.outputs",
        ),
        (lambda f, b: (f.run(), f.run(), b.run())[1:], "it ran the forward twice"),
        (
            lambda f, b: (f.run(), [b.run()[0].sum()]),
            r"float64\[\] as the gradient of backward.inputs\[0\], which is float64\[1, 4\]",
        ),
        (
            lambda f, b: (f.run().detach(), b.run()),
            r"returned the tensors \(float64\[1, 4\]\), and .* \(float64\[1, 4\], requires_grad\)",
        ),
        (lambda f, b: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_what_a_function_returns_wrong_is_named_with_the_pair(returns: Any, says: str) -> None:
    pipe = Pipeline.from_stages(stages(Layers), schedule=SCHEDULE, loss_fn=mean_loss)
    pipe.on_overlap(returns)
    with pytest.raises(StageError, match=says) as caught:
        pipe.step(X, target=Y)
    assert "OVERLAP_F_B, which " in str(caught.value)
    assert "<lambda> runs" in str(caught.value)
