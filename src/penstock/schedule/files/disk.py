"""Schedules on disk: the ending of the name says the form."""

from __future__ import annotations

from pathlib import Path

from penstock.errors import InputFileError, UsageError, printable
from penstock.schedule.base import Schedule
from penstock.schedule.files.csv_form import from_csv, to_csv
from penstock.schedule.files.json_form import from_json, to_json
from penstock.schedule.files.limits import DEFAULT, Limits, read_text

SUFFIXES = (".csv", ".json")


def save(schedule: Schedule, path: str | Path) -> None:
    """Write a schedule to a ``.csv`` or ``.json`` file.

    Raises:
        UsageError: another ending.
        ScheduleError: CSV cannot hold the schedule's edges.
    """
    file = Path(path)
    text = to_json(schedule) if _suffix(file) == ".json" else to_csv(schedule)
    file.write_text(text, encoding="utf-8", newline="")


def load(path: str | Path, *, limits: Limits = DEFAULT) -> Schedule:
    """Read a schedule from a ``.csv`` or ``.json`` file. Whether it completes is for ``validate`` to say.

    Raises:
        UsageError: another ending.
        InputFileError: what the file holds is not a schedule; the message names file, row, column, text.
    """
    file = Path(path)
    suffix = _suffix(file)
    text = read_text(file, limits)
    try:
        if suffix == ".json":
            return from_json(text, limits=limits)
        return from_csv(text, name=printable(file.stem, keep=""), limits=limits)
    except InputFileError as error:
        raise InputFileError(f"{file}: {error}") from error


def _suffix(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UsageError(f"{path}: the name of a schedule file ends in {' or '.join(SUFFIXES)}")
    return suffix
