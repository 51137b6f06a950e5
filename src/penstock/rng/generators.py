"""The default generators of the CPU and of accelerators: what dropout and its like draw from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class Generators:
    """The default generators of the CPU and of some devices.

    ``torch.manual_seed`` seeds those of every backend there may be, which takes a hundred times as long.

    Args:
        devices: besides the CPU.
    """

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        others = sorted({d for d in devices if d.type not in {"cpu", "meta"}}, key=str)
        self._cpu = torch.default_generator
        self._all = [self._cpu, *map(_generator, others)]
        self._alone = not others

    def seed(self, number: int) -> None:
        """Start them all at a seed."""
        if self._alone:
            self._cpu.manual_seed(number)
            return
        for generator in self._all:
            generator.manual_seed(number)

    @property
    def started_at(self) -> int:
        """The seed they were last started at, or that of a state that was put back since."""
        return self._cpu.initial_seed()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put them back afterwards to where they are now."""
        states = [generator.get_state() for generator in self._all]
        try:
            yield
        finally:
            for generator, state in zip(self._all, states, strict=True):
                generator.set_state(state)


def _generator(device: torch.device) -> Any:
    module: Any = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    # Nothing is there before the backend has begun.
    module.init()
    return module.default_generators[index]


def devices_of(module: nn.Module) -> set[torch.device]:
    """Where a module's parameters and buffers are."""
    return {tensor.device for tensor in (*module.parameters(), *module.buffers())}
