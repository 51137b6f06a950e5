"""A pool of gloo worker processes, started once and used by many tests.

The workers are forked from one process that has imported torch and Penstock. Tasks and replies travel as JSON
over pipes. A task names a function as ``module:function``. Each of the first ``ranks`` workers calls it with
their process group and the task's arguments; it returns JSON data.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.errors import PenstockError, UsageError

PATIENCE = 10.0
"""Seconds that idle workers have to exit before they are killed."""
STARTING = 60.0
"""Seconds that new workers may take to start: they import torch, which takes long on a busy machine."""
SHOWN = 4000
"""Characters of the beginning, and of the end, of what a failed worker has printed."""
AFTER = 3.0
"""Seconds that the other workers have to report their errors after the first one."""
STACKS = getattr(signal, "SIGUSR2", 0)
"""What makes a worker print where it is; 0 where there is no such signal."""
_FORKSERVER = "forkserver" in multiprocessing.get_all_start_methods()
_CONTEXT: Any = multiprocessing.get_context("forkserver" if _FORKSERVER else "spawn")


class WorkerError(PenstockError, RuntimeError):
    """A task failed in a worker, or did not end in time; the message holds the worker's traceback."""


class WorkerPool:
    """Worker processes that share a gloo group.

    A task that fails or takes too long ends all workers; the next task starts new ones. A script that makes a
    pool does so under ``if __name__ == "__main__":``, since each worker imports the script, as with all of
    Python's ``multiprocessing``.

    Args:
        size: the number of workers.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: str, ranks: int, timeout: float = 60.0, **arguments: Any) -> list[Any]:
        """Call a function on the first ``ranks`` workers.

        Args:
            function: ``module:function``, called with ``group=`` and the arguments.
            ranks: the number of workers that run it.
            timeout: seconds for all of them together, once they have started.
            arguments: JSON data.

        Returns:
            The result of each worker's call, by rank.

        Raises:
            UsageError: the pool has not so many workers.
            WorkerError: a worker failed, died or did not end in time.
        """
        if not 1 <= ranks <= self.size:
            raise UsageError(
                f"ranks={ranks}: the pool has {self.size} workers, so it must be 1 to {self.size}; make a "
                "larger one, WorkerPool(size)"
            )
        task = json.dumps({"function": function, "ranks": ranks, "arguments": arguments}).encode()
        timeout += 0.0 if self._processes else STARTING
        try:
            self._start()
            for pipe in self._pipes[:ranks]:
                with contextlib.suppress(OSError):  # a dead worker shows when its reply is read
                    pipe.send_bytes(task)
            return self._replies(ranks, time.monotonic() + timeout)
        except BaseException:
            self._end(patience=0.0)
            raise

    def _replies(self, ranks: int, deadline: float) -> list[Any]:
        """The workers' replies; after an error the others are not waited for long."""
        replies: dict[int, dict[str, Any]] = {}
        while len(replies) < ranks:
            waiting = {self._pipes[rank]: rank for rank in range(ranks) if rank not in replies}
            ready: Any = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in (waiting[pipe] for pipe in ready):
                replies[rank] = self._reply(rank)
                if "error" in replies[rank]:
                    deadline = min(deadline, time.monotonic() + AFTER)
        errors = [reply["error"] for reply in replies.values() if "error" in reply]
        if late := sorted(set(range(ranks)) - set(replies)):
            errors += [f"workers {late} did not end in time", *self._stacks(late)]
        if errors:
            raise WorkerError("\n".join(errors))
        return [replies[rank]["result"] for rank in range(ranks)]

    def _reply(self, rank: int) -> dict[str, Any]:
        try:
            reply: dict[str, Any] = json.loads(self._pipes[rank].recv_bytes())
        except (EOFError, OSError):
            return {"error": f"worker {rank} died:\n{self._written(rank)}"}
        return {"error": f"worker {rank}:\n{reply['error']}"} if "error" in reply else reply

    def _written(self, rank: int) -> str:
        """Return what a worker has printed in its task, without the middle of a long text."""
        file = Path(self._folder.name if self._folder else "", f"errors-{rank}")
        text = file.read_text() if file.exists() else ""
        return text if len(text) <= 2 * SHOWN else f"{text[:SHOWN]}\n...\n{text[-SHOWN:]}"

    def _stacks(self, ranks: Sequence[int]) -> Iterator[str]:
        """Where workers are, as each prints it when it gets the signal."""
        if not STACKS:
            return
        for rank in ranks:
            os.kill(self._processes[rank].pid, STACKS)
        time.sleep(0.5)
        for rank in ranks:
            yield f"worker {rank} is here:\n{self._written(rank)[-SHOWN:]}"

    def _start(self) -> None:
        if self._processes:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-workers-")
        # This has no effect if the fork server already runs; that one may have imported more.
        _CONTEXT.set_forkserver_preload([__name__])
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        }
        for rank in range(self.size):
            pipe, end = _CONTEXT.Pipe()
            task = (rank, self.size, self._folder.name, end, environment)
            process = _CONTEXT.Process(target=work, args=task, daemon=True)
            process.start()
            end.close()
            self._processes.append(process)
            self._pipes.append(pipe)

    def close(self) -> None:
        """End all workers; the next task starts new ones."""
        self._end(PATIENCE)

    def _end(self, patience: float) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(b"")
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join(patience)
            process.kill()
            process.join()
            pipe.close()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---- in a worker


def work(rank: int, size: int, folder: str, pipe: Any, environment: dict[str, str]) -> None:
    """Serve tasks until an empty one comes, or the pool has gone."""
    os.environ |= environment
    torch.set_num_threads(1)
    errors = Path(folder, f"errors-{rank}").open("w", buffering=1)  # noqa: SIM115 - open to the end
    for number in (1, 2):
        os.dup2(errors.fileno(), number)
    sys.stdout = sys.stderr = errors
    if STACKS:
        faulthandler.register(STACKS, errors, all_threads=False)
    store = Path(folder, "store").absolute().as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    # All processes make all groups at the start, since torch numbers groups within each process.
    groups = [dist.new_group(list(range(count))) for count in range(1, size + 1)]
    with contextlib.suppress(KeyboardInterrupt, EOFError, OSError):
        while task := pipe.recv_bytes():
            errors.seek(0)
            errors.truncate()
            pipe.send_bytes(serve(json.loads(task), groups))
    dist.destroy_process_group()


def serve(task: dict[str, Any], groups: list[Any]) -> bytes:
    """Run a task, and return its result, or the traceback of its error, as JSON."""
    module, _, name = task["function"].partition(":")
    try:
        function = getattr(import_module(module), name)
        result = function(group=groups[task["ranks"] - 1], **task["arguments"])
        return json.dumps({"result": result}).encode()
    except Exception:
        return json.dumps({"error": traceback.format_exc()}).encode()
