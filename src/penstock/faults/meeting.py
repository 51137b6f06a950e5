"""The rendezvous of a job's processes: in bounded time, with an error that names the absent ones."""

from __future__ import annotations

import ipaddress
import logging
import os
import platform
import socket
import stat
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, but not marked so
from torch.distributed.distributed_c10d import PrefixStore

from penstock.errors import AgreementError, UsageError, listed, printable
from penstock.faults.activity import Patience
from penstock.faults.places import ranges

T = TypeVar("T")

DAY = timedelta(days=1)
"""How long a wait on a peer may take; the watch finds a silent one much earlier."""
LATE = 10.0
"""Seconds after which it is logged who has not come yet."""
SLACK = 1.0
"""Seconds to wait for the store's answer beyond the rendezvous timeout."""
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
        AgreementError: a process is absent; the message says which.
    """
    seconds = (patience or Patience()).rendezvous
    created = not dist.is_initialized()
    if not created:
        chosen = _group_of(group)
        members = tuple(dist.get_process_group_ranks(chosen))
        rank, place = dist.get_rank(), "make their pipeline"
    elif group is not None:
        raise UsageError("group= was given, but torch.distributed is not initialized")
    else:
        launch = read_environment()
        _stay_local(launch)
        rank, members, place = launch.rank, tuple(range(launch.ranks)), launch.place
    job = job or Members(members, members, (rank,))

    def come() -> Any:
        if created:
            store = _reach_store(launch, seconds)
        else:
            world: Any = dist.group.WORLD
            store = PrefixStore(f"penstock/{ranges(job.members)}", world.get_group_store())
        return rendezvous(store, rank, job.members, seconds, place, launched=created)

    room = _within(seconds, rank, place, come)
    if created:
        chosen = _start_world(launch, room, device, seconds)
    hosts = dist.get_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return Meeting(job, chosen, room, created, hosts)


def rendezvous(
    store: Any,
    rank: int,
    members: Sequence[int],
    seconds: float,
    place: str,
    *,
    launched: bool = False,
) -> Any:
    """Wait until every process has arrived.

    They count themselves in a room, a part of the store. Its key ``end`` is written once: by the last one to
    arrive, or by the first that runs out of time or has another number of processes. So all read the same
    outcome. A room that has ended is not used again; the next attempt takes a new one.

    Args:
        store: a store that all reach.
        rank: this process's global rank.
        members: the global ranks of all.
        seconds: the time within which all must arrive.
        place: where or for what they meet, in words.
        launched: whether a launcher gave each process its rank.

    Returns:
        The room, which will also hold their places.

    Raises:
        AgreementError: a process is absent, comes twice, or counts other processes.
    """
    room = _enter(store, rank, launched)
    size = int(room.compare_set("size", "", str(len(members))))
    end, arrived = "", 0
    if size != len(members):
        end = (
            f"ranks differ in WORLD_SIZE: rank {rank} has {len(members)}, and another has {size}; start all "
            "of them with the same"
        )
    else:
        arrived = room.add("count", 1)
    if arrived == len(members):
        end = _HERE
    # The store answers when the key is there: nobody asks again and again, however many wait.
    if not end and not _has(room, min(LATE, seconds)):
        if arrived == 1 and seconds > LATE:
            logger.warning(
                "penstock: %s; waiting for them", _absent(store, room, members, LATE, place)
            )
        if seconds <= LATE or not _has(room, seconds - LATE):
            end = (
                f"{_absent(store, room, members, seconds, place)}; start them, or wait longer with "
                "rendezvous_timeout="
            )
    end = room.compare_set("end", "", end or "-").decode()
    if end == _HERE:
        return room
    if launched and rank == 0:
        # The store may end with this process: let the others read the reason first.
        sleep(SLACK)
    raise AgreementError(printable(end))


def _has(room: Any, seconds: float) -> bool:
    """Whether the meeting ends within this time."""
    try:
        room.wait(["end"], timedelta(seconds=seconds))
    except RuntimeError:
        # Not all stores raise a DistStoreError when time is up. One that is lost does not answer either.
        return bool(room.check(["end"]))
    return True


def _enter(store: Any, rank: int, launched: bool) -> Any:
    """Enter the next room that has not ended."""
    process = f"process {os.getpid()} on {platform.node()}"
    first = store.compare_set(f"process/{rank}", "", process).decode()
    if launched and first != process:
        raise AgreementError(
            f"two processes have come with RANK={rank}, {first} and {process}; every rank needs its own, and "
            "if the first one has ended, all must be started again"
        )
    while True:
        room = PrefixStore(f"meeting-{store.add(f'attempts/{rank}', 1)}", store)
        if not room.check(["end"]):
            break
    # A place must be there before somebody reads it, since the store lets who reads wait for it.
    room.set(f"place/{rank}", "-")
    return room


def _absent(store: Any, room: Any, members: Sequence[int], seconds: float, place: str) -> str:
    """The message that names the absent processes."""
    absent = [rank for rank in members if not room.check([f"place/{rank}"])]
    known = [rank for rank in absent[:4] if store.check([f"process/{rank}"])]
    words = "".join(
        f"; rank {rank} was here before, as {store.get(f'process/{rank}').decode()}: it is elsewhere in its "
        "code, or has ended"
        for rank in known
    )
    return (
        f"after {seconds:g} s ranks [{listed(map(str, absent))}] of {len(members)} have not come to "
        f"{place}{words}"
    )


def _within(seconds: float, rank: int, place: str, run: Callable[[], T]) -> T:
    """Call a function that may block in torch; if it takes too long, raise and ignore its result."""
    future: Future[T] = Future()

    def call() -> None:
        try:
            future.set_result(run())
        except BaseException as error:
            future.set_exception(error)

    # Not an executor's thread: the interpreter waits for those at exit.
    Thread(target=call, name="penstock rendezvous", daemon=True).start()
    try:
        return future.result(seconds + 3 * SLACK)
    except TimeoutError:
        raise AgreementError(
            f"rank {rank}, on the way to {place}, has had no answer from the store there for {seconds:g} s: "
            "the listener is not a torch TCPStore, or its process is stopped, or the network to it is cut; "
            "where another program has the port, choose another MASTER_PORT"
        ) from None
    except dist.DistError as error:
        raise AgreementError(
            f"the store was lost while the ranks came to {place}: {first_line(error)}; the process that "
            "hosts it, usually that of rank 0, has ended: see what it says"
        ) from error


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
            timeout=timedelta(seconds=seconds + SLACK),
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


GONE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 4000}
"""After how long the system takes a machine that answers nothing for gone: about 5 s."""


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
    return Launch(
        rank,
        ranks,
        address,
        port,
        # torchrun counts on each machine by itself: one that joined later has had fewer restarts. Only a
        # store that outlives them needs the count.
        f"{run}/{restart}" if hosted else run,
        hosted,
        environment.get("LOCAL_WORLD_SIZE") == environment["WORLD_SIZE"] or _is_loopback(address),
    )


def _stay_local(launch: Launch) -> None:
    """Have gloo listen on the loopback interface alone, if all ranks are on this machine."""
    names = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if launch.one_host and names and "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = name = min(names)
        logger.info("all ranks are on this machine: set GLOO_SOCKET_IFNAME=%s", name)


def _reach_store(launch: Launch, seconds: float) -> Any:
    """Connect to the store, which rank 0 or the launcher hosts."""
    hosts, listening = launch.rank == 0 and not launch.hosted, None
    try:
        if hosts and _is_loopback(launch.address):
            # Torch's own socket would listen on all interfaces.
            address = (socket.gethostbyname(launch.address), launch.port)
            listening = socket.create_server(address, backlog=1024).detach()
        store = TCPStore(
            launch.address,
            launch.port,
            None,
            hosts,
            timedelta(seconds=seconds),
            wait_for_workers=False,
            master_listen_fd=listening,
        )
    except (OSError, dist.DistError) as error:
        if hosts:
            raise UsageError(
                f"rank 0 cannot listen at {launch.place}: {first_line(error)}; the port is in use, also by a "
                "second process with RANK=0 or the rest of an earlier job: choose another MASTER_PORT"
            ) from error
        raise AgreementError(
            f"rank {launch.rank} found no store of torch at {launch.place} within {seconds:g} s: "
            f"{first_line(error)}; is rank 0 started, and can this machine reach it? Where another program "
            "has the port, choose another MASTER_PORT"
        ) from error
    return PrefixStore(f"penstock/{launch.attempt}", store)


def _is_loopback(address: str) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
