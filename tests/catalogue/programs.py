"""All programs of the catalogue by name, and the ways in which each is run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from penstock.testing import Case, Verdict, compare
from tests.catalogue import between
from tests.catalogue.cases import BATCHES, CASES, LANGUAGE, LOOPED
from tests.catalogue.kinds import KINDS, ONLY_CUT, case_of
from tests.catalogue.models import MODELS

TOLERANCE = 1e-9
"""The largest difference in double precision."""


class Row(NamedTuple):
    """A program, how it is cut, and by which schedule one process runs it."""

    make: Callable[[], Case]
    stages: Any = None
    schedule: str = "ZB-V"


IN_TWO = {"levels with repeats", "BYOL that moves its target in the forward"}
"""What is right in two stages, and refused in four, where stages would share what a step changes."""


def _kind(name: str) -> Callable[[], Case]:
    return lambda: case_of((KINDS | ONLY_CUT)[name])


def _group(name: str) -> str:
    return "batch" if name in BATCHES else "language" if name in LANGUAGE else "odd"


PROGRAMS: dict[str, Row] = {
    **{
        f"architecture: {name}": Row(make, schedule="ZB-H1" if name in IN_TWO else "ZB-V")
        for name, make in MODELS.items()
    },
    **{
        f"{_group(name)}: {name}": Row(make, LOOPED if name == "looped" else 4)
        for name, make in CASES.items()
    },
    **{f"value: {name}": Row(_kind(name)) for name in KINDS | ONLY_CUT},
    **{
        f"between: {name}": Row(partial(between.between, name), ["l.1", "l.2", "l.3"])
        for name in between.PROGRAMS
    },
}
ALONE = (
    "architecture: a rotary buffer set by the forward",
    "architecture: a state list kept by the model",
)
"""What is right in one process and refused between processes, where each has but its own stages."""
ON_WIRES = (
    *(f"language: {one}" for one in ("skip edges", "tied", "looped", "ragged, some count")),
    *(f"odd: {one}" for one in ("encoder-decoder", "draws: chain", "draws: between, all")),
    *("architecture: ", "language: added losses", "odd: gradient: ", "odd: model: "),
    *(
        f"between: {one}"
        for one in ("a result", "hooks on what", "losses", "parts of", "counts up")
    ),
)
"""How the names of those begin by which other things travel than by the rest, or nothing."""
BETWEEN = [name for name in PROGRAMS if name.startswith(ON_WIRES) and name not in ALONE]
"""What runs in two processes. Values that stages by hand return have a test of their own."""
WAYS = ("one process", "two processes")
"""How the matrix runs each of them, always with backward in halves."""


def run(name: str, group: Any = None) -> Verdict:
    """Run a program in one of the ways."""
    make, stages, schedule = PROGRAMS[name]
    # What is cut into four stages has two in each process.
    schedule = "ZB-H1" if group is not None and stages is None else schedule
    torch.manual_seed(0)
    # Evaluations between processes have tests of their own.
    options: dict[str, Any] = {"stages": stages, "mesh": group, "evaluate": group is None}
    if name.startswith("between: "):
        # What is left on modules shows itself in the next step.
        options |= {"steps": 2, "optimizer": partial(torch.optim.SGD, lr=0.1)}
    return compare(make(), schedule=schedule, ranks=2, microbatches=4, **options)
