"""What a case is, as plain data.

A case is a model and a run of it. The model is a :class:`Body` of lines, each a row of ``lines.toml``, or a
block with a body of its own. Nothing here knows torch's rules: if a plain loop cannot run it, it is not a
case.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

_TABLE = tomllib.loads(Path(__file__).with_name("lines.toml").read_text())
PRELUDES: dict[str, str] = _TABLE.pop("preludes")
BLOCKS: dict[str, str] = _TABLE.pop("blocks")
HOOKS: dict[str, str] = _TABLE.pop("hooks")
WEIGHT_EVENTS: dict[str, str] = _TABLE.pop("weights")
EVENTS: dict[str, str] = _TABLE.pop("events") | WEIGHT_EVENTS

_HEAVY = re.compile(
    r"Linear|Conv|Embedding|LSTM|GRU|RNN|Attention|coder|Norm[123d]*\(|PReLU|Bilinear"
)
FLOATS = "VSI"
CLASSES = 4
"""The number of tokens and classes: at most the smallest width, so that outputs can be scores."""
_OPTIONS = (
    "ready", "uses", "weight", "total", "scaler", "clip", "outputs", "metrics", "evaluate", "twin", "load",
    "autocast", "lengths", "by_name", "balance",
)  # fmt: skip
SEVERAL = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
"""Schedules that take any number of stages on a rank."""
FORMS = {"t": "tuple", "d": "dict", "c": "Pair"}
"""The forms in which a module can return several values, by their kind."""


@dataclass(frozen=True)
class Op:
    """A row of the table."""

    kinds: str
    family: str
    code: list[str] = field(default_factory=lambda: ["{m}({0})"])
    make: list[str] = field(default_factory=list)
    where: str = "any"
    square: str = ""
    options: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def takes(self) -> list[str]:
        """The kinds of its arguments."""
        return self.kinds.split("->")[0].split(",")

    @property
    def gives(self) -> list[str]:
        """The kinds of its results."""
        return self.kinds.split("->")[1].split(",")

    @cached_property
    def choices(self) -> dict[str, list[Any]]:
        """All that can be chosen, with the choices."""
        return {"code": self.code, "make": self.make or [""], **self.options}

    @property
    def is_module(self) -> bool:
        """Whether the line is a call of a module."""
        return any(
            "nn." in make and "nn.Parameter(" not in make.split("\n")[0] for make in self.make
        )


OPS = {name: Op(**{"family": name} | row) for name, row in _TABLE.items()}
FAMILIES = tuple(dict.fromkeys(op.family for op in OPS.values()))


@dataclass
class Line:
    """One line of a forward, which makes the value ``h<number>``.

    Attributes:
        number: the number in the name of what it makes.
        op: the row of the table, ``"block"``, or ``"again"`` for another call of a line's module.
        takes: the names of its arguments.
        choices: for each list of the row the index of the choice.
        body: the body of a block.
        copies: how many copies of a block follow each other.
        times: how often a block is called in a row.
        again: the number of the line whose module is called once more.
    """

    number: int
    op: str
    takes: list[str]
    choices: dict[str, int] = field(default_factory=dict)
    body: Body | None = None
    copies: int = 1
    times: int = 1
    again: int | None = None

    @property
    def is_square(self) -> bool:
        """Whether it has a module with a weight of ``[D, D]``."""
        return self.op in OPS and OPS[self.op].square == "module"

    @property
    def gives_one(self) -> bool:
        """Whether its module returns a single tensor of floats."""
        if self.body is not None:
            return self.body.form == "one" and self.body.kinds()[self.body.gives[0]] in FLOATS
        return OPS[self.op].code[self.choices["code"]].startswith("{m}(")

    @property
    def weighs(self) -> bool:
        """Whether it has a module with weights, which can be placed."""
        if self.body is not None:
            rows = [OPS[line.op].make for line in self.body.lines if line.op in OPS]
            return "nn.Parameter(" in str(rows) or any(line.weighs for line in self.body.lines)
        choices = OPS[self.op].choices.items() if self.is_module else ()
        text = str([values[self.choices[name]] for name, values in choices if name != "code"])
        return "affine=False" not in text and bool(_HEAVY.search(text))

    @property
    def is_module(self) -> bool:
        """Whether it has a module of its own."""
        return self.body is not None or (self.op in OPS and OPS[self.op].is_module)


@dataclass
class Body:
    """A forward: the kinds of its arguments by name, its lines, what it returns and in which form."""

    takes: dict[str, str]
    lines: list[Line]
    gives: list[str]
    form: str = "one"

    def kinds(self) -> dict[str, str]:
        """The kind of each value."""
        found = dict(self.takes)
        for line in self.lines:
            for suffix, kind in zip(("", "b"), self.gives_of(line, found), strict=False):
                found[f"h{line.number}{suffix}"] = kind
        return found

    def gives_of(self, line: Line, kinds: dict[str, str]) -> list[str]:
        """The kinds of the values that a line makes."""
        if line.again is not None:
            line = next(one for one in self.lines if one.number == line.again)
        if line.body is not None:
            forms = {form: kind for kind, form in FORMS.items()}
            inside = line.body.kinds()
            return [forms.get(line.body.form) or inside[line.body.gives[0]]]
        op = OPS[line.op]
        star = next((kinds[v] for v, k in zip(line.takes, op.takes, strict=True) if k == "*"), "?")
        return [star if kind == "*" else kind for kind in op.gives]

    def all_lines(self) -> Iterator[Line]:
        """All lines, including those of blocks."""
        for line in self.lines:
            yield line
            if line.body is not None:
                yield from line.body.all_lines()


@dataclass
class At:
    """A hook, an event or a tie: what it is, the paths of one or two modules, and the step before which."""

    what: str
    path: str = ""
    other: str = ""
    step: int = 0


@dataclass
class Run:
    """What is done with the model; the defaults are the plainest choices."""

    schedule: str = "GPipe"
    ranks: int = 2
    each: int = 1
    rows: list[str] = field(default_factory=list)
    placement: list[int] = field(default_factory=list)
    cut: str = "count"
    points: list[int] = field(default_factory=list)
    balance: str = ""
    batches: list[int] = field(default_factory=lambda: [4])
    microbatches: list[int] = field(default_factory=lambda: [2])
    lengths: list[int] = field(default_factory=list)
    ready: bool = False
    by_name: int = 0
    given: str = "tensors"
    loss: str = "mse"
    reduction: str = "mean"
    weight: str = ""
    uses: str = ""
    accumulate: int = 1
    total: float = 0.0
    scaler: bool = False
    optimizer: str = "SGD"
    clip: str = ""
    outputs: bool = False
    metrics: bool = False
    evaluate: list[int] = field(default_factory=list)
    twin: list[int] = field(default_factory=list)
    load: list[int] = field(default_factory=list)
    dtype: str = "float64"
    autocast: bool = False
    gloo: bool = False

    @property
    def steps(self) -> int:
        """How many steps there are."""
        return len(self.batches)

    @property
    def stages(self) -> int:
        """Into how many stages the model is cut."""
        return len(self.placement) or self.ranks * self.each


@dataclass
class Case:
    """A model and a run of it."""

    name: str
    model: Body
    run: Run
    sequential: bool = False
    width: int = 4
    length: int = 3
    hooks: list[At] = field(default_factory=list)
    ties: list[At] = field(default_factory=list)
    events: list[At] = field(default_factory=list)

    @property
    def draws(self) -> bool:
        """Whether the model draws random numbers."""
        return any(
            line.op in OPS and OPS[line.op].family == "draws" for line in self.model.all_lines()
        )

    def families(self) -> list[str]:
        """The families under which a case is counted."""
        run = self.run
        found = {OPS[line.op].family if line.op in OPS else "reuse" if line.again else "blocks"
                 for line in self.model.all_lines()}  # fmt: skip
        found |= {
            f"call: {list(BLOCKS)[line.choices['call']]}"
            for line in self.model.all_lines()
            if line.body
        }
        found |= {f"event: {event.what}" for event in self.events}
        found |= {"hooks"} if self.hooks else set()
        found |= {f"tie: {tie.what}" for tie in self.ties}
        found |= {f"cut: {'chain' if self.sequential and run.cut == 'count' else run.cut}"}
        found |= {
            f"schedule: {'of its own' if run.rows else run.schedule}",
            f"loss: {run.loss}, {run.reduction}",
        }
        found |= {name for name in _OPTIONS if getattr(run, name)}
        found |= {f"arguments: {run.given}"} if run.given != "tensors" else set()
        found |= {"accumulation"} if run.accumulate > 1 else set()
        found |= {f"inputs: {kind}" for kind in self.model.takes.values()} | {
            f"output: {self.model.form}"
        }
        return sorted(found | {"gloo" if run.gloo else "one process", run.dtype, run.optimizer})


def places(body: Body, path: str = "") -> list[tuple[str, Line]]:
    """The modules of a model, each with its path and line."""
    found = []
    for line in (one for one in body.lines if one.is_module):
        inner = [
            f"{path}m{line.number}" + (f".{i}" if line.copies > 1 else "")
            for i in range(line.copies)
        ]
        found += [(name, line) for name in inner]
        if line.body is not None:
            found += [place for name in inner for place in places(line.body, f"{name}.")]
    return found
