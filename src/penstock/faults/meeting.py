"""The rendezvous of a pipeline's ranks: in bounded time, with an error that names absent ranks."""

from __future__ import annotations

import ipaddress
import logging
import os
import platform
import socket
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from time import monotonic, sleep
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, but not marked so
from torch.distributed.distributed_c10d import PrefixStore

from penstock.errors import AgreementError, UsageError, printable
from penstock.faults.activity import Patience

T = TypeVar("T")

DAY = timedelta(days=1)
"""The limit for an operation of a group; the watch finds a silent rank much earlier."""
SLACK = 1.0
"""Seconds to wait for the store's answer beyond the rendezvous timeout."""
_HERE = "all are here"
_NOBODY = 0x7FFF
"""The tag of a message that no rank sends."""

logger = logging.getLogger("penstock")


@dataclass(frozen=True)
class Meeting:
    """The ranks of a pipeline, once they have met.

    Args:
        rank: this process's rank in the pipeline.
        ranks: the number of ranks.
        global_ranks: their ranks in the default process group.
        group: their process group.
        store: their part of the group's store.
        created: whether :func:`meet` started the default process group, which ``close`` then ends.
        hosts: whether the store ends with this process.
        host: the address and port of the store, if known.
    """

    rank: int
    ranks: int
    global_ranks: tuple[int, ...]
    group: Any
    store: Any
    created: bool
    hosts: bool
    host: tuple[str, int] | None

    def close(self) -> None:
        """End the default process group, if :func:`meet` started it."""
        if self.created and dist.is_initialized():
            dist.destroy_process_group()


def meet(
    group: dist.ProcessGroup | None = None,
    patience: Patience | None = None,
    device: torch.device | None = None,
) -> Meeting:
    """Meet the other ranks; all of them call this together.

    An existing process group is used. Otherwise the default one is started from the launcher's environment:
    gloo, and also NCCL if the device is a GPU.

    Args:
        group: the ranks of the pipeline, in order; by default all.
        patience: its ``rendezvous_timeout`` is the time within which all ranks must arrive.
        device: where this rank's stages live.

    Raises:
        UsageError: this process is not in the group, or the launcher's environment is wrong.
        AgreementError: a rank is absent; the message says which.
    """
    seconds = (patience or Patience()).rendezvous
    created = not dist.is_initialized()
    if not created:
        chosen = _group_of(group)
        members = tuple(dist.get_process_group_ranks(chosen))
        rank, place = chosen.rank(), "make their pipeline"
    elif group is not None:
        raise UsageError("group= was given, but torch.distributed is not initialized")
    else:
        launch = read_environment()
        _stay_local(launch)
        rank, members, place = launch.rank, tuple(range(launch.ranks)), launch.place

    def come() -> Any:
        own = None if created else PrefixStore("penstock", chosen.get_group_store())
        store = own or _reach_store(launch, seconds)
        return rendezvous(store, rank, len(members), seconds, place, launched=created)

    room = _within(seconds, rank, place, come)
    if created:
        chosen = _start_world(launch, room, device, seconds)
    hosts = dist.get_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address, port = (os.environ.get(f"MASTER_{name}", "") for name in ("ADDR", "PORT"))
    host = (address, int(port)) if address and port.isdecimal() else None
    return Meeting(rank, len(members), members, chosen, room, created, hosts, host)


def rendezvous(
    store: Any, rank: int, ranks: int, seconds: float, place: str, *, launched: bool = False
) -> Any:
    """Wait until every rank has arrived.

    The ranks count themselves in a room, a part of the store. Its key ``end`` is written once: by the last
    rank to arrive, or by the first that runs out of time or has another number of ranks. So all ranks read
    the same outcome. A room that has ended is not used again; the next attempt takes a new one.

    Args:
        store: a store that all ranks reach.
        rank: this process's rank.
        ranks: the number of ranks.
        seconds: the time within which all must arrive.
        place: where or for what they meet, in words.
        launched: whether a launcher gave each process its rank.

    Returns:
        The room, which will also hold the heartbeats.

    Raises:
        AgreementError: a rank is absent, comes twice, or has another number of ranks.
    """
    deadline = monotonic() + seconds
    room = _enter(store, rank, launched)
    size = int(room.compare_set("size", "", str(ranks)))
    end = ""
    if size != ranks:
        end = (
            f"ranks differ in WORLD_SIZE: rank {rank} has {ranks}, and another has {size}; start all of them "
            "with the same"
        )
    elif room.add("count", 1) == ranks:
        end = _HERE
    pause = 0.002
    while not end and not room.check(["end"]):
        if monotonic() > deadline:
            end = _absent(store, room, ranks, seconds, place)
        sleep(pause)
        pause = min(0.05, 1.3 * pause)
    end = room.compare_set("end", "", end or "-").decode()
    if end == _HERE:
        return room
    if launched and rank == 0:
        # The store may end with this process: let the others read the reason first.
        sleep(SLACK)
    raise AgreementError(printable(end))


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
    # Each rank's watch reads these keys from its start.
    for key in ("failure", f"beat/{rank}", f"here/{rank}"):
        room.set(key, "-")
    return room


def _absent(store: Any, room: Any, ranks: int, seconds: float, place: str) -> str:
    """The message that names the absent ranks."""
    absent = [rank for rank in range(ranks) if not room.check([f"here/{rank}"])]
    known = [rank for rank in absent if store.check([f"process/{rank}"])]
    words = "".join(
        f"; rank {rank} was here before, as {store.get(f'process/{rank}').decode()}: it is elsewhere in its "
        "code, or has ended"
        for rank in known
    )
    return (
        f"after {seconds:g} s ranks {absent} of {ranks} have not come to {place}{words}; start them, or wait "
        "longer with rendezvous_timeout="
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
            "what listens is no store of torch, or its process is stopped, or the network to it is cut; "
            "where another program has the port, choose another MASTER_PORT"
        ) from None
    except dist.DistError as error:
        raise AgreementError(
            f"the store was lost while the ranks came to {place}: {first_line(error)}; the process that "
            "hosts it, usually that of rank 0, has ended: see what it says"
        ) from error


def _start_world(launch: Launch, room: Any, device: torch.device | None, seconds: float) -> Any:
    backend = "cpu:gloo,cuda:nccl" if device is not None and device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(
            backend,
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
                group.recv([torch.zeros(1)], peer, _NOBODY).wait(timedelta(milliseconds=1))


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
    run, restart = (environment.get(f"TORCHELASTIC_{n}", "0") for n in ("RUN_ID", "RESTART_COUNT"))
    return Launch(
        rank,
        ranks,
        address,
        port,
        f"{run}/{restart}",
        environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
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


def own_address(host: tuple[str, int] | None) -> str:
    """The address under which the host of the store sees this machine; empty if unknown."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(host or ("", 0))  # sends nothing
            address: str = probe.getsockname()[0]
            return "" if _is_loopback(address) else address
    except OSError:
        return ""


def _is_loopback(address: str) -> bool:
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
