"""Weights: first values, files, names, norms, optimizer states, and weights that several stages share."""

from __future__ import annotations

from penstock.weights.files import WeightFiles
from penstock.weights.folders import load_partition, parameters_on_meta, read_weights
from penstock.weights.initialise import Init, init_weights

__all__ = [
    "Init",
    "WeightFiles",
    "init_weights",
    "load_partition",
    "parameters_on_meta",
    "read_weights",
]
