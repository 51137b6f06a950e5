"""What a rank is, and how fast: its device, memory and versions, and its rates."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from penstock._engine.devices import is_accelerator, memory_of, name_of, wait_for

WINDOW, WINDOWS = 0.15, 4
"""The seconds of a window, and their number."""


@dataclass(frozen=True)
class Facts:
    """What a rank is.

    Args:
        host: the name of its machine.
        device: the name of its device, as the driver or the system gives it.
        memory: the bytes of its device.
        threads: the threads with which torch computes, of a CPU.
        versions: what it runs, by name.
    """

    host: str
    device: str
    memory: float
    threads: int
    versions: Mapping[str, str]


def facts_of(device: torch.device) -> Facts:
    """Return what this process is."""
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "penstock": _version("penstock-pipeline"),
        "system": f"{platform.system()} {platform.machine()}",
    }
    name, threads = processor(), torch.get_num_threads()
    if is_accelerator(device):
        name, threads = name_of(device), 0
        driver = getattr(torch.version, device.type, None) or torch.version.hip
        versions[device.type] = str(driver or "unknown")
    return Facts(socket.gethostname(), name, memory_for(device), threads, versions)


def _version(package: str) -> str:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return "not installed"


def processor() -> str:
    """The name of the processor, where the system tells it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


class Rates:
    """Measures how fast a device is.

    Args:
        device: the device.
        window: the seconds of each window.
    """

    def __init__(self, device: torch.device, window: float = WINDOW) -> None:
        self.device, self._window = device, window

    def _seconds(self, work: Callable[[], Any]) -> float:
        """Return how long a piece of work takes: the least of the means of several windows of time.

        What slows a rank all the time slows all windows; what else a machine does for a moment, only some.
        """
        work()
        best = inf
        for _ in range(WINDOWS):
            count, seconds, start = 0, 0.0, perf_counter()
            while seconds < self._window:
                work()
                count += 1
                wait_for(self.device)
                seconds = perf_counter() - start
            best = min(best, seconds / count)
        return best

    def products(self, dtype: str) -> float:
        """The floating-point operations per second in matrix products of a type."""
        size = 256 if self.device.type == "cpu" else 8192
        matrix = torch.ones(size, size, device=self.device, dtype=getattr(torch, dtype))
        product = partial(torch.mm, matrix, matrix, out=torch.empty_like(matrix))
        return 2.0 * size**3 / self._seconds(product)

    def copies(self) -> float:
        """The bytes per second that memory reads and writes."""
        source = torch.ones(2 ** (24 if self.device.type == "cpu" else 28), device=self.device)
        target = torch.empty_like(source)
        return 2.0 * source.nbytes / self._seconds(lambda: target.copy_(source))

    def least(self) -> float:
        """The least time that an operation takes."""
        few = torch.ones(16, device=self.device)

        def many() -> None:
            for _ in range(100):
                few.add_(1.0)

        return self._seconds(many) / 100

    def block(self) -> float:
        """Return how long work takes that is like a step's: forward and backward of a block."""
        cpu = self.device.type == "cpu"
        width, dtype = (256, torch.float32) if cpu else (4096, torch.bfloat16)
        inner, outer = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        block = nn.Sequential(nn.LayerNorm(width), inner, nn.GELU(), outer).to(self.device, dtype)
        batch = torch.ones(256, width, device=self.device, dtype=dtype)
        return self._seconds(lambda: block(batch).sum().backward())


def memory_for(device: torch.device) -> float:
    """The bytes of a device, or this process's share of the machine's; 0 if the system does not tell."""
    if is_accelerator(device):
        return float(memory_of(device))
    try:
        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0.0
    return whole / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
