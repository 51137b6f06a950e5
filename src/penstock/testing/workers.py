"""A pool of gloo worker processes for tests: started once, used by many.

Tasks and results travel as lines of JSON over pipes. A task names a function as ``module:function``; it is
called on each of the first ``ranks`` workers with a process group of them and the task's arguments, and
gives JSON data back.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from penstock.errors import PenstockError


class WorkerError(PenstockError, RuntimeError):
    """A task raised in a worker, or did not end in time; the message holds the worker's traceback."""


class WorkerPool:
    """Worker processes that share one gloo group.

    A task that fails or exceeds its time ends all workers; the next task starts new ones.

    Args:
        size: how many workers.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._workers: list[_Worker] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: str, ranks: int, timeout: float = 60.0, **arguments: Any) -> list[Any]:
        """Call a function on the first ``ranks`` workers.

        Args:
            function: ``module:function``, called with ``group=`` and the arguments.
            ranks: how many workers take part.
            timeout: seconds for all of them together.
            arguments: JSON data.

        Returns:
            What each worker's call gave, by rank.

        Raises:
            WorkerError: one raised, died or did not end in time.
        """
        self._start()
        task = json.dumps({"function": function, "ranks": ranks, "arguments": arguments})
        for worker in self._workers[:ranks]:
            worker.send(task)
        deadline = time.monotonic() + timeout
        try:
            return [worker.result(deadline) for worker in self._workers[:ranks]]
        except WorkerError:
            self.close()
            raise

    def _start(self) -> None:
        if self._workers:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-workers-")
        store = Path(self._folder.name) / "store"
        self._workers = [_Worker(rank, self.size, store) for rank in range(self.size)]

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            worker.kill()
        self._workers = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Worker:
    """A process that reads tasks and writes results, and a thread that reads what it writes."""

    def __init__(self, rank: int, size: int, store: Path) -> None:
        self._rank = rank
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in kill()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock.testing.worker", str(rank), str(size), str(store)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=_environment(),
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._pipe(self._process.stdout):
            self._lines.put(line)
        self._lines.put("")

    def send(self, task: str) -> None:
        pipe = self._pipe(self._process.stdin)
        pipe.write(task + "\n")
        pipe.flush()

    def result(self, deadline: float) -> Any:
        try:
            line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise WorkerError(f"worker {self._rank} did not end in time") from None
        if not line:
            raise WorkerError(f"worker {self._rank} died:\n{self._said()}")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"worker {self._rank}:\n{answer['error']}")
        return answer["result"]

    def _said(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-4000:]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            self._pipe(pipe).close()

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        if pipe is None:
            raise WorkerError("the worker has no pipe")
        return pipe


def _environment() -> dict[str, str]:
    """This process's, with its import path, one torch thread, and gloo on the loopback device."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
