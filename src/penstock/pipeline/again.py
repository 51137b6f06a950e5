"""Stages that compute the forward of some modules again in backward, instead of keeping what it made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.stage import PipelineStage


class FrugalStage(PipelineStage):
    """A stage some of whose modules keep nothing of their forward but what it was given.

    Attributes:
        again: these modules.
    """

    again: Sequence[nn.Module] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module for a microbatch, see :meth:`PipelineStage.forward`."""
        with _computed_again(self.again):
            return super().forward(*args, **kwargs)


@contextmanager
def _computed_again(modules: Sequence[nn.Module]) -> Iterator[None]:
    """The modules are as their author made them before and after: others may run them too."""
    if not torch.is_grad_enabled():
        yield
        return
    own = [vars(module).get("forward") for module in modules]
    for module in modules:
        vars(module)["forward"] = partial(checkpoint, module.forward, use_reentrant=False)
    try:
        yield
    finally:
        for module, forward in zip(modules, own, strict=True):
            if forward is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = forward
