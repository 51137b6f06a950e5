"""How much a schedule file may hold: files come from others, and reading one must end."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import InputFileError


@dataclass(frozen=True)
class Limits:
    """Caps on what is read.

    Attributes:
        size: bytes of the file.
        ranks: programs.
        actions: actions of all programs, empty cells included.
    """

    size: int = 256 * 2**20
    ranks: int = 4096
    actions: int = 10_000_000


DEFAULT = Limits()


def read_text(path: Path, limits: Limits) -> str:
    """The text of a file that is not too large.

    Raises:
        InputFileError: there is no such file, it is too large, or it is not UTF-8.
    """
    try:
        with open(path, "rb", opener=_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InputFileError(
                    f"{path}: is not a regular file, but a pipe, a device or a socket"
                )
            data = file.read(limits.size + 1)
    except OSError as error:
        raise InputFileError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        if isinstance(error, InputFileError):
            raise
        raise InputFileError(f"{str(path)!r}: cannot be read: {error}") from error
    if len(data) > limits.size:
        raise InputFileError(
            f"{path}: larger than {limits.size} bytes; raise Limits.size to read it"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputFileError(f"{path}: byte {error.start} is not UTF-8 text") from error


def _at_once(path: str, flags: int) -> int:
    """Open without waiting for somebody to write at the other end of a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def check_counts(ranks: int, actions: int, limits: Limits) -> None:
    """Refuse more programs or actions than the limits allow."""
    if ranks > limits.ranks:
        raise InputFileError(f"{ranks} ranks: more than {limits.ranks}, see Limits.ranks")
    if actions > limits.actions:
        raise InputFileError(f"{actions} actions: more than {limits.actions}, see Limits.actions")


def check_microbatches(stages: int, microbatches: int, limits: Limits) -> None:
    """Refuse a microbatch index so high that its missing actions alone exceed the limits."""
    if stages * microbatches > limits.actions:
        raise InputFileError(
            f"{microbatches} microbatches of {stages} stages: more than {limits.actions} forwards, "
            "see Limits.actions"
        )
