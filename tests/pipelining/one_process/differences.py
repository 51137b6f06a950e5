"""What docs/coming-from-torch.md says to differ: torch 2.13's answer, and ours."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

from tests.pipelining.either import CPU, Names, alone


class Watched(nn.Module):
    """Counts what a split backward does with a checkpointed block and with a hook on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.runs = self.hooked = 0
        self.linear.weight.register_post_accumulate_grad_hook(self.hook)

    def hook(self, parameter: Tensor) -> None:
        del parameter
        self.hooked += 1

    def block(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.last(self.linear(x))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=False)


class Two:
    """Two linear stages on one rank, a batch, and a schedule over them."""

    def __init__(self, p: Names, kind: str = "Interleaved1F1B", **options: Any) -> None:
        torch.manual_seed(0)
        self.modules: list[Any] = [nn.Linear(4, 4), nn.Linear(4, 4)]
        self.x, self.y = torch.randn(6, 4), torch.randn(6, 4)
        self.plain = copy.deepcopy(nn.Sequential(*self.modules))
        change = options.pop("change", None)
        if change is not None:
            self.modules = [change(at, module) for at, module in enumerate(self.modules)]
        given = self.x[:3].clone().requires_grad_(True)
        if options.pop("told", False):
            options = {"input_args": (given,), "output_args": (given,)}
        stages = [p.PipelineStage(m, i, 2, CPU, **options) for i, m in enumerate(self.modules)]
        self.schedule = getattr(p.schedules, f"Schedule{kind}")(stages, 2, loss_fn=mse_loss)

    def step(self, samples: int = 6, **options: Any) -> Any:
        return self.schedule.step(self.x[:samples], target=self.y[:samples], **options)

    def like_plain(self, samples: int = 6, times: int = 1) -> bool:
        """Whether the first weight's gradient is that of a plain loop."""
        for _ in range(times):
            mse_loss(self.plain(self.x[:samples]), self.y[:samples]).backward()
        found, expected = self.modules[0].weight.grad, self.plain.get_parameter("0.weight").grad
        assert expected is not None
        return torch.allclose(found, expected, atol=1e-6)


def two_steps(p: Names) -> bool:
    two = Two(p)
    two.step()
    two.step()
    return two.like_plain(times=2)


def a_batch_with_a_gradient(p: Names) -> float:
    two = Two(p)
    x, same = (two.x.clone().requires_grad_(True) for _ in range(2))
    two.schedule.step(x, target=two.y)
    mse_loss(two.plain(same), two.y).backward()
    assert x.grad is not None
    assert same.grad is not None
    return round(float((x.grad / same.grad).mean()), 3)


def losses_hold_graphs(p: Names) -> bool:
    losses: list[Tensor] = []
    Two(p).step(losses=losses)
    return any(loss.requires_grad for loss in losses)


def uneven_samples(p: Names) -> bool:
    two = Two(p)
    two.step(5)
    return two.like_plain(5)


def evaluation_in_a_v(p: Names) -> str:
    two = Two(p, "ZBVZeroBubble")
    try:
        two.schedule.eval(two.x, target=two.y)
    except AssertionError as error:
        return str(error)
    return "done"


def checkpoint_in_halves(p: Names) -> list[int]:
    two = Two(p, "InterleavedZeroBubble", told=True, change=lambda *_: Watched())
    two.step()
    return [module.runs for module in two.modules]


def hooks_in_halves(p: Names) -> list[int]:
    two = Two(p, "InterleavedZeroBubble", told=True, change=lambda *_: Watched())
    two.modules[1].forward = two.modules[1].block
    two.step()
    return [module.hooked for module in two.modules]


def after_a_frozen_stage(p: Names) -> bool:
    two = Two(
        p,
        "InterleavedZeroBubble",
        input_args=(torch.ones(3, 4),),
        output_args=(torch.ones(3, 4),),
        change=lambda at, module: module.requires_grad_(at == 1),
    )
    two.step()
    return two.modules[1].weight.grad is not None


def compiled_in_halves(p: Names) -> str:
    compiled = {"change": lambda _, module: torch.compile(module, backend="eager")}
    try:
        Two(p, "InterleavedZeroBubble", **compiled).step()
    except RuntimeError as error:
        return "refused" if "torch.compile" in str(error) else str(error)
    return "done"


def specs_by_name(p: Names) -> list[tuple[int, ...]]:
    spec = {"b": p.microbatch.TensorChunkSpec(0), "a": p.microbatch.TensorChunkSpec(1)}
    given = {"a": torch.ones(2, 4), "b": torch.ones(4, 2)}
    _, kwargs = p.microbatch.split_args_kwargs_into_chunks((), given, 2, None, spec)
    return [tuple(kwargs[0][name].shape) for name in "ab"]


def backwards_of_looped_bfs(p: Names) -> list[str]:
    return [str(a) for a in Two(p, "LoopedBFS").schedule.pipeline_order[0] if "B" in str(a)]


def order_of_1f1b(p: Names) -> str:
    stage = p.PipelineStage(nn.Linear(4, 4), 0, 1, CPU)
    schedule = p.schedules.Schedule1F1B(stage, 2, loss_fn=mse_loss)
    return str(schedule._get_pipeline_order()[0][0])


def nowhere_to_cut(p: Names) -> list[int]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pipe = p.pipeline(nn.Sequential(nn.Linear(4, 4)), (torch.ones(3, 4),))
    return [pipe.num_stages, sum("no split point" in str(warning.message) for warning in told)]


ROWS: list[tuple[Callable[[Names], Any], Any, Any]] = [
    (two_steps, False, True),
    (a_batch_with_a_gradient, 2.0, 1.0),
    (losses_hold_graphs, True, False),
    (uneven_samples, False, True),
    (evaluation_in_a_v, "can't steal_bwd_input if this stage doesn't have backward", "done"),
    (checkpoint_in_halves, [4, 8], [4, 4]),
    (hooks_in_halves, [2, 0], [2, 2]),
    (after_a_frozen_stage, False, True),
    (compiled_in_halves, "refused", "done"),
    (specs_by_name, [(1, 4), (4, 1)], [(2, 2), (2, 2)]),
    (backwards_of_looped_bfs, ["1B1", "1B0", "0B1", "0B0"], ["1B0", "1B1", "0B0", "0B1"]),
    (order_of_1f1b, "0F1", "0F0"),
    (nowhere_to_cut, [1, 0], [1, 1]),
]


def answer(row: Callable[[Names], Any], package: str) -> Any:
    with alone():
        return row(Names(package))
