"""The device of a process, of whatever kind: chosen once, used, waited for, named."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import torch

from penstock.errors import UsageError


def kinds() -> tuple[str, ...]:
    """The kinds of devices that compute here; one may be made known to torch after Penstock was imported."""
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def placed_on(device: torch.device | str) -> torch.device:
    """Resolve ``device=``: without an index, such as ``"cuda"``, it is that of ``LOCAL_RANK``, of torchrun.

    Raises:
        UsageError: this machine has no such device.
    """
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        said = str(error).partition(" at start of")[0]
        raise UsageError(f"device={device!r}: {said}") from None
    if not is_accelerator(chosen):
        return torch.device(chosen.type)  # Accelerate says cpu:0, which no tensor does
    numbered = "" if chosen.index is not None else ", by LOCAL_RANK"
    if numbered:
        chosen = torch.device(chosen.type, int(os.environ.get("LOCAL_RANK", "0")))
    kind = torch.get_device_module(chosen.type)
    count = kind.device_count() if kind.is_available() else 0
    if not count:
        raise UsageError(
            f"device={str(device)!r}: torch.{chosen.type}.is_available() is False in this process; use "
            "device='cpu', or install a driver and a torch build for it"
        )
    if chosen.index >= count:
        raise UsageError(
            f"device={str(device)!r}: this process would take number {chosen.index}{numbered}, but there are "
            f"only {count}; start at most {count} processes on this machine, or give each its device"
        )
    return chosen


def autocast_types() -> list[str]:
    """The types that autocast computes in now, by type of device; empty outside of autocast."""
    return [
        f"{kind}:{torch.get_autocast_dtype(kind)}"
        for kind in kinds()
        if torch.is_autocast_enabled(kind)
    ]


def is_accelerator(device: torch.device) -> bool:
    """Tell whether a device has memory and work of its own beside the host's."""
    return device.type not in {"cpu", "meta"}


def numbered(device: torch.device) -> torch.device:
    """A device with its number: the current one of its kind, if it has none."""
    if device.index is not None or not is_accelerator(device):
        return device
    return torch.device(device.type, torch.get_device_module(device.type).current_device())


def use(device: torch.device) -> None:
    """Make a device the current one of this process.

    What names no device, such as collectives of torch, would use the first one in every process.
    """
    if is_accelerator(device) and device.index is not None:
        torch.get_device_module(device.type).set_device(device)


def wait_for(device: torch.device) -> None:
    """Wait until a device has done all its work."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def name_of(device: torch.device) -> str:
    """The name of an accelerator's model, or its kind if it does not tell."""
    module: Any = torch.get_device_module(device.type)
    return str(getattr(module, "get_device_name", lambda one: one.type)(device))


def memory_of(device: torch.device) -> int:
    """The bytes of an accelerator's memory; 0 if it does not tell."""
    with suppress(RuntimeError):
        return torch.accelerator.get_memory_info(device)[1]
    return 0
