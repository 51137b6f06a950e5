"""First weights of a model, of stages, or of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from penstock.errors import UsageError
from penstock.weights.initialise import Init, initialise


@runtime_checkable
class _Pipeline(Protocol):
    def init_weights(self, seed: int, init: Init | None = None) -> None:
        """As below."""


@runtime_checkable
class _Stage(Protocol):
    module: nn.Module
    device: torch.device


def init_weights(
    target: Any,
    seed: int,
    init: Init | None = None,
    *,
    device: torch.device | str | None = None,
) -> None:
    """Give all weights their first values, the same bits however the model is cut.

    Each module's own ``reset_parameters()`` runs, and after it, for each module, ``init`` or the
    ``_init_weights(module)`` of the model around it, such as transformers'; both under a seed made of
    ``seed`` and the module's path. What is on the meta device gets memory first. A tied weight is
    initialised by the module of its first name. What no initialiser knows stays as the constructor left it.
    Torch's generators are afterwards where they were.

    Args:
        target: a model, one of its stages (as a module or a ``PipelineStage``), several of them, or a
            ``Pipeline``, where every rank calls it.
        seed: of all values.
        init: called with each module, children first, in place of the model's ``_init_weights``.
        device: where to put what is on the meta device; by default the CPU, or the stage's.

    Raises:
        UsageError: something was on the meta device and nobody filled it; the message names it.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UsageError(f"seed={seed!r}: must be a whole number")
    if isinstance(target, nn.Module | _Stage):
        initialise([_home(target, device)], seed, init)
    elif isinstance(target, _Pipeline):
        _check_no_device(device)
        target.init_weights(seed, init)
    elif isinstance(target, Iterable):
        initialise([_home(stage, device) for stage in target], seed, init)
    else:
        raise UsageError(
            f"{type(target).__name__} has no weights; give a model, stages, or a Pipeline"
        )


def _check_no_device(device: Any) -> None:
    if device is not None:
        raise UsageError("a Pipeline knows where its stages live; leave out device=")


def _home(stage: Any, device: torch.device | str | None) -> tuple[nn.Module, torch.device]:
    if isinstance(stage, nn.Module):
        return stage, torch.device(device or "cpu")
    if isinstance(stage, _Stage):
        return stage.module, torch.device(device or stage.device)
    raise UsageError(f"{type(stage).__name__} is no stage; give modules or PipelineStages")
