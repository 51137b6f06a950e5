"""Schedules as JSON: with placement, edges and name, so that the round trip is exact."""

from __future__ import annotations

import json
from typing import Any

from penstock.errors import InputFileError, ScheduleError, printable
from penstock.schedule.action import Entry, parse_action
from penstock.schedule.base import Schedule
from penstock.schedule.edges import Edge, Placement
from penstock.schedule.files.limits import DEFAULT, Limits, check_counts, check_microbatches

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
_SHOWN = 60
_LONGEST_NAME = 200
_DIGITS = 18
"""More than any number here needs, and fewer than Python refuses to read."""


def to_json(schedule: Schedule) -> str:
    """Write a schedule as JSON, a line per program."""
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
    check_counts(len(programs), sum(map(len, programs)), limits)
    _check_placement(data["placement"])
    check_microbatches(len(data["placement"]), data["microbatches"], limits)
    try:
        return Schedule(
            printable(data["name"], keep="")[:_LONGEST_NAME],
            Placement(tuple(data["placement"])),
            data["microbatches"],
            tuple(tuple(_program(rank, program)) for rank, program in enumerate(programs)),
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
            raise InputFileError(f"placement[{stage}]: {rank} is no rank of {len(data)} stages")


def _kind(data: object) -> str:
    return "null" if data is None else type(data).__name__


def _program(rank: int, program: list[str]) -> list[Entry]:
    entries = []
    for position, text in enumerate(program):
        try:
            entries.append(parse_action(text))
        except ScheduleError as error:
            where = f"programs[{rank}][{position}]"
            raise InputFileError(
                f"{where}: {text[:_SHOWN]!r} is not an action; "
                "write <stage><op><microbatch>, such as 2F0 or 0SEND_F1"
            ) from error
    return entries


def _edge(number: int, data: object) -> Edge:
    where = f"edges[{number}]"
    edge = _object(data, _EDGE_KEYS, where)
    _check_list(edge["targets"], int, f"{where}.targets")
    if not edge["value"].isprintable():
        raise InputFileError(f"{where}.value: {edge['value'][:_SHOWN]!r} cannot be printed")
    return Edge(edge["value"], edge["source"], tuple(edge["targets"]), edge["gradient"])
