"""Torch's generators, their states, and the seeds that they are given."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

# ---- the default generators of the CPU and of accelerators: what dropout and its like draw from


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


# ---- seeds that are the same in every process: by a hash of what the numbers are drawn for


class Seeds(NamedTuple):
    """The seeds of a module call.

    Args:
        inside: of what the module itself draws, until it calls another.
        after: of what its caller draws from then on, until it calls another.
    """

    inside: int
    after: int


@dataclass(frozen=True)
class Draw:
    """For which step the numbers are drawn.

    Args:
        seed: the seed of the whole training.
        step: the number of the step, from 0.
    """

    seed: int
    step: int

    def key(self, microbatch: int) -> bytes:
        """The key of all seeds of a microbatch."""
        return _digest(f"{self.seed} {self.step} {microbatch}".encode())


@dataclass
class Place:
    """A module call, by where it stands in the model's forward: the whole way down to it.

    So it is the same place whichever calls of the same module are made in other stages.

    Args:
        address: the calls on the way, each with its number among those of its caller.
        path: under which of its paths the module is called.
    """

    address: str = ""
    path: str = ""
    _calls: dict[str, int] = field(default_factory=dict)

    def next(self, paths: Sequence[str]) -> Place:
        """The place of the next call that is made from here.

        Args:
            paths: of the module that is called. One that stands at several places below the caller is called
                under one path after the other.
        """
        below = f"{self.path}." if self.path else ""
        found = [path for path in paths if path.startswith(below)] if len(paths) > 1 else paths
        names = found or paths
        count = self._calls.get(names[0], 0)
        self._calls[names[0]] = count + 1
        last = min(count, len(names) - 1)
        if names[last] == self.path and not count:
            # A wrapper calls what it wraps, which is then where it would be without.
            return Place(self.address, self.path)
        name = names[last].removeprefix(below) if found else names[last]
        return Place(f"{self.address}/{name}:{count - last}", names[last])

    def seeds(self, key: bytes) -> Seeds:
        """The seeds of this call for a microbatch's key."""
        found = _digest(self.address.encode(), key)
        return Seeds(_number(found[:8]), _number(found[8:]))


def following(seed: int) -> int:
    """The seed of what is drawn next, after something was under ``seed``: one step of splitmix64."""
    mixed = (seed + 0x9E3779B97F4A7C15) & _ALL
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _ALL
    return (mixed ^ (mixed >> 31)) >> 1


_ALL = 2**64 - 1


def seed_of(seed: int, name: str) -> int:
    """A seed for what is drawn once, such as a module's first weights."""
    return _number(_digest(f"{seed} {name}".encode())[:8])


def _digest(text: bytes, key: bytes = b"") -> bytes:
    return hashlib.blake2b(text, key=key, digest_size=16).digest()


def _number(digest: bytes) -> int:
    # 63 bits: every generator takes them.
    return int.from_bytes(digest, "little") >> 1
