"""What a replicated or sharded stage needs around a step, and which stages need it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

Apart = Callable[[], AbstractContextManager[Any]]


class Adapter:
    """Goes along with a stage through a call; a method that is not overridden does nothing.

    Attributes:
        whole_backward: whether the graph of a stage's backward must be run in one piece. Gradients of weights
            may be left to the weights' half all the same.
        casts: whether the module changes the types of its arguments before its own code sees them.
    """

    whole_backward = False
    casts = False

    def fits(self, module: nn.Module) -> bool:
        """Whether it is still the one for a stage's module, which a user may have wrapped since."""
        raise NotImplementedError

    def begin(self, microbatches: int, *, trains: bool = True, gathers: bool = True) -> None:
        """A call of so many microbatches begins.

        Args:
            microbatches: how many.
            trains: whether they go backward.
            gathers: whether parameters are to be gathered now; else the schedule says when, or their use.
        """

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
        """The call is over: gradients are reduced when this returns."""

    def abandon(self) -> None:
        """The call was interrupted."""


def adapter_of(module: nn.Module, apart: Apart = nullcontext) -> Adapter | None:
    """The adapter of a stage's module, where it or a part of it is replicated or sharded.

    Args:
        module: of the stage, in its wrapper.
        apart: a context in which those gradients that the stage collects apart are the parameters' ``.grad``.
    """
    # torch's part that shards takes long to import; where nobody has imported it, nothing is sharded.
    if not isinstance(module, DistributedDataParallel) and _SHARDS not in sys.modules:
        return None
    found: Adapter | None = import_module("penstock.parallel.adapters").make_adapter(module, apart)
    return found


_SHARDS = "torch.distributed.fsdp"


def over_replicas(module: nn.Module, mesh: Any, *, shard: bool) -> nn.Module:
    """A stage's module spread over the replicas of a pipeline, in the usual way.

    Args:
        module: of the stage.
        mesh: with a dimension ``dp``.
        shard: whether each replica holds a part of each weight, by FSDP2, or all of it.
    """
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    if shard:
        made: nn.Module = import_module(_SHARDS).fully_shard(module, mesh=mesh["dp"])
        return made
    return DistributedDataParallel(module, process_group=mesh.get_group("dp"))
