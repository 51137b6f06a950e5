"""Two machines, as network namespaces of this one, and the link between them."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

_PAIRS = itertools.count()
Space = tuple[str, str]
"""A namespace, and its end of the link."""
NOWHERE = ["lladdr", "02:00:00:00:00:99", "nud", "permanent"]
"""A machine that is not there: what goes to it is lost without a word, as behind a broken switch."""


def ip(*arguments: str) -> bool:
    try:
        done = subprocess.run(["ip", *arguments], capture_output=True, timeout=20, check=False)
    except OSError:
        return False
    return done.returncode == 0


@contextmanager
def machines() -> Iterator[list[Space]]:
    """Two namespaces with a link; none where this machine does not let us make them."""
    tag = f"{os.getpid() % 10000}{next(_PAIRS)}"
    names = [(f"penstock{side}{tag}", f"ps{side}{tag}") for side in "ab"]
    (first, here), (second, there) = names
    try:
        done = (
            ip("netns", "add", first)
            and ip("netns", "add", second)
            and ip(
                "link", "add", here, "netns", first, "type", "veth", "peer", there, "netns", second
            )
            and all(
                ip("-n", name, "addr", "add", f"10.213.0.{number}/24", "dev", device)
                and ip("-n", name, "link", "set", device, "up")
                and ip("-n", name, "link", "set", "lo", "up")
                for number, (name, device) in enumerate(names, start=1)
            )
        )
        yield names if done else []
    finally:
        for name, _ in names:
            ip("netns", "del", name)


def lose(space: Space, address: str) -> bool:
    """What this machine sends to an address is lost."""
    return ip("-n", space[0], "neigh", "replace", address, "dev", space[1], *NOWHERE)


def heal(spaces: list[Space]) -> bool:
    """Nothing that these machines send to each other is lost any more."""
    ends = zip(spaces, ("10.213.0.2", "10.213.0.1"), strict=True)
    return all(
        ip("-n", space, "neigh", "del", address, "dev", device) for (space, device), address in ends
    )


def cuts(spaces: list[Space]) -> dict[str, Callable[[], bool]]:
    """The ways to cut the link between two machines."""
    near, far = spaces
    to_far, to_near = partial(lose, near, "10.213.0.2"), partial(lose, far, "10.213.0.1")
    return {
        "both ways": lambda: to_far() and to_near(),
        "to the far side": to_far,
        "to the near side": to_near,
        "a machine is gone": lambda: ip("-n", near[0], "link", "set", near[1], "down"),
    }
