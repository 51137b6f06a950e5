"""For which tensors a gradient surely comes back, and for which one may be missing.

A value that a stage gives may be used by nobody, or on a branch that is not always taken. Then no gradient
comes for it, which is not the same as zeros: in the plain model the weights behind it get none either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.schedule import Edge
from penstock.values import ValueSpec, flatten

Links = dict[str, list[list[list[str | int]] | None]]
"""For each value of a stage, and each tensor in it, the tensors ``[value, index]`` that it was made of, or
``None`` where it requires no gradient."""


def name_links(
    reached: Sequence[Sequence[int] | None],
    arguments: Sequence[tuple[str, int]],
    values: Mapping[str, Sequence[int]],
) -> Links:
    """The links of a stage by the names of values.

    Args:
        reached: for each tensor of the module's output, those of its arguments that it was made of.
        arguments: which value's tensor each of the arguments is; those of the batch come after.
        values: for each value that the stage gives, which tensors of the output are in it.
    """
    named: list[list[list[str | int]] | None] = [
        None if row is None else [[*arguments[i]] for i in row if i < len(arguments)]
        for row in reached
    ]
    return {name: [named[index] for index in positions] for name, positions in values.items()}


def positions_in(output: Any, values: Mapping[str, Any]) -> dict[str, list[int]]:
    """Which of an output's tensors are in each value: the whole output, or items of it by name."""
    found: dict[str, list[int]] = {}
    start = 0
    whole = {name: value for name, value in values.items() if value is output}
    for name, item in (whole or output).items():
        stop = start + len(flatten(item)[0])
        if name in values:
            found[name] = list(range(start, stop))
        start = 0 if whole else stop
    return found


def mark_optional(
    edges: Sequence[Edge], specs: Mapping[str, ValueSpec], links: Sequence[Links]
) -> dict[str, ValueSpec]:
    """Mark the tensors whose gradient may be missing.

    Args:
        edges: which stages give and use the values.
        specs: of the values.
        links: of each stage. The loss is made of one tensor at least that the last stage gives, of which is
            not known.
    """
    last = [set(map(tuple, row)) for rows in links[-1].values() for row in rows if row is not None]
    sure: set[tuple[str | int, ...]] = set.intersection(*last) if last else set()
    for of in reversed(links[:-1]):
        rows = {(name, i): row for name, found in of.items() for i, row in enumerate(found)}
        sure.update(tuple(t) for at, row in rows.items() if row and at in sure for t in row)
    used = {edge.value for edge in edges if edge.gradient}
    return {
        name: spec.marked({i for i in range(len(spec.tensors)) if (name, i) in sure})
        if name in used
        else spec
        for name, spec in specs.items()
    }
