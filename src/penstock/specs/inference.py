"""Find what a stage gives without running it for real."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from penstock.specs.structure import flatten, unflatten
from penstock.specs.value import ValueSpec

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def infer_output(module: nn.Module, arguments: ValueSpec, device: torch.device) -> ValueSpec:
    """The spec of what ``module`` gives for arguments of a spec.

    It runs on the meta device where the module's code allows it, which computes nothing; else for real,
    on zeros. Either way parameters, buffers, gradients and random state stay as they were.

    Args:
        module: a stage.
        arguments: the spec of ``(args, kwargs)``.
        device: where the stage lives.

    Raises:
        Exception: whatever the module raises when run for real.
    """
    try:
        return _run(module, arguments, torch.device("meta"), _as_meta)
    except Exception:
        with torch.random.fork_rng(_generators(device), device_type=device.type):
            return _run(module, arguments, device, torch.clone)


def _run(
    module: nn.Module,
    arguments: ValueSpec,
    device: torch.device,
    stand_in: Callable[[Tensor], Tensor],
) -> ValueSpec:
    args, kwargs = arguments.fill([_argument(spec, device) for spec in arguments.tensors])
    state = _state(module, stand_in)
    with device, torch.enable_grad():
        return ValueSpec.of(functional_call(module, state, args, kwargs))


def _argument(spec: Any, device: torch.device) -> Tensor:
    tensor = torch.zeros(spec.shape, dtype=spec.torch_dtype, device=device)
    # A view: a module may change its input in place, which a leaf that requires grad would refuse.
    return tensor.requires_grad_(spec.requires_grad) * 1 if spec.requires_grad else tensor


def _state(module: nn.Module, stand_in: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Stand-ins for buffers, which forward may change, and on meta for parameters."""
    buffers = {name: stand_in(buffer) for name, buffer in module.named_buffers()}
    if stand_in is not _as_meta:
        return buffers
    return buffers | {name: stand_in(p) for name, p in module.named_parameters()}


def _as_meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)


def _generators(device: torch.device) -> list[int]:
    if device.type == "cpu":
        return []
    return [device.index if device.index is not None else torch.accelerator.current_device_index()]


def spec_of_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> ValueSpec:
    """The spec of a call's arguments."""
    return ValueSpec.of((args, kwargs))


def specs_of_calls(calls: Iterable[Arguments]) -> list[ValueSpec]:
    """The specs of several calls; calls alike share one object."""
    specs: list[ValueSpec] = []
    for call in calls:
        tensors, structure = flatten(call)
        alike = bool(specs) and specs[-1].fits(tensors, structure)
        specs.append(specs[-1] if alike else ValueSpec.of(call))
    return specs


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nested value with each tensor changed."""
    tensors, structure = flatten(value)
    return unflatten(structure, [change(tensor) for tensor in tensors])
