"""Files that commands read and write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import typer

from penstock.errors import UsageError
from penstock.schedule import reading


def check_folder(path: Path | None) -> None:
    """Refuse a path in a folder that does not exist, before a command does its work."""
    if path is not None and not path.absolute().parent.is_dir():
        raise UsageError(f"{path}: cannot be written: there is no folder {path.parent}")


def read_text(path: Path) -> str:
    """The text of a file that a flag names."""
    if not path.exists():
        raise UsageError(f"{path}: cannot be read: there is no such file")
    return reading.read_text(path)


def write(path: Path | None, writes: Callable[[Path], object]) -> None:
    """Write a file, if a flag asks for it, and say so."""
    if path is None:
        return
    try:
        writes(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from error
    typer.echo(f"wrote {path}")


def write_text(path: Path | None, text: Callable[[], str]) -> None:
    """Write a text to a file, if a flag asks for it, and say so."""
    write(path, lambda path: path.write_text(text(), encoding="utf-8", newline=""))
