"""The device of tests: ``PENSTOCK_TEST_DEVICE=cuda make test`` runs those of behaviour on a GPU.

The switch makes it torch's default device, in the tests and in the processes that they start, so that a test
that names no device runs there. ``cpu`` is one, and so is ``played``, a device that a CPU plays.
"""

from __future__ import annotations

import os

import torch

from tests import played

NAME = os.environ.get("PENSTOCK_TEST_DEVICE", "")
DEVICE = NAME or "cuda"
"""The device of tests that need one which is no CPU, unless the switch says `cpu`."""


def is_there() -> bool:
    """Whether this machine has the device."""
    if NAME == played.NAME:
        played.register()
    if torch.device(DEVICE).type == "cpu":
        return True
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    return accelerator is not None and accelerator.type == torch.device(DEVICE).type


HAS_DEVICE = is_there()


def device_of_rank(rank: int) -> str:
    """The device of a process: one each, as far as there are several."""
    kind = torch.device(DEVICE).type
    return "cpu" if kind == "cpu" else f"{kind}:{rank % torch.accelerator.device_count()}"


def switch() -> None:
    """Let what is made without a device be made on the device of the switch.

    Kernels are those that always give the same bits, where there are such, since tests hold the bits of
    schedules, processes and resumed runs against each other. Where there is none, torch warns.
    """
    if not NAME:
        return
    torch.set_default_device(NAME)
    if torch.device(NAME).type not in {"cpu", played.NAME}:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
