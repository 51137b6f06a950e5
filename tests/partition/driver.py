"""Run the stages of a partition by hand, forwards and backwards, and hold them against the plain model."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

import penstock
from penstock._engine.rng import LOSS, Draws
from penstock._engine.values import map_tensors
from penstock.partition import CallPlan, Partition, partition
from penstock.stage import StageCall, StageModule

Score = Callable[[Any], Tensor]


def cut(
    model: nn.Module,
    stages: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Partition:
    """Cut a model as the first batch does: by how the arguments look."""
    call = map_tensors((tuple(args), dict(kwargs or {})), lambda tensor: tensor.to("meta"))
    return partition(model, stages, example=call, **options)


def square_mean(output: Any) -> Tensor:
    """A loss of a tensor, or of the tensors in an output."""
    if isinstance(output, Tensor):
        return output.square().mean()
    for name in ("loss", "logits", "logits_per_image", "last_hidden_state"):
        if isinstance(output, Mapping) and output.get(name) is not None:
            return output[name].square().mean()  # type: ignore[no-any-return]
    tensors = [t for t in output if isinstance(t, Tensor)]
    return torch.stack([t.square().mean() for t in tensors]).sum()


@dataclass
class Forwarded:
    """What a forward through all stages left."""

    plan: CallPlan
    output: Any = None
    arrived: list[dict[str, Any]] = field(default_factory=list)
    sent: list[dict[str, Any]] = field(default_factory=list)
    losses: list[Any] = field(default_factory=list)


def fresh(tensor: Tensor, *, gradient: bool) -> Tensor:
    """A copy that may be changed in place, whose leaf collects the gradient."""
    leaf = tensor.detach().clone(memory_format=torch.preserve_format)
    return leaf.requires_grad_(gradient and tensor.requires_grad)


def forwards(
    cut: Partition,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    draws: Draws | None = None,
) -> Forwarded:
    named = dict(kwargs or {})
    first: Any = cut.modules[0]
    (score,) = first.scores([(args, named, draws)])
    plan = first.plan(score)
    done = Forwarded(plan)
    batch = [fresh(tensor, gradient=True).clone() for tensor in score.batch] if score else args
    rest = {} if score else named
    values: dict[str, Tensor] = {}
    gradients = {edge.value: edge.gradient for edge in plan.edges}
    for index, module in enumerate(cut.modules):
        wanted = [edge.value for edge in plan.edges if index in edge.targets]
        leaves = {name: fresh(values[name], gradient=gradients[name]) for name in wanted}
        arrived = {
            n: torch.empty_like(t).copy_(t) if t.requires_grad else t for n, t in leaves.items()
        }
        with penstock.collect_losses() as losses:
            output, sent = module(StageCall(plan, 0, score, draws), arrived, *batch, **rest)
        assert set(sent) == {edge.value for edge in plan.edges if edge.source == index}
        done.arrived.append(leaves)
        done.sent.append(sent)
        done.losses.append(losses)
        values.update(sent)
    done.output = output
    return done


def backwards(done: Forwarded, loss: Tensor) -> None:
    gradients: dict[str, Tensor] = {}
    for index in reversed(range(len(done.sent))):
        roots: list[Tensor] = []
        seeds: list[Tensor | None] = []
        added = done.losses[index].total()
        if added.requires_grad:
            roots.append(added)
            seeds.append(None)
        if index == len(done.sent) - 1 and loss.requires_grad:
            roots.append(loss)
            seeds.append(None)
        for name, tensor in done.sent[index].items():
            if name in gradients and tensor.requires_grad:
                roots.append(tensor)
                seeds.append(gradients[name])
        if roots:
            torch.autograd.backward(roots, seeds)
        for name, leaf in done.arrived[index].items():
            if leaf.grad is not None:
                gradients[name] = gradients[name] + leaf.grad if name in gradients else leaf.grad


def randomness(model: nn.Module, microbatch: int, units: list[str]) -> Any:
    return penstock.randomness(model, seed=3, microbatch=microbatch, units=units)


def check_equal(  # noqa: PLR0913 - one oracle, many cases
    model: nn.Module,
    stages: Any,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    score: Score = square_mean,
    tolerance: float = 1e-10,
    draws: bool = False,
    repeat: int = 1,
    recompute: Any = False,
) -> Partition:
    """Check the loss (bit by bit) and every gradient against the plain model's; names and buffers too."""
    whole = copy.deepcopy(model)
    parts = (
        stages(model) if callable(stages) else cut(model, stages, args, kwargs, recompute=recompute)
    )
    codes = [m for m in parts.modules if isinstance(m, StageModule)]
    units = [path for m in codes for path, part in m.named_modules() if part in m.units]
    for microbatch in range(repeat):
        call, theirs = copy.deepcopy((args, kwargs or {})), copy.deepcopy((args, kwargs or {}))
        seeded = randomness(whole, microbatch, units) if draws else contextlib.nullcontext()
        with penstock.collect_losses() as losses, seeded:
            expected = score(whole(*theirs[0], **theirs[1])) + losses.total()
            expected.backward()
        drawn = Draws(3, 0, microbatch, None) if draws else None
        done = forwards(parts, *call, drawn)
        if drawn is not None:
            drawn.enter(LOSS, 0)
        loss = score(done.output)
        backwards(done, loss)
        total = loss.detach() + sum(one.total().detach() for one in done.losses)
        # Losses of several stages are added in another order.
        added = any(one.total().requires_grad for one in done.losses)
        assert_close(total, expected.detach(), rtol=0, atol=1e-12 if added else 0)
    for (name, mine), (_, other) in zip(
        model.named_parameters(), whole.named_parameters(), strict=True
    ):
        assert apart(mine.grad, other.grad) <= tolerance, name
    assert {n for m in parts.modules for n in m.state_dict()} == set(whole.state_dict())
    named = dict(model.named_buffers())
    for name, buffer in whole.named_buffers():
        assert_close(named[name], buffer, rtol=0, atol=tolerance)
    return parts


def apart(mine: Tensor | None, theirs: Tensor | None) -> float:
    present = [gradient for gradient in (mine, theirs) if gradient is not None]
    if not present:
        return 0.0
    # A parameter that no stage uses in this call may have zeros instead of nothing.
    first, *rest = present
    return float((first - rest[0] if rest else first).abs().max())
