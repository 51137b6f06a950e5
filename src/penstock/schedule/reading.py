"""Files that somebody gives: their text, if they are not too large. Needs no library."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from penstock.errors import InputFileError, printable

MOST_BYTES, MOST_RANKS, MOST_ACTIONS = 256 * 2**20, 4096, 10_000_000
"""The largest file that is read, and the most programs and actions of a schedule in one, with empty cells."""
SUFFIXES = (".csv", ".json")


def read_text(path: Path) -> str:
    """Read the text of a file that is not too large.

    Raises:
        InputFileError: the file does not exist, is not a regular file, is too large, or is not UTF-8.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            data = file.read(MOST_BYTES + 1) if is_regular else b""
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InputFileError(f"{printable(str(path))}: cannot be read: {why}") from error
    if not is_regular:
        raise InputFileError(f"{path}: is not a regular file, but a pipe, a device or a socket")
    if len(data) > MOST_BYTES:
        raise InputFileError(f"{path}: larger than {MOST_BYTES} bytes")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputFileError(f"{path}: byte {error.start} is not UTF-8 text") from error


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting for a writer, in case the file is a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
