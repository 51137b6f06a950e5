"""All programs of the catalogue by name, and the ways in which each is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from penstock.testing import Case, Verdict, compare
from tests.catalogue.models import MODELS
from tests.pipeline.cases import BATCHES, CASES, LANGUAGE
from tests.values.kinds import KINDS, ONLY_CUT, case_of

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


PROGRAMS: dict[str, Row] = {
    **{
        f"architecture: {name}": Row(make, schedule="ZB-H1" if name in IN_TWO else "ZB-V")
        for name, make in MODELS.items()
    },
    **{
        f"{'batch' if name in BATCHES else 'language' if name in LANGUAGE else 'odd'}: {name}": Row(
            case.make, None if case.stages == 4 else case.stages
        )
        for name, case in CASES.items()
    },
    **{f"value: {name}": Row(_kind(name)) for name in KINDS | ONLY_CUT},
}
ALONE = (
    "architecture: a rotary buffer set by the forward",
    "architecture: a state list kept by the model",
)
"""What is right in one process and refused between processes, where each has but its own stages."""
BETWEEN = [name for name in PROGRAMS if name.startswith("arch") and name not in ALONE]
"""What runs in two processes; values, and what wires carry of the others, have tests of their own."""
WAYS = ("one process", "two processes")
"""How the matrix runs each of them, always with backward in halves."""


def run(name: str, group: Any = None) -> Verdict:
    """Run a program in one of the ways."""
    make, stages, schedule = PROGRAMS[name]
    # What is cut by lists has four stages, of which each process has two.
    schedule = "ZB-H1" if group is not None and stages is None else schedule
    torch.manual_seed(0)
    return compare(make(), schedule=schedule, ranks=2, microbatches=4, stages=stages, mesh=group)
