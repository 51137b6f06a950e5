"""A user's script: it trains, fails as its arguments say, and knows nothing of how it was started."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import torch

from penstock.testing import fail_at
from tests.faults.jobs import X, make


def main(folder: Path, how: str) -> None:
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    pipe = make({})
    pipe.report_failures_to(folder)
    pipe.step(X, target=X)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    if how == "frozen":
        if rank == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank == "2":
            ctypes.PyDLL(None).sleep(120)
    if how in ("wait", "frozen"):
        time.sleep(120)
    fired = folder / "fired"
    # mypy cannot know that the argument is one of the kinds of faults.
    with fail_at(1, 2, "1F2", how, before=lambda: fired.write_text(str(time.monotonic()))):  # type: ignore[arg-type]
        for _ in range(3):
            pipe.step(X, target=X)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
