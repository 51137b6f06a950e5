"""One process of a :class:`penstock.testing.WorkerPool`; see there."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from importlib import import_module
from typing import IO, Any

import torch

from penstock.transport.process_group import Groups


def main(rank: int, size: int, store: str) -> None:
    """Serve tasks until standard input ends."""
    torch.set_num_threads(1)
    # What a task prints must not stand between the results.
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with Groups(rank, size, store) as groups:
        for line in sys.stdin:
            serve(json.loads(line), groups, results)


def serve(task: dict[str, Any], groups: Groups, results: IO[str]) -> None:
    """Run a task and write its answer as a line of JSON: its result, or the traceback of its error."""
    module, _, name = task["function"].partition(":")
    try:
        function = getattr(import_module(module), name)
        result = function(group=groups.first(task["ranks"]), **task["arguments"])
        answer = json.dumps({"result": result})
    except Exception:
        answer = json.dumps({"error": traceback.format_exc()})
    print(answer, file=results, flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
