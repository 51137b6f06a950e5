"""A step of a known call signature, from its first action to its last: no new buffer, and no host read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from penstock import ActionEvent, Pipeline, PipelineStage
from penstock import schedule as ps
from tests.pipeline.models import X, Y, chain, mean_loss
from tests.processes import in_processes

READS = {
    getattr(Tensor, name)
    for name in ("item", "tolist", "__float__", "__int__", "__bool__", "__index__", "cpu")
}
MADE = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.zeros.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.cat.default,
}


class Reads(TorchFunctionMode):
    """Counts numbers of tensors that Python reads."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts["read"] += func in READS
        return func(*args, **(kwargs or {}))


class Made(TorchDispatchMode):
    """Counts memory that is made without a computation, and numbers that C++ reads."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts["read"] += func is torch.ops.aten._local_scalar_dense.default
        result = func(*args, **(kwargs or {}))
        # The halves of a backward are joined by a tensor of one number.
        self.counts["made"] += func in MADE and result.numel() > 1
        return result


@contextmanager
def counted(pipe: Pipeline, last: ps.Action) -> Iterator[Counter[str]]:
    """Count from the first action of a step to its last."""
    counts, open = Counter[str](), ExitStack()

    def before(_: ActionEvent) -> None:
        if not counts["actions"]:
            open.enter_context(Reads(counts))
            open.enter_context(Made(counts))
        counts["actions"] += 1

    def after(event: ActionEvent) -> None:
        if event.action == last:
            open.close()

    with open, pipe.on("*", before=before, after=after):
        yield counts


def stages(width: int, indices: Sequence[int], count: int) -> list[PipelineStage]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)]
    return [PipelineStage(layers[index], index, count) for index in indices]


def counts_of_steps(pipe: Pipeline, width: int, last: ps.Action) -> list[Counter[str]]:
    x = torch.ones(8, width)
    found = []
    for _ in range(6):
        with counted(pipe, last) as counts:
            pipe.step(x, target=x)
        assert counts["actions"] >= 16
        found.append(counts)
    return found


NAMES = ["1F1B", "GPipe", "ZB-V", "Interleaved1F1B"]


@pytest.mark.parametrize("name", NAMES)
def test_in_one_process(name: str) -> None:
    schedule = ps.build(name, ranks=2, microbatches=4)
    made = stages(16, range(schedule.stages), schedule.stages)
    pipe = Pipeline.from_stages(made, schedule=schedule, loss_fn=functional.mse_loss)
    last = ps.merged(pipe.schedule)[-1]
    for counts in counts_of_steps(pipe, 16, last)[3:]:
        assert (counts["read"], counts["made"]) == (0, 0)


def test_a_model_that_was_cut() -> None:
    pipe = Pipeline(chain(8), schedule="ZB-V", ranks=2, microbatches=4, loss_fn=mean_loss)
    pipe.step(X, target=Y)
    last = ps.merged(pipe.schedule)[-1]
    for _ in range(4):
        with counted(pipe, last) as counts:
            pipe.step(X, target=Y)
    assert counts["actions"] == 48
    assert (counts["read"], counts["made"]) == (0, 0)


@in_processes(2)
def test_between_processes(group: Any) -> None:
    """Small messages travel over sockets, large ones over gloo."""
    for name in NAMES:
        for width in (16, 20_000 if name == "1F1B" else 64):
            schedule = ps.build(name, ranks=2, microbatches=4)
            here = schedule.placement.stages_on(group.rank())
            linear = stages if width < 1000 else scaled
            made = linear(width, here, schedule.stages)
            loss = functional.mse_loss
            pipe = Pipeline.from_stages(made, schedule=schedule, loss_fn=loss, mesh=group)
            *_, last = pipe.schedule.actions(group.rank())
            arrived = addresses(pipe)
            steps = counts_of_steps(pipe, width, last)
            for counts in steps[3:]:
                assert (counts["read"], counts["made"]) == (0, 0), (name, width, counts)
            assert len(set(map(frozenset, arrived()[3:]))) == 1
            pipe.close()


class Scale(nn.Module):
    """A stage with few weights and large outputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.factor)


def scaled(width: int, indices: Sequence[int], count: int) -> list[PipelineStage]:
    return [PipelineStage(Scale(width), index, count) for index in indices]


def addresses(pipe: Pipeline) -> Callable[[], list[set[int]]]:
    """Where in memory what arrived in each step so far has lain."""
    steps: list[set[int]] = []

    def after(event: ActionEvent) -> None:
        steps[-1].update(tensor.data_ptr() for tensor in event.outputs)

    pipe.on("*RECV_F*", after=after)
    pipe.on("*RECV_B*", after=after)
    pipe.on_step(before=lambda _: steps.append(set()), after=lambda _: None)
    return lambda: steps
