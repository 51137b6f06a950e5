"""How the ranks of a pipeline meet: in a bounded time, and with the name of who is absent if they do not."""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, but not marked so
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore

from penstock.errors import AgreementError, UsageError, printable
from penstock.faults.activity import Patience
from penstock.faults.processes import Process, die_with_parent, this_process

T = TypeVar("T")

DAY = timedelta(days=1)
"""How long an operation of a group may take: the watch finds a silent rank much earlier."""
SLACK = 1.0
"""Seconds beyond the time to meet after which the others' answer is not waited for any more."""
_NOBODY = 0x7FFF
"""The tag of a message that nobody sends."""

logger = logging.getLogger("penstock")


@dataclass(frozen=True)
class Meeting:
    """The ranks of a pipeline that have met.

    Args:
        rank: this process's rank in the pipeline.
        ranks: the number of ranks.
        global_ranks: their ranks in the default process group.
        group: their process group.
        store: a part of the group's store, under a random name that only these ranks were told.
        created: whether :func:`meet` has started the default process group, and ``close`` ends it.
        hosts: whether the store ends with this process.
        processes: the process of each rank.
        host: the address and port of the store, where they are known.
    """

    rank: int
    ranks: int
    global_ranks: tuple[int, ...]
    group: Any
    store: Any
    created: bool
    hosts: bool
    processes: tuple[Process, ...]
    host: tuple[str, int] | None = None

    def close(self) -> None:
        """End the default process group, if it was started here."""
        if self.created and dist.is_initialized():
            dist.destroy_process_group()


def meet(
    group: dist.ProcessGroup | None = None,
    patience: Patience | None = None,
    device: torch.device | None = None,
    mesh: DeviceMesh | None = None,
) -> Meeting:
    """Meet the other ranks; all of them call this together.

    A process group that exists is used. Otherwise the default one is started from the launcher's
    environment: gloo, and NCCL beside it if the device is a GPU.

    Args:
        group: the ranks of the pipeline, in order; by default all.
        patience: its ``rendezvous_timeout`` is the time until all ranks must be there.
        device: where this rank's stages live.
        mesh: instead of a group: its dimension ``"pp"``, or its only one.

    Raises:
        UsageError: this process is not in the group, or the launcher's environment is wrong.
        AgreementError: a rank is absent; the message says which.
    """
    seconds = (patience or Patience()).rendezvous
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()
    created = not dist.is_initialized()
    if not created:
        chosen = _group_of(group, mesh)
        members = tuple(dist.get_process_group_ranks(chosen))
        rank, place = chosen.rank(), "make their pipeline"
    elif group is not None or mesh is not None:
        raise UsageError("group= or mesh= was given, but torch.distributed is not initialized")
    else:
        call = read_environment()
        _stay_local(call)
        rank, members, place = call.rank, tuple(range(call.ranks)), call.place

    def come() -> tuple[Any, tuple[Process, ...]]:
        own = None if created else PrefixStore("penstock", chosen.get_group_store())
        store = own or _reach_store(call, seconds)
        name, processes = gather(store, rank, len(members), seconds, place, launched=created)
        return PrefixStore(name, store), processes

    room, processes = _within(seconds, rank, place, come)
    if created:
        chosen = _start_world(call, room, device, seconds, processes)
    hosts = dist.get_rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return Meeting(
        rank, len(members), members, chosen, room, created, hosts, processes, _store_host()
    )


def _start_world(
    call: LauncherCall,
    room: Any,
    device: torch.device | None,
    seconds: float,
    processes: Sequence[Process],
) -> Any:
    backend = "cpu:gloo,cuda:nccl" if device is not None and device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("world", room),
            rank=call.rank,
            world_size=call.ranks,
            timeout=timedelta(seconds=seconds + SLACK),
        )
    except (dist.DistError, RuntimeError) as error:
        conditions = enumerate(process.condition() for process in processes)
        gone = [f"; rank {r} {_CONDITIONS[c]}" for r, c in conditions if c in ("stopped", "ended")]
        raise AgreementError(
            f"the ranks came to {call.place}, but could not connect: {first_line(error)}{''.join(gone)}"
        ) from error
    world: Any = dist.group.WORLD
    world.set_timeout(DAY)
    return world


def end_waits(group: Any) -> None:
    """End all waits of this process on a group, from any thread; the others' waits on it end as well.

    The group is broken for good. NCCL communicators are aborted. On gloo, ``abort`` ends nothing (torch
    2.13); but a receive that times out closes all connections, so that every wait raises within
    milliseconds, here and, as their connections are closed, on the other ranks.

    Args:
        group: a ``ProcessGroup``, or a ``ProcessGroupGloo`` by itself.
    """
    with suppress(RuntimeError, AttributeError):
        group.abort()
    for peer in range(group.size()):
        if peer != group.rank():
            # From any peer that is not gone; a receive from one that is gone closes nothing.
            with suppress(RuntimeError):
                group.recv([torch.zeros(1)], peer, _NOBODY).wait(timedelta(milliseconds=1))


def _group_of(group: Any, mesh: DeviceMesh | None) -> Any:
    if mesh is not None:
        names = mesh.mesh_dim_names or ()
        if "pp" not in names and mesh.ndim != 1:
            raise UsageError(f'mesh= has the dimensions {names}: must have "pp", or one dimension')
        group = mesh.get_group("pp" if "pp" in names else None)
    # Torch returns this as the group to processes that are not in it.
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise UsageError(f"process {dist.get_rank()} is not in the group that was given")
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise UsageError(f"group={group!r}: must be a process group")
    return group or dist.group.WORLD


# ---- the launcher's variables, and the store


@dataclass(frozen=True)
class LauncherCall:
    """What a launcher has told this process.

    Args:
        rank: its rank.
        ranks: the number of ranks.
        address: the address of the store, at rank 0 or the launcher.
        port: the port of the store.
        attempt: the name of this start of the job.
        hosted: whether the launcher hosts the store.
        one_host: whether all processes are on this machine.
    """

    rank: int
    ranks: int
    address: str
    port: int
    attempt: str = "0"
    hosted: bool = False
    one_host: bool = False

    @property
    def place(self) -> str:
        """The place of the store, in words."""
        return f"{self.address}:{self.port} (MASTER_ADDR and MASTER_PORT)"


def read_environment(environment: Any = os.environ) -> LauncherCall:
    """Read the launcher's variables from the environment.

    Raises:
        UsageError: a variable is missing or invalid; the message lists everything that is wrong.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    problems = [f"{name} is not set" for name in names if not environment.get(name)]
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        text = environment.get(name) or "0"
        if not text.isdecimal():
            problems.append(f"{name}={text!r} is no number")
        numbers[name] = int(text) if text.isdecimal() else 0
    rank, ranks, port = numbers.values()
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
    return LauncherCall(
        rank,
        ranks,
        address,
        port,
        f"{run}/{restart}",
        environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        environment.get("LOCAL_WORLD_SIZE") == environment["WORLD_SIZE"] or _is_loopback(address),
    )


def _stay_local(call: LauncherCall) -> None:
    """Have gloo listen on the loopback interface alone, if all ranks are on this machine."""
    if not call.one_host or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):
            logger.info("all ranks are on this machine: set GLOO_SOCKET_IFNAME=%s", name)
            os.environ["GLOO_SOCKET_IFNAME"] = name
            return


def _reach_store(call: LauncherCall, seconds: float) -> Any:
    """The store of a launcher's processes, which rank 0 or the launcher hosts."""
    hosts, listening = call.rank == 0 and not call.hosted, None
    try:
        if hosts and _is_loopback(call.address):
            # Torch's own socket would listen on all interfaces.
            address = (socket.gethostbyname(call.address), call.port)
            listening = socket.create_server(address, backlog=1024).detach()
        store = TCPStore(
            call.address,
            call.port,
            None,
            hosts,
            timedelta(seconds=seconds),
            wait_for_workers=False,
            master_listen_fd=listening,
        )
    except (OSError, dist.DistError) as error:
        if hosts:
            raise UsageError(
                f"rank 0 cannot listen at {call.place}: {first_line(error)}; the port is in use, also by a "
                "second process with RANK=0 or the rest of an earlier job: choose another MASTER_PORT"
            ) from error
        raise AgreementError(
            f"rank {call.rank} found no store of torch at {call.place} within {seconds:g} s: "
            f"{first_line(error)}; is rank 0 started, and can this machine reach it? Where another program "
            "has the port, choose another MASTER_PORT"
        ) from error
    return PrefixStore(f"penstock/{call.attempt}", store)


def _store_host() -> tuple[str, int] | None:
    address, port = (os.environ.get(f"MASTER_{name}", "") for name in ("ADDR", "PORT"))
    return (address, int(port)) if address and port.isdecimal() else None


def own_address(host: tuple[str, int] | None) -> str:
    """The address under which the host of the store sees this machine; empty if not known."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(host or ("", 0))  # sends nothing
            address: str = probe.getsockname()[0]
            return "" if _is_loopback(address) else address
    except OSError:
        return ""


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


# ---- how the ranks meet at the store

_CONDITIONS = {
    "runs": "runs, elsewhere in its code",
    "stopped": "is stopped by a signal",
    "ended": "has ended",
    "unknown": "is out of sight, on another machine",
}


def gather(
    store: Any,
    rank: int,
    ranks: int,
    seconds: float,
    place: str,
    *,
    launched: bool = False,
) -> tuple[str, tuple[Process, ...]]:
    """Wait until every rank is there.

    Every rank says that it waits, under a ticket of its own. Rank 0 answers each ticket, once all ranks are
    there, with a random name for their part of the store; so an earlier attempt to meet disturbs nothing.

    Args:
        store: a store that all of them reach.
        rank: this process's rank.
        ranks: the number of ranks.
        seconds: until all must be there.
        place: where they come to, in words.
        launched: whether a launcher has given each process its rank.

    Returns:
        The name, and the process of each rank.

    Raises:
        AgreementError: a rank is absent, comes twice, or has another number of ranks.
    """
    deadline = time.monotonic() + seconds
    ticket, process = secrets.token_hex(8), this_process(own_address(_store_host()))
    own = json.dumps(asdict(process))
    other = store.compare_set(f"process/{rank}", "", own).decode()
    if launched and other != own and _process(other).condition() != "ended":
        raise AgreementError(f"two processes have RANK={rank}; every rank needs its own")
    store.set(f"process/{rank}", own)
    store.set(f"waits/{rank}", json.dumps({"ticket": ticket, "ranks": ranks, "process": own}))
    pause, reply = 0.002, None
    while reply is None:
        if rank == 0:
            _answer_all(store, ranks, seconds, time.monotonic() > deadline, place)
        elif time.monotonic() > deadline + SLACK:
            _say_late(store, rank)
            raise AgreementError(_absent(store, ranks, seconds, place))
        reply = _read(store, f"reply/{ticket}")
        if reply is None:
            time.sleep(pause)
            pause = min(0.05, 1.3 * pause)
    if "problem" in reply:
        _say_late(store, rank)
        if launched and rank == 0:
            # The store may end with this process: the others must have read the answer.
            time.sleep(SLACK)
        raise AgreementError(printable(str(reply["problem"])))
    store.set(f"waits/{rank}", "{}")
    return str(reply["name"]), tuple(_process(text) for text in reply["processes"])


def _answer_all(store: Any, ranks: int, seconds: float, is_late: bool, place: str) -> None:
    """As rank 0, answer all that wait, once there is an answer."""
    entries = [_read(store, f"waits/{rank}") or {} for rank in range(ranks)]
    here = {rank: entry for rank, entry in enumerate(entries) if "ticket" in entry}
    reply: dict[str, Any]
    if len({entry["ranks"] for entry in here.values()}) > 1:
        said = ", ".join(f"rank {rank} has {entry['ranks']}" for rank, entry in here.items())
        reply = {"problem": f"ranks differ in WORLD_SIZE: {said}; start all of them with the same"}
    elif len(here) == ranks:
        name = f"pipeline-{secrets.token_hex(16)}"
        # The watch of each rank reads these from its beginning.
        for key in [
            "failure",
            *(f"{topic}/{rank}" for rank in here for topic in ("beat", "stacks")),
        ]:
            store.set(f"{name}/{key}", "-")
        reply = {"name": name, "processes": [entry["process"] for entry in here.values()]}
    elif is_late:
        reply = {"problem": _absent(store, ranks, seconds, place)}
    else:
        return
    for entry in here.values():
        store.set(f"reply/{entry['ticket']}", json.dumps(reply))


def _say_late(store: Any, rank: int) -> None:
    """Leave; the time of the others is up as well, and they must not take this rank for absent."""
    store.set(f"waits/{rank}", json.dumps({"late": time.time()}))


def _absent(store: Any, ranks: int, seconds: float, place: str) -> str:
    """Who is absent, in words."""
    entries = [_read(store, f"waits/{rank}") or {} for rank in range(ranks)]
    recent = time.time() - seconds - SLACK
    absent = [r for r, e in enumerate(entries) if "ticket" not in e and e.get("late", 0.0) < recent]
    if not absent:
        return f"after {seconds:g} s rank 0 has come to {place}, but does not go on: it is stopped, or ended"
    words = ""
    for rank in absent:
        if store.check([f"process/{rank}"]):
            process = _process(store.get(f"process/{rank}").decode())
            words += f"; process {process.pid} of rank {rank} {_CONDITIONS[process.condition()]}"
    return (
        f"after {seconds:g} s ranks {absent} of {ranks} have not come to {place}{words}; start them, or wait "
        "longer with rendezvous_timeout="
    )


def _read(store: Any, key: str) -> dict[str, Any] | None:
    if not store.check([key]):
        return None
    record: dict[str, Any] = json.loads(store.get(key))
    return record


def _process(text: str) -> Process:
    return Process(**json.loads(text))


def _within(seconds: float, rank: int, place: str, run: Callable[[], T]) -> T:
    """Call a function that may block in torch for longer than this time; then its result is ignored."""
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(run())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="penstock rendezvous", daemon=True)
    thread.start()
    thread.join(seconds + 3 * SLACK)
    if errors and isinstance(errors[0], dist.DistError):
        raise AgreementError(
            f"the store was lost while the ranks came to {place}: {first_line(errors[0])}; the process that "
            "hosts it, usually that of rank 0, has ended: see what it says"
        ) from errors[0]
    if errors:
        raise errors[0]
    if not results:
        raise AgreementError(
            f"rank {rank}, on the way to {place}, has had no answer from the store there for {seconds:g} s: "
            "what listens is no store of torch, or its process is stopped, or the network to it is cut; "
            "where another program has the port, choose another MASTER_PORT"
        )
    return results[0]
