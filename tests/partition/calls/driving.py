"""Drive the stages of a partition by hand, and hold them against the unsplit model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.partition import Description, Partition, named_tensors
from penstock.values import ValueSpec

Score = Callable[[Any], Tensor]


def square_mean(output: Any) -> Tensor:
    """A loss of a tensor, or of the main part of an output of transformers."""
    if isinstance(output, Tensor):
        return output.square().mean()
    found = output.get("logits")
    main: Tensor = output["last_hidden_state"] if found is None else found
    return main.square().mean()


def describe(made: Partition, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Description:
    assert made.describe is not None
    call = ValueSpec.of((tuple(args), dict(kwargs)))
    return made.describe(call, torch.is_grad_enabled())


def run(made: Partition, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Any:
    """The last stage's output; each stage is given what the description says, and no more."""
    given = dict(kwargs or {})
    edges = describe(made, args, given).edges
    values: dict[str, Any] = {}
    output: Any = None
    for index, module in enumerate(made.modules):
        mine = {edge.value: values[edge.value] for edge in edges if index in edge.targets}
        output = module(mine, tuple(args), given)
        if index < len(made.modules) - 1:
            assert list(output) == [edge.value for edge in edges if edge.source == index]
            values |= output
    return output


def check_equal(
    model: nn.Module,
    cut: Callable[[nn.Module], Partition],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    score: Score = square_mean,
    tolerance: float = 1e-9,
) -> Partition:
    """Check the loss and every gradient against the unsplit model's; its names and buffers too."""
    whole = copy.deepcopy(model)
    expected = score(whole(*args, **dict(kwargs or {})))
    expected.backward()
    made = cut(model)
    made.check_covers(model)
    found = score(run(made, args, kwargs))
    found.backward()
    assert float((found - expected).detach().abs()) <= tolerance
    for (name, mine), (_, theirs) in zip(
        model.named_parameters(), whole.named_parameters(), strict=True
    ):
        assert _apart(mine.grad, theirs.grad) <= tolerance, name
    check_names(made, whole)
    return made


def check_names(made: Partition, whole: nn.Module) -> None:
    """Check that the stages together have the whole's names, and its buffers' values."""
    assert {name for part in made.modules for name in part.state_dict()} == set(whole.state_dict())
    held = {name: tensor for part in made.modules for name, tensor in named_tensors(part)}
    assert set(held) == {name for name, _ in named_tensors(whole)}
    for name, buffer in whole.named_buffers():
        assert torch.equal(held[name], buffer), name


def _apart(mine: Tensor | None, theirs: Tensor | None) -> float:
    present = [gradient for gradient in (mine, theirs) if gradient is not None]
    if not present:
        return 0.0
    # A parameter that is used by no stage of this call may have zeros instead of nothing.
    first, *rest = present
    return float((first - rest[0] if rest else first).abs().max())
