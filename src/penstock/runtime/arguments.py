"""How the values that a stage uses become the arguments of its module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import SpecError
from penstock.schedule import Edge

Call = tuple[tuple[Any, ...], dict[str, Any]]


def as_arguments(taken: Sequence[Edge], values: Mapping[str, Any]) -> Call:
    """The arguments of a stage that uses these values.

    One value is passed by position, a tuple as several arguments; several values are passed by name.
    """
    if len(taken) > 1:
        return (), {edge.value: values[edge.value] for edge in taken}
    value = values[taken[0].value]
    return (value if isinstance(value, tuple) else (value,)), {}


def as_values(given: Sequence[Edge], output: Any) -> dict[str, Any]:
    """The values that a stage's output holds: the whole output, or several by name from a dict.

    Raises:
        SpecError: several are needed and the output is no dict that has them all.
    """
    if len(given) == 1:
        return {given[0].value: output}
    names = [edge.value for edge in given]
    if not isinstance(output, dict) or not output.keys() >= set(names):
        found = list(output) if isinstance(output, dict) else f"a {type(output).__name__}"
        raise SpecError(f"stage {given[0].source} must give a dict with {names}; it gave {found}")
    return {name: output[name] for name in names}
