"""Files on file systems that fail now and then: tried again for a while, replaced as a whole, read with care.

Nothing here imports torch.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

from penstock.errors import (
    CheckpointError,
    InputFileError,
    PenstockError,
    StorageError,
    quoted,
)

BLOCK = 4 << 20
"""The bytes that are written or read at once."""
LONGEST_JSON = 256_000_000
DEEPEST_JSON = 100

# ---- file systems that fail

T = TypeVar("T")
PATIENCE = 10.0
"""Seconds for which an operation is tried again that a file system refuses."""
_PAUSE = 0.1
NO_SUCH_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
_FINAL = {
    errno.ENOSPC,
    getattr(errno, "EDQUOT", 0),
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EISDIR,
}
_FINAL |= {
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EEXIST,
    errno.ENOTEMPTY,
    errno.EFBIG,
}
"""Errors that waiting does not cure."""


def patiently(doing: str, path: Path, act: Callable[[], T]) -> T:
    """Do something with a file, again and again for a while if the file system fails.

    Args:
        doing: what, for the message: ``cannot be <doing>``.
        path: the file or folder.
        act: does it, from the beginning each time.

    Raises:
        StorageError: it failed to the end.
    """
    started = time.monotonic()
    while True:
        try:
            return act()
        except OSError as error:
            if isinstance(error, PenstockError):
                raise
            tried = time.monotonic() - started
            if error.errno in _FINAL or error.errno is None or tried >= PATIENCE:
                raise storage_error(doing, path, error, tried) from error
            time.sleep(_PAUSE)


def storage_error(doing: str, path: Path, error: OSError, tried: float = 0.0) -> StorageError:
    """The error for a failure of a file system: its path, host, number and name."""
    name = errno.errorcode.get(error.errno or 0, "no number")
    again = f", for {tried:.0f} s" if tried >= 1 else ""
    failure = StorageError(
        f"{str(path)[:300]} cannot be {doing} on the host {socket.gethostname()}{again}: "
        f"{error.strerror or error} ({name})"
    )
    failure.errno = error.errno
    return failure


def is_there(path: Path, *, folder: bool = False) -> bool:
    """Tell whether there is a file, or a folder, of this path.

    Raises:
        StorageError: the file system does not say.
    """

    def look() -> bool:
        try:
            mode = os.stat(path).st_mode
        except ValueError:
            return False
        except OSError as error:
            if error.errno in NO_SUCH_FILE:
                return False
            raise
        return stat.S_ISDIR(mode) if folder else not stat.S_ISDIR(mode)

    return patiently("read", path, look)


def check_arrived(path: Path, size: int | None = None) -> None:
    """Check that this host sees a file or folder that another process has written.

    Args:
        path: the file or folder.
        size: the file's size in bytes, if it is known.

    Raises:
        CheckpointError: it does not.
    """
    try:
        seen = patiently("read", path, path.stat).st_size
    except StorageError as error:
        if error.errno not in NO_SUCH_FILE:
            raise
        seen = -1
    if seen < 0 or size not in (None, seen):
        what = "does not see" if seen < 0 else f"sees {seen:,} of {size:,} bytes of"
        raise CheckpointError(
            f"the host {socket.gethostname()} {what} {path}, which another process has written: "
            f"{path.parent.absolute()} must lie where all processes see the same files"
        )


def write_blocks(path: Path, content: Callable[[], Iterable[bytes | memoryview]]) -> int:
    """Write a file, flush it to disk, and return its CRC-32.

    Args:
        path: the file; another one of this name is removed first.
        content: yields the file's bytes, part by part; called again if the file system has failed.
    """

    def write() -> int:
        # After a failure everything is written anew: what had not reached the disk may be lost.
        path.unlink(missing_ok=True)
        summed = 0
        with path.open("xb") as file:
            for part in content():
                for begin in range(0, len(part), BLOCK):
                    block = memoryview(part)[begin : begin + BLOCK]
                    summed = crc32(block, summed)
                    file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return summed

    return patiently("written", path, write)


def write_bytes(path: Path, content: bytes, *, reads_back: bool = False) -> None:
    """Write a file, and flush it to disk; perhaps check that it can be read."""
    write_blocks(path, lambda: [content])
    if reads_back and read_bytes(path, len(content)) != content:
        raise CheckpointError(f"{path} is not what was just written: the file system has lost it")


def rename(hidden: Path, place: Path) -> None:
    """Give a file or folder, which is on the disk, its final name; a file may replace another one."""

    def move() -> None:
        # Again, perhaps: a server may have renamed it, and its answer was lost; or only the flush has failed.
        if hidden.exists() or not place.exists():
            hidden.replace(place)
        _sync(place.parent)

    if hidden.is_dir():
        patiently("written", hidden, lambda: _sync(hidden))
    patiently("written", place, move)


def _sync(folder: Path) -> None:
    """Flush a folder's entries to disk, where the system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file whole, or leave the old one: under another name, flushed to disk, and renamed."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        write_bytes(partial, content, reads_back=True)
        rename(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


# ---- names

_LONGEST_NAME = 255


def file_name(name: str, form: str, source: Path | None = None) -> str:
    """Return the name that one file gives to another, if it is one of those that it may give.

    A table or an index may come from somebody else, and what it names is read, replaced or removed. So such a
    name is never a path: it is one component, visible, and of a known form.

    Args:
        name: the name.
        form: the names that there may be, as a regular expression.
        source: the file that gives it, for the message.

    Raises:
        InputFileError: it is another name.
    """
    is_plain = name.isprintable() and not re.search(r"[/\\:]|^\.", name)
    if not is_plain or len(name) > _LONGEST_NAME or not re.fullmatch(form, name):
        raise InputFileError(
            f"{source or 'it'} names {quoted([name])}, which is no file that belongs beside it: a path, a "
            "hidden file or one of another kind is not used"
        )
    return name


# ---- bytes and JSON


@contextmanager
def open_regular(path: Path) -> Iterator[BufferedReader]:
    """Open a file for reading; refuse anything but a regular file, since a pipe or device might never end."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except ValueError as error:
        raise InputFileError(f"{str(path)[:300]} cannot be read: {error}") from error
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise InputFileError(f"{path} cannot be read: it is not a regular file")
        yield file


def read_bytes(path: Path, most: int = LONGEST_JSON) -> bytes:
    """A file's content, if it is not longer than ``most`` bytes."""

    def read() -> bytes:
        with open_regular(path) as file:
            return file.read(most + 1)

    content = patiently("read", path, read)
    if len(content) > most:
        raise InputFileError(f"{path} has more than {most:,} bytes")
    return content


def parse_json(content: bytes, path: Path) -> Any:
    """The JSON value of a file's content, if it is not nested deeper than ``DEEPEST_JSON``."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputFileError(f"{path} is not JSON ({error})") from error
    if _is_deeper(value, DEEPEST_JSON):
        raise InputFileError(f"{path} is nested deeper than {DEEPEST_JSON} levels")
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return not levels or any(_is_deeper(one, levels - 1) for one in inner)
