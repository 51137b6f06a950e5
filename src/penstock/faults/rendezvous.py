"""How the ranks of a pipeline find each other: in a bounded time, and in clear words where they do not.

``torch.distributed.init_process_group`` waits half an hour for a rank that nobody started. Here every rank
says that it waits, the first one invites those that have come, and all learn who the others are and where
word can be left, before a first connection is made.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from penstock.errors import AgreementError
from penstock.faults.board import Board, SharedBoard, StoreBoard
from penstock.faults.launched import Call, first_line, read_call, stay_local, store_of
from penstock.faults.processes import Process, die_with_parent, launcher, this_process
from penstock.faults.team import Team

SLACK = 1.0
"""Seconds beyond the time for meeting that a blocked call has to end by itself."""

_LINGER = 1.0
_SHORTEST, _LONGEST = 0.002, 0.05
"""Seconds between two looks at the store: the first ones, and later ones."""

T = TypeVar("T")

logger = logging.getLogger("penstock")


class Rendezvous:
    """One rank's way to the others.

    Args:
        rank: this one.
        ranks: how many there are.
        reach: gives the store that all of them can reach, or an error at a moment of the monotonic clock.
        seconds: until all must be there.
        call: what the launcher said, where there is no group yet.
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
        """Of the processes of a launcher, at the place that it named.

        Raises:
            UsageError: the environment makes no sense.
        """
        call = read_call()
        stay_local(call)

        def reach(deadline: float) -> Any:
            return PrefixStore(f"penstock/{call.attempt}", store_of(call, seconds, deadline))

        return cls(call.rank, call.world, reach, seconds, call)

    @classmethod
    def of_group(cls, group: dist.ProcessGroup, seconds: float) -> Rendezvous:
        """Of the processes of a group."""
        store = PrefixStore("penstock/meeting", group.get_group_store())
        return cls(group.rank(), group.size(), lambda _: store, seconds)

    def meet(self) -> Team:
        """Wait until every rank is there, and learn who the others are.

        Raises:
            UsageError: the port is taken.
            AgreementError: one is missing, comes twice, means another world, or is stopped meanwhile.
        """
        if launcher() is not None:
            die_with_parent()
        try:
            return self._within(self._seconds + SLACK, self._meet)
        except dist.DistError as error:
            raise AgreementError(
                f"the store was lost while the ranks came to {self._place}: {first_line(error)}; the "
                "process that hosts it, as a rule that of rank 0, has ended: see what it says"
            ) from error

    def start_world(self, backend: str, wait: float) -> None:
        """Start the default process group of those that have met.

        Args:
            backend: as for ``init_process_group``.
            wait: seconds that an operation may take; to connect they have the time for meeting.
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
        """A part of the store that only this meeting has."""
        return PrefixStore(f"{name}/{self._name}", self._store)

    def _meet(self) -> Team:
        self._store = self._reach(self._deadline)
        self._come()
        while (found := self._invitation()) is None:
            if time.monotonic() > self._deadline:
                # The others, whose time is up as well, must not take this one for missing.
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
        """Wait no more: what stands there is not for the next meeting."""
        self._store.set(f"waits/{self.rank}", "null")

    def _invitation(self) -> dict[str, Any] | None:
        """What the first rank says to this one, once all have come."""
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
        """What those that wait have said."""
        found = {rank: self._read(f"waits/{rank}") for rank in range(self.ranks)}
        return {rank: waits for rank, waits in found.items() if waits and "token" in waits}

    def _answer(self, here: Mapping[int, Mapping[str, Any]], word: Mapping[str, Any]) -> None:
        for waits in here.values():
            self._store.set(f"invited/{waits['token']}", json.dumps(word))

    def _give_up_all(self, problem: str) -> None:
        """Refuse also those that come later."""
        self._store.set("problem", problem)
        self._refuse(problem)

    def _refuse(self, problem: str) -> None:
        """Raise, and tell all that wait for the first rank; who hosts the store stays until they know."""
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
        """What is known of a rank's process, if it ever came."""
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
        """Memory if all ranks can share it; else keys of the store."""
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
            # All that can have it open; who has it needs no name for it.
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
        """Call a function that torch may hold up for longer; what it does after this time is ignored."""
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
