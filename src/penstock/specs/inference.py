"""Find what a stage gives without running it for real."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.specs.tensors import TensorSpec
from penstock.specs.trial import copy_with_data, copy_without_data, randomness_kept, run_itself
from penstock.specs.value import ValueSpec

log = logging.getLogger("penstock")
Run = Callable[..., Any]


def infer_output(module: nn.Module, arguments: ValueSpec, device: torch.device) -> ValueSpec:
    """The spec of what ``module`` gives for arguments of a spec.

    A copy of it without data runs on the meta device where the module's code allows that, which computes
    nothing; else a copy that shares its parameters runs for real, on zeros; else, where it cannot be copied,
    the module itself, and what it does to its attributes is undone. Parameters, buffers, gradients,
    attributes and random numbers stay as they were. Forward hooks that can change something run as copies,
    those that only look do not.

    Args:
        module: a stage.
        arguments: the spec of ``(args, kwargs)``.
        device: where the stage lives.

    Raises:
        Exception: whatever the module raises when run for real.
    """
    with randomness_kept(device):
        try:
            if autocast_types():
                raise NotImplementedError("autocast does nothing on the meta device")
            return _spec_of(copy_without_data(module), arguments, torch.device("meta"))
        except Exception as error:
            log.debug("found no shapes without data: %s", error)
            return _spec_for_real(module, arguments, device)


def _spec_for_real(module: nn.Module, arguments: ValueSpec, device: torch.device) -> ValueSpec:
    before = _versions(module)
    try:
        return _spec_of(_runnable(module), arguments, device)
    finally:
        if _versions(module) != before:
            log.warning("a forward that changes parameters in place has run once on zeros")


def _versions(module: nn.Module) -> list[int]:
    return [p._version for p in module.parameters() if not p.is_inference()]


def _runnable(module: nn.Module) -> Run:
    try:
        return copy_with_data(module)
    except Exception as error:  # whatever a module's attributes raise when they are copied
        log.debug("a module that cannot be copied runs itself: %s", error)
        return partial(run_itself, module)


def _spec_of(run: Run, arguments: ValueSpec, device: torch.device) -> ValueSpec:
    args, kwargs = arguments.fill([_argument(spec, device) for spec in arguments.tensors])
    with device, torch.enable_grad():
        return ValueSpec.of(run(*args, **kwargs))


def _argument(spec: TensorSpec, device: torch.device) -> Tensor:
    tensor = spec.zeros(device)
    # A view: a module may change its input in place, which a leaf that requires grad would refuse.
    return tensor.requires_grad_(spec.requires_grad) * 1 if spec.requires_grad else tensor


def autocast_types() -> list[str]:
    """The types that autocast casts to now, on this machine's devices; empty without autocast."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    return [
        f"{kind}:{torch.get_autocast_dtype(kind)}"
        for kind in kinds
        if torch.is_autocast_enabled(kind)
    ]


def spec_of_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ValueSpec:
    """The spec of a call's arguments."""
    return ValueSpec.of((args, kwargs))
