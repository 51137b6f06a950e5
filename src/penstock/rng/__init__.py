"""Where random numbers come from: a stream for each step, microbatch and module call."""

from penstock.rng.drawing import OwnHook, called_to_draw, is_compiled, unwrapped, visible
from penstock.rng.generators import Generators, devices_of
from penstock.rng.keys import Draw, Place, seed_of
from penstock.rng.operations import can_draw, generators_kept, has_drawn, identity, noticed
from penstock.rng.plain import randomness
from penstock.rng.state import Randomness, Seed, own_seed
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
