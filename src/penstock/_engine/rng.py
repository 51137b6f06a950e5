"""Random numbers, seeded for each call of a unit so that masks depend neither on schedule nor on cut."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal

import torch

from penstock.errors import UsageError

Seed = int | Literal["off"] | None
"""A seed, ``"off"``, or ``None`` for torch's own seed."""

LOSS = ":loss"
"""Replaces a unit's path when the loss draws."""

_CPU = [torch.default_generator]
_NUMBERS: dict[tuple[str, int], int] = {}
"""A hash of each path and call number."""


def seed_of(seed: int, name: str) -> int:
    """Derive a seed from a name."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


@lru_cache(16)
def _start_of(seed: int, step: int) -> int:
    return seed_of(seed, str(step))


def _mixed(number: int) -> int:
    """Splitmix64, which maps nearby numbers to distant ones. Vigna, xoshiro.di.unimi.it."""
    number = (number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return number ^ (number >> 31)


def _generators(devices: Iterable[torch.device]) -> list[torch.Generator]:
    """The default generators of the CPU and of some devices."""
    generators = [*_CPU]
    for device in sorted({d for d in devices if d.type not in {"cpu", "meta"}}, key=str):
        module: Any = torch.get_device_module(device)
        # The generators do not exist until the backend is initialised.
        module.init()
        index = module.current_device() if device.index is None else device.index
        generators.append(module.default_generators[index])
    return generators


def seed_generators(number: int, devices: Iterable[torch.device] = ()) -> None:
    """Seed torch's default generators of the CPU and of some devices."""
    for generator in _generators(devices):
        generator.manual_seed(number)


class Draws:
    """Seeds torch's default generators for one microbatch of one step.

    Args:
        seed: the seed of the training run.
        step: the number of the step, from 0.
        microbatch: the index of the microbatch.
        device: the stage's device, seeded besides the CPU.
    """

    def __init__(self, seed: int, step: int, microbatch: int, device: torch.device | None) -> None:
        self._start = _mixed(_start_of(seed, step) + microbatch) >> 1
        self._generators = _CPU if device is None or device.type == "cpu" else _generators([device])

    def enter(self, path: str, number: int) -> None:
        """Seed the generators before a call.

        Args:
            path: the path of the unit that is called, or a name that is no path.
            number: the number of the call.
        """
        place = _NUMBERS.get((path, number))
        if place is None:
            place = _NUMBERS[path, number] = _mixed(seed_of(0, path) + number) >> 1
        # Both are well mixed.
        seed = self._start ^ place
        for generator in self._generators:
            generator.manual_seed(seed)


@contextmanager
def generators_kept(devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Restore torch's default generators on exit."""
    kept = [(generator, generator.get_state()) for generator in _generators(devices)]
    try:
        yield
    finally:
        for generator, state in kept:
            generator.set_state(state)


def generator_states(devices: Iterable[torch.device] = ()) -> list[torch.Tensor]:
    """The states of torch's default generators of the CPU and of some devices."""
    return [generator.get_state() for generator in _generators(devices)]


def set_generator_states(
    states: Iterable[torch.Tensor], devices: Iterable[torch.device] = ()
) -> None:
    """Set the states that :func:`generator_states` returned for the same devices."""
    for generator, state in zip(_generators(devices), states, strict=True):
        generator.set_state(state)


class Randomness:
    """The seed of a pipeline's random numbers, and the number of its next step.

    After a checkpoint is loaded, steps draw what they would have drawn without the interruption, whatever
    the ranks, stages and schedule of the new pipeline.

    Args:
        seed: the seed of the training run; ``"off"`` leaves torch's generators alone.

    Raises:
        UsageError: the seed is neither a whole number nor ``"off"``.
    """

    def __init__(self, seed: int | Literal["off"]) -> None:
        self.seed = _checked(seed)
        self.step = 0

    def draws(self, step: int, microbatch: int, device: torch.device | None = None) -> Draws | None:
        """The draws of a microbatch; ``None`` if the generators are left alone."""
        return None if self.seed == "off" else Draws(self.seed, step, microbatch, device)

    def advance(self) -> None:
        """Go on to the next step."""
        self.step += 1

    def state_dict(self) -> dict[str, int | str]:
        """The state to save."""
        return {"seed": self.seed, "step": self.step}

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Continue from a saved state, which must be the same on every rank.

        Raises:
            UsageError: the state is not one that :meth:`state_dict` returns.
        """
        if state.keys() != {"seed", "step"}:
            raise UsageError(
                f"a state of randomness holds 'seed' and 'step', not {sorted(state)}; "
                "load what state_dict() returned"
            )
        step = state["step"]
        if not isinstance(step, int) or step < 0:
            raise UsageError(f"step={step!r}: must be a whole number of at least 0")
        self.seed, self.step = _checked(state["seed"]), step


def _checked(seed: object) -> int | Literal["off"]:
    if seed == "off":
        return "off"
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UsageError(
            f"seed={seed!r}: must be a whole number, 'off' to leave torch's generators alone, or None "
            "for the seed that torch was given"
        )
    return seed


def checked_seed(seed: Seed) -> int | Literal["off"]:
    """Check a seed; None becomes torch's own."""
    return torch.initial_seed() if seed is None else _checked(seed)


__all__ = [
    "LOSS",
    "Draws",
    "Randomness",
    "Seed",
    "checked_seed",
    "generators_kept",
    "seed_of",
]
