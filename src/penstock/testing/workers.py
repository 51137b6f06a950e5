"""A pool of gloo worker processes, started once and used by many tests.

The workers are forked from one process that has imported torch and Penstock. Tasks and results travel as
JSON over pipes. A task names a function as ``module:function``, which is called on each of the first
``ranks`` workers with a process group of these and the task's arguments, and returns JSON data.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import queue
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from penstock.errors import PenstockError
from penstock.transport.process_group import Groups

PATIENCE = 10.0
"""How many seconds idle workers have to end by themselves."""
STARTING = 60.0
"""How many seconds new workers may take to start."""
AFTER = 3.0
"""How many seconds the other workers have to report their errors after the first one did."""
_METHODS = multiprocessing.get_all_start_methods()
_CONTEXT: Any = multiprocessing.get_context("forkserver" if "forkserver" in _METHODS else "spawn")
_Lines = queue.SimpleQueue[tuple[int, str]]


class WorkerError(PenstockError, RuntimeError):
    """A task failed in a worker, or did not end in time; the message holds the worker's traceback."""


class WorkerPool:
    """Worker processes that share a gloo group.

    A task that fails or takes too long ends all workers; the next task starts new ones. A script that makes a
    pool does so under ``if __name__ == "__main__":``, since each worker imports the script, as with all of
    Python's ``multiprocessing``.

    Args:
        size: how many workers there are.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._workers: list[_Worker] = []
        self._lines: _Lines = queue.SimpleQueue()
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: str, ranks: int, timeout: float = 60.0, **arguments: Any) -> list[Any]:
        """Call a function on the first ``ranks`` workers.

        Args:
            function: ``module:function``, called with ``group=`` and the arguments.
            ranks: how many workers take part.
            timeout: seconds for all of them together, once they have started.
            arguments: JSON data.

        Returns:
            What each worker's call returned, by rank.

        Raises:
            WorkerError: a worker failed, died or did not end in time.
        """
        # New processes import torch, which on a busy machine takes as long as a test.
        timeout += 0.0 if self._workers else STARTING
        self._start()
        task = json.dumps({"function": function, "ranks": ranks, "arguments": arguments})
        try:
            for worker in self._workers[:ranks]:
                worker.send(task)
            answers = self._answers(ranks, time.monotonic() + timeout)
        except BaseException:
            self._end(at_once=True)
            raise
        return [answers[rank] for rank in range(ranks)]

    def _answers(self, ranks: int, deadline: float) -> dict[int, Any]:
        """The workers' answers, as they come; after an error the others are not waited for long."""
        answers: dict[int, Any] = {}
        while len(answers) < ranks:
            try:
                rank, line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                late = sorted(set(range(ranks)) - set(answers))
                raise WorkerError(f"workers {late} did not end in time") from None
            try:
                answers[rank] = self._workers[rank].read(line)
            except WorkerError as error:
                raise self._with_others(error, ranks - len(answers) - 1) from None
        return answers

    def _with_others(self, first: WorkerError, missing: int) -> WorkerError:
        """The first error and those that come soon after, since the cause may be reported later."""
        errors, deadline = [str(first)], time.monotonic() + AFTER
        for _ in range(missing):
            try:
                rank, line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
                self._workers[rank].read(line)
            except queue.Empty:
                break
            except WorkerError as error:
                errors.append(str(error))
        return WorkerError("\n".join(errors))

    def _start(self) -> None:
        if self._workers:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-workers-")
        self._lines = queue.SimpleQueue()
        # Without an effect where that process runs already, which may have imported more.
        _CONTEXT.set_forkserver_preload([__name__])
        self._workers = [
            _Worker(rank, self.size, self._folder.name, self._lines) for rank in range(self.size)
        ]

    def close(self) -> None:
        """End all workers; the next task starts new ones."""
        self._end(at_once=False)

    def _end(self, *, at_once: bool) -> None:
        for worker in self._workers:
            worker.let_go()
        for worker in self._workers:
            worker.end(0.0 if at_once else PATIENCE)
        self._workers = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Worker:
    """A process that gets tasks and gives results, and a thread that reads them."""

    def __init__(self, rank: int, size: int, folder: str, lines: _Lines) -> None:
        self._rank = rank
        self._lines = lines
        self._errors = Path(folder, f"errors-{rank}")
        self._pipe, there = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(
            target=work, args=(rank, size, folder, there, _environment()), daemon=True
        )
        self._process.start()
        there.close()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in _received(self._pipe):
            self._lines.put((self._rank, line))
        self._lines.put((self._rank, ""))

    def send(self, task: str) -> None:
        try:
            self._pipe.send_bytes(task.encode())
        except OSError:
            raise self._died() from None

    def read(self, line: str) -> Any:
        """The answer that a line holds; an empty line means that the worker has ended."""
        if not line:
            raise self._died()
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"worker {self._rank}:\n{answer['error']}")
        return answer["result"]

    def _died(self) -> WorkerError:
        text = self._errors.read_text() if self._errors.exists() else ""
        return WorkerError(f"worker {self._rank} died:\n{text[-4000:]}")

    def let_go(self) -> None:
        """Tell the worker that there are no more tasks."""
        with contextlib.suppress(OSError):
            self._pipe.send_bytes(b"")

    def end(self, patience: float) -> None:
        """Give the worker some seconds to end by itself, then kill it."""
        self._process.join(patience)
        self._process.kill()
        self._process.join()
        self._reader.join()
        self._pipe.close()


def _received(pipe: Connection) -> Iterator[str]:
    """What comes through a pipe, until an empty message or its end."""
    with contextlib.suppress(EOFError, OSError):
        while found := pipe.recv_bytes():
            yield found.decode()


def _environment() -> dict[str, str]:
    """This process's environment, with one torch thread, and gloo on the loopback device."""
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }


# ---- in a worker


def work(rank: int, size: int, folder: str, pipe: Connection, environment: dict[str, str]) -> None:
    """Serve tasks until there are no more."""
    os.environ |= environment
    torch.set_num_threads(1)
    errors = Path(folder, f"errors-{rank}").open("w", buffering=1)  # noqa: SIM115 - open to the end
    for number in (1, 2):
        os.dup2(errors.fileno(), number)
    sys.stdout = sys.stderr = errors
    with (
        contextlib.suppress(KeyboardInterrupt),
        Groups(rank, size, f"{folder}/store") as groups,
    ):
        for line in _received(pipe):
            pipe.send_bytes(serve(json.loads(line), groups))


def serve(task: dict[str, Any], groups: Groups) -> bytes:
    """Run a task, and return its result, or the traceback of its error, as JSON."""
    module, _, name = task["function"].partition(":")
    try:
        function = getattr(import_module(module), name)
        result = function(group=groups.first(task["ranks"]), **task["arguments"])
        return json.dumps({"result": result}).encode()
    except Exception:
        return json.dumps({"error": traceback.format_exc()}).encode()
