"""What each rank holds while a schedule runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from penstock.schedule.action import Op
from penstock.schedule.packed import CODE, Packed

Amounts = NDArray[np.float64]


def changes(packed: Packed, activation: Sequence[float], stash: Sequence[float]) -> Amounts:
    """By how much each action changes what its rank holds.

    Args:
        packed: the schedule.
        activation: for each stage what its F holds until I or B.
        stash: for each stage what its I leaves until W.
    """
    table = np.zeros((len(CODE), packed.schedule.stages))
    table[CODE[Op.F]] = activation
    table[CODE[Op.B]] = np.negative(activation)
    table[CODE[Op.I]] = np.subtract(stash, activation)
    table[CODE[Op.W]] = np.negative(stash)
    found: Amounts = table[packed.op, packed.stage]
    return found


def peaks(packed: Packed, changed: Amounts) -> tuple[float, ...]:
    """The most that each rank holds at any time."""
    ends = packed.starts.tolist()
    return tuple(
        float(np.cumsum(changed[first:last]).max(initial=0.0)) for first, last in pairwise(ends)
    )
