"""Imported by the process that jobs are forked from: what a first step imports is then there already."""

from __future__ import annotations

import torch

from tests.faults.jobs import RANKS, X, make

torch.set_num_threads(1)
make({}, ranks=RANKS).eval(X, target=X)
