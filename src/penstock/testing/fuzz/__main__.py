"""The campaign: many cases, each judged in a worker; failures are shrunk, and grouped by their cause.

``python -m penstock.testing.fuzz --seconds 600``, or ``make fuzz``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.testing.fuzz.cases import Case
from penstock.testing.fuzz.growing import count, grow
from penstock.testing.fuzz.judging import Verdict, alike, signature, verdict_of_ranks
from penstock.testing.fuzz.program import program, tolerance
from penstock.testing.fuzz.shrinking import shrink
from penstock.testing.workers import WorkerError, WorkerPool

OUTCOMES = ("same", "refused", "failed", "void")
PROCESSES = 3
_HERE = "penstock.testing.fuzz.judging"
_DULL = {
    "linear", "pointwise", "activation", "blocks", "call: plain", "inputs: S", "inputs: V", "inputs: I",
    "output: one", "one process", "float64", "SGD", "cut: count", "cut: points", "schedule: GPipe",
    "loss: mse, mean",
}  # fmt: skip
"""Families that say nothing about the cause of a failure."""


class Bench:
    """Judges cases in workers, so that a crash or a hang fails the case and not the campaign.

    Args:
        limit: how many seconds each side of a case may take.
        together: workers for cases of several processes, if there are some already.
    """

    def __init__(self, limit: float = 60.0, together: WorkerPool | None = None) -> None:
        self._limit = limit
        self._alone = WorkerPool(1)
        self._together = together or WorkerPool(PROCESSES)

    def judge(self, case: Case) -> Verdict:
        """The verdict on a case."""
        text = program(case)
        try:
            return self._judged(case, text)
        except WorkerError as error:
            lines = str(error).strip().splitlines()
            crash = f"crash: {lines[0]} {lines[-1]}"[:150]
            outcome = "failed" if self._plain_runs(text) else "void"
            return Verdict(outcome, crash, str(error))

    def _plain_runs(self, text: str) -> bool:
        """Whether the plain loop runs without a crash; some faults of torch end the process."""
        try:
            self._alone.run(
                f"{_HERE}:work_plain", 1, self._limit + 60.0, program=text, limit=self._limit
            )
        except WorkerError:
            return False
        return True

    def _judged(self, case: Case, text: str) -> Verdict:
        patience = 2 * self._limit + 120.0  # also for starting, on a busy machine
        if not case.run.gloo:
            task = {"program": text, "tolerance": tolerance(case), "limit": self._limit}
            (answer,) = self._alone.run(f"{_HERE}:work_alone", 1, patience, **task)
            return Verdict(**answer)
        answers = self._together.run(
            f"{_HERE}:work_together", case.run.ranks, patience, program=text, limit=self._limit
        )
        verdict = verdict_of_ranks(answers, tolerance(case))
        told = {answer.get("verdict", answer).get("outcome", "") for answer in answers}
        if len(told) > 1 or "failed" in told:
            self._together.close()  # messages between the ranks may still be under way
        return verdict

    def smaller(self, case: Case, verdict: Verdict, seconds: float) -> Case:
        """A small case that fails in the same way."""
        first = signature(verdict)
        known: dict[str, bool] = {}

        def fails(tried: Case) -> bool:
            text = program(tried)
            if text not in known:
                known[text] = alike(self.judge(tried), first)
            return known[text]

        return shrink(case, fails, seconds)

    def close(self) -> None:
        """End the workers."""
        self._alone.close()
        self._together.close()


@dataclass
class Fault:
    """Failures that seem to have one cause."""

    signature: str
    families: list[str]
    program: str
    detail: str
    cases: list[str] = field(default_factory=list)

    def explains(self, case: Case, found: str) -> bool:
        """Whether it explains a failure: the same error, or the same difference in a case of its families."""
        same = self.signature == found
        return same and (found.startswith("failed") or set(self.families) <= set(case.families()))


@dataclass
class Campaign:
    """The results of a campaign so far."""

    outcomes: Counter[str] = field(default_factory=Counter)
    families: dict[str, Counter[str]] = field(default_factory=dict)
    refusals: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def note(self, case: Case, verdict: Verdict) -> None:
        """Count a case."""
        self.outcomes[verdict.outcome] += 1
        for family in case.families():
            self.families.setdefault(family, Counter())[verdict.outcome] += 1
        if verdict.outcome in ("refused", "void"):
            self.refusals[f"{verdict.outcome} {verdict.reason}"] += 1
            self.examples.setdefault(f"{verdict.outcome} {verdict.reason}", case.name)

    def report(self) -> str:
        """The counts, and each fault with its program."""
        lines = [f"{'family':34}" + "".join(f"{outcome:>9}" for outcome in OUTCOMES)]
        for name, counts in sorted(self.families.items()):
            lines.append(f"{name:34}" + "".join(f"{counts[outcome]:9}" for outcome in OUTCOMES))
        lines += ["", "refused, by reason:"]
        for reason, times in self.refusals.most_common():
            if reason.startswith("refused"):
                lines.append(
                    f"{times:6}  {reason.removeprefix('refused ')}  ({self.examples[reason]})"
                )
        for fault in self.faults:
            lines += ["", f"{len(fault.cases)} times {fault.signature}: {', '.join(fault.families)}",
                      f"# {', '.join(fault.cases[:10])}", fault.program]  # fmt: skip
        return "\n".join([*lines, "", str(self)])

    def __str__(self) -> str:
        counts = {outcome: self.outcomes[outcome] for outcome in OUTCOMES}
        void = counts.pop("void")
        told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
        return f"{sum(counts.values())} cases: {told}; {len(self.faults)} faults; {void} void"

    def to_json(self) -> dict[str, Any]:
        """The results as JSON data."""
        return {
            "outcomes": dict(self.outcomes),
            "families": {name: dict(counts) for name, counts in sorted(self.families.items())},
            "refusals": [
                [count, reason, self.examples[reason]]
                for reason, count in self.refusals.most_common()
            ],
            "faults": [vars(fault) for fault in self.faults],
        }


def look_into(
    bench: Bench, campaign: Campaign, case: Case, verdict: Verdict, seconds: float
) -> None:
    """Add a failure to those of its cause, or shrink it and print what it is."""
    found = signature(verdict)
    for fault in campaign.faults:
        if fault.explains(case, found):
            fault.cases.append(case.name)
            return
    small = bench.smaller(case, verdict, seconds)
    families = sorted(set(small.families()) - _DULL)
    detail = bench.judge(small).detail
    for fault in campaign.faults:
        if (fault.signature, fault.families) == (found, families):
            fault.cases.append(case.name)
            return
    campaign.faults.append(Fault(found, families, program(small), detail, [case.name]))
    _say(f"{case.name}: {found}: {', '.join(families)}")


def run(bench: Bench, options: argparse.Namespace) -> Campaign:
    """Run the campaign that was asked for."""
    campaign = Campaign()
    start = said = time.monotonic()
    for number in itertools.count(options.first):
        if campaign.outcomes.total() >= options.cases or time.monotonic() > start + options.seconds:
            break
        if options.seed == "forms" and number == count():
            break
        case = grow(f"{options.seed}:{number}")
        verdict = bench.judge(case)
        campaign.note(case, verdict)
        if verdict.outcome == "failed":
            look_into(bench, campaign, case, verdict, options.shrink)
        if time.monotonic() > said + 60:
            said = time.monotonic()
            _say(f"{said - start:6.0f} s  {campaign}")
            _write(options.json, campaign)
    _write(options.json, campaign)
    return campaign


def one(bench: Bench, name: str, seconds: float) -> int:
    """Judge one case, and print it or what it shrinks to."""
    case = grow(name)
    verdict = bench.judge(case)
    if verdict.outcome in ("failed", "refused"):
        case = bench.smaller(case, verdict, seconds)
        verdict = bench.judge(case)
    _say(program(case))
    _say(f"{name}: {verdict.outcome} {verdict.reason}\n{verdict.detail}")
    return int(verdict.outcome == "failed")


def _write(file: Path | None, campaign: Campaign) -> None:
    if file is not None:
        file.write_text(json.dumps(campaign.to_json(), indent=1))


def main(arguments: list[str] | None = None) -> int:
    """Run the campaign and print what it found; 0 if nothing failed."""
    parser = argparse.ArgumentParser(prog="python -m penstock.testing.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which it ends")
    parser.add_argument("--cases", type=float, default=float("inf"), help="after which it ends")
    parser.add_argument("--seed", default="0", help="of the cases, which are named <seed>:<number>")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--case", help="repeat this one case, such as 0:17")
    parser.add_argument(
        "--shrink", type=float, default=60.0, help="seconds for making a failure small"
    )
    parser.add_argument("--json", type=Path, help="a file for the figures and faults")
    options = parser.parse_args(arguments)
    if options.seconds == options.cases == float("inf") and options.seed != "forms":
        options.seconds = 600.0
    with closing(Bench()) as bench:
        if options.case:
            return one(bench, options.case, options.shrink)
        campaign = run(bench, options)
    _say(campaign.report())
    return int(bool(campaign.faults))


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - this is a command


if __name__ == "__main__":
    sys.exit(main())
