"""Find what a stage gives without running it for real."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from penstock.specs.value import ValueSpec


def infer_output(module: nn.Module, arguments: ValueSpec, device: torch.device) -> ValueSpec:
    """The spec of what ``module`` gives for arguments of a spec.

    A copy of it without data runs on the meta device where the module's code allows that, which computes
    nothing; else the module itself for real, on zeros. Either way parameters, buffers, gradients and random
    state stay as they were.

    Args:
        module: a stage.
        arguments: the spec of ``(args, kwargs)``.
        device: where the stage lives.

    Raises:
        Exception: whatever the module raises when run for real.
    """
    try:
        if autocast_types():
            raise NotImplementedError("autocast does nothing on the meta device")
        return _run(_without_data(module), {}, arguments, torch.device("meta"))
    except Exception:
        with torch.random.fork_rng(_generators(device), device_type=device.type):
            buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
            return _run(module, buffers, arguments, device)


def _run(
    module: nn.Module, buffers: dict[str, Tensor], arguments: ValueSpec, device: torch.device
) -> ValueSpec:
    args, kwargs = arguments.fill([_argument(spec, device) for spec in arguments.tensors])
    with device, torch.enable_grad():
        return ValueSpec.of(functional_call(module, buffers, args, kwargs))


def _argument(spec: Any, device: torch.device) -> Tensor:
    tensor = torch.zeros(spec.shape, dtype=spec.torch_dtype, device=device)
    # A view: a module may change its input in place, which a leaf that requires grad would refuse.
    return tensor.requires_grad_(spec.requires_grad) * 1 if spec.requires_grad else tensor


def _without_data(module: nn.Module) -> nn.Module:
    """A copy on the meta device: what forward leaves in it, such as a cache, is not left in the module."""
    parameters = {id(p): nn.Parameter(_as_meta(p), p.requires_grad) for p in module.parameters()}
    buffers = {id(buffer): _as_meta(buffer) for buffer in module.buffers()}
    return copy.deepcopy(module, {**parameters, **buffers})


def _as_meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)


def _generators(device: torch.device) -> list[int]:
    if device.type == "cpu":
        return []
    return [device.index if device.index is not None else torch.accelerator.current_device_index()]


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
