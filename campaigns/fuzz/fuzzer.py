"""Many random programs, each judged; failures are shrunk, and grouped by their reason."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, reproduce_failure, settings

from campaigns.fuzz.judging import Outcome
from campaigns.fuzz.programs import LAYOUTS, Program, programs

KINDS = ("same", "refused", "failed", "void")
SHRINKING = 60.0
"""How many seconds new failures are made smaller."""
Judge = Callable[[Program], Outcome]


class Failure(AssertionError):
    """A program failed. Each reason has a class of its own, by which hypothesis tells them apart."""

    def __init__(self, program: Program, outcome: Outcome) -> None:
        super().__init__(f"{outcome.reason}\n{program.source}\n{outcome.detail}")
        self.program = program
        self.outcome = outcome


@dataclass
class Fuzzer:
    """What became of the programs so far.

    Attributes:
        judge: runs a program.
        deadline: the time after which nothing more is generated or shrunk.
        kinds: how many programs ended how.
        features: the same for each feature of programs.
        reasons: how often a program was refused or void, by reason.
        faults: the smallest program for each reason of a failure, and the line that repeats it.
    """

    judge: Judge
    deadline: float = float("inf")
    kinds: Counter[str] = field(default_factory=Counter)
    features: dict[str, Counter[str]] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    faults: dict[str, dict[str, str]] = field(default_factory=dict)
    _known: dict[str, Outcome] = field(default_factory=dict)
    _classes: dict[str, type[Failure]] = field(default_factory=dict)
    _reported: set[str] = field(default_factory=set)
    _until: float = 0.0

    def explore(self, seed: int, most: int, *, layout: str = LAYOUTS[0]) -> None:
        """Generate programs, and shrink those that fail in a way that is new."""
        test = self._test(layout)
        options = settings(
            max_examples=most,
            database=None,
            deadline=None,
            print_blob=True,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        )
        self._until = self.deadline
        try:
            hypothesis.seed(seed)(options(test))()
        except BaseExceptionGroup as group:
            self._add_faults(group.exceptions, layout)
        except Failure as failure:
            self._add_faults([failure], layout)

    def repeat(self, blob: str) -> tuple[Program, Outcome]:
        """Run the program of a line that repeats a failure."""
        code, _, where = blob.partition(":")
        runs: list[Program] = []

        @reproduce_failure(hypothesis.__version__, code.encode())
        @settings(database=None, deadline=None, suppress_health_check=list(HealthCheck))
        @given(programs(layout=LAYOUTS[int(where)]))
        def test(program: Program) -> None:
            runs.append(program)
            raise Failure(program, Outcome("failed"))

        with suppress(Failure):
            test()
        return runs[-1], self.judge(runs[-1])

    def _test(self, layout: str) -> Callable[[], None]:
        @given(programs(layout=layout))
        def test(program: Program) -> None:
            outcome = self._known.get(program.source)
            if outcome is None:
                if time.monotonic() > self._until:
                    return
                outcome = self._known[program.source] = self.judge(program)
                self._count(program, outcome)
            if outcome.kind == "failed" and outcome.reason not in self.faults:
                if self._until == self.deadline:
                    self._until = time.monotonic() + SHRINKING
                raise self._class_of(outcome.reason)(program, outcome)

        return test

    def _class_of(self, reason: str) -> type[Failure]:
        return self._classes.setdefault(reason, type("Failure", (Failure,), {}))

    def _count(self, program: Program, outcome: Outcome) -> None:
        self.kinds[outcome.kind] += 1
        for feature in program.features:
            self.features.setdefault(feature, Counter())[outcome.kind] += 1
        if outcome.kind in ("refused", "void"):
            self.reasons[f"{outcome.kind} {outcome.reason}"] += 1

    def _add_faults(self, failures: Any, layout: str) -> None:
        for failure in failures:
            if not isinstance(failure, Failure):
                raise failure
            notes = "".join(getattr(failure, "__notes__", []))
            blob = re.search(r"reproduce_failure\('[^']*', b'([^']+)'\)", notes)
            case = f"{blob[1]}:{LAYOUTS.index(layout)}" if blob else "unknown"
            self.faults[failure.outcome.reason] = {
                "program": failure.program.source,
                "repeat": f"make campaign ARGS='fuzz --case {case}'",
                "detail": failure.outcome.detail,
            }

    def report(self) -> str:
        """The counts, and each fault with its program and the line that repeats it."""
        lines = [f"{'feature':34}" + "".join(f"{kind:>9}" for kind in KINDS)]
        for name, counts in sorted(self.features.items()):
            lines.append(f"{name:34}" + "".join(f"{counts[kind]:9}" for kind in KINDS))
        lines += ["", *(f"{count:6}  {reason}" for reason, count in self.reasons.most_common())]
        self._reported.clear()
        return "\n".join([*lines, self.new_faults(), str(self)])

    def new_faults(self) -> str:
        """Each fault that was not told yet, with its program and the line that repeats it."""
        new = {
            reason: fault for reason, fault in self.faults.items() if reason not in self._reported
        }
        self._reported |= new.keys()
        texts = [
            ["", f"FAILED: {reason}", fault["program"], fault["detail"], fault["repeat"], ""]
            for reason, fault in new.items()
        ]
        return "\n".join(line for text in texts for line in text)

    def __str__(self) -> str:
        counts = ", ".join(f"{self.kinds[kind]} {kind}" for kind in KINDS)
        return f"{self.kinds.total()} programs: {counts}; {len(self.faults)} faults"
