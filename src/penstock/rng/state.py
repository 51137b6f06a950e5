"""The random numbers of a pipeline and of a plain loop: seeds and steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from penstock.errors import UsageError
from penstock.rng.generators import Draw, Generators, devices_of
from penstock.rng.streams import Streams

# ---- how far a training's random numbers have come


Seed = int | Literal["off"] | None
"""A seed, ``"off"``, or ``None`` for torch's own."""


class Randomness:
    """The seed of a pipeline's random numbers, and the number of its next step.

    Saved with a checkpoint and loaded again, steps draw what they would have drawn without the stop,
    whatever the new pipeline's ranks, stages and schedule.

    Args:
        seed: of the training; ``"off"`` leaves torch's generators alone.

    Raises:
        UsageError: the seed is something else.
    """

    def __init__(self, seed: int | Literal["off"]) -> None:
        self._seed = checked(seed)
        self._step = 0

    @property
    def seed(self) -> int | Literal["off"]:
        """The seed, or ``"off"``."""
        return self._seed

    @property
    def step(self) -> int:
        """The number of the next step."""
        return self._step

    @property
    def next(self) -> Draw | None:
        """What the next step draws for; None where torch's generators are left alone."""
        return None if self._seed == "off" else Draw(self._seed, self._step)

    @property
    def last(self) -> Draw | None:
        """What the last step drew for, to run it again."""
        last = max(self._step - 1, 0)
        return None if self._seed == "off" else Draw(self._seed, last)

    def advance(self) -> None:
        """Go on to the next step."""
        self._step += 1

    def state_dict(self) -> dict[str, int | str]:
        """What to save."""
        return {"seed": self._seed, "step": self._step}

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Go on from what was saved, the same on every rank.

        Raises:
            UsageError: it is not what :meth:`state_dict` gives.
        """
        if state.keys() != {"seed", "step"}:
            raise UsageError(
                f"a state of randomness holds 'seed' and 'step', not {sorted(state)}; "
                "load what state_dict() gave"
            )
        step = state["step"]
        if not isinstance(step, int) or step < 0:
            raise UsageError(f"step={step!r}: must be a number from 0")
        self._seed, self._step = checked(state["seed"]), step


def checked(seed: object) -> int | Literal["off"]:
    """A seed as it can be used.

    Raises:
        UsageError: it cannot.
    """
    if seed == "off":
        return "off"
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UsageError(
            f"seed={seed!r}: must be a whole number, 'off' to leave torch's generators alone, or None "
            "for the seed that torch was given"
        )
    return seed


def own_seed(seed: Seed) -> int | Literal["off"]:
    """A seed as it can be used, torch's own where none was given."""
    return torch.initial_seed() if seed is None else checked(seed)


# ---- the random numbers of a pipeline's step, in a plain loop


@contextmanager
def randomness(
    model: nn.Module, *, seed: int, step: int = 0, microbatch: int = 0
) -> Iterator[None]:
    """Draw what a pipeline would draw for a microbatch: the same dropout masks, bit for bit.

    Forward, loss and backward of the microbatch belong into the context, each once. Afterwards torch's
    generators are where they were.

    Args:
        model: the whole model, or a part under the names that it has in the model.
        seed: of the training, as given to :class:`penstock.Pipeline`.
        step: the number of the step, from 0.
        microbatch: its index.
    """
    generators = Generators(devices_of(model))
    streams = Streams(model, generators)

    def leave(*_: Any) -> None:
        streams.loss(microbatch)

    with generators.kept(), streams.installed(Draw(seed, step)):
        streams.forward(microbatch)
        handle = model.register_forward_hook(leave)
        try:
            yield
        finally:
            handle.remove()
