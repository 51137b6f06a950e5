"""The command behind ``make fuzz``: random programs until the time is up."""

from __future__ import annotations

import argparse
import itertools
import sys
import time

from penstock.testing import WorkerPool
from tests.fuzz.campaign import Campaign
from tests.fuzz.judging import Outcome, judge_in
from tests.fuzz.programs import LAYOUTS, Program

PROCESSES = 4
SHARES = (60, 25, 15)
"""How many of a hundred programs are in each layout."""


def main(arguments: list[str] | None = None) -> int:
    """Run a campaign and print what it found; 0 if nothing failed."""
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="after which it ends")
    parser.add_argument("--programs", type=int, default=sys.maxsize, help="after which it ends")
    parser.add_argument("--seed", type=int, default=0, help="what the programs are drawn from")
    parser.add_argument("--layouts", default="012", help="which: 0 one process, 1 gloo, 2 2 x 2")
    parser.add_argument("--rounds", type=int, default=0, help="of programs, that are left out")
    parser.add_argument("--case", help="repeat one: what a failure printed")
    options = parser.parse_args(arguments)
    with WorkerPool(1) as alone, WorkerPool(PROCESSES) as together:

        def judge(program: Program) -> Outcome:
            pool = alone if program.processes == 1 else together
            return judge_in(pool, program.source, program.processes)

        campaign = Campaign(judge, time.monotonic() + options.seconds)
        if options.case:
            program, outcome = campaign.repeat(options.case)
            say(f"{program.source}\n{outcome.kind} {outcome.reason}\n{outcome.detail}")
            return int(outcome.kind == "failed")
        for number in itertools.count(options.rounds):
            for layout in map(int, options.layouts):
                seed = options.seed * 10**6 + number
                campaign.explore(seed, SHARES[layout], layout=LAYOUTS[layout])
            say(campaign.new_faults() + str(campaign))
            # A round may draw programs that were drawn before: the last one is not cut short.
            if campaign.kinds.total() >= options.programs or time.monotonic() > campaign.deadline:
                break
    say(campaign.report())
    return int(bool(campaign.faults))


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - this is a command


if __name__ == "__main__":
    sys.exit(main())
