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
NOT_SEEN_BETWEEN = (
    "architecture: a rotary buffer set by the forward",
    "architecture: a detector with targets",
    "architecture: queries that ask an encoder",
    "architecture: a state list kept by the model",
    "architecture: a variational autoencoder",
    "architecture: generator and critic",
    "architecture: generator, and critic of a detached sample",
    "architecture: diffusion with its loss inside",
    "architecture: a flow of couplings",
    "architecture: BYOL",
    "architecture: BYOL that moves its target in the forward",
    "architecture: two towers with a scale",
    "architecture: one encoder for two inputs",
    "architecture: a frozen teacher inside",
    "architecture: Fourier neural operator",
    "architecture: a complex network",
    "architecture: graph network",
    "architecture: graph network whose number of graphs is in its data",
    "architecture: points with learned transforms",
    "architecture: fields with encoded positions and a skip",
    "architecture: tables of categories, and their products",
    "architecture: factors",
    "architecture: capsules that vote in rounds",
    "architecture: weights made by a network",
    "architecture: weights with norms and low ranks",
    "architecture: gradients reversed between units",
    "architecture: checkpoints of the author's own",
    "architecture: layers that are sometimes left out, inside",
    "architecture: heads by name",
    "architecture: an exit after each block",
    "architecture: losses added on the way",
    "architecture: latents that ask their input",
    "architecture: a memory that steps write",
    "architecture: an energy whose gradient is the output, in units",
    "architecture: an equation: gradients of the output",
    "architecture: an argument that is a dataclass",
    "architecture: squeeze and excite",
    "architecture: texts by convolutions side by side",
    "architecture: pictures in time",
    "architecture: what hooks collect inside",
    "architecture: a running mean outside of units",
    "architecture: sums and parameters between modules",
    "architecture: parameters used again, beside a buffer",
    "architecture: a module that is given another's weight, which is never called",
    "architecture: a state handed from one lstm to the next",
    "architecture: a dataclass between modules",
    "architecture: modules that look at numbers",
    "architecture: a tensor detached between modules",
    "architecture: forwards called without their modules",
    "architecture: one layer inside all blocks",
    "architecture: results written into a tensor of the forward's",
    "architecture: noise that is taken off at the end",
    "architecture: a dictionary of another class that layers share",
    "architecture: a chain that begins in place",
    "architecture: a chain with one activation twice",
)
"""Architectures that have not been seen in two processes, or are refused there though not in one."""
BETWEEN = [name for name in PROGRAMS if name.startswith("arch") and name not in NOT_SEEN_BETWEEN]
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
