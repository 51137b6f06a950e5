"""JSON files that somebody has crafted: any place odd, and any name a path.

Whoever reads one refuses it with one error in one line, or takes it; nothing else, and in little memory.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from penstock.errors import InputFileError

NAMES = ["../x", "/tmp/x", "a/x", "..", ".x", "x.py", "C:\\x", "x\0y", "~/x", "x" * 300]
"""Names that could be paths, or those of other files."""
ODD: list[Any] = [
    *NAMES,
    None,
    True,
    -1,
    0,
    3,
    2**63,
    10**40,
    1e400,
    0.5,
    "",
    "\x1b[2J\n",
    "é" * 9000,
]
ODD += [[], {}, [1], {"$": "tensor", "of": "none"}, {"$": "array"}, {"$": "Size", "of": ["a"]}]
ODD += [{"$": 7}, {"$": "number", "of": ["O", "AAAA"]}, {"$": "scalar", "of": [{}, "load"]}]
ODD += [{"$": "deque", "of": [-1]}, {"$": "device", "of": "no"}, {"$": "float", "of": []}]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each place in a JSON value: what holds it, and its key there."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def mutate(table: Any, chance: random.Random) -> Any:
    """A table with one to three odd places."""
    table = copy.deepcopy(table)
    for _ in range(chance.choice([1, 1, 2, 3])):
        branch = chance.choice(list(table))
        inside = list(places(table[branch])) if isinstance(table[branch], dict | list) else []
        holder, key = chance.choice(inside) if inside and chance.random() < 0.9 else (table, branch)
        kind = chance.random()
        if kind < 0.2:
            del holder[key]
        elif kind < 0.4 and isinstance(holder, dict):
            holder[chance.choice([f"{key}x", *NAMES])] = holder.pop(key)
        elif kind < 0.5 and isinstance(holder[key], int):
            holder[key] += chance.choice([-1, 1, 7])
        else:
            holder[key] = copy.deepcopy(chance.choice(ODD))
    return table


def refused(text: str, read: Callable[[str], Any], count: int, seed: int = 0) -> list[str]:
    """Read so many crafted copies of a file; return the messages of refusals, and raise any other error."""
    chance, original, messages = random.Random(seed), json.loads(text), []
    for _ in range(count):
        try:
            read(json.dumps(mutate(original, chance)))
        except InputFileError as error:
            messages.append(str(error))
    return messages
