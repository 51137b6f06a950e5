"""Schedules as CSV: a row per rank, a cell per action. torch writes and reads the same.

With messages it is what torch calls ``compute_comms``, without ``compute_only``. CSV holds neither placement
nor edges: a stage is on the rank in whose row it computes, and the edges are the chain.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable

from penstock.errors import InputFileError, ScheduleError
from penstock.schedule.action import COMPUTE_OPS, Action, Entry, parse_action
from penstock.schedule.base import Schedule, flat
from penstock.schedule.edges import Placement, chain
from penstock.schedule.files.limits import DEFAULT, Limits, check_counts, check_microbatches

_RUNS = ("=", "+", "-", "@", "\t", "\r")
"""What a cell begins with that a spreadsheet takes for a formula."""
_SHOWN = 60
"""How much of a wrong cell an error shows."""


def to_csv(schedule: Schedule) -> str:
    """Write a schedule as CSV.

    Raises:
        ScheduleError: the schedule has edges other than the chain, which CSV cannot hold.
    """
    if schedule.edges != chain(schedule.stages):
        raise ScheduleError(f"{schedule.name} has edges other than the chain: write it as JSON")
    return csv_table(map(str, program) for program in schedule.programs)


def csv_table(rows: Iterable[Iterable[str]]) -> str:
    """Rows of text as CSV; a cell that a spreadsheet would run gets a ``'`` in front."""
    out = io.StringIO()
    csv.writer(out).writerows([_unrunnable(cell) for cell in row] for row in rows)
    return out.getvalue()


def _unrunnable(cell: str) -> str:
    return f"'{cell}" if cell.startswith(_RUNS) else cell


def from_csv(text: str, *, name: str = "CSV", limits: Limits = DEFAULT) -> Schedule:
    """Read a schedule from CSV; empty cells are bubbles and left out.

    Args:
        text: a row per rank.
        name: what to call the schedule.
        limits: caps on its size.

    Raises:
        InputFileError: a cell is not an action, or the rows are not a schedule; the message names row,
            column and text.
    """
    rows = _rows(text)
    check_counts(len(rows), sum(map(len, rows)), limits)
    programs = tuple(tuple(_program(number, row)) for number, row in enumerate(rows, 1))
    placement = _placement(programs)
    microbatches = _microbatches(programs)
    check_microbatches(placement.stages, microbatches, limits)
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
            try:
                yield parse_action(text)
            except ScheduleError as error:
                raise InputFileError(
                    f"row {number}, column {column}: {text[:_SHOWN]!r} is not an action; "
                    "write <stage><op><microbatch>, such as 2F0 or 0SEND_F1"
                ) from error


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
