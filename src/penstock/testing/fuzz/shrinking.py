"""Make a failing case as small and as plain as possible while it fails in the same way."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from itertools import islice

from penstock.testing.fuzz.cases import OPS, Body, Case, Line, Run

Change = Callable[[Case], object]
"""Takes something away from a copy of a case, or changes nothing if it cannot."""


def shrink(case: Case, fails: Callable[[Case], bool], seconds: float = 60.0) -> Case:
    """The smallest case that is found in some time.

    Args:
        case: a case that fails.
        fails: whether another case fails in the same way.
        seconds: how long to try.
    """
    deadline = time.monotonic() + seconds
    before = None
    while case != before:
        before = case
        for changes in (_runs, _extras, _lines, _blocks, _choices, _values):
            case = _pass(case, changes, fails, deadline)
    return case


def _pass(
    case: Case,
    changes: Callable[[Case], Iterator[Change]],
    fails: Callable[[Case], bool],
    deadline: float,
) -> Case:
    position = 0
    while change := next(islice(changes(case), position, None), None):
        if time.monotonic() > deadline:
            break
        tried = copy.deepcopy(case)
        change(tried)
        # After a success the next change is at the same position.
        if tried != case and fails(tried):
            case = tried
        else:
            position += 1
    return case


# ---- the run

_SHAPE = {
    *("schedule", "ranks", "each", "rows", "placement", "cut", "points"),
    *("batches", "microbatches", "gloo", "dtype"),
}
_PLAIN_SCHEDULES = ("GPipe", "1F1B", "ZB-H1")
_ONE_RANK: dict[str, object] = {
    "ranks": 1, "each": 1, "rows": [], "placement": [], "cut": "count", "points": [],
}  # fmt: skip


def _set(values: Mapping[str, object], case: Case) -> None:
    vars(case.run).update(copy.deepcopy(dict(values)))


def _runs(case: Case) -> Iterator[Change]:
    """Changes that each make the run plainer in some respect, so that none undoes another."""
    run, plain = case.run, vars(Run())
    most = max(*run.batches, *run.microbatches)
    tried: list[Mapping[str, object]] = [{n: v for n, v in plain.items() if n not in _SHAPE}]
    for name in dict.fromkeys((*_PLAIN_SCHEDULES, run.schedule)):
        tried += [_ONE_RANK | {"schedule": name}]
        if run.stages > 2 or run.cut != "points":
            # Cuts at points stay where they are when lines are removed.
            places = [line.number for line in case.model.lines if line.is_module][1:]
            tried += [
                _ONE_RANK | {"schedule": name, "ranks": 2, "cut": "points", "points": [n]}
                for n in places
            ]
        if name == run.schedule:
            break
    if not run.rows and run.ranks > 1:
        fewer = run.ranks - 1
        tried += [{"ranks": fewer, "points": cut} for cut in (run.points[1:], run.points[:-1])]
    if not run.rows:
        tried += [
            {"microbatches": [n] * run.steps, "batches": [n] * run.steps}
            for n in (1, 2)
            if n < most
        ]
        tried += [{"microbatches": [max(run.microbatches) - 1 or 1] * run.steps}]
    tried += [{"cut": "points"}] if run.cut == "lists" else []
    tried += [{"cut": "count"}] if run.cut in ("calls", "traced") else []
    tried += [{"dtype": "float64", "autocast": False}, {"gloo": False}]
    tried += [{one.name: plain[one.name]} for one in fields(Run) if one.name not in _SHAPE]
    for steps in (1, run.steps - 1):
        if 0 < steps < run.steps:
            yield partial(_cut_steps, steps)
    for values in tried:
        yield partial(_set, values)
    yield partial(_put, "width", 4)
    yield partial(_put, "length", 2)


def _put(name: str, value: object, case: Case) -> None:
    setattr(case, name, value)


def _cut_steps(steps: int, case: Case) -> None:
    for name in ("batches", "microbatches", "lengths"):
        setattr(case.run, name, getattr(case.run, name)[:steps])
    case.events = [event for event in case.events if event.step < steps]


def _extras(case: Case) -> Iterator[Change]:
    for name in ("hooks", "ties", "events"):
        for index in range(len(getattr(case, name))):
            rest = [one for place, one in enumerate(getattr(case, name)) if place != index]
            yield partial(_put, name, rest)
    yield partial(_put, "events", [replace(event, step=1) for event in case.events])


# ---- the model


def _bodies(case: Case) -> list[Body]:
    return [case.model, *(line.body for line in case.model.all_lines() if line.body is not None)]


def _lines(case: Case) -> Iterator[Change]:
    """Remove many lines at once, then single ones, from the last to the first."""
    for place, body in enumerate(_bodies(case)):
        numbers = [line.number for line in reversed(body.lines)]
        size = len(numbers)
        while size:
            for start in range(0, len(numbers), size):
                yield partial(_drop, place, numbers[start : start + size])
            size //= 2


def _drop(place: int, numbers: list[int], case: Case) -> None:
    body = _bodies(case)[place]
    for line in [one for one in body.lines if one.number in numbers or one.again in numbers][::-1]:
        _take_out(case, body, line)


def _take_out(case: Case, body: Body, line: Line) -> None:
    """Remove a line if those that use its values can use earlier ones of the same kind."""
    index, kinds = body.lines.index(line), body.kinds()
    before = Body(body.takes, body.lines[:index], []).kinds()
    instead = {}
    for value in (f"h{line.number}", f"h{line.number}b"):
        if value in body.gives or any(value in one.takes for one in body.lines):
            same = [
                name for name in (*line.takes, *reversed(before)) if before[name] == kinds[value]
            ]
            if not same:
                return
            instead[value] = same[0]
    _rename(body, instead)
    body.lines.remove(line)
    _forget(case, index, line.number)


def _rename(body: Body, names: Mapping[str, str]) -> None:
    for line in body.lines:
        line.takes = [names.get(name, name) for name in line.takes]
    body.gives = [names.get(name, name) for name in body.gives]


def _forget(case: Case, index: int, number: int) -> None:
    """Remove what names the module of a removed line; a cut before it moves to the next module."""
    gone = f"m{number}"

    def stays(path: str) -> bool:
        return gone not in path.split(".")

    for name in ("hooks", "ties", "events"):
        setattr(
            case, name, [one for one in getattr(case, name) if stays(one.path) and stays(one.other)]
        )
    case.run.uses = case.run.uses if stays(case.run.uses.partition(" ")[2]) else ""
    points = case.run.points
    if number in points:
        later = [
            line.number
            for line in case.model.lines[index:]
            if line.is_module and line.number not in points
        ]
        case.run.points = sorted({*points, *later[:1]} - {number})


def _at(index: int, change: Callable[[Case, Line], object], case: Case) -> None:
    change(case, list(case.model.all_lines())[index])


def _blocks(case: Case) -> Iterator[Change]:
    for index, line in enumerate(case.model.all_lines()):
        if line.body is not None:
            yield partial(_at, index, lambda _, one: setattr(one, "copies", 1))
            yield partial(_at, index, lambda _, one: setattr(one, "times", 1))
            yield partial(_at, index, lambda _, one: one.choices.update(call=0))
            yield partial(_at, index, _unfold)
            for place in range(1, len(line.takes)):
                yield partial(_at, index, partial(_take_less, place))


def _take_less(place: int, _: Case, line: Line) -> None:
    assert line.body is not None
    name = list(line.body.takes)[place]
    if not _is_used(name, line.body):
        line.takes.pop(place)
        line.body.takes.pop(name)


def _is_used(name: str, body: Body) -> bool:
    return name in body.gives or any(name in line.takes for line in body.lines)


def _unfold(case: Case, block: Line) -> None:
    """Replace a block by its lines."""
    inside = block.body
    around = next(body for body in _bodies(case) if any(line is block for line in body.lines))
    if (
        inside is None
        or inside.form != "one"
        or any(one.again == block.number for one in around.lines)
    ):
        return
    _rename(inside, dict(zip(inside.takes, block.takes, strict=True)))
    index = around.lines.index(block)
    around.lines[index : index + 1] = inside.lines
    _rename(around, {f"h{block.number}": inside.gives[0]})
    _forget(case, index, block.number)


def _choices(case: Case) -> Iterator[Change]:
    for index, line in enumerate(case.model.all_lines()):
        if line.body is not None:
            continue
        for name in (name for name, choice in line.choices.items() if choice):
            yield partial(_at, index, partial(_choose_first, name))
        op = OPS.get(line.op)
        if op is None or (op.gives[:1] == op.takes[:1] and len(op.gives) == 1):
            plain = "linear" if op is None or op.is_module else "pointwise"
            yield partial(_at, index, partial(_become, plain))


def _choose_first(name: str, _: Case, line: Line) -> None:
    line.choices[name] = 0


def _become(op: str, _: Case, line: Line) -> None:
    line.op, line.takes, line.again = op, line.takes[:1], None
    line.choices = dict.fromkeys(OPS[op].choices, 0)


def _values(case: Case) -> Iterator[Change]:
    """Fewer inputs and outputs of the model, and lines that use the first value of the same kind."""
    model = case.model
    for name in model.gives if model.form != "one" else ():
        yield partial(_give_one, name)
    for name in [one for one in list(model.takes)[1:] if not _is_used(one, model)]:
        yield partial(_forget_input, name)
    kinds = model.kinds()
    for index, line in enumerate(model.lines):
        for place, name in enumerate(line.takes):
            first = next(one for one, kind in kinds.items() if kind == kinds[name])
            yield partial(_take, index, place, first)


def _give_one(name: str, case: Case) -> None:
    case.model.form, case.model.gives = "one", [name]


def _forget_input(name: str, case: Case) -> None:
    case.model.takes.pop(name)


def _take(index: int, place: int, name: str, case: Case) -> None:
    case.model.lines[index].takes[place] = name
