"""The random numbers that a pipeline would draw, without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from penstock._engine.rng import LOSS, Draws, generators_kept
from penstock.partition.interception import Interceptor, Seeded, intercepted
from penstock.partition.units import find_units, once


@contextmanager
def randomness(
    model: nn.Module,
    *,
    seed: int,
    step: int = 0,
    microbatch: int = 0,
    units: Sequence[str] | None = None,
) -> Iterator[None]:
    """Draw what a pipeline would draw for a microbatch: the same dropout masks, bit for bit.

    Run the forward and the loss of the microbatch once each in the context. It restores the states of
    torch's generators.

    Args:
        model: the whole model.
        seed: the seed of the training, as given to :class:`penstock.Pipeline`.
        step: the number of the step, from 0.
        microbatch: the index of the microbatch.
        units: the paths of the modules that the pipeline places as a whole; by default those of a pipeline
            with few stages.
    """
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    device = next((d for d in devices if d.type not in {"cpu", "meta"}), None)
    draws = Draws(seed, step, microbatch, device)
    paths = once(model, find_units(model, 2) if units is None else units)
    seeded = Seeded([Interceptor(model.get_submodule(path), path) for path in paths], draws, {})
    root = Interceptor(model, "")

    def call(_: Interceptor, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        output = seeded.run(run, args, kwargs)
        draws.enter(LOSS, 0)
        return output

    with generators_kept(devices), intercepted([root], call):
        yield
