"""Schedules in files: CSV, which torch also reads and writes, and JSON, which holds everything.

Files are not trusted: reading one always ends, and an error says in one line what is wrong with it.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from penstock.errors import InputFileError, ScheduleError, UsageError, printable
from penstock.schedule.action import COMPUTE_OPS, Entry, Program, Slice, parse_action
from penstock.schedule.base import (
    Edge,
    Placement,
    Schedule,
    chain,
    flat,
)
from penstock.schedule.reading import MOST_ACTIONS, MOST_RANKS, SUFFIXES, read_text

_SHOWN, _LONGEST_NAME = 60, 200
"""The most characters that an error shows of an invalid text, and the most of a name."""


def save(schedule: Schedule, path: str | Path) -> None:
    """Write a schedule to a ``.csv`` or ``.json`` file.

    Raises:
        UsageError: the name has another ending.
        ScheduleError: CSV cannot hold the schedule's edges.
    """
    file = Path(path)
    text = to_json(schedule) if _suffix(file) == ".json" else to_csv(schedule)
    file.write_text(text, encoding="utf-8", newline="")


def load(path: str | Path) -> Schedule:
    """Read a schedule from a ``.csv`` or ``.json`` file; ``validate`` reports whether it completes.

    Raises:
        UsageError: the name has another ending.
        InputFileError: the file does not hold a schedule; the message names the file, row, column and text.
    """
    file = Path(path)
    suffix = _suffix(file)
    text = read_text(file)
    try:
        if suffix == ".json":
            return from_json(text)
        return from_csv(text, name=printable(file.stem, keep=""))
    except InputFileError as error:
        raise InputFileError(f"{file}: {error}") from error


def _suffix(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise UsageError(f"{path}: the name of a schedule file ends in {' or '.join(SUFFIXES)}")
    return suffix


def _entries(rows: list[list[str]], where: str, first: int) -> Iterator[Program]:
    """Parse each row of texts as a program; empty texts are bubbles and are left out.

    Args:
        rows: a row for each rank.
        where: the place of a text in an error: a format of ``row`` and ``column``, counted from ``first``.
        first: the number of the first row and column.
    """
    count = sum(map(len, rows))
    if len(rows) > MOST_RANKS:
        raise InputFileError(f"{len(rows)} ranks: more than {MOST_RANKS}")
    if count > MOST_ACTIONS:
        raise InputFileError(f"{count} actions: more than {MOST_ACTIONS}")
    for row, texts in enumerate(rows, first):
        program: list[Entry] = []
        for column, text in enumerate(texts, first):
            if stripped := text.strip(" "):
                program.append(_entry(stripped, where, row, column))
        yield tuple(program)


def _entry(text: str, where: str, row: int, column: int) -> Entry:
    try:
        return parse_action(text)
    except ScheduleError as error:
        raise InputFileError(
            f"{where.format(row=row, column=column)}: {text[:_SHOWN]!r} is not an action; "
            "write <stage><op><microbatch>, such as 2F0 or 0SEND_F1"
        ) from error


def _check_microbatches(stages: int, microbatches: int) -> None:
    """Refuse so many microbatches that their forwards alone exceed the limit."""
    if stages * microbatches > MOST_ACTIONS:
        raise InputFileError(
            f"{microbatches} microbatches of {stages} stages: more than {MOST_ACTIONS} forwards"
        )


# ---- CSV: one row per rank, one cell per action
# Torch calls this form ``compute_comms`` with messages, and ``compute_only`` without. CSV holds neither
# placement nor edges: a stage is on the rank in whose row it computes, and the edges are the chain.


def to_csv(schedule: Schedule) -> str:
    """Write a schedule as CSV.

    Raises:
        ScheduleError: the schedule has edges other than the chain, which CSV cannot hold.
    """
    if schedule.edges != chain(schedule.stages):
        raise ScheduleError(f"{schedule.name} has edges other than the chain: write it as JSON")
    out = io.StringIO()
    csv.writer(out).writerows([*map(str, program)] for program in schedule.programs)
    return out.getvalue()


def from_csv(text: str, *, name: str = "CSV") -> Schedule:
    """Read a schedule from CSV; empty cells are bubbles and are left out.

    Args:
        text: the CSV, one row per rank.
        name: the name of the schedule.

    Raises:
        InputFileError: a cell is not an action, or the rows are not a schedule; the message names row,
            column and text.
    """
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        rows = list(reader)
    except csv.Error as error:
        raise InputFileError(f"row {reader.line_num}: not CSV: {error}") from error
    while rows and not rows[-1]:
        rows.pop()
    if not rows:
        raise InputFileError("no rows: expected one per rank")
    programs = tuple(_entries(rows, "row {row}, column {column}", 1))
    placement = _placement(programs)
    actions = (action for program in programs for action in flat(program))
    named = {action.microbatch for action in actions}
    slices = 1 + max((m.number for m in named if isinstance(m, Slice)), default=0)
    microbatches = 1 + max(
        (m.microbatch if isinstance(m, Slice) else m or 0 for m in named), default=0
    )
    _check_microbatches(placement.stages, microbatches * slices)
    try:
        return Schedule(name, placement, microbatches, programs, slices=slices)
    except ScheduleError as error:
        raise InputFileError(f"{error} (rank r is row r + 1)") from error


def _placement(programs: tuple[Program, ...]) -> Placement:
    rank_of: dict[int, int] = {}
    for rank, program in enumerate(programs):
        computing = {action.stage for action in flat(program) if action.op in COMPUTE_OPS}
        if not computing:
            raise InputFileError(f"row {rank + 1}: computes nothing; each rank must hold a stage")
        for stage in sorted(computing):
            if rank_of.setdefault(stage, rank) != rank:
                raise InputFileError(
                    f"row {rank + 1}: stage {stage} computes in row {rank_of[stage] + 1} already; "
                    "a stage is on one rank"
                )
    missing = next((stage for stage in range(len(rank_of)) if stage not in rank_of), None)
    if missing is not None:
        raise InputFileError(f"no row computes stage {missing}, but stage {max(rank_of)} is there")
    return Placement(tuple(rank_of[stage] for stage in range(len(rank_of))))


# ---- JSON: with placement, edges and name, so that the round trip is exact


Number = Annotated[int, Field(le=10**9)]
"""A number with an upper bound that no valid file reaches."""


class EdgeJson(BaseModel):
    """An edge in a file."""

    model_config = ConfigDict(strict=True, extra="forbid")

    value: str
    source: Number
    targets: list[Number]
    gradient: bool


class ScheduleJson(BaseModel):
    """A schedule in a file."""

    model_config = ConfigDict(strict=True, extra="forbid")

    format: Literal["penstock-schedule"]
    version: Literal[1]
    name: str
    microbatches: Number
    slices: Number = 1
    placement: list[Number]
    edges: list[EdgeJson]
    programs: list[list[str]]


def to_json(schedule: Schedule) -> str:
    """Write a schedule as JSON, with one line per program."""
    head = {
        "format": "penstock-schedule",
        "version": 1,
        "name": schedule.name,
        "microbatches": schedule.microbatches,
        **({"slices": schedule.slices} if schedule.slices > 1 else {}),
        "placement": schedule.placement.rank_of,
        "edges": [asdict(edge) for edge in schedule.edges],
    }
    lines = ",\n  ".join(json.dumps([str(entry) for entry in p]) for p in schedule.programs)
    return f'{json.dumps(head, indent=1)[:-2]},\n "programs": [\n  {lines}\n ]\n}}\n'


def from_json(text: str) -> Schedule:
    """Read a schedule from JSON.

    Raises:
        InputFileError: the text is not JSON, has other keys or types, or is not a schedule.
    """
    try:
        data = json.loads(text, object_pairs_hook=_distinct)
        read = ScheduleJson.model_validate(data)
    except ValidationError as error:
        raise InputFileError(_first_of(error)) from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputFileError):
            raise
        raise InputFileError(f"not JSON: {error}") from error
    programs = tuple(_entries(read.programs, "programs[{row}][{column}]", 0))
    stages = len(read.placement)
    beyond = next((rank for rank in read.placement if not 0 <= rank < stages), None)
    if beyond is not None:
        raise InputFileError(f"placement: {beyond} is not a rank of {stages} stages")
    _check_microbatches(stages, read.microbatches * max(1, read.slices))
    try:
        return Schedule(
            printable(read.name, keep="")[:_LONGEST_NAME],
            Placement(tuple(read.placement)),
            read.microbatches,
            programs,
            tuple(map(_edge, read.edges)),
            read.slices,
        )
    except ScheduleError as error:
        raise InputFileError(str(error)) from error


def _edge(read: EdgeJson) -> Edge:
    if not read.value.isprintable():
        raise InputFileError(f"edges: the value {read.value[:_SHOWN]!r} cannot be printed")
    return Edge(read.value, read.source, tuple(read.targets), read.gradient)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        raise InputFileError(f"a key occurs twice among {sorted(keys)[:8]}")
    return dict(pairs)


def _first_of(error: ValidationError) -> str:
    """The first error and its place, in one line."""
    first = error.errors(include_url=False)[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    wrong = (
        "" if first["type"] in ("missing", "extra_forbidden") else f", not {first['input']!r:.60}"
    )
    problem, *_ = first["msg"].partition(" or instance of")
    return printable(f"{place.lstrip('.')[:_SHOWN] or 'the file'}: {problem}{wrong}", keep="")
