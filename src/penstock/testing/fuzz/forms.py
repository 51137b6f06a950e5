"""A case for each form in the table, which chance would take long to come by: ``forms:<number>``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product, starmap
from typing import NamedTuple

from penstock.testing.fuzz.cases import FLOATS, OPS, Body, Case, Line, Run


class _Form(NamedTuple):
    op: str
    kind: str
    option: str
    choice: int
    inside: bool


@cache
def _forms() -> tuple[_Form, ...]:
    return tuple(_every())


def _every() -> Iterator[_Form]:
    for name, op in OPS.items():
        for option, values in op.choices.items():
            # The first of each other option stands with the first code.
            for choice in range(0 if option == "code" else 1, len(values)):
                kinds = FLOATS if "*" in op.kinds and choice == 0 else "S"
                yield from starmap(_Form, product([name], kinds, [option], [choice], (True, False)))


def count() -> int:
    """How many forms there are."""
    return len(_forms())


def form(number: int) -> Case:
    """The case of a form: weights before it and behind it, in another stage each.

    Raises:
        IndexError: there are no more.
    """
    op, kind, option, choice, inside = _forms()[number]
    row = OPS[op]
    choices = dict.fromkeys(row.choices, 0) | {option: choice}
    model = Body({f"x{i}": kind if one == "*" else one for i, one in enumerate(row.takes)}, [], [])
    if inside or row.where == "unit":
        takes = [_after_linear(model, name) for name in model.takes]
        within = Body(dict(zip("abc", model.takes.values(), strict=False)), [], [])
        line = Line(50, op, [_after_linear(within, name) for name in within.takes], choices)
        within.lines.append(line)
        within.gives = ["h50"]
        model.lines.append(Line(40, "block", takes, {"call": 0}, within))
    else:
        model.lines.append(
            Line(40, op, [_after_linear(model, name) for name in model.takes], choices)
        )
    kinds = model.kinds()
    floats = [
        name
        for name in ("h40", *(one for line in model.lines for one in line.takes))
        if kinds[name] in FLOATS
    ]
    if len(model.lines) == 1:  # nothing is before it, so that there would be one stage
        model.takes["y"] = "S"
        floats = [_after_linear(model, "y"), *(name for name in floats if kinds[name] == "S")]
        model.lines.append(
            Line(41, "sum", [floats[0], floats[-1]], dict.fromkeys(OPS["sum"].choices, 0))
        )
        floats = ["h41"]
    model.gives = [_after_linear(model, floats[0])]
    run = Run(
        schedule="ZB-H1",
        cut="points",
        points=[model.lines[-1].number],
        batches=[4, 4],
        microbatches=[2, 2],
    )
    return Case(f"forms:{number}", model, run)


def _after_linear(body: Body, name: str) -> str:
    """A value that a linear layer makes of this one, if it is of floats."""
    if body.kinds()[name] not in FLOATS:
        return name
    number = len(body.lines) + (60 if name in "abc" else 1)
    body.lines.append(Line(number, "linear", [name], dict.fromkeys(OPS["linear"].choices, 0)))
    return f"h{number}"
