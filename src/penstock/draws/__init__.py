"""Where random numbers come from: a stream for each step, microbatch and module call."""

from penstock.draws.drawing import OwnHook, unwrapped, visible
from penstock.draws.generators import Generators, devices_of
from penstock.draws.keys import Draw, seed_of
from penstock.draws.plain import randomness
from penstock.draws.state import Randomness, Seed, own_seed
from penstock.draws.streams import Streams, in_backward, named

__all__ = [
    "Draw",
    "Generators",
    "OwnHook",
    "Randomness",
    "Seed",
    "Streams",
    "devices_of",
    "in_backward",
    "named",
    "own_seed",
    "randomness",
    "seed_of",
    "unwrapped",
    "visible",
]
