"""Random numbers: seeded for each call of a unit, so that masks depend neither on schedule nor on cut."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch

from penstock.errors import UsageError

Seed = int | Literal["off"] | None
"""A seed, ``"off"``, or ``None`` for torch's own seed."""

LOSS = ":loss"
"""Stands for a unit's path where the loss draws."""

_NUMBERS: dict[tuple[str, int], int] = {}
"""For each path and number of a call, a number made of them."""


def seed_of(seed: int, name: str) -> int:
    """A seed for what has a name."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def _mixed(number: int) -> int:
    """Splitmix64: numbers that are near each other become ones that are not. Vigna, xoshiro.di.unimi.it."""
    number = (number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return number ^ (number >> 31)


def _generators(devices: Iterable[torch.device]) -> list[torch.Generator]:
    """The default generators of the CPU and of some devices."""
    generators = [torch.default_generator]
    for device in sorted({d for d in devices if d.type not in {"cpu", "meta"}}, key=str):
        module: Any = torch.get_device_module(device)
        # There are no generators before the backend is initialised.
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
        seed: of the training.
        step: the number of the step, from 0.
        microbatch: its index.
        device: besides the CPU, where the stage is.
    """

    def __init__(self, seed: int, step: int, microbatch: int, device: torch.device | None) -> None:
        self._start = seed_of(seed, f"{step}/{microbatch}")
        self._generators = _generators([] if device is None else [device])

    def enter(self, path: str, number: int) -> None:
        """Seed them.

        Args:
            path: of the unit that is called, or a name that is no path.
            number: of the call.
        """
        place = _NUMBERS.get((path, number))
        if place is None:
            place = _NUMBERS[path, number] = _mixed(seed_of(0, path) + number)
        seed = _mixed(self._start ^ place) >> 1
        for generator in self._generators:
            generator.manual_seed(seed)


@contextmanager
def generators_kept(devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Leave torch's default generators where they were."""
    generators = _generators(devices)
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


class Randomness:
    """The seed of a pipeline's random numbers, and the number of its next step.

    After it is saved with a checkpoint and loaded again, steps draw what they would have drawn without the
    interruption, whatever the ranks, stages and schedule of the new pipeline.

    Args:
        seed: of the training; ``"off"`` leaves torch's generators alone.

    Raises:
        UsageError: the seed is something else.
    """

    def __init__(self, seed: int | Literal["off"]) -> None:
        self.seed = _checked(seed)
        self.step = 0

    def draws(self, step: int, microbatch: int, device: torch.device | None = None) -> Draws | None:
        """What seeds the generators for a microbatch; ``None`` if they are left alone."""
        return None if self.seed == "off" else Draws(self.seed, step, microbatch, device)

    def advance(self) -> None:
        """Go on to the next step."""
        self.step += 1

    def state_dict(self) -> dict[str, int | str]:
        """What to save."""
        return {"seed": self.seed, "step": self.step}

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Continue from what was saved, the same on every rank.

        Raises:
            UsageError: it is not what :meth:`state_dict` returns.
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


def own_seed(seed: Seed) -> int | Literal["off"]:
    """A valid seed; torch's own if it is None."""
    return torch.initial_seed() if seed is None else _checked(seed)


__all__ = [
    "LOSS",
    "Draws",
    "Randomness",
    "Seed",
    "generators_kept",
    "own_seed",
    "seed_of",
]
