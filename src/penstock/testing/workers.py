"""A pool of gloo worker processes, started once and used by many tests.

Tasks and results travel as lines of JSON over pipes. A task names a function as ``module:function``, which is
called on each of the first ``ranks`` workers with a process group of these and the task's arguments, and
returns JSON data.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import torch

from penstock.errors import PenstockError
from penstock.transport.process_group import Groups

PATIENCE = 10.0
"""How many seconds idle workers have to end by themselves."""
STARTING = 60.0
"""How many seconds new workers may take to start."""
AFTER = 3.0
"""How many seconds the other workers have to report their errors after the first one did."""
_WORK = "import sys; from penstock.testing.workers import work; work(*sys.argv[1:])"
"""The program of a worker; not ``-m`` of this module, which the package would import a second time."""
_Lines = queue.SimpleQueue[tuple[int, str]]


class WorkerError(PenstockError, RuntimeError):
    """A task failed in a worker, or did not end in time; the message holds the worker's traceback."""


class WorkerPool:
    """Worker processes that share a gloo group.

    A task that fails or takes too long ends all workers; the next task starts new ones.

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
        store = Path(self._folder.name) / "store"
        self._lines = queue.SimpleQueue()
        self._workers = [_Worker(r, self.size, store, self._lines) for r in range(self.size)]

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
    """A process that reads tasks and writes results, and a thread that reads what it writes."""

    def __init__(self, rank: int, size: int, store: Path, lines: _Lines) -> None:
        self._rank = rank
        self._lines = lines
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in end()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WORK, str(rank), str(size), str(store)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=_environment(),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._pipe(self._process.stdout):
            self._lines.put((self._rank, line))
        self._lines.put((self._rank, ""))

    def send(self, task: str) -> None:
        pipe = self._pipe(self._process.stdin)
        try:
            pipe.write(task + "\n")
            pipe.flush()
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
        self._errors.seek(0)
        return WorkerError(f"worker {self._rank} died:\n{self._errors.read()[-4000:]}")

    def let_go(self) -> None:
        """Tell the worker that there are no more tasks."""
        with contextlib.suppress(OSError):
            self._pipe(self._process.stdin).close()

    def end(self, patience: float) -> None:
        """Give the worker some seconds to end by itself, then kill it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._pipe(self._process.stdout).close()
        self._errors.close()

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        if pipe is None:
            raise WorkerError("the worker has no pipe")
        return pipe


def _environment() -> dict[str, str]:
    """This process's environment, with its import path, one torch thread, and gloo on the loopback device."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }


# ---- in a worker


def work(rank: str, size: str, store: str) -> None:
    """Serve tasks until standard input ends."""
    torch.set_num_threads(1)
    # What a task prints goes to standard error, so that it does not mix with the results.
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with contextlib.suppress(KeyboardInterrupt), Groups(int(rank), int(size), store) as groups:
        for line in sys.stdin:
            serve(json.loads(line), groups, results)


def serve(task: dict[str, Any], groups: Groups, results: IO[str]) -> None:
    """Run a task, and write its result, or the traceback of its error, as a line of JSON."""
    module, _, name = task["function"].partition(":")
    try:
        function = getattr(import_module(module), name)
        result = function(group=groups.first(task["ranks"]), **task["arguments"])
        answer = json.dumps({"result": result})
    except Exception:
        answer = json.dumps({"error": traceback.format_exc()})
    print(answer, file=results, flush=True)
