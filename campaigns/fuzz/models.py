"""The models of random programs: the source of their classes, written line by line."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from textwrap import indent
from typing import Any, TypeVar

from hypothesis import strategies as st

from campaigns.fuzz.lines import CALLS, FAMILIES, FORMS, HEAVY, Form

T = TypeVar("T")
STEADY = ("linear", "pointwise", "views", "skips")
"""Families that every program may have; each has a few others, so that it has much of a few things."""
ORDERED = (
    "batch norm", "buffers", "state", "kept values", "given buffers", "own counts", "global numbers"
)  # fmt: skip
"""Families whose numbers depend on the order of the microbatches, and change once more in a checkpoint."""


@dataclass
class Body:
    """A forward that is being written: its values with their kinds, its lines, and its modules."""

    kinds: dict[str, str]
    init: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)
    units: list[str] = field(default_factory=list)
    """The modules with weights, in order."""
    modules: list[str] = field(default_factory=list)
    square: list[str] = field(default_factory=list)
    """The modules with a weight of 4 by 4."""
    tables: list[str] = field(default_factory=list)
    """The embeddings of 4 rows."""
    callable: list[tuple[str, str]] = field(default_factory=list)
    """The modules that can be called again, each with the kind of its argument."""

    def floats(self) -> list[str]:
        return [name for name, kind in self.kinds.items() if kind in "VS"]


class Author:
    """Writes one program with what hypothesis draws."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self.draw = draw
        self.families = {*STEADY, *(self.pick(FAMILIES) for _ in range(6))}
        self.number = 0
        self.classes: list[str] = []
        self.used: set[str] = set()
        self.shares = False
        self.fixed_length = False

    def pick(self, options: Sequence[T]) -> T:
        picked: T = self.draw(st.sampled_from(options))
        return picked

    def chance(self, one_in: int) -> bool:
        return bool(self.draw(st.integers(0, one_in - 1)) == one_in - 1)

    def value(self, body: Body, kind: str) -> str:
        """The name of a value of a kind, preferably a late one, so that models are deep rather than wide."""
        same = [name for name, other in body.kinds.items() if other == kind][::-1]
        return self.pick(same[:2] * 2 + same)

    # ---- models

    def lines(self, body: Body, most: int, depth: int) -> None:
        for _ in range(most):
            if self.draw(st.integers(0, 8)) == 0:
                break
            self.line(body, depth)

    def line(self, body: Body, depth: int) -> None:
        if depth < 2 and body.floats() and self.chance(5):
            self.block(body, depth)
        elif body.callable and self.chance(8):
            self.again(body)
        else:
            forms = [f for f in FORMS if f.family in self.families and self.fits(f, body, depth)]
            if forms:
                family = self.pick(list(dict.fromkeys(form.family for form in forms)))
                self.form(body, self.pick([form for form in forms if form.family == family]))

    def fits(self, form: Form, body: Body, depth: int) -> bool:
        kinds = set(body.kinds.values())
        wanted = all(kind in kinds or (kind == "*" and kinds & {"V", "S"}) for kind in form.takes)
        return wanted and (depth > 0 or not form.only_in_units)

    def form(self, body: Body, form: Form, argument: str = "") -> None:
        """Write a line of a form."""
        self.number += 1
        self.used.add(form.family)
        number, out = self.number, f"h{self.number}"
        first = argument or (self.pick(body.floats()[::-1]) if form.takes[0] == "*" else "")
        star = body.kinds[first] if first else ""
        arguments = [first] if first else [self.value(body, form.takes[0])]
        arguments += [self.value(body, star if k == "*" else k) for k in form.takes[1:]]
        words = {"m": f"self.m{number}", "n": str(number), "out": out}
        self.fixed_length |= bool(re.search(r"\b3\b", form.make + form.code))
        if form.make:
            new = form.make.format(**words)
            body.init.append(new if new.startswith("self.") else f"self.m{number} = {new}")
            self.keep(body, form, f"m{number}", star or form.takes)
        code = form.code.format(*arguments, **words)
        body.code.append(code if "{out}" in form.code else f"{out} = {code}")
        for name, kind in zip((out, f"{out}b"), form.gives, strict=False):
            body.kinds[name] = star if kind == "*" else kind

    def keep(self, body: Body, form: Form, name: str, kind: str) -> None:
        """Note what can be done with a new module."""
        if form.make.startswith(("nn.Parameter", "self.")):
            return
        # The members of a list may be in different stages.
        several = form.make.startswith("nn.ModuleList([")
        names = [f"{name}.0", f"{name}.1"] if several else [name]
        body.modules += names
        if re.search(HEAVY, form.make) and "affine=False" not in form.make:
            body.units += names
        if form.make.startswith("nn.Embedding(4, 4"):
            body.tables.append(name)
        if form.make.startswith("nn.Linear(4, 4") and "\n" not in form.make:
            body.square.append(name)
        if form.code == "{m}({0})" and form.takes == "*":
            body.callable.append((name, kind))

    def again(self, body: Body) -> None:
        """Call a module once more."""
        name, kind = self.pick(body.callable)
        self.number += 1
        self.shares = True
        body.code.append(f"h{self.number} = self.{name}({self.value(body, kind)})")
        body.kinds[f"h{self.number}"] = kind

    def block(self, body: Body, depth: int) -> None:
        """Write a unit of several lines, and its call, or a loop over its calls."""
        first, others = self.pick(body.floats()[::-1]), list(body.kinds)[::-1]
        values = [first] + ([self.pick(others)] if self.chance(3) else [])
        takes = {f"a{i}": body.kinds[name] for i, name in enumerate(values)}
        inner = Body(dict(takes))
        self.lines(inner, 4, depth + 1)
        self.number += 1
        number, out, returned = self.number, f"h{self.number}", inner.floats()[-1]
        kind, text = inner.kinds[returned], returned
        more = [name for name in inner.floats() if inner.kinds[name] == "S" and name != returned]
        if kind == "S" and more and self.chance(4):
            kind = self.pick("td")
            text = (
                f"({returned}, {more[-1]})" if kind == "t" else f"dict(a={returned}, b={more[-1]})"
            )
        self.classes.append(class_text(f"Block{number}", inner, ", ".join(takes), text))
        calls = CALLS[:1] * 2 + (CALLS[:-1] if "losses inside" in self.used else CALLS)
        call = CALLS[0] if self.used & set(ORDERED) else self.pick(calls)
        self.used |= {"units"} | ({"checkpoint"} if "checkpoint" in call else set())
        named = ", ".join(f"{name}={value}" for name, value in zip(takes, values, strict=True))
        words = {"out": out, "m": f"self.m{number}", "args": ", ".join(values), "named": named}
        loop, new = "", f"Block{number}()"
        if kind == takes["a0"] and "," not in words["args"] and self.chance(4):
            words |= {"args": out, "named": f"a0={out}"}
            loop = self.pick((f"for layer in self.m{number}:", "for _ in range(2):"))
            if "layer" in loop:
                words["m"], new = "layer", f"nn.ModuleList([{new}, {new}])"
            else:
                self.shares = True
        text = call.format(**words)
        body.code.append(f"{out} = {first}\n{loop}\n{indent(text, '    ')}" if loop else text)
        body.init.append(f"self.m{number} = {new}")
        body.modules.append(f"m{number}")
        body.units += [f"m{number}"] if inner.units else []
        body.kinds[out] = kind

    def model(self) -> tuple[Body, list[str], list[str]]:
        """The model: its body, the names of its arguments, and of what it returns."""
        takes = {"x0": self.pick("SV")}
        while len(takes) < 4 and self.chance(3):
            takes[f"x{len(takes)}"] = self.pick("SVKQtdoi")
        body = Body(dict(takes))
        self.lines(body, 9, 0)
        for _ in range(max(1, self.pick((2, 3, 4, 6)) - len(body.units))):
            self.form(body, FORMS[0], body.floats()[-1])
        outputs = [body.floats()[-1]]
        if len(body.floats()) > 1 + len(takes) and self.chance(4):
            outputs.append(self.pick(body.floats()[-2::-1]))
        return body, list(takes), outputs

    def chain(self) -> Body:
        """An ``nn.Sequential``."""
        body = Body({"x0": self.pick("SV")})
        forms = [f for f in FORMS if f.family in self.families and f.code == "{m}({0})"
                 and f.takes == f.gives == "*" and "\n" not in f.make]  # fmt: skip
        self.form(body, FORMS[0], "x0")
        for _ in range(5):
            if self.draw(st.integers(0, 5)) == 0:
                break
            self.form(body, self.pick(forms), body.floats()[-1])
        self.form(body, FORMS[0], body.floats()[-1])
        return body


def class_text(name: str, body: Body, takes: str, returned: str) -> str:
    """A module class."""
    init = ["super().__init__()", *body.init]
    parts = ["def __init__(self):", *map(deeper, init), ""] if body.init else []
    parts += [f"def forward(self, {takes}):", *map(deeper, [*body.code, f"return {returned}"])]
    return f"class {name}(nn.Module):\n" + deeper("\n".join(parts))


def deeper(text: str) -> str:
    return indent(text, "    ")
