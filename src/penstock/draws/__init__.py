"""Where random numbers come from: a stream for each step, microbatch and module call."""

from penstock.draws.drawing import OwnHook, called_to_draw, is_compiled, unwrapped, visible
from penstock.draws.generators import Generators, devices_of
from penstock.draws.keys import Draw, Place, seed_of
from penstock.draws.operations import can_draw, generators_kept, has_drawn, identity, noticed
from penstock.draws.plain import randomness
from penstock.draws.state import Randomness, Seed, own_seed
from penstock.draws.streams import Streams, in_backward

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
