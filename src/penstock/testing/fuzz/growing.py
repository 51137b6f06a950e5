"""Cases from seeds: a random model, and a random run of it; or one for each form of the table."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product, starmap
from typing import Any, NamedTuple

from penstock.schedule import names
from penstock.testing.fuzz.cases import (
    BLOCKS,
    EVENTS,
    FAMILIES,
    FLOATS,
    FORMS,
    HOOKS,
    OPS,
    SEVERAL,
    At,
    Body,
    Case,
    Line,
    Run,
    places,
)

_V_SHAPED = ("ZB-V", "V-Half", "V-Min", "DualPipeV")
_IN_ORDER = ("batch norm", "buffers", "parametrised")
_ON_TRACES = ("scale", "evaluation", "training", "gradients of zero")
_OFTEN = ("linear", "pointwise", "skips", "activation", "functional", "in place", "views")


def grow(name: str) -> Case:
    """The case of a name such as ``0:17``, made of a seed and a number; it is always the same.

    Every tenth case has one process per rank. The seed ``forms`` gives the forms of the table, in order.

    Raises:
        IndexError: there are no more forms.
    """
    seed, _, number = name.partition(":")
    if seed == "forms":
        return form(int(number))
    pick = random.Random(name)
    author = _Author(pick)
    model = author.model()
    case = Case(
        name, model, Run(gloo=name.endswith("9")), width=pick.choice((4, 6)), length=pick.choice((3, 2)),
        sequential=author.chains and pick.random() < 0.9,
    )  # fmt: skip
    _decorate(case, pick)
    _plan(case, pick)
    _schedule(case, pick)
    _leave_out(case)
    return case


def _leave_out(case: Case) -> None:
    """Leave out what differs from a plain loop according to the documentation."""
    lines = list(case.model.all_lines())
    if case.run.cut == "traced":
        # A graph has no modules: hooks ran once, while it was traced, and modes stay as they were then.
        case.hooks = []
        case.events = [event for event in case.events if event.what in _ON_TRACES]
    if case.hooks or any(line.op == "hook on a tensor" for line in lines):
        case.run.scaler = False  # the hooks would see scaled gradients
    if _keeps_order(case):
        # Statistics depend on the order of microbatches, and a checkpoint would update them twice.
        for line in (line for line in lines if line.body is not None):
            line.choices["call"] = 0
    if any(line.again is not None or line.times > 1 for line in lines) or case.ties:
        # The gradient of a weight of several stages is complete only at the end of the step.
        case.hooks = [hook for hook in case.hooks if ".weight" not in HOOKS[hook.what]]


def _keeps_order(case: Case) -> bool:
    lines = case.model.all_lines()
    return any(line.op in OPS and OPS[line.op].family in _IN_ORDER for line in lines)


# ---- the model


class _Author:
    """Writes the lines of one model, of some families only, so that each case has much of a few things."""

    def __init__(self, pick: random.Random) -> None:
        self.pick = pick
        self.count = 0
        share = pick.choice((0.15, 0.3, 0.5))
        self.families = {f for f in FAMILIES if pick.random() < (0.6 if f in _OFTEN else share)}
        self.families |= {"linear", "views"}
        if pick.random() < 0.7:
            self.families.discard("draws")
        self.nested = pick.random() < 0.6
        self.chains = pick.random() < 0.1

    def model(self) -> Body:
        pick = self.pick
        if self.chains:
            return self.chain()
        kinds = [pick.choice("SSSVKI")]
        while len(kinds) < 4 and pick.random() < 0.4:
            kinds.append(pick.choice("SSVKNQQtdcooi"))
        takes = {f"x{i}": kind for i, kind in enumerate(kinds)}
        body = self.body(takes, pick.randint(3, 10), depth=0)
        while sum(line.is_module for line in body.lines) < 2 or not _trained(body):
            self.add(body, ("linear",), depth=0)
            body.gives[0] = self.last(body)
        return body

    def chain(self) -> Body:
        """The model of an ``nn.Sequential``."""
        kind = self.pick.choice(FLOATS)
        body = Body({"x0": kind}, [], ["x0"])
        rows = [n for n, op in OPS.items() if op.is_module and op.family in self.families
                and op.kinds in ("*->*", f"{kind}->{kind}") and op.code[0] == "{m}({0})"
                and not any("\n" in make for make in op.make)]  # fmt: skip
        for _ in range(self.pick.randint(2, 7)):
            line = self.line(body, self.pick.choice(rows), 0)
            line.takes, line.choices["code"] = [body.gives[0]], 0
            body.lines.append(line)
            body.gives = [f"h{line.number}"]
        return body

    def body(self, takes: dict[str, str], lines: int, depth: int) -> Body:
        body = Body(takes, [], [])
        for _ in range(lines):
            rows = self.rows(body, depth)
            if rows:
                self.add(body, rows, depth)
        if not self.floats(body):
            self.add(body, ("embedding",), depth)
        body.gives = [self.last(body)]
        self.form(body, depth)
        return body

    def form(self, body: Body, depth: int) -> None:
        """Let it return several values, now and then."""
        kinds, pick = body.kinds(), self.pick
        others = [name for name in self.floats(body) if name not in body.gives]
        if depth:
            others = [name for name in others if kinds[name] == kinds[body.gives[0]] == "S"]
        if others and pick.random() < 0.3:
            body.form = FORMS[pick.choice("tdc")]
            body.gives.append(pick.choice(others))

    def floats(self, body: Body) -> list[str]:
        return [name for name, kind in body.kinds().items() if kind in FLOATS]

    def last(self, body: Body) -> str:
        return self.floats(body)[-1]

    def rows(self, body: Body, depth: int) -> Sequence[str]:
        """Rows of one family that fit here."""
        kinds = set(body.kinds().values())
        fits = [
            name for name, op in OPS.items()
            if op.family in self.families and (depth or op.where == "any") and _fits(op.takes, kinds)
        ]  # fmt: skip
        if not fits:
            return ()
        if depth < 2 and self.nested and self.floats(body) and self.pick.random() < 0.25:
            return ("block",)
        if self.pick.random() < 0.1 and any(_repeats(line) for line in body.lines):
            return ("again",)
        family = self.pick.choice(sorted({OPS[name].family for name in fits}))
        return [name for name in fits if OPS[name].family == family]

    def add(self, body: Body, rows: Sequence[str], depth: int) -> None:
        kinds = set(body.kinds().values())
        rows = [row for row in rows if row not in OPS or _fits(OPS[row].takes, kinds)]
        if rows:
            body.lines.append(self.line(body, self.pick.choice(rows), depth))

    def line(self, body: Body, row: str, depth: int) -> Line:
        kinds, pick = body.kinds(), self.pick
        self.count += 1
        number = self.count
        if row == "again":
            first = pick.choice([line for line in body.lines if _repeats(line)])
            same = [name for name, kind in kinds.items() if kind == kinds[first.takes[0]]]
            return Line(number, row, [self.near(same), *first.takes[1:]], again=first.number)
        if row == "block":
            return self.block(body, number, depth)
        op = OPS[row]
        choices = {name: self.choice(values) for name, values in op.choices.items()}
        return Line(number, row, self.arguments(op.takes, kinds), choices)

    def choice(self, values: Sequence[Any]) -> int:
        return 0 if self.pick.random() < 0.2 else self.pick.randrange(len(values))

    def arguments(self, takes: Sequence[str], kinds: dict[str, str]) -> list[str]:
        star = kinds[
            self.near([name for name, kind in kinds.items() if kind in FLOATS] or [*kinds])
        ]
        wanted = [star if kind == "*" else kind for kind in takes]
        return [
            self.near([name for name, found in kinds.items() if found == kind]) for kind in wanted
        ]

    def near(self, names: Sequence[str]) -> str:
        """One of the names, preferably a late one, so that models are deep rather than wide."""
        return self.pick.choices(names, [2.0**i + 1 for i in range(len(names))])[0]

    def block(self, body: Body, number: int, depth: int) -> Line:
        kinds, pick = body.kinds(), self.pick
        given = [self.near(list(kinds)) for _ in range(pick.choice((1, 1, 1, 2, 3)))]
        given[0] = self.near(self.floats(body))
        takes = {f"a{i}": kinds[name] for i, name in enumerate(given)}
        inner = self.body(takes, pick.randint(1, 4), depth + 1)
        call = 0 if pick.random() < 0.5 else pick.randrange(len(BLOCKS))
        line = Line(number, "block", given, {"call": call}, inner)
        if (
            inner.form == "one"
            and inner.kinds()[inner.gives[0]] == takes["a0"]
            and pick.random() < 0.4
        ):
            line.copies, line.times = pick.choice(((2, 1), (3, 1), (1, 2), (1, 3)))
        return line


def _trained(body: Body) -> bool:
    """Whether its first result depends on a weight."""
    wanted, found = {body.gives[0]}, False
    for line in reversed(body.lines):
        if wanted & {f"h{line.number}", f"h{line.number}b"}:
            wanted |= set(line.takes)
            found = found or line.weighs
    return found


def _fits(takes: Sequence[str], kinds: set[str]) -> bool:
    return all(kind in kinds or (kind == "*" and kinds & set(FLOATS)) for kind in takes)


def _repeats(line: Line) -> bool:
    return line.again is None and line.is_module and line.copies == 1


# ---- hooks, ties, events


def _decorate(case: Case, pick: random.Random) -> None:
    found = places(case.model)
    square = [path for path, line in found if line.is_square]
    for _ in range(pick.randint(1, 3) if pick.random() < 0.25 else 0):
        what = pick.choice(list(HOOKS))
        fits = [path for path, line in found if "output" not in HOOKS[what] or line.gives_one]
        paths = square if ".weight" in HOOKS[what] else fits
        case.hooks += [At(what, pick.choice(paths))] if paths else []
    if len(square) > 1 and pick.random() < 0.15:
        one, other = pick.sample(square, 2)
        case.ties.append(At(pick.choice(("weight", "weight", "module")), one, other))
    case.run.batches = [pick.choice((4, 5, 6, 7))] * 3
    for _ in range(pick.choice((1, 1, 2)) if square and pick.random() < 0.3 else 0):
        step, what = pick.choice((1, 1, 2)), pick.choice(list(EVENTS))
        case.events.append(At(what, pick.choice(square), pick.choice(square), step))


# ---- the run


def _plan(case: Case, pick: random.Random) -> None:
    run = case.run

    def now_and_then(share: float, *values: Any) -> Any:
        return pick.choice(values) if pick.random() < share else None

    if pick.random() < 0.3:
        run.batches = [pick.choice((1, 3, 4, 5, 7)) for _ in run.batches]
    run.accumulate = now_and_then(0.1, 3) or 1
    run.reduction = now_and_then(0.3, "sum") or "mean"
    run.loss = now_and_then(0.4, "cross entropy", "smooth l1", "no target") or "mse"
    run.weight = now_and_then(0.2, "target", "numbers", "number") or ""
    if run.weight and run.accumulate > 1:
        run.accumulate, run.total = 1, 10.0
    elif run.accumulate == 1:
        run.total = now_and_then(0.05, 7.0) or 0.0
    run.optimizer = now_and_then(0.4, "AdamW", "momentum") or "SGD"
    run.clip = now_and_then(0.2, "0.1", "0.5, 1.0", "0.1, float('inf')") or ""
    run.scaler = pick.random() < 0.05 and not run.clip
    run.outputs = pick.random() < 0.2
    run.metrics = pick.random() < 0.05
    run.ready = pick.random() < 0.07
    run.by_name = (
        0 if case.sequential else now_and_then(0.3, *range(len(case.model.takes) + 1)) or 0
    )
    run.given = now_and_then(0.15, "mapping", "requires grad", "views", "alias") or "tensors"
    run.scaler = run.scaler and run.given != "requires grad"
    run.dtype = now_and_then(0.08, "float32") or "float64"
    run.autocast = run.dtype == "float32" and pick.random() < 0.5
    square = [path for path, line in places(case.model) if line.is_square]
    if square and not run.gloo and pick.random() < 0.08:
        run.uses = f"{pick.choice(('norm', 'linear'))} {square[-1]}"
    if not case.draws:
        run.evaluate = [step for step in (0, 1, 2) if pick.random() < 0.06]
        run.twin = [] if run.gloo else [step for step in (0, 2) if pick.random() < 0.03]
    run.load = [1] if pick.random() < 0.04 else []
    if not _depends_on_length(case) and pick.random() < 0.2:
        run.lengths = [case.length, case.length, case.length + 1]


def _depends_on_length(case: Case) -> bool:
    rows = [OPS[line.op] for line in case.model.all_lines() if line.op in OPS]
    return any("{T}" in str(values) for row in rows for values in row.choices.values())


def _schedule(case: Case, pick: random.Random) -> None:
    run = case.run
    units = max(1, sum(line.copies for line in case.model.lines if line.weighs))
    run.ranks = min(units, pick.randint(2, 3) if run.gloo else pick.choice((1, 2, 2, 2, 3, 3, 4)))
    two = units > 1
    run.schedule = pick.choice(
        [n for n in names() if n != "forward-only" and (two or n not in _V_SHAPED)]
    )
    if run.schedule in _V_SHAPED:
        run.ranks, run.each = min(run.ranks, units // 2), 2
    elif run.schedule in SEVERAL:
        run.each = pick.randint(1, min(3, units // run.ranks))
    run.microbatches = [pick.randint(1, 6)] * run.steps
    if run.schedule == "DualPipeV":
        run.microbatches = [max(*run.microbatches, 2 * run.ranks)] * run.steps
        run.batches = [max(size, 2 * run.ranks) for size in run.batches]
    elif pick.random() < 0.15:
        run.microbatches = [pick.randint(1, 5) for _ in run.batches]
    one = len(set(run.microbatches)) == 1 and min(run.batches) >= run.microbatches[0]
    if one and not _keeps_order(case) and pick.random() < 0.25:
        _own_schedule(run, run.microbatches[0], units, pick)
    if run.stages > 1 and pick.random() < 0.5:
        _cut(case, pick)


def _cut(case: Case, pick: random.Random) -> None:
    run = case.run
    run.cut = pick.choice(("points", "lists", "calls", "traced"))
    if run.cut in ("calls", "traced"):
        run.balance = pick.choice(("", "", "parameters", "flops", "memory"))
        return
    numbers = [line.number for line in case.model.lines if line.weighs]
    if len(numbers) < run.stages:
        run.cut = "count"
    else:
        run.points = sorted(pick.sample(numbers[1:], run.stages - 1))


def _own_schedule(run: Run, count: int, units: int, pick: random.Random) -> None:
    """Make a schedule: any order that one rank alone could run is valid, whichever ranks hold the stages."""
    stages = pick.randint(run.ranks, max(run.ranks, min(units, 5)))
    placement = [*range(run.ranks), *(pick.randrange(run.ranks) for _ in range(stages - run.ranks))]
    pick.shuffle(placement)
    rows: list[list[str]] = [[] for _ in range(run.ranks)]
    todo = {m: _path(stages, pick.choice(("B", "IW", "mixed")), pick) for m in range(count)}
    eager = pick.choice((0.0, 0.5, 3.0))
    while any(todo.values()):
        ready = [m for m, path in todo.items() if path]
        m = pick.choices(ready, [1.0 + eager * len(todo[m]) for m in ready])[0]
        stage, op = todo[m].pop(_next(todo[m], pick))
        rows[placement[stage]].append(f"{stage}{op}{m}")
    run.rows, run.placement = [" ".join(row) for row in rows], placement


def _path(stages: int, how: str, pick: random.Random) -> list[tuple[int, str]]:
    """The actions of a microbatch, in order; a W may also come later."""
    back: list[tuple[int, str]] = []
    for stage in reversed(range(stages)):
        split = how == "IW" or (how == "mixed" and pick.random() < 0.5)
        back += [(stage, "I"), (stage, "W")] if split else [(stage, "B")]
    return [*((stage, "F") for stage in range(stages)), *back]


def _next(path: Sequence[tuple[int, str]], pick: random.Random) -> int:
    """The index of the action to take next: the first, or one that may overtake a W."""
    waiting = [i for i, (_, op) in enumerate(path) if op != "W"]
    first = waiting[0] if waiting else 0
    due = [i for i in range(first + 1) if path[i][1] == "W"] or [first]
    return first if path[first][1] != "W" and pick.random() < 0.6 else pick.choice(due)


# ---- one case for each form in the table, since chance takes long to reach them all: ``forms:<number>``


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
    """The case of a form, with weights before it and after it in different stages.

    Raises:
        IndexError: there are no more forms.
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
    if len(model.lines) == 1:  # nothing comes before it, so there would be one stage
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
    """The value that a linear layer makes of this one, if this is a tensor of floats."""
    if body.kinds()[name] not in FLOATS:
        return name
    number = len(body.lines) + (60 if name in "abc" else 1)
    body.lines.append(Line(number, "linear", [name], dict.fromkeys(OPS["linear"].choices, 0)))
    return f"h{number}"
