"""Tasks for the tests of the pool of workers."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist


def add(group: Any, first: int, second: int = 1) -> list[int]:
    """The sum, this worker's rank and how many take part."""
    return [first + second, dist.get_rank(group), dist.get_world_size(group)]


def together(group: Any) -> float:
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return float(total)


def threads(group: Any) -> int:
    return torch.get_num_threads()


def speak(group: Any) -> str:
    """What a task prints is no answer."""
    sys.stdout.write("{'result': 'nonsense'}\n")
    os.write(1, b"more\n")
    return "answer"


def fail(group: Any, rank: int) -> None:
    """One rank raises while the others wait for it."""
    if dist.get_rank() == rank:
        raise KeyError("lost")
    together(group)


def die(group: Any, rank: int) -> None:
    if dist.get_rank() == rank:
        sys.stderr.write("first words" + 20_000 * "." + "last words\n")
        sys.stderr.flush()
        os._exit(3)
    together(group)


def die_soon(group: Any) -> None:
    """Ends after the answer has been given."""
    threading.Timer(0.2, os._exit, (3,)).start()


def sleep(group: Any, seconds: float) -> None:
    time.sleep(seconds)


def answer_oddly(group: Any) -> Any:
    return {1, 2}
