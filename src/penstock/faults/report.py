"""What is left behind about a failure: ``failure.json``, and torchrun's error file."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from penstock.errors import printable
from penstock.faults.failure import LONGEST_TRACE, Failure
from penstock.faults.silence import Place

FILE = "failure.json"


def versions() -> dict[str, str]:
    """Of what takes part in a run."""
    try:
        own = version("penstock")
    except PackageNotFoundError:
        own = "unknown"
    return {"penstock": own, "torch": torch.__version__, "python": platform.python_version()}


def stacks() -> str:
    """Where each thread of this process is; no values, which may be secret."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            lines = "".join(traceback.format_stack(frame))
            parts.append(f"thread {names.get(ident, ident)}:\n{lines}")
    return printable("\n".join(parts))[-LONGEST_TRACE:]


def story(
    failures: Sequence[Failure],
    places: Mapping[int, Place],
    found: Mapping[int, str],
    rank: int,
) -> dict[str, Any]:
    """The whole story as JSON data; nothing of the environment is in it.

    Args:
        failures: in the order in which they happened.
        places: where each rank is.
        found: the stacks of the ranks that gave some.
        rank: who tells it.
    """
    return {
        "summary": summary(failures),
        "failures": [asdict(failure) for failure in failures],
        "ranks": [{**asdict(place), "words": str(place)} for place in places.values()],
        "stacks": {str(number): text for number, text in found.items()},
        "told_by": rank,
        "time": time.time(),
        "versions": versions(),
    }


def summary(failures: Sequence[Failure]) -> str:
    """All failures in a line."""
    first, *later = map(str, failures)
    return first + "".join(f"; then {failure}" for failure in later)


def write(folder: Path | None, told: Mapping[str, Any]) -> None:
    """Write ``failure.json`` where there is none; a failure to do so must not hide the failure."""
    if folder is None:
        return
    with contextlib.suppress(OSError), (folder / FILE).open("x", encoding="utf-8") as file:
        json.dump(told, file, indent=1)


def tell_torchrun(failure: Failure, *, own: bool) -> None:
    """Write the error file that torchrun names, where nobody has; it calls the earliest one the cause.

    Its clock has seconds. A rank that only follows dates its own a little later, to come after the cause.

    Args:
        failure: what happened.
        own: whether on this rank.
    """
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not name:
        return
    moment = int(failure.time) if own else int(max(failure.time, time.time())) + 2
    extra: dict[str, Any] = {
        "py_callstack": failure.trace if own else "",
        "timestamp": str(moment),
        "status": failure.status,
        "own": own,
    }
    said = str(failure) if own else f"stopped because {failure}"
    path = Path(name)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            json.dump({"message": {"message": said, "extraInfo": extra}}, file)
