"""Random programs: a model, its data, its loss and a Pipeline, each trained by it and by a plain loop.

A failure prints the smallest program that fails so, and the command that repeats it. See docs/campaigns.md.
"""

from __future__ import annotations

import itertools
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Generator, Iterator
from functools import partial

from campaigns.fuzz.fuzzer import KINDS, Fuzzer
from campaigns.fuzz.judging import Outcome, judge_in
from campaigns.fuzz.programs import LAYOUTS, Program
from campaigns.run import Campaign, Rows
from campaigns.table import Row
from penstock.testing import WorkerPool

PROCESSES = 4
SHARES = dict(zip(LAYOUTS, (60, 25, 15), strict=True))
"""How many of a hundred programs are in each layout."""


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--case", help="repeat one: what a failure printed")


def cases(options: Namespace) -> Generator[tuple[str, Rows]]:
    with WorkerPool(1) as alone, WorkerPool(PROCESSES) as together:

        def judge(program: Program) -> Outcome:
            pool = alone if program.processes == 1 else together
            return judge_in(pool, program.source, program.processes)

        fuzzer = Fuzzer(judge, time.monotonic() + options.seconds)
        if options.case:
            yield options.case, partial(repeat, fuzzer, options.case)
            return
        try:
            for number in itertools.count():
                for layout in LAYOUTS:
                    seed = options.seed * 10**6 + number
                    name = f"round {number}, {layout}"
                    yield name, partial(explore, fuzzer, name, seed, layout)
        finally:
            print(fuzzer.report())


def explore(fuzzer: Fuzzer, name: str, seed: int, layout: str) -> Iterator[Row]:
    before, known = fuzzer.kinds.copy(), len(fuzzer.faults)
    fuzzer.explore(seed, SHARES[layout], layout=layout)
    if faults := fuzzer.new_faults():
        print(faults)
    counts = tuple(fuzzer.kinds[kind] - before[kind] for kind in KINDS)
    yield Row(name, "same" if len(fuzzer.faults) == known else "failed", counts)


def repeat(fuzzer: Fuzzer, case: str) -> Iterator[Row]:
    program, outcome = fuzzer.repeat(case)
    print(f"{program.source}\n{outcome.kind} {outcome.reason}\n{outcome.detail}")
    yield Row(case, outcome.kind, tuple(int(kind == outcome.kind) for kind in KINDS))


CAMPAIGN = Campaign(cases, columns=KINDS, bad=("failed",), seconds=600.0, options=add_options)
