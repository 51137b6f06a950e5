"""What makes programs: microbatches, a module of a function, and a loss to which every output contributes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock import Loss, Microbatches
from penstock.testing import Case

Call = tuple[Sequence[Any], Mapping[str, Any]]
"""The arguments of one microbatch."""
MICROBATCHES = 4
SAMPLES = 2
LARGEST = 1e4
"""Numbers of an output that are larger mask something, and are no part of the loss."""


def case_of(model: nn.Module, calls: Sequence[Call], **options: Any) -> Case:
    """A model and its microbatches, with a loss of each microbatch by itself."""
    if any(args and kwargs for args, kwargs in calls):
        raise ValueError("give a microbatch's arguments by position or by name")
    whole = [dict(kwargs) if kwargs else tuple(args) for args, kwargs in calls]
    batch = Microbatches(whole, samples=[SAMPLES] * len(calls))
    return Case(model, [batch], None, Loss(loss_of, check=False), **options)


class Does(nn.Module):
    """What a function makes of this module and its arguments; a list of parts is a ``ModuleList``, a tensor a buffer."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, nn.ModuleList(part) if isinstance(part, list) else part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def calls_of(program: Case) -> list[Call]:
    """The arguments of each microbatch."""
    return [((), call) if isinstance(call, dict) else (call, {}) for call in program.args[0].calls]


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A nested value with other tensors."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return type(value)({key: mapped(one, change) for key, one in value.items()})  # type: ignore[call-arg]
    if type(value) in (list, tuple):
        return type(value)(mapped(one, change) for one in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **mapped(vars(value), change))
    return value


def loss_of(output: Any, _: Any = None) -> Tensor:
    """A number to which all numbers of an output contribute, each with another factor."""
    terms = [_term(tensor, place) for place, tensor in enumerate(_floats(output))]
    if not terms:
        raise ValueError("the output has no tensor of floating-point numbers")
    return torch.stack(terms).sum()


def _term(tensor: Tensor, place: int) -> Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = real.reshape(-1)
    factors = torch.cos(torch.arange(flat.numel(), dtype=flat.dtype) + place)
    counts = flat.detach().abs() < LARGEST
    return (
        torch.where(counts, flat * factors, 0.0).sum() / max(flat.numel(), 1)
        + torch.where(counts, flat, 0.0).square().mean()
    )


def _floats(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _floats(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _floats(one)
    elif dataclasses.is_dataclass(value):
        for one in vars(value).values():
            yield from _floats(one)
    elif type(value).__name__ == "DiagonalGaussianDistribution":
        yield from (value.mean, value.logvar)
