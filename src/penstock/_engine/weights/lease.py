"""One writer for a folder, and the one way in which what was written there becomes visible.

``filelock.SoftFileLease`` needs no locks, which some file systems lack, or keep on each host. Its file says
whose the folder is, and is touched while the owner lives. Another process takes the folder if the owner ended
on this host, or if nothing has happened for some time of its own clock; clocks of other hosts are not read.
So an owner may have lost the folder: it looks before it publishes or removes anything.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from filelock import LeaseSettingsMismatch, SoftFileLease, Timeout

from penstock._engine.weights.storage import NO_SUCH_FILE, check_arrived, patiently, rename
from penstock.errors import UsageError, shortened

LOCK = ".lock"
RENEWAL = 2.0
"""Seconds between two renewals of a lease."""
PATIENCE = 10.0
"""Seconds without a renewal after which the owner of a lease is taken to have ended."""


class Lease:
    """The right of this process to write into a folder; all writers of the process share it.

    It is given back by :meth:`release`, or when nothing refers to it.

    Args:
        folder: the folder; it is made if necessary.
        clean: removes what an earlier owner has left; called if the folder is newly taken.
        waits: whether to look for some seconds if the owner lives; otherwise it must have ended on this host.

    Raises:
        UsageError: another run has the folder.
        StorageError: the folder cannot be written to.
    """

    def __init__(
        self, folder: Path, clean: Callable[[], None] = lambda: None, *, waits: bool = True
    ) -> None:
        patiently("made", folder, lambda: folder.mkdir(parents=True, exist_ok=True))
        self._path = folder.resolve() / LOCK
        self._lock = SoftFileLease(
            self._path,
            lease_duration=PATIENCE,
            heartbeat_interval=RENEWAL,
            thread_local=False,
            is_singleton=True,
        )
        if self._lock.is_locked and not self.is_ours():
            self._lock.release(force=True)
        is_new = not self._lock.is_locked
        patiently("written to", self._path.parent, partial(self._take, waits=waits))
        self._release = weakref.finalize(self, _give_back, self._lock, self._lock.token)
        if is_new:
            clean()

    def _take(self, *, waits: bool) -> None:
        seen: list[float] = []

        def is_alive() -> bool:
            with suppress(OSError):
                seen.append(self._path.stat().st_mtime)
            return len({*seen}) > 1

        try:
            try:
                most = PATIENCE + RENEWAL if waits else 0.0
                self._lock.acquire(timeout=most, cancel_check=is_alive)
            except Timeout:
                if not waits or is_alive():
                    raise
                # Where names cannot be exchanged, as on NFS, filelock leaves what its owner left.
                self._lock.force_break()
                self._lock.acquire(timeout=0)
        except (Timeout, LeaseSettingsMismatch) as error:
            raise self._refusal() from error

    def _refusal(self) -> UsageError:
        owner = self._lock.owner
        whose = "its .lock is gone"
        if owner is not None:
            whose = f"process {owner.pid} on {shortened(owner.hostname.partition('?')[0])}"
        return UsageError(
            f"{self._path.parent}: another run writes here ({whose}); give each run a folder of its own, or "
            "end the other one. If it is a process of this run, give penstock.Checkpoints(group=...) the "
            "group of all its processes"
        )

    def is_ours(self) -> bool:
        """Tell whether the folder is still this process's.

        Raises:
            StorageError: the file system does not say.
        """

        def look() -> bool:
            try:
                self._path.open("rb").close()
            except OSError as error:
                if error.errno in NO_SUCH_FILE:
                    return False
                raise
            owner = self._lock.owner
            return owner is not None and owner.token == self._lock.token

        return patiently("read", self._path, look)

    def check(self) -> None:
        """Check that the folder is still this process's.

        Raises:
            UsageError: another run has taken it.
        """
        if not self.is_ours():
            raise self._refusal()

    def publish(self, hidden: Path, place: Path, sizes: Mapping[Path, int]) -> None:
        """Make visible what was written: a file, or a folder, gets its name once everything is on the disk.

        Args:
            hidden: where it was written.
            place: its name from now on.
            sizes: the size in bytes of each file that other processes have written for it.

        Raises:
            CheckpointError: a file is not here as its process has written it.
            UsageError: another run has taken the folder.
        """
        for path, size in sizes.items():
            check_arrived(path, size)
        self.check()
        rename(hidden, place)

    def release(self) -> None:
        """Give the folder back."""
        self._release()


def _give_back(lock: SoftFileLease, token: str | None) -> None:
    # What was lost, and taken again since, is not this one's to give back.
    if lock.token == token:
        with suppress(OSError):
            lock.release()
