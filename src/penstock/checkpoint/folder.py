"""The folder of a run's checkpoints: find, publish and remove them.

A checkpoint is a folder ``step-<step>`` with a table and a file of tensors for each process that wrote. It is
written as ``.writing-…`` next to the others, flushed to disk, and renamed when it is complete, so that no
partial one has a checkpoint's name. For the same reason an old one is renamed before it is removed.

The names alone say in which order checkpoints were written. A run that goes back and saves an earlier step
than the latest begins another generation: ``step-<step>-<generation>``.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from penstock._engine.weights.lease import LOCK, Lease
from penstock._engine.weights.storage import is_there, patiently, write_bytes
from penstock.checkpoint.table import TABLE
from penstock.errors import StorageError, UsageError

_NAME = re.compile(r"step-(\d{1,18})(?:-(\d{1,9}))?")


class CheckpointFolder(NamedTuple):
    """A checkpoint's folder, its generation and its step."""

    path: Path
    generation: int
    step: int


def find(folder: Path) -> list[CheckpointFolder]:
    """The checkpoints of a folder, the one that was written last first.

    Raises:
        StorageError: the folder cannot be listed.
    """

    def names() -> list[str]:
        with os.scandir(folder) as entries:
            return [one.name for one in entries if one.is_dir()]

    listed = patiently("listed", folder, names) if is_there(folder, folder=True) else []
    matches = (_NAME.fullmatch(name) for name in listed)
    checkpoints = [
        CheckpointFolder(folder / one[0], int(one[2] or 1), int(one[1])) for one in matches if one
    ]
    return sorted(checkpoints, key=lambda one: (one.generation, one.step), reverse=True)


class Writer:
    """Publishes checkpoints in a folder; only one process of a run does so."""

    def __init__(self, folder: Path, keep: int | None) -> None:
        self._folder = folder
        self._keep = keep
        self._lease: Lease | None = None

    def begin(self, step: int, save: str) -> Path:
        """Make a new folder for the files of a checkpoint."""
        self.hold()
        path = self._folder / f".writing-{step}-{save}"
        patiently("made", path, lambda: path.mkdir(exist_ok=True))
        return path

    def hold(self) -> None:
        """Make the folder of checkpoints if necessary, and take it; refuse if another run has it."""
        if self._lease is None or not self._lease.is_ours():
            self._lease = Lease(self._folder, self._clean)

    def tidy(self) -> None:
        """Remove what a run left that was killed on this host; leave the folder alone if it may be in use."""
        with suppress(UsageError, StorageError):
            if self._lease is None and os.path.lexists(self._folder / LOCK):
                Lease(self._folder, self._clean, waits=False).release()

    def _clean(self) -> None:
        with suppress(OSError):
            for kind in ("writing", "removing", "shared"):
                for left in self._folder.glob(f".{kind}-*"):
                    _delete(left)

    def publish(self, written: Path, step: int, table: bytes, sizes: Mapping[Path, int]) -> Path:
        """Write a checkpoint's table, make the checkpoint visible, and remove old ones.

        Args:
            written: the folder that :meth:`begin` made, with all other files.
            step: the checkpoint's step.
            table: the content of its table.
            sizes: the size in bytes of each file.

        Returns:
            The checkpoint's final folder.

        Raises:
            CheckpointError: the checkpoint cannot be written or not be read; earlier ones are as they were.
            UsageError: another run has taken the folder.
        """
        assert self._lease is not None  # taken when the writing began
        before = find(self._folder)
        write_bytes(written / TABLE, table, reads_back=True)
        place = self._folder / _name(step, before)
        self._lease.publish(written, place, sizes)
        # The new one replaces older ones, and one of the same step.
        others = [one for one in before if one.step != step]
        kept = others if self._keep is None else others[: self._keep - 1]
        self._lease.check()
        for one in before:
            if one not in kept:
                _remove(one.path)
        return place

    def reason(self, error: Exception) -> Exception:
        """Why writing has failed: another run that has taken the folder removes what it finds there."""
        try:
            if self._lease is not None:
                self._lease.check()
        except UsageError as taken:
            return taken
        except StorageError:
            pass
        return error

    def close(self) -> None:
        """Let another run write here."""
        if self._lease is not None:
            self._lease.release()
        self._lease = None


def _name(step: int, before: list[CheckpointFolder]) -> str:
    generation = before[0].generation if before else 1
    if before and before[0].step >= step:
        generation += 1
    return f"step-{step:08d}" + (f"-{generation}" if generation > 1 else "")


def _remove(path: Path) -> None:
    """Remove a checkpoint; rename it first, so that no partial one ever has its name."""
    hidden = path.with_name(f".removing-{path.name}-{os.urandom(4).hex()}")
    with suppress(OSError):
        path.rename(hidden)
        _delete(hidden)


def _delete(path: Path) -> None:
    """Remove a folder, or a file; of a link, the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
