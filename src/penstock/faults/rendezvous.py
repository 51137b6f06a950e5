"""How the ranks of a pipeline meet: in a bounded time, and with a clear message if they do not.

The launcher's variables lead every process to a store, which the launcher or rank 0 hosts. With
``torch.distributed.init_process_group`` they would wait half an hour for a rank that nobody has started.
Here, every rank says in the store that it waits, rank 0 invites those that have come, and all ranks learn
who the others are and where to leave messages, before any connection is made.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # public, but not marked so
from torch.distributed.distributed_c10d import PrefixStore

from penstock.errors import AgreementError, UsageError
from penstock.faults.board import Board, SharedBoard, StoreBoard
from penstock.faults.monitor import Team
from penstock.faults.processes import Process, die_with_parent, launcher, this_process

# ---- the launcher's variables, and the store


_POLL = 0.05

logger = logging.getLogger("penstock")


@dataclass(frozen=True)
class Call:
    """What a launcher has told this process.

    Args:
        rank: its rank.
        world: the number of ranks.
        address: the address of the store, at rank 0 or the launcher.
        port: the port of the store.
        attempt: the name of this start of the job.
        hosted: whether the launcher hosts the store.
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
        """The place of the store, in words."""
        return f"{self.address}:{self.port} (MASTER_ADDR and MASTER_PORT)"


def read_call(environment: Any = os.environ) -> Call:
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
    rank, world, port = numbers.values()
    if not problems and not rank < world:
        problems.append(f"RANK={rank} must be below WORLD_SIZE={world}")
    if not problems and not 0 < port < 65536:
        problems.append(f"MASTER_PORT={port} is no port")
    if problems:
        raise UsageError(
            f"the launcher's environment is incomplete or wrong: {'; '.join(problems)}; start with "
            "torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
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
    """Have gloo listen on the loopback interface alone, if all ranks are on this machine."""
    if not call.one_host or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    for _, name in socket.if_nameindex():
        if name in ("lo", "lo0"):
            logger.info("all ranks are on this machine: set GLOO_SOCKET_IFNAME=%s", name)
            os.environ["GLOO_SOCKET_IFNAME"] = name
            return


def store_of(call: Call, patience: float, deadline: float) -> Any:
    """The store of a launcher's processes, hosted by rank 0 or by the launcher.

    Args:
        call: what the launcher said.
        patience: seconds until all ranks must be there.
        deadline: the end of that time, on the monotonic clock.

    Raises:
        UsageError: the port is in use.
        AgreementError: nothing listens there, or something that is not a store.
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
    """A socket that only this machine can reach, as torch's own would listen on all interfaces."""
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
    """The first line of an error's message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


# ---- how the ranks meet at the store


SLACK = 1.0
"""Seconds beyond the time for meeting in which a blocked call should end by itself."""

_LINGER = 1.0
_SHORTEST, _LONGEST = 0.002, 0.05
"""Seconds between two looks at the store, at first and later."""

T = TypeVar("T")


class Rendezvous:
    """How one rank meets the others.

    Args:
        rank: this rank.
        ranks: the number of ranks.
        reach: connects to the common store; it raises at a given time on the monotonic clock.
        seconds: the time until all ranks must be there.
        call: what the launcher said, if there is no process group yet.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        reach: Callable[[float], Any],
        seconds: float,
        call: Call | None = None,
    ) -> None:
        self.rank = rank
        self.ranks = ranks
        self._reach = reach
        self._store: Any = None
        self._name = ""
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._call = call
        self._place = call.place if call else "make their pipeline"
        self._process = this_process()
        self._token = secrets.token_hex(8)
        self._pause = _SHORTEST

    @classmethod
    def of_launcher(cls, seconds: float) -> Rendezvous:
        """For the processes of a launcher, at the address that it gave.

        Raises:
            UsageError: the launcher's variables are wrong.
        """
        call = read_call()
        stay_local(call)

        def reach(deadline: float) -> Any:
            return PrefixStore(f"penstock/{call.attempt}", store_of(call, seconds, deadline))

        return cls(call.rank, call.world, reach, seconds, call)

    @classmethod
    def of_group(cls, group: dist.ProcessGroup, seconds: float) -> Rendezvous:
        """For the processes of an existing group."""
        store = PrefixStore("penstock/meeting", group.get_group_store())
        return cls(group.rank(), group.size(), lambda _: store, seconds)

    def meet(self) -> Team:
        """Wait until every rank is there, and learn who the others are.

        Raises:
            UsageError: the port is in use.
            AgreementError: a rank is missing, comes twice, has another WORLD_SIZE, or is stopped meanwhile.
        """
        if launcher() is not None:
            die_with_parent()
        try:
            return self._within(self._seconds + SLACK, self._meet)
        except dist.DistError as error:
            raise AgreementError(
                f"the store was lost while the ranks came to {self._place}: {first_line(error)}; the "
                "process that hosts it, usually that of rank 0, has ended: see what it says"
            ) from error

    def start_world(self, backend: str, wait: float) -> None:
        """Start the default process group of the ranks that have met.

        Args:
            backend: as for ``init_process_group``.
            wait: seconds that an operation may take; connecting has the time for meeting.
        """
        dist.init_process_group(
            backend,
            store=self.room("world"),
            rank=self.rank,
            world_size=self.ranks,
            timeout=timedelta(seconds=self._seconds + SLACK),
        )
        if dist.group.WORLD is not None:
            dist.group.WORLD.set_timeout(timedelta(seconds=wait))

    def room(self, name: str) -> Any:
        """A part of the store that only this meeting uses."""
        return PrefixStore(f"{name}/{self._name}", self._store)

    def _meet(self) -> Team:
        self._store = self._reach(self._deadline)
        self._come()
        while (found := self._invitation()) is None:
            if time.monotonic() > self._deadline:
                # The time of the others is up as well; they must not take this rank for missing.
                self._store.set(f"waits/{self.rank}", json.dumps({"late": time.time()}))
                self._refuse(self._absent())
            self._wait()
        self._leave()
        self._name = found["name"]
        processes = {rank: Process(**data) for rank, data in enumerate(found["processes"])}
        return Team(self.rank, processes, self._board(found["folder"], processes))

    def _come(self) -> None:
        own = json.dumps(self._process.as_json())
        seen = self._store.compare_set(f"process/{self.rank}", "", own).decode()
        if self._call is not None and seen != own and self._of(seen).condition() != "ended":
            self._give_up_all(f"two processes have RANK={self.rank}; every rank needs its own")
        self._store.set(f"process/{self.rank}", own)
        waits = {"token": self._token, "ranks": self.ranks, "process": self._process.as_json()}
        self._store.set(f"waits/{self.rank}", json.dumps(waits))

    def _leave(self) -> None:
        """Stop waiting, so that the next meeting does not find this rank's entry."""
        self._store.set(f"waits/{self.rank}", "null")

    def _invitation(self) -> dict[str, Any] | None:
        """What rank 0 has answered this rank; None while ranks are missing."""
        if self._call is not None and self._store.check(["problem"]):
            self._refuse(self._store.get("problem").decode(errors="replace"))
        if self.rank == 0:
            self._invite()
        found = self._read(f"invited/{self._token}")
        if found is not None and "problem" in found:
            self._leave()
            raise AgreementError(found["problem"])
        return found

    def _invite(self) -> None:
        here = self._here()
        sizes = {rank: waits["ranks"] for rank, waits in here.items()}
        if len(set(sizes.values())) > 1:
            told = ", ".join(f"rank {rank} has {size}" for rank, size in sizes.items())
            self._give_up_all(
                f"ranks differ in WORLD_SIZE: {told}; start all of them with the same"
            )
        if len(here) < self.ranks:
            return
        folder = None
        processes = [waits["process"] for waits in here.values()]
        if all(Process(**process).is_here for process in processes):
            with suppress(OSError):
                folder = str(SharedBoard.make(self.ranks))
        word = {"name": secrets.token_hex(8), "processes": processes, "folder": folder}
        self._answer(here, word)

    def _here(self) -> dict[int, dict[str, Any]]:
        """The entries of all ranks that wait."""
        found = {rank: self._read(f"waits/{rank}") for rank in range(self.ranks)}
        return {rank: waits for rank, waits in found.items() if waits and "token" in waits}

    def _answer(self, here: Mapping[int, Mapping[str, Any]], word: Mapping[str, Any]) -> None:
        for waits in here.values():
            self._store.set(f"invited/{waits['token']}", json.dumps(word))

    def _give_up_all(self, problem: str) -> None:
        """Refuse, now and for ranks that come later."""
        self._store.set("problem", problem)
        self._refuse(problem)

    def _refuse(self, problem: str) -> None:
        """Raise, and tell all ranks that wait. A rank 0 that hosts the store stays until they know."""
        if self.rank == 0:
            self._answer(self._here(), {"problem": problem})
        if self._call is not None and self.rank == 0 and not self._call.hosted:
            time.sleep(_LINGER)
        raise AgreementError(problem)

    def _absent(self) -> str:
        words = [self._read(f"waits/{rank}") or {} for rank in range(self.ranks)]
        oldest = time.time() - self._seconds
        missing = [
            rank for rank, w in enumerate(words) if "token" not in w and w.get("late", 0.0) < oldest
        ]
        if not missing:
            return self._held_up([0])
        told = [text for rank in missing if (text := self._stand_of(rank))]
        return (
            f"after {self._seconds:g} s ranks {missing} of {self._all} have not come to {self._place}"
            f"{'; '.join(['', *told])}; start them, or wait longer with rendezvous_timeout"
        )

    def _held_up(self, ranks: list[int]) -> str:
        told = [text for rank in ranks if (text := self._stand_of(rank))]
        return (
            f"after {self._seconds:g} s ranks {ranks} of {self._all} came to {self._place}, but do not go "
            f"on{'; '.join(['', *told])}"
        )

    @property
    def _all(self) -> str:
        return f"WORLD_SIZE={self.ranks}" if self._call else str(self.ranks)

    def _stand_of(self, rank: int) -> str:
        """What is known of a rank's process, if it came before."""
        if not self._store.check([f"process/{rank}"]):
            return ""
        process = self._of(self._store.get(f"process/{rank}").decode())
        words = {
            "runs": "runs, elsewhere in its code",
            "stopped": "is stopped by a signal",
            "ended": "has ended",
            "unknown": f"is out of sight, on {process.host.partition('/')[0]}",
        }
        return f"the process {process.pid} of rank {rank} {words[process.condition()]}"

    def _board(self, folder: str | None, processes: Mapping[int, Process]) -> Board:
        """A board in shared memory if all ranks can share it, otherwise in the store."""
        own: Board | None = None
        if folder is not None and processes[0].is_here:
            with suppress(OSError, ValueError):
                own = SharedBoard.opened(self.rank, self.ranks, Path(folder))
        store = self.room("board")
        StoreBoard.prepare(self.rank, store)
        store.set(f"shares/{self.rank}", json.dumps(own is not None))
        while silent := [rank for rank in range(self.ranks) if not store.check([f"shares/{rank}"])]:
            if time.monotonic() > self._deadline:
                raise AgreementError(self._held_up(silent))
            self._wait()
        if folder is not None:
            # All ranks that can have it open now, and need no name for it any more.
            with suppress(OSError):
                os.unlink(folder)
        shares = all(json.loads(store.get(f"shares/{rank}")) for rank in range(self.ranks))
        return own if own is not None and shares else StoreBoard(self.rank, self.ranks, store)

    def _read(self, key: str) -> dict[str, Any] | None:
        if not self._store.check([key]):
            return None
        found: dict[str, Any] | None = json.loads(self._store.get(key))
        return found

    @staticmethod
    def _of(text: str) -> Process:
        return Process(**json.loads(text))

    def _within(self, seconds: float, run: Callable[[], T]) -> T:
        """Call a function that may block in torch for longer than this time; then its result is ignored."""
        found: list[T] = []
        failed: list[BaseException] = []

        def call() -> None:
            try:
                found.append(run())
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=call, name="penstock rendezvous", daemon=True)
        thread.start()
        thread.join(seconds)
        if failed:
            raise failed[0]
        if not found:
            raise AgreementError(
                f"rank {self.rank}, on the way to {self._place}, has had no answer from the store there "
                f"for {seconds:g} s: what listens is no store of torch, or its process is stopped, or the "
                "network to it is cut; where another program has the port, choose another MASTER_PORT"
            )
        return found[0]

    def _wait(self) -> None:
        time.sleep(self._pause)
        self._pause = min(_LONGEST, 1.3 * self._pause)
