"""What docs/coming-from-torch.md says to differ: torch 2.13's answer, and ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.pipelining.either import CPU, WIDTH, Names, Seat, X, Y, alone, mean_loss


class Watched(nn.Module):
    """Counts what a split backward does with a checkpointed block and with a hook on a parameter."""

    def __init__(self, checkpointed: bool = True) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.checkpointed, self.runs, self.hooked = checkpointed, 0, 0

    def watch(self) -> None:
        def hook(_: Tensor) -> None:
            self.hooked += 1

        self.linear.weight.register_post_accumulate_grad_hook(hook)

    def block(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.last(self.linear(x))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Any:
        return (
            checkpoint(self.block, x, use_reentrant=False) if self.checkpointed else self.block(x)
        )


def linears(freeze: bool = False) -> list[Any]:
    return [nn.Linear(WIDTH, WIDTH).requires_grad_(last or not freeze) for last in (False, True)]


def two_stages(
    p: Names,
    kind: str = "Interleaved1F1B",
    make: Callable[[], Sequence[nn.Module]] | None = None,
    learns: bool | None = None,
) -> tuple[Seat, Any]:
    """Two stages on one rank, and a schedule over them."""
    part = torch.ones(4, WIDTH).requires_grad_(bool(learns))
    # What torch's package needs to know where it cannot find it out.
    options = {} if learns is None else {"input_args": (part,), "output_args": (part,)}
    seat = Seat(p.package, None, {0: [0, 1]}, make, mean_loss, **options)
    return seat, seat.schedule(kind, 2)


def steps_without_zeroing(p: Names, samples: int = 8, times: int = 2) -> bool:
    """Whether the first gradient is that of a plain loop."""
    seat, schedule = two_stages(p)
    for _ in range(times):
        schedule.step(X[:samples], target=Y[:samples])
        mean_loss(seat.expected(X[:samples]), Y[:samples]).backward()
    gradient, expected = seat.gradients()[0], next(seat.reference.parameters()).grad
    assert gradient is not None
    assert expected is not None
    return torch.allclose(gradient, expected, atol=1e-6)


def uneven_samples(p: Names) -> bool:
    return steps_without_zeroing(p, 7, 1)


def a_batch_with_a_gradient(p: Names) -> float:
    seat, schedule = two_stages(p)
    x, same = (X.clone().requires_grad_(True) for _ in range(2))
    schedule.step(x, target=Y)
    mean_loss(seat.expected(same), Y).backward()
    assert x.grad is not None
    assert same.grad is not None
    return round(float(x.grad.norm() / same.grad.norm()), 3)


def losses_hold_graphs(p: Names) -> bool:
    losses: list[Tensor] = []
    two_stages(p)[1].step(X, target=Y, losses=losses)
    return any(loss.requires_grad for loss in losses)


def evaluation_in_a_v(p: Names) -> str:
    try:
        two_stages(p, "ZBVZeroBubble")[1].eval(X, target=Y)
    except AssertionError as error:
        return str(error)
    return "done"


def checkpoint_in_halves(p: Names) -> list[int]:
    make = lambda: [Watched(), Watched()]  # noqa: E731
    seat, schedule = two_stages(p, "InterleavedZeroBubble", make, learns=True)
    schedule.step(X, target=Y)
    return [module.runs for module in seat.modules]


def hooks_in_halves(p: Names) -> list[int]:
    make = lambda: [Watched(), Watched(False)]  # noqa: E731
    seat, schedule = two_stages(p, "InterleavedZeroBubble", make, learns=True)
    for module in seat.modules:
        module.watch()
    schedule.step(X, target=Y)
    return [module.hooked for module in seat.modules]


def after_a_frozen_stage(p: Names) -> bool:
    make = lambda: linears(freeze=True)  # noqa: E731
    seat, schedule = two_stages(p, "InterleavedZeroBubble", make, learns=False)
    schedule.step(X, target=Y)
    return seat.modules[1].weight.grad is not None


def compiled_in_halves(p: Names) -> str:
    make: Any = lambda: [torch.compile(one, backend="eager") for one in linears()]  # noqa: E731
    try:
        two_stages(p, "InterleavedZeroBubble", make)[1].step(X, target=Y)
    except RuntimeError as error:
        return "refused" if "torch.compile" in str(error) else str(error)
    return "done"


def specs_by_name(p: Names) -> list[tuple[int, ...]]:
    spec = {"b": p.microbatch.TensorChunkSpec(0), "a": p.microbatch.TensorChunkSpec(1)}
    named = {"a": torch.ones(2, 4), "b": torch.ones(4, 2)}
    _, kwargs = p.microbatch.split_args_kwargs_into_chunks((), named, 2, None, spec)
    return [tuple(kwargs[0][name].shape) for name in "ab"]


def backwards_of_looped_bfs(p: Names) -> list[str]:
    order = two_stages(p, "LoopedBFS")[1].pipeline_order
    return [str(action) for action in order[0] if "B" in str(action)]


def order_of_1f1b(p: Names) -> str:
    stage = p.PipelineStage(nn.Linear(4, 4), 0, 1, CPU)
    schedule = p.schedules.Schedule1F1B(stage, 2, loss_fn=mean_loss)
    return str(schedule._get_pipeline_order()[0][0])


def nowhere_to_cut(p: Names) -> list[int]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe = p.pipeline(nn.Sequential(nn.Linear(4, 4)), (torch.ones(3, 4),))
    return [pipe.num_stages, sum("no split point" in str(one.message) for one in caught)]


DIFFERENCES: list[tuple[Callable[[Names], Any], Any, Any]] = [
    (steps_without_zeroing, False, True),
    (uneven_samples, False, True),
    (a_batch_with_a_gradient, 2.0, 1.0),
    (losses_hold_graphs, True, False),
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
