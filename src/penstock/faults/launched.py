"""What a launcher said to its processes, and the store that it or rank 0 keeps for them."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, but not marked so

from penstock.errors import AgreementError, UsageError

_POLL = 0.05

logger = logging.getLogger("penstock")


@dataclass(frozen=True)
class Call:
    """What a launcher told this process.

    Args:
        rank: its number.
        world: how many there are.
        address: where rank 0, or the launcher, can be reached.
        port: likewise.
        attempt: what this start of the job is called.
        hosted: whether the launcher keeps the store.
        one_host: whether all processes are on this machine.
    """

    rank: int
    world: int
    address: str
    port: int
    attempt: str = "0"
    hosted: bool = False
    one_host: bool = False

    @property
    def place(self) -> str:
        """The store's, in words."""
        return f"{self.address}:{self.port} (MASTER_ADDR and MASTER_PORT)"


def read_call(environment: Any = os.environ) -> Call:
    """What the environment says.

    Raises:
        UsageError: a variable is missing or makes no sense; the message lists all that is wrong.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    problems = [f"{name} is not set" for name in names if not environment.get(name)]
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        text = environment.get(name) or "0"
        if not text.isdecimal():
            problems.append(f"{name}={text!r} is no number")
        numbers[name] = int(text) if text.isdecimal() else 0
    rank, world, port = numbers.values()
    if not problems and not rank < world:
        problems.append(f"RANK={rank} must be below WORLD_SIZE={world}")
    if not problems and not 0 < port < 65536:
        problems.append(f"MASTER_PORT={port} is no port")
    if problems:
        raise UsageError(
            f"the launcher's environment is incomplete or wrong: {'; '.join(problems)}; start with "
            "torchrun or penstock run, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        )
    address = environment["MASTER_ADDR"]
    return Call(
        rank,
        world,
        address,
        port,
        f"{environment.get('TORCHELASTIC_RUN_ID', '')}/{environment.get('TORCHELASTIC_RESTART_COUNT', 0)}",
        environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        environment.get("LOCAL_WORLD_SIZE") == environment["WORLD_SIZE"] or _is_loopback(address),
    )


def stay_local(call: Call) -> None:
    """Have gloo listen on the loopback interface alone, where all ranks are on this machine."""
    if not call.one_host or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):
            logger.info("all ranks are on this machine: set GLOO_SOCKET_IFNAME=%s", name)
            os.environ["GLOO_SOCKET_IFNAME"] = name
            return


def store_of(call: Call, patience: float, deadline: float) -> Any:
    """The store of a launcher's processes: rank 0 keeps it, or the launcher.

    Args:
        call: what the launcher said.
        patience: seconds until all must be there.
        deadline: the end of them on the monotonic clock.

    Raises:
        UsageError: the port is taken.
        AgreementError: nobody is there, or something else.
    """
    wait = timedelta(seconds=patience)
    if call.rank == 0 and not call.hosted:
        return _hosted_store(call, wait)
    _await_port(call, patience, deadline)
    try:
        return TCPStore(call.address, call.port, None, False, wait, wait_for_workers=False)
    except dist.DistError as error:
        raise AgreementError(
            f"what listens at {call.place} is no store of torch: {first_line(error)}; choose another "
            "MASTER_PORT"
        ) from error


def _hosted_store(call: Call, wait: timedelta) -> Any:
    try:
        listening = _loopback_socket(call) if _is_loopback(call.address) else None
        return TCPStore(
            call.address,
            call.port,
            None,
            True,
            wait,
            wait_for_workers=False,
            master_listen_fd=None if listening is None else listening.detach(),
        )
    except (OSError, dist.DistError) as error:
        raise UsageError(
            f"rank 0 cannot listen at {call.place}: {first_line(error)}; the port is in use, also by a "
            "second process with RANK=0 or the rest of an earlier job: choose another MASTER_PORT"
        ) from error


def _loopback_socket(call: Call) -> socket.socket:
    """A socket that only this machine can reach; torch's own would listen on all interfaces."""
    family, kind, _, _, address = socket.getaddrinfo(
        call.address, call.port, type=socket.SOCK_STREAM
    )[0]
    listening = socket.socket(family, kind)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
        listening.listen(1024)
    except OSError:
        listening.close()
        raise
    return listening


def _await_port(call: Call, patience: float, deadline: float) -> None:
    while True:
        try:
            left = max(_POLL, deadline - time.monotonic())
            socket.create_connection((call.address, call.port), timeout=left).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise AgreementError(
                    f"rank {call.rank} found nobody at {call.place} within {patience:g} s ({error}): is "
                    "rank 0 started, and can this machine reach it?"
                ) from error
            time.sleep(_POLL)


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def first_line(error: BaseException) -> str:
    """What an error says first."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
