"""Files that somebody gives: their text, if they are not too large. Needs no library."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import InputFileError, printable


@dataclass(frozen=True)
class Limits:
    """Limits on what a schedule file may hold.

    Attributes:
        size: the most bytes in the file.
        ranks: the most programs in the file.
        actions: the most actions in all programs, including empty cells.
    """

    size: int = 256 * 2**20
    ranks: int = 4096
    actions: int = 10_000_000


DEFAULT = Limits()
SUFFIXES = (".csv", ".json")


def read_text(path: Path, limits: Limits) -> str:
    """Read the text of a file that is not too large.

    Raises:
        InputFileError: the file does not exist, is not a regular file, is too large, or is not UTF-8.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            data = file.read(limits.size + 1) if is_regular else b""
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InputFileError(f"{printable(str(path))}: cannot be read: {why}") from error
    if not is_regular:
        raise InputFileError(f"{path}: is not a regular file, but a pipe, a device or a socket")
    if len(data) > limits.size:
        raise InputFileError(
            f"{path}: larger than {limits.size} bytes; raise Limits.size to read it"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputFileError(f"{path}: byte {error.start} is not UTF-8 text") from error


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting for a writer, in case the file is a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
