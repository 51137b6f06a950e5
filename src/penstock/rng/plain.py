"""The random numbers of a pipeline's step, in a plain loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from penstock.rng.generators import Generators, devices_of
from penstock.rng.keys import Draw
from penstock.rng.streams import Streams


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
