"""Seeds that are the same in every process: by a hash of what the numbers are drawn for."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple


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


def seeds_of(key: bytes, name: bytes, count: int) -> Seeds:
    """The seeds of a call.

    Args:
        key: of the microbatch.
        name: the module's path.
        count: how many times it has been called before.
    """
    found = _digest(b"%d %s" % (count, name), key)
    return Seeds(_number(found[:8]), _number(found[8:]))


def seed_of(seed: int, name: str) -> int:
    """A seed for what is drawn once, such as a module's first weights."""
    return _number(_digest(f"{seed} {name}".encode())[:8])


def _digest(text: bytes, key: bytes = b"") -> bytes:
    return hashlib.blake2b(text, key=key, digest_size=16).digest()


def _number(digest: bytes) -> int:
    # 63 bits: every generator takes them.
    return int.from_bytes(digest, "little") >> 1
