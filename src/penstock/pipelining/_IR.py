"""The traced pipe where torch has it."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from penstock.pipelining._utils import PipeInfo
from penstock.pipelining.tracing.pipe import SUBMODULE as PP_SUBMOD_PREFIX
from penstock.pipelining.tracing.pipe import Pipe
from penstock.pipelining.tracing.pipe import submodule_name as get_submod_name
from penstock.pipelining.tracing.split import (
    SplitPoint,
    annotate_split_points,
    pipe_split,
    pipeline,
)

__all__ = [
    "PP_SUBMOD_PREFIX",
    "LossWrapper",
    "MultiUseParameterConfig",
    "Pipe",
    "PipeInfo",
    "PipeSequential",
    "PipeSplitWrapper",
    "SplitPoint",
    "TrivialLossWrapper",
    "annotate_split_points",
    "aten_pipe_split_alias",
    "get_submod_name",
    "pipe_split",
    "pipeline",
]

# What a split policy puts into a graph, or finds in one.
aten_pipe_split_alias = torch.ops.penstock.split.default


class PipeSplitWrapper:
    """Where :class:`SplitPoint` was once."""

    SplitPoint = SplitPoint


class PipeSequential(nn.Sequential):
    """Modules one after the other, with a cut between each two of them."""

    @staticmethod
    def from_sequential(sequential_instance: nn.Sequential) -> PipeSequential:
        """The modules of a sequence, with their parameters."""
        return PipeSequential(*sequential_instance)

    def forward(self, input: Any) -> Any:
        """Call each module with what the one before gave."""
        for place, module in enumerate(self):
            if place:
                pipe_split()
            input = module(input)
        return input


class LossWrapper(nn.Module):
    """A model together with its loss; a subclass says in ``forward`` what is given to which.

    Args:
        module: the model.
        loss_fn: its loss.
    """

    def __init__(self, module: nn.Module, loss_fn: Callable[..., Tensor]) -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What a subclass says.

        Raises:
            NotImplementedError: it says nothing.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no forward; write one that calls self.module and self.loss_fn"
        )


class TrivialLossWrapper(LossWrapper):
    """A model of one input, whose loss compares its output with targets."""

    loss_spec = True

    def forward(self, x: Any, targets: Any) -> Any:
        """The loss."""
        return self.loss_fn(self.module(x), targets)


class MultiUseParameterConfig(Enum):
    """What becomes of a parameter that several stages use; Penstock always does the second."""

    TRANSMIT = 1
    REPLICATE = 2
