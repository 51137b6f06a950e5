"""What a replicated or sharded stage needs around a step, and which stages need it."""

from __future__ import annotations

import sys
from importlib import import_module

from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Adapter:
    """Goes along with a stage through a training step; what it does not do otherwise is nothing.

    Attributes:
        whole_backward: whether the stage's backward must come in one piece.
    """

    whole_backward = False

    def begin(self, microbatches: int) -> None:
        """A step of so many microbatches begins."""

    def forward(self, microbatch: int) -> None:
        """A microbatch's forward begins."""

    def loss(self, microbatch: int) -> None:
        """Its loss begins, on the last stage."""

    def backward(self, microbatch: int) -> None:
        """Its backward begins, or a half of it."""

    def done(self, microbatch: int) -> None:
        """Its backward is over."""

    def unshard(self) -> None:
        """Gather the parameters, to be there when they are needed."""

    def reshard(self) -> None:
        """Let go of gathered parameters."""

    def reduce(self) -> None:
        """Start to reduce the gradients: all of the step are there."""

    def finish(self) -> None:
        """The step is over: gradients are reduced when this returns."""

    def abandon(self) -> None:
        """The step was interrupted."""


def adapter_of(module: nn.Module) -> Adapter | None:
    """The adapter of a stage's module, where it or a part of it is replicated or sharded."""
    # torch's part that shards takes long to import; where nobody has imported it, nothing is sharded.
    if not isinstance(module, DistributedDataParallel) and _SHARDS not in sys.modules:
        return None
    found: Adapter | None = import_module("penstock.parallel.adapters").make_adapter(module)
    return found


_SHARDS = "torch.distributed.fsdp"
