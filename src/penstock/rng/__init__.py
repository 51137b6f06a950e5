"""Where random numbers come from: a stream for each step, microbatch and module call."""

from penstock.rng.drawing import (
    OwnHook,
    called_to_draw,
    can_draw,
    generators_kept,
    has_drawn,
    identity,
    is_compiled,
    noticed,
    unwrapped,
    visible,
)
from penstock.rng.generators import Draw, Generators, Place, devices_of, seed_of
from penstock.rng.state import Randomness, Seed, own_seed, randomness
from penstock.rng.streams import Streams, in_backward

__all__ = [
    "Draw",
    "Generators",
    "OwnHook",
    "Place",
    "Randomness",
    "Seed",
    "Streams",
    "called_to_draw",
    "can_draw",
    "devices_of",
    "generators_kept",
    "has_drawn",
    "identity",
    "in_backward",
    "is_compiled",
    "noticed",
    "own_seed",
    "randomness",
    "seed_of",
    "unwrapped",
    "visible",
]
