"""Scripts and modules run as a launcher would run them, one process per rank, without its time to start.

The processes are forked from one that has imported what they need. Launchers themselves have tests of their
own in tests/faults/test_launched.py.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import runpy
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, but not marked so

LIMIT = 110.0
"""Seconds until the processes are killed and the test fails."""


PORTS = 10_000, 32_000
"""Below those that Linux gives to connections, which would take a free one before a job listens there."""
_free = iter(random.Random(os.getpid()).sample(range(*PORTS), 2_000))


def free_port() -> int:
    """A port at which nothing listens; this process gets no port twice."""
    for port in _free:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError(f"no port of {PORTS} is free")


class Ran(NamedTuple):
    """How one process ended."""

    status: int | None
    out: str
    err: str


@contextmanager
def forked(
    target: Callable[..., None], arguments: Iterable[tuple[Any, ...]]
) -> Iterator[list[Any]]:
    """Fork a process for each row of arguments, from the one of tests/conftest.py; none outlives this."""
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=target, args=row) for row in arguments]
    try:
        for process in processes:
            process.start()
        yield processes
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()


def run_script(
    *command: str,
    processes: int = 1,
    limit: float = LIMIT,
    meanwhile: Callable[[list[int]], None] | None = None,
) -> list[Ran]:
    """Run a script, or a module after ``-m``, as ``python`` would; for several processes as torchrun would.

    As under torchrun, the others are terminated when one fails.

    Args:
        command: the script or module, and its arguments.
        processes: how many ranks there are.
        limit: seconds until they are killed.
        meanwhile: called with the ids of the processes once they have started.

    Returns:
        How each rank ended.
    """
    # The agent's store is here, so that no port has to be free.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with TemporaryDirectory() as folder:
        outputs = [f"{folder}/{rank}" for rank in range(processes)]
        # One that is ended before it has begun has printed nothing.
        for one in outputs:
            for way in ("out", "err"):
                Path(f"{one}.{way}").touch()
        rows = (
            (command, _environment(rank, processes, store.port), output)
            for rank, output in enumerate(outputs)
        )
        with forked(_main, rows) as started:
            if meanwhile is not None:
                meanwhile([process.pid for process in started])
            late = _await(started, limit)
        texts = [[Path(f"{one}.{way}").read_text() for way in ("out", "err")] for one in outputs]
    assert not late, f"ranks {late} still ran after {limit} s: {texts}"
    return [Ran(process.exitcode, *text) for process, text in zip(started, texts, strict=True)]


def _environment(rank: int, processes: int, port: int) -> dict[str, str]:
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if processes == 1:
        return environment
    return environment | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _await(started: Sequence[Any], limit: float) -> list[int]:
    """Wait until all have ended, or one has failed.

    Returns:
        The ranks that did not end in time.
    """
    deadline = time.monotonic() + limit
    running = {process.sentinel: process for process in started}
    while running and time.monotonic() < deadline:
        ended = connection.wait(list(running), deadline - time.monotonic())
        stopped = [running.pop(sentinel) for sentinel in ended]
        for process in stopped:
            process.join()
        if any(process.exitcode for process in stopped):
            for process in running.values():
                process.terminate()
    return [rank for rank, process in enumerate(started) if process.is_alive()]


def _main(command: tuple[str, ...], environment: dict[str, str], output: str) -> None:
    os.environ |= environment
    torch.set_num_threads(1)
    for number, way in ((1, "out"), (2, "err")):
        file = Path(f"{output}.{way}").open("w", buffering=1)  # noqa: SIM115 - open to the end
        os.dup2(file.fileno(), number)
        setattr(sys, f"std{way}", file)
    try:
        if command[0] == "-m":
            sys.argv = list(command[1:])
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(command)
            sys.path.insert(0, str(Path(command[0]).parent))
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
