"""Jobs of several processes that a test may kill, stop or cut off, each with its own output and exit status.

The processes are forked from one that has imported what they need, or from the test's own. Tasks that end by
themselves run in the pool of :class:`penstock.testing.WorkerPool`; only tests of launchers start these.
"""

from __future__ import annotations

import faulthandler
import functools
import inspect
import multiprocessing
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from multiprocessing import forkserver
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, but not marked so

from penstock.testing import WorkerPool

LIMIT = 110.0
"""Seconds until a job is killed and its test fails."""
PORTS = 10_000, 32_000
"""Below those that Linux gives to connections, which would take a free one before a job listens there."""
_free = iter(random.Random(os.getpid()).sample(range(*PORTS), 2_000))


def in_processes(
    count: int, seconds: float = 60.0
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test run as a whole in each of the pool's first workers, with their group as ``group``.

    Its other arguments are the test's parameters, which must be JSON data, and fixtures that are paths. What
    fails in one worker is shown as it failed there.

    Args:
        count: the number of workers.
        seconds: the time that they have.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(workers: WorkerPool | None = None, group: Any = None, **arguments: Any) -> None:
            if workers is None:
                given = {n: Path(v) if n == "tmp_path" else v for n, v in arguments.items()}
                test(group, **given)
            else:
                sent = {n: str(v) if isinstance(v, Path) else v for n, v in arguments.items()}
                workers.run(f"{test.__module__}:{test.__name__}", count, seconds, **sent)

        _, *more = inspect.signature(test).parameters.values()
        pool = inspect.Parameter("workers", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        run.__signature__ = inspect.Signature([pool, *more])  # type: ignore[attr-defined] # for pytest
        return run

    return decorate


def free_port() -> int:
    """A port at which nothing listens; this process gets no port twice."""
    for port in _free:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError(f"no port of {PORTS} is free")


def warm_up() -> None:
    """Start the process that others are forked from, which imports what they need meanwhile."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.warm"])
    forkserver.ensure_running()


class Ended(NamedTuple):
    """How a process ended: its exit status, below zero the signal, and what it printed."""

    status: int | None
    out: str
    err: str


class Job:
    """A context with forked processes; at its end all are dead, with what they have forked.

    Args:
        target: what each calls, and ends.
        rows: the arguments of each.
        environments: what is added to the environment of each.
        here: fork from this process, with all that the test has patched in it; by default from the one that
            :func:`warm_up` starts, which gets ``target`` and ``rows`` pickled.
    """

    def __init__(
        self,
        target: Callable[..., object],
        rows: Sequence[tuple[Any, ...]] = ((),),
        environments: Sequence[dict[str, str]] = (),
        *,
        here: bool = False,
    ) -> None:
        context: Any = multiprocessing.get_context("fork" if here else "forkserver")
        self._folder = TemporaryDirectory()
        self._outputs = [f"{self._folder.name}/{number}" for number in range(len(rows))]
        of_each = zip(rows, environments or [{}] * len(rows), self._outputs, strict=True)
        self._processes: list[Any] = [
            context.Process(target=_run, args=(target, *of_one)) for of_one in of_each
        ]

    def __enter__(self) -> Job:
        for process, output in zip(self._processes, self._outputs, strict=True):
            # One that is ended before it has begun has printed nothing.
            for way in ("out", "err"):
                Path(f"{output}.{way}").touch()
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.pid is not None:
                process.kill()
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.join()
        self._folder.cleanup()

    @property
    def pids(self) -> list[int]:
        """The ids of the processes."""
        return [process.pid for process in self._processes]

    @property
    def ended(self) -> list[Ended]:
        """What each has printed so far, and its status once it has ended."""
        return [
            Ended(
                process.exitcode, *(Path(f"{output}.{way}").read_text() for way in ("out", "err"))
            )
            for process, output in zip(self._processes, self._outputs, strict=True)
        ]

    def until(self, condition: Callable[[], object], limit: float = LIMIT) -> None:
        """Wait until something is so; fail if a process ends before."""
        deadline = time.monotonic() + limit
        while not condition():
            alive = all(process.is_alive() for process in self._processes)
            assert (alive and time.monotonic() < deadline) or condition(), self.ended
            time.sleep(0.02)

    def wait(
        self, limit: float = LIMIT, *, frozen: Sequence[int] = (), together: bool = False
    ) -> list[Ended]:
        """Wait until all have ended; fail if one does not in time.

        Args:
            limit: seconds from now.
            frozen: the numbers of those that do not end by themselves.
            together: whether the others are terminated when one fails, as under torchrun.
        """
        deadline = time.monotonic() + limit
        running = [p for number, p in enumerate(self._processes) if number not in frozen]
        while running and time.monotonic() < deadline:
            # Not a wait for their pipes, which what they have forked may hold.
            time.sleep(0.01)
            running = [process for process in running if process.is_alive()]
            if together and any(process.exitcode for process in self._processes):
                for process in running:
                    process.terminate()
                together = False  # a second signal would end what leaves in an orderly way
        for process in running:
            os.kill(process.pid, signal.SIGUSR2)  # each prints where it is
        if running:
            time.sleep(0.5)
        alive = [p for p in self._processes if p in running or p.is_alive()]
        numbers = [self._processes.index(process) for process in alive]
        assert numbers == list(frozen), f"{numbers} ran after {limit} s, not {frozen}: {self.ended}"
        return self.ended


def in_child(function: Callable[[], object]) -> Ended:
    """How a fork of this process ends that calls a function."""
    with Job(function, here=True) as job:
        return job.wait()[0]


def _run(
    target: Callable[..., object], row: tuple[Any, ...], environment: dict[str, str], output: str
) -> None:
    # A group of its own, with which all that it forks is killed.
    os.setpgid(0, 0)
    # Where the tests run in the background, a shell has it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
    torch.set_num_threads(1)
    for number, way in ((1, "out"), (2, "err")):
        file = Path(f"{output}.{way}").open("w", buffering=1)  # noqa: SIM115 - open to the end
        os.dup2(file.fileno(), number)
        setattr(sys, f"std{way}", file)
    faulthandler.register(signal.SIGUSR2)
    target(*row)


# ---- what launchers do


def variables(rank: int, ranks: int, port: int, *, agent: bool = False) -> dict[str, str]:
    """What torchrun tells a process; with ``agent``, the store at that port is the launcher's."""
    told = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return told | ({"TORCHELASTIC_USE_AGENT_STORE": "True"} if agent else {})


@contextmanager
def script(*command: str, processes: int = 1) -> Iterator[Job]:
    """A script, or a module after ``-m``, run as ``python`` would; in several processes as torchrun would."""
    # The agent's store is here, so that no port has to be free.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = [variables(rank, processes, store.port, agent=True) for rank in range(processes)]
    environments = told if processes > 1 else [{}]
    with Job(_run_script, [command] * processes, environments) as job:
        yield job


def run_script(*command: str, processes: int = 1, limit: float = LIMIT) -> list[Ended]:
    """How each process of a script ended; the others are terminated when one fails."""
    with script(*command, processes=processes) as job:
        return job.wait(limit, together=True)


def _run_script(*command: str) -> None:
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


@contextmanager
def program(
    *command: str, folder: Path | None = None, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A program in a process of its own, such as a real launcher; at the end it is dead."""
    variables = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        # The Python and the Penstock of the tests.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        **(environment or {}),
    }
    variables.pop("GLOO_SOCKET_IFNAME", None)
    to = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=folder, env=variables, stdout=to, stderr=to, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def end_of(process: subprocess.Popen[str], limit: float = LIMIT) -> Ended:
    """How a program ended."""
    out, err = process.communicate(timeout=limit)
    return Ended(process.returncode, out, err)


def run_program(*command: str, limit: float = LIMIT, **options: Any) -> Ended:
    """How a program ended; the options are those of :func:`program`."""
    with program(*command, **options) as process:
        return end_of(process, limit)


def torchrun(*arguments: str, processes: int) -> AbstractContextManager[subprocess.Popen[str]]:
    """A program under torchrun."""
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))
    return program(sys.executable, *launch, *arguments)
