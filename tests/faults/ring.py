"""A program of a few ranks that send each other numbers, watched as a pipeline is, and failing as it is told.

It drives the watch by itself, without a Pipeline. Run it under a launcher, with its settings as JSON.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.faults import Activity, Patience, Watch, end_waits, meet, status_of
from penstock.schedule import Action, Op
from penstock.testing import fail_at

LIMIT = 100.0
"""Seconds until a rank that still runs says where, and ends."""


class Ring:
    """One rank: forwards go up, backwards come down.

    Args:
        folder: where it notes what happens.
        case: the settings: ``timeout``, ``meeting``: seconds; ``steps``.
    """

    def __init__(self, folder: Path, case: dict[str, Any]) -> None:
        patience = Patience((60.0, case.get("timeout", 2.0)), case.get("meeting", 60.0))
        self.meeting = meet(patience=patience)
        self.rank, self.last = self.meeting.rank, self.meeting.ranks - 1
        self.activity = Activity(self.rank)
        self.watch = Watch(self.activity, self.meeting, patience)
        self.watch.protect(self.abort)
        self.watch.keep_in(folder)
        self.folder = folder

    def abort(self) -> None:
        end_waits(self.meeting.group)

    def set_up(self) -> None:
        self.activity.prepare("builds its stage")
        self.activity.wait("all ranks", None)
        dist.barrier()
        self.watch.made()

    def step(self, step: int) -> None:
        self.activity.begin(step)
        for microbatch in range(3):
            self.act(Op.F, microbatch, self.rank - 1, self.rank + 1)
        for microbatch in range(3):
            self.act(Op.B, microbatch, self.rank + 1, self.rank - 1)
        self.activity.act(None)
        self.activity.wait("the sum of the step", None)
        dist.all_reduce(torch.zeros(1))
        self.activity.rest()

    def act(self, op: Op, microbatch: int, source: int, target: int) -> None:
        self.watch.check()
        if 0 <= source <= self.last:
            self.activity.wait(f"{self.rank}RECV_{op}{microbatch}", source)
            dist.recv(torch.zeros(4), source)
        self.activity.act(Action(self.rank, op, microbatch))
        if 0 <= target <= self.last:
            dist.send(torch.zeros(4), target)

    def run(self, fault: Any, case: dict[str, Any]) -> None:
        try:
            self.set_up()
            for step in fault.over(range(1, case.get("steps", 4) + 1), self.rank):
                self.step(step)
                if step == 2:
                    (self.folder / f"trains-{self.rank}").write_text(str(os.getpid()))
        except BaseException as error:
            cause = self.watch.failed(error)
            if cause is error:
                raise
            raise cause from None


def main(folder: Path, case: dict[str, Any]) -> int:
    """Run one rank; returns its exit status."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    torch.set_num_threads(1)
    fired = folder / "fired"
    error: BaseException | None = None
    with fail_at(**case["fault"], before=lambda: fired.write_text(str(time.monotonic()))) as fault:
        try:
            ring = Ring(folder, case)
            ring.run(fault, case)
            ring.watch.close()
            ring.meeting.close()
        except BaseException as caught:
            error = caught
            traceback.print_exc()
    record = {"error": type(error).__name__, "text": str(error), "time": time.monotonic()}
    (folder / f"ended-{os.environ.get('RANK', '0')}").write_text(json.dumps(record))
    return 0 if error is None else status_of(error)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
