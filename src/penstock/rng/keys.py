"""Seeds that are the same in every process: by a hash of what the numbers are drawn for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
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


@dataclass
class Place:
    """A module call, by where it stands in the model's forward: the whole way down to it.

    So it is the same place whichever calls of the same module are made in other stages.

    Args:
        address: the calls on the way, each with its number among those of its caller.
        path: under which of its paths the module is called.
    """

    address: str = ""
    path: str = ""
    _calls: dict[str, int] = field(default_factory=dict)

    def next(self, paths: Sequence[str]) -> Place:
        """The place of the next call that is made from here.

        Args:
            paths: of the module that is called. One that stands at several places below the caller is called
                under one path after the other.
        """
        below = f"{self.path}." if self.path else ""
        found = [path for path in paths if path.startswith(below)] if len(paths) > 1 else paths
        names = found or paths
        count = self._calls.get(names[0], 0)
        self._calls[names[0]] = count + 1
        last = min(count, len(names) - 1)
        if names[last] == self.path and not count:
            # A wrapper calls what it wraps, which is then where it would be without.
            return Place(self.address, self.path)
        name = names[last].removeprefix(below) if found else names[last]
        return Place(f"{self.address}/{name}:{count - last}", names[last])

    def seeds(self, key: bytes) -> Seeds:
        """The seeds of this call for a microbatch's key."""
        found = _digest(self.address.encode(), key)
        return Seeds(_number(found[:8]), _number(found[8:]))


def following(seed: int) -> int:
    """The seed of what is drawn next, after something was under ``seed``: one step of splitmix64."""
    mixed = (seed + 0x9E3779B97F4A7C15) & _ALL
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _ALL
    return (mixed ^ (mixed >> 31)) >> 1


_ALL = 2**64 - 1


def seed_of(seed: int, name: str) -> int:
    """A seed for what is drawn once, such as a module's first weights."""
    return _number(_digest(f"{seed} {name}".encode())[:8])


def _digest(text: bytes, key: bytes = b"") -> bytes:
    return hashlib.blake2b(text, key=key, digest_size=16).digest()


def _number(digest: bytes) -> int:
    # 63 bits: every generator takes them.
    return int.from_bytes(digest, "little") >> 1
