"""Schedules in files: as CSV, which torch reads and writes too, and as JSON, which holds everything."""

from __future__ import annotations

import csv
import io
import json
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import InputFileError, ScheduleError, UsageError, printable
from penstock.schedule.action import COMPUTE_OPS, Action, Entry, parse_action
from penstock.schedule.base import Edge, Placement, Schedule, chain, flat


@dataclass(frozen=True)
class Limits:
    """Limits on what a schedule file may hold.

    Attributes:
        size: bytes in the file.
        ranks: programs in it.
        actions: actions in all programs, including empty cells.
    """

    size: int = 256 * 2**20
    ranks: int = 4096
    actions: int = 10_000_000


DEFAULT = Limits()

SUFFIXES = (".csv", ".json")
_SHOWN = 60
"""How many characters of a wrong text an error shows."""


def save(schedule: Schedule, path: str | Path) -> None:
    """Write a schedule to a ``.csv`` or ``.json`` file.

    Raises:
        UsageError: the name has another ending.
        ScheduleError: CSV cannot hold the schedule's edges.
    """
    file = Path(path)
    text = to_json(schedule) if _suffix(file) == ".json" else to_csv(schedule)
    file.write_text(text, encoding="utf-8", newline="")


def load(path: str | Path, *, limits: Limits = DEFAULT) -> Schedule:
    """Read a schedule from a ``.csv`` or ``.json`` file. Whether it completes is for ``validate`` to say.

    Raises:
        UsageError: the name has another ending.
        InputFileError: the file does not hold a schedule; the message names the file, row, column and text.
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


# ---- files may be anybody's: reading one must come to an end


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
    """Open without waiting for a writer, in case it is a pipe."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _entry(text: str, where: str) -> Entry:
    try:
        return parse_action(text)
    except ScheduleError as error:
        raise InputFileError(
            f"{where}: {text[:_SHOWN]!r} is not an action; "
            "write <stage><op><microbatch>, such as 2F0 or 0SEND_F1"
        ) from error


def _check_counts(ranks: int, actions: int, limits: Limits) -> None:
    """Refuse more programs or actions than the limits allow."""
    if ranks > limits.ranks:
        raise InputFileError(f"{ranks} ranks: more than {limits.ranks}, see Limits.ranks")
    if actions > limits.actions:
        raise InputFileError(f"{actions} actions: more than {limits.actions}, see Limits.actions")


def _check_microbatches(stages: int, microbatches: int, limits: Limits) -> None:
    """Refuse a microbatch index so high that the actions missing below it exceed the limits."""
    if stages * microbatches > limits.actions:
        raise InputFileError(
            f"{microbatches} microbatches of {stages} stages: more than {limits.actions} forwards, "
            "see Limits.actions"
        )


# ---- CSV: one row per rank, one cell per action
# With messages it is what torch calls ``compute_comms``, and without them ``compute_only``. CSV holds neither
# placement nor edges: a stage is on the rank in whose row it computes, and the edges are the chain.


_RUNS = ("=", "+", "-", "@", "\t", "\r")
"""The beginnings of cells that a spreadsheet would take for formulas."""


def to_csv(schedule: Schedule) -> str:
    """Write a schedule as CSV.

    Raises:
        ScheduleError: the schedule has edges other than the chain, which CSV cannot hold.
    """
    if schedule.edges != chain(schedule.stages):
        raise ScheduleError(f"{schedule.name} has edges other than the chain: write it as JSON")
    return csv_table(map(str, program) for program in schedule.programs)


def csv_table(rows: Iterable[Iterable[str]]) -> str:
    """Rows of text as CSV; a cell that a spreadsheet would evaluate is prefixed with ``'``."""
    out = io.StringIO()
    csv.writer(out).writerows([_unrunnable(cell) for cell in row] for row in rows)
    return out.getvalue()


def _unrunnable(cell: str) -> str:
    return f"'{cell}" if cell.startswith(_RUNS) else cell


def from_csv(text: str, *, name: str = "CSV", limits: Limits = DEFAULT) -> Schedule:
    """Read a schedule from CSV; empty cells are bubbles and are left out.

    Args:
        text: one row per rank.
        name: what to call the schedule.
        limits: limits on its size.

    Raises:
        InputFileError: a cell is not an action, or the rows are not a schedule; the message names row,
            column and text.
    """
    rows = _rows(text)
    _check_counts(len(rows), sum(map(len, rows)), limits)
    programs = tuple(tuple(_program(number, row)) for number, row in enumerate(rows, 1))
    placement = _placement(programs)
    microbatches = _microbatches(programs)
    _check_microbatches(placement.stages, microbatches, limits)
    try:
        return Schedule(name, placement, microbatches, programs)
    except ScheduleError as error:
        raise InputFileError(f"{error} (rank r is row r + 1)") from error


def _rows(text: str) -> list[list[str]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        rows = list(reader)
    except csv.Error as error:
        raise InputFileError(f"row {reader.line_num}: not CSV: {error}") from error
    while rows and not rows[-1]:
        rows.pop()
    if not rows:
        raise InputFileError("no rows: expected one per rank")
    return rows


def _program(number: int, row: list[str]) -> Iterable[Entry]:
    for column, cell in enumerate(row, 1):
        text = cell.strip(" ")
        if text:
            yield _entry(text, f"row {number}, column {column}")


def _placement(programs: tuple[tuple[Entry, ...], ...]) -> Placement:
    rank_of: dict[int, int] = {}
    for rank, program in enumerate(programs):
        for stage in sorted({a.stage for a in flat(program) if a.op in COMPUTE_OPS}):
            if rank_of.setdefault(stage, rank) != rank:
                where = _column(program, stage)
                raise InputFileError(
                    f"row {rank + 1}, column {where}: stage {stage} computes in row "
                    f"{rank_of[stage] + 1} already; a stage is on one rank"
                )
        if not any(home == rank for home in rank_of.values()):
            raise InputFileError(f"row {rank + 1}: computes nothing; each rank must hold a stage")
    missing = next((stage for stage in range(len(rank_of)) if stage not in rank_of), None)
    if missing is not None:
        raise InputFileError(f"no row computes stage {missing}, but stage {max(rank_of)} is there")
    return Placement(tuple(rank_of[stage] for stage in range(len(rank_of))))


def _column(program: tuple[Entry, ...], stage: int) -> int:
    """The first column with an action of a stage."""
    at = (i for i, entry in enumerate(program, 1) if any(a.stage == stage for a in flat((entry,))))
    return next(at)


def _microbatches(programs: tuple[tuple[Entry, ...], ...]) -> int:
    return 1 + max(_numbers(action for program in programs for action in flat(program)), default=0)


def _numbers(actions: Iterable[Action]) -> Iterable[int]:
    return (action.microbatch for action in actions if action.microbatch is not None)


# ---- JSON: with placement, edges and name, so that the round trip is exact


FORMAT, VERSION = "penstock-schedule", 1
_KEYS = {
    "format": str,
    "version": int,
    "name": str,
    "microbatches": int,
    "placement": list,
    "edges": list,
    "programs": list,
}
_EDGE_KEYS = {"value": str, "source": int, "targets": list, "gradient": bool}
_LONGEST_NAME = 200
_DIGITS = 18
"""More digits than any number here needs, and fewer than Python refuses to read."""


def to_json(schedule: Schedule) -> str:
    """Write a schedule as JSON, with one line per program."""
    head = {
        "format": FORMAT,
        "version": VERSION,
        "name": schedule.name,
        "microbatches": schedule.microbatches,
        "placement": schedule.placement.rank_of,
        "edges": [
            {"value": e.value, "source": e.source, "targets": e.targets, "gradient": e.gradient}
            for e in schedule.edges
        ],
    }
    lines = ",\n  ".join(json.dumps([str(entry) for entry in p]) for p in schedule.programs)
    return f'{json.dumps(head, indent=1)[:-2]},\n "programs": [\n  {lines}\n ]\n}}\n'


def from_json(text: str, *, limits: Limits = DEFAULT) -> Schedule:
    """Read a schedule from JSON.

    Raises:
        InputFileError: the text is not JSON, has other keys or types, or is not a schedule.
    """
    data = _object(_parse(text), _KEYS, "the file")
    if (data["format"], data["version"]) != (FORMAT, VERSION):
        raise InputFileError(
            f"format {data['format']!r} version {data['version']}: expected {FORMAT!r} version {VERSION}"
        )
    programs = data["programs"]
    for rank, program in enumerate(programs):
        _check_list(program, str, f"programs[{rank}]")
    _check_counts(len(programs), sum(map(len, programs)), limits)
    _check_placement(data["placement"])
    _check_microbatches(len(data["placement"]), data["microbatches"], limits)
    try:
        return Schedule(
            printable(data["name"], keep="")[:_LONGEST_NAME],
            Placement(tuple(data["placement"])),
            data["microbatches"],
            tuple(
                tuple(_entry(text, f"programs[{rank}][{at}]") for at, text in enumerate(program))
                for rank, program in enumerate(programs)
            ),
            tuple(_edge(i, edge) for i, edge in enumerate(data["edges"])),
        )
    except ScheduleError as error:
        raise InputFileError(str(error)) from error


def _parse(text: str) -> object:
    try:
        return json.loads(
            text, object_pairs_hook=_distinct, parse_constant=_no_constant, parse_int=_whole
        )
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputFileError(f"not JSON: {error}") from error


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        raise InputFileError(f"a key occurs twice among {sorted(keys)[:8]}")
    return dict(pairs)


def _whole(text: str) -> int:
    if len(text) > _DIGITS:
        raise InputFileError(f"{text[:_SHOWN]}... is a number of {len(text)} digits")
    return int(text)


def _no_constant(text: str) -> None:
    raise InputFileError(f"{text} is not a number")


def _object(data: object, keys: dict[str, type], where: str) -> dict[str, Any]:
    """An object with exactly these keys, each of its type."""
    if not isinstance(data, dict):
        raise InputFileError(f"{where}: expected an object, found {_kind(data)}")
    if data.keys() != keys.keys():
        wrong = printable(", ".join(sorted(data.keys() ^ keys.keys()))[:_SHOWN])
        raise InputFileError(f"{where}: unknown or missing keys: {wrong}")
    for key, kind in keys.items():
        if type(data[key]) is not kind:
            raise InputFileError(f"{where}: {key} must be {kind.__name__}, not {_kind(data[key])}")
    return data


def _check_list(data: object, kind: type, where: str) -> None:
    if not isinstance(data, list):
        raise InputFileError(f"{where}: expected a list, found {_kind(data)}")
    for i, item in enumerate(data):
        if type(item) is not kind:
            raise InputFileError(f"{where}[{i}]: must be {kind.__name__}, not {_kind(item)}")


def _check_placement(data: list[int]) -> None:
    _check_list(data, int, "placement")
    for stage, rank in enumerate(data):
        if not 0 <= rank < len(data):
            raise InputFileError(f"placement[{stage}]: {rank} is not a rank of {len(data)} stages")


def _kind(data: object) -> str:
    return "null" if data is None else type(data).__name__


def _edge(number: int, data: object) -> Edge:
    where = f"edges[{number}]"
    edge = _object(data, _EDGE_KEYS, where)
    _check_list(edge["targets"], int, f"{where}.targets")
    if not edge["value"].isprintable():
        raise InputFileError(f"{where}.value: {edge['value'][:_SHOWN]!r} cannot be printed")
    return Edge(edge["value"], edge["source"], tuple(edge["targets"]), edge["gradient"])
