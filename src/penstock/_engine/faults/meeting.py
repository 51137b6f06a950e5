"""The rendezvous of a job's processes: in bounded time, with an error that names the absent ones."""

from __future__ import annotations

import ipaddress
import logging
import os
import platform
import socket
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, but not marked so
from torch.distributed.distributed_c10d import PrefixStore

from penstock._engine.faults.activity import Patience
from penstock._engine.faults.places import ranges, read_text
from penstock.errors import AgreementError, UsageError, first_line, listed

DAY = timedelta(days=1)
"""How long a wait on a peer may take; the watch finds a silent one much earlier."""
LATE = 10.0
"""Seconds after which it is logged who has not come yet."""
MOMENT = 1.5
"""Seconds beyond the rendezvous timeout, for those who are on their way when the store opens or closes."""
PAUSE = 0.25
"""Seconds from one look whether the store has opened to the next."""
_HERE = "all are here"
_NOBODY = 0x7FFF
"""The tag of a message that no rank sends."""

logger = logging.getLogger("penstock")


class Members(NamedTuple):
    """The processes of a job, as global ranks: pipelines side by side, of which this process is in one.

    Args:
        members: all of them.
        pipeline: those of this process's pipeline, in the order of its ranks.
        beside: those at this process's place in each pipeline of the job, in order; this one alone where
            there is one pipeline.
    """

    members: tuple[int, ...]
    pipeline: tuple[int, ...]
    beside: tuple[int, ...]

    @property
    def process(self) -> int:
        """This process."""
        return next(one for one in self.pipeline if one in self.beside)

    @property
    def rank(self) -> int:
        """This process's rank in its pipeline."""
        return self.pipeline.index(self.process)

    @property
    def replica(self) -> int | None:
        """The number of this process's pipeline; None where there is one."""
        return self.beside.index(self.process) if len(self.beside) > 1 else None


@dataclass(frozen=True)
class Meeting:
    """The processes of a job, once they have met.

    Args:
        job: the processes of the job.
        group: the pipeline's process group.
        room: the job's part of the store.
        created: whether :func:`meet` started the default process group, which ``close`` then ends.
        hosts: whether the store ends with this process.
    """

    job: Members
    group: Any
    room: Any
    created: bool
    hosts: bool

    @property
    def store(self) -> Any:
        """The pipeline's own part of the store."""
        return PrefixStore(f"pipeline/{ranges(self.job.pipeline)}", self.room)

    def close(self) -> None:
        """End the default process group, if :func:`meet` started it."""
        if self.created and dist.is_initialized():
            dist.destroy_process_group()


def meet(
    group: dist.ProcessGroup | None = None,
    patience: Patience | None = None,
    device: torch.device | None = None,
    job: Members | None = None,
) -> Meeting:
    """Meet the other processes of the job; all of them call this together.

    An existing process group is used. Otherwise the default one is started from the launcher's environment:
    gloo, and also NCCL if the device is a GPU.

    Args:
        group: the ranks of the pipeline, in order; by default all processes.
        patience: its ``rendezvous`` is the time within which all must arrive.
        device: where this rank's stages live.
        job: the processes of the job; by default those of the group.

    Raises:
        UsageError: this process is not in the group, or the launcher's environment is wrong.
        AgreementError: a process is absent or has declined; the message says which.
    """
    seconds = (patience or Patience()).rendezvous
    launch = None
    if dist.is_initialized():
        chosen = _group_of(group)
        members, rank = tuple(dist.get_process_group_ranks(chosen)), dist.get_rank()
    elif group is not None:
        raise UsageError("a process group was given, but torch.distributed is not initialized")
    else:
        launch = read_environment()
        _stay_local(launch)
        members, rank = tuple(range(launch.ranks)), launch.rank
    job = job or Members(members, members, (rank,))
    room = Rendezvous(rank, job.members, seconds, launch).run()
    created = launch is not None
    if launch is not None:
        chosen = _start_world(launch, room, device, seconds)
    hosts = dist.get_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return Meeting(job, chosen, room, created, hosts)


def decline(members: Sequence[int], error: BaseException) -> None:
    """Tell the others that this process does not come to their next meeting, which ends there with its error.

    It is for an error before the meeting in an existing process group; without a group there is no store yet.

    Args:
        members: the processes of the job, as global ranks.
        error: why it does not come.
    """
    if not dist.is_initialized() or len(members) < 2:
        return
    rank, store = dist.get_rank(), _existing_store(members)
    with suppress(RuntimeError):  # the store was lost
        room = PrefixStore(f"meeting-{store.add(f'attempts/{rank}', 0) + 1}", store)
        room.set(f"declined/{rank}", "-")
        room.set("declined", "-")
        room.compare_set("end", "", f"rank {rank}: {type(error).__name__}: {error}")


def _existing_store(members: Sequence[int]) -> Any:
    world: Any = dist.group.WORLD
    return PrefixStore(f"penstock/{ranges(members)}", world.get_group_store())


class Rendezvous:
    """One process's way to the others, in bounded time.

    They count themselves in a room, a part of the store. Its key ``end`` is written once: by the last one to
    arrive, or by the first that runs out of time, has another number of processes or declines to come. So all
    read the same outcome. A room that has ended is not used again; the next attempt takes a new one.

    Args:
        rank: this process's global rank.
        members: the global ranks of all.
        seconds: the time within which all must arrive.
        launch: what the launcher said; None where they meet in an existing process group.
    """

    def __init__(
        self, rank: int, members: Sequence[int], seconds: float, launch: Launch | None
    ) -> None:
        self._rank, self._members, self._seconds, self._launch = rank, members, seconds, launch
        self._hosts = launch is not None and launch.hosts
        self._place = "make their pipeline" if launch is None else launch.place

    def run(self) -> Any:
        """Wait until every process has arrived.

        Returns:
            The room, which will also hold their places.

        Raises:
            AgreementError: a process is absent, has declined, comes twice, or counts other processes.
        """
        # Torch waits without end for an answer, as from a listener that is no store.
        future: Future[Any] = Future()

        def come() -> None:
            try:
                future.set_result(self._come())
            except BaseException as error:
                future.set_exception(error)

        # Not an executor's thread: the interpreter waits for those at exit.
        Thread(target=come, name="penstock rendezvous", daemon=True).start()
        try:
            return future.result(self._seconds + (7 if self._hosts else 4) * MOMENT)
        except TimeoutError:
            raise AgreementError(
                f"rank {self._rank}, on the way to {self._place}, has had no answer from the store there for "
                f"{self._seconds:g} s: the listener is not a torch TCPStore, or its process is stopped, or "
                "the network to it is cut; where another program has the port, choose another MASTER_PORT"
            ) from None
        except dist.DistError as error:
            raise AgreementError(
                f"the store was lost while the ranks came to {self._place}: {first_line(error)}; the process "
                "that hosts it, usually that of rank 0, has ended: see what it says"
            ) from error

    def _come(self) -> Any:
        until = monotonic() + self._seconds
        if self._launch is None:
            store = _existing_store(self._members)
        else:
            store = _reach_store(self._launch, self._seconds, until)
        process = f"process {os.getpid()} on {platform.node()}"
        first = read_text(store.compare_set(f"process/{self._rank}", "", process))
        if self._launch is not None and first != process:
            raise AgreementError(
                f"two processes have come with RANK={self._rank}, {first} and {process}; every rank needs "
                "its own, and if the first one has ended, all must be started again"
            )
        while True:
            room = PrefixStore(f"meeting-{store.add(f'attempts/{self._rank}', 1)}", store)
            if not room.check(["end"]):
                break
            if room.check(["declined"]) and not room.check([f"declined/{self._rank}"]):
                raise AgreementError(read_text(room.get("end")))
        # A place must be there before somebody reads it, since the store lets who reads wait for it.
        room.set(f"place/{self._rank}", "-")
        # Where the store opened late, the others are on their way to it as well.
        end = room.compare_set(
            "end", "", self._outcome(store, room, max(until, monotonic() + MOMENT))
        )
        if end == _HERE.encode():
            return room
        room.add("told", 1)
        if self._hosts:
            # The store may end with this process: let the others read the reason first.
            last = monotonic() + 2 * MOMENT
            while room.add("told", 0) < room.add("count", 0) and monotonic() < last:
                sleep(0.02)
        raise AgreementError(read_text(end))

    def _outcome(self, store: Any, room: Any, until: float) -> str:
        """Wait until the meeting ends; return what this process says of it, if it is the first to say so."""
        number = len(self._members)
        size = read_text(room.compare_set("size", "", str(number)))
        if size != str(number):
            # Before it counts itself, so that nobody can say that all are here.
            room.compare_set(
                "end",
                "",
                f"ranks differ in WORLD_SIZE: rank {self._rank} has {number}, and another has {size}; start "
                "all of them with the same",
            )
        arrived = room.add("count", 1)
        if arrived == number:
            return _HERE
        # The store answers when the key is there: nobody asks again and again, however many wait.
        if until - monotonic() > LATE and not _has_ended(room, LATE) and arrived == 1:
            words = self._absence(store, room, LATE)
            if words:
                logger.warning("penstock: %s; waiting for them", words)
        if _has_ended(room, until - monotonic()):
            return "-"
        # The first that runs out of time looks who is absent, for all of them; all may have come just now.
        looks = room.add("late", 1) == 1
        words = self._absence(store, room, self._seconds) if looks else ""
        if not words and _has_ended(room, 2 * MOMENT):
            return "-"
        words = words or (
            f"after {self._seconds:g} s {room.add('count', 0)} of {number} ranks have come to {self._place}, "
            "and the one that looked who is absent has ended"
        )
        return (
            f"{words}; start them, or wait longer with "
            f"timeout=penstock.Timeouts(rendezvous={2 * self._seconds:g})"
        )

    def _absence(self, store: Any, room: Any, seconds: float) -> str:
        """Name the absent processes; return nothing if all are here."""
        absent = [rank for rank in self._members if not room.check([f"place/{rank}"])]
        known = [rank for rank in absent[:4] if store.check([f"process/{rank}"])]
        words = "".join(
            f"; rank {rank} was here before, as {read_text(store.get(f'process/{rank}'))}: it is elsewhere "
            "in its code, or has ended"
            for rank in known
        )
        come = f"of {len(self._members)} have not come to {self._place}{words}"
        return f"after {seconds:g} s ranks [{listed(map(str, absent))}] {come}" if absent else ""


def _has_ended(room: Any, seconds: float) -> bool:
    """Return whether the meeting ends within this time."""
    try:
        # For no time at all, a store of torch would wait without end.
        room.wait(["end"], timedelta(seconds=max(seconds, 0.01)))
    except RuntimeError:
        # Not all stores raise a DistStoreError when time is up. One that is lost does not answer either.
        return bool(room.check(["end"]))
    return True


def _backend_for(device: torch.device | None) -> str:
    """The backend of the world: gloo, and for tensors on an accelerator what torch has for its kind."""
    backend = dist.Backend.default_device_backend_map.get("cpu" if device is None else device.type)
    if device is None or backend in (None, "gloo") or not dist.is_backend_available(backend):
        return "gloo"
    return f"cpu:gloo,{device.type}:{backend}"


def _start_world(launch: Launch, room: Any, device: torch.device | None, seconds: float) -> Any:
    try:
        dist.init_process_group(
            _backend_for(device),
            store=PrefixStore("world", room),
            rank=launch.rank,
            world_size=launch.ranks,
            timeout=timedelta(seconds=seconds + MOMENT),
        )
    except (dist.DistError, RuntimeError) as error:
        raise AgreementError(
            f"the ranks came to {launch.place}, but could not connect: {first_line(error)}"
        ) from error
    world: Any = dist.group.WORLD
    world.set_timeout(DAY)
    return world


def end_waits(group: Any) -> None:
    """End all of this process's waits on a group, from any thread; the other ranks' waits on it end too.

    The group is broken for good. NCCL communicators are aborted. On gloo, ``abort`` ends nothing (torch
    2.13), but a receive that times out closes all connections, so that every wait raises within
    milliseconds, here and on the other ranks.

    Args:
        group: a ``ProcessGroup``, or a bare ``ProcessGroupGloo``.
    """
    with suppress(RuntimeError, AttributeError):
        group.abort()
    for peer in range(group.size()):
        if peer != group.rank():
            # From every peer, since a receive from one that has gone closes nothing.
            with suppress(RuntimeError):
                group.recv([torch.zeros(1, device="cpu")], peer, _NOBODY).wait(
                    timedelta(milliseconds=1)
                )


GONE = {
    "TCP_KEEPIDLE": 20,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 4,
    "TCP_USER_TIMEOUT": 60_000,
}
"""After how long the system takes a machine that answers nothing for gone: a minute, since networks heal."""


@contextmanager
def noticing_gone_machines() -> Iterator[None]:
    """Connections that are opened in this context, and others to the same machines, break when one is gone.

    Otherwise a wait on a machine that lost its power, or whose network was cut, would not end: TCP is silent
    while nothing is sent. The system asks the other machine's system, so that a process there that is
    stopped or busy breaks nothing. Only Linux tells which connections a process has.
    """
    before = _open_sockets()
    yield
    after = _open_sockets()
    machines = {_machine(number) for number, _ in after - before} - {""}
    for number in [number for number, _ in after if _machine(number) in machines]:
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in GONE.items():
                end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _open_sockets() -> set[tuple[int, int]]:
    """The numbers of this process's sockets, which are used again, and those of what they stand for."""
    folder, sockets = Path("/proc/self/fd"), set()
    for name in os.listdir(folder) if folder.exists() else ():
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                sockets.add((int(name), status.st_ino))
    return sockets


def _machine(number: int) -> str:
    """The address of the other machine that a socket is connected to; empty for any other socket."""
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as end:
        if end.family in (socket.AF_INET, socket.AF_INET6):
            address = str(end.getpeername()[0]).removeprefix("::ffff:")
            return "" if _is_loopback(address) else address
    return ""


def _group_of(group: Any) -> Any:
    # Torch returns this in place of the group to processes outside of it.
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise UsageError(f"process {dist.get_rank()} is not in the group that was given")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise UsageError(f"group={group!r}: must be a process group")
    return group or dist.group.WORLD


# ---- the launcher's variables, and the store


class Launch(NamedTuple):
    """A launcher's variables for one process; the address and the port are those of the store."""

    rank: int
    ranks: int
    address: str
    port: int
    attempt: str  # identifies this start of the job
    hosted: bool  # whether the launcher hosts the store
    one_host: bool  # whether all processes are on this machine

    @property
    def hosts(self) -> bool:
        """Whether this process hosts the store."""
        return self.rank == 0 and not self.hosted

    @property
    def place(self) -> str:
        """The store's address, in words."""
        return f"{self.address}:{self.port} (MASTER_ADDR and MASTER_PORT)"


def read_environment(environment: Any = os.environ) -> Launch:
    """Read the launcher's variables from the environment.

    Raises:
        UsageError: a variable is missing or invalid; the message lists everything that is wrong.
    """
    problems, numbers = [], {}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        text = environment.get(name) or ""
        if not text:
            problems.append(f"{name} is not set")
        elif name != "MASTER_ADDR" and not text.isdecimal():
            problems.append(f"{name}={text!r} is no number")
        elif name != "MASTER_ADDR":
            numbers[name] = int(text)
    rank, ranks, port = (numbers.get(name, 0) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if not problems and not rank < ranks:
        problems.append(f"RANK={rank} must be below WORLD_SIZE={ranks}")
    if not problems and not 0 < port < 65536:
        problems.append(f"MASTER_PORT={port} is no port")
    if problems:
        raise UsageError(
            f"the launcher's environment is incomplete or wrong: {'; '.join(problems)}; start with "
            "torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    address = environment["MASTER_ADDR"]
    hosted = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    run, restart = (environment.get(f"TORCHELASTIC_{n}", "0") for n in ("RUN_ID", "RESTART_COUNT"))
    # torchrun counts on each machine by itself: one that joined later has had fewer restarts. Only a store
    # that outlives them, as torchrun's does, needs the count.
    attempt = f"{run}/{restart}" if hosted else run
    on_one = environment.get("LOCAL_WORLD_SIZE") == environment["WORLD_SIZE"]
    return Launch(rank, ranks, address, port, attempt, hosted, on_one or _is_loopback(address))


def _stay_local(launch: Launch) -> None:
    """Have gloo listen on the loopback interface alone, if all ranks are on this machine."""
    names = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if launch.one_host and names and "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = name = min(names)
        logger.info("all ranks are on this machine: set GLOO_SOCKET_IFNAME=%s", name)


def _reach_store(launch: Launch, seconds: float, until: float) -> Any:
    """Connect to the store, which rank 0 or the launcher hosts."""
    listening = None
    try:
        if not launch.hosts:
            _await_listener(launch, until)
        elif _is_loopback(launch.address):
            # Torch's own socket would listen on all interfaces.
            address = (socket.gethostbyname(launch.address), launch.port)
            listening = socket.create_server(address, backlog=1024).detach()
        store = TCPStore(
            launch.address,
            launch.port,
            None,
            launch.hosts,
            timedelta(seconds=max(until - monotonic(), MOMENT)),
            wait_for_workers=False,
            master_listen_fd=listening,
        )
    except (OSError, dist.DistError) as error:
        if launch.hosts:
            raise UsageError(
                f"rank 0 cannot listen at {launch.place}: {first_line(error)}; the port is in use, also by a "
                "second process with RANK=0 or the rest of an earlier job: choose another MASTER_PORT"
            ) from error
        raise AgreementError(
            f"rank {launch.rank} found no store of torch at {launch.place} within {seconds:g} s: "
            f"{first_line(error)}; is rank 0 started, and can this machine reach it? Where another program "
            "has the port, choose another MASTER_PORT"
        ) from error
    store.set_timeout(timedelta(seconds=seconds))
    return PrefixStore(f"penstock/{launch.attempt}", store)


def _await_listener(launch: Launch, until: float) -> None:
    """Wait until somebody listens: torch itself looks ever more rarely, and may miss who comes late.

    Raises:
        OSError: nobody did in time; it says why.
    """
    while True:
        left = until - monotonic()
        try:
            socket.create_connection(
                (launch.address, launch.port), max(PAUSE, min(left, 5.0))
            ).close()
            return
        except OSError:
            if left < 0:
                raise
        sleep(PAUSE)


def _is_loopback(address: str) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
