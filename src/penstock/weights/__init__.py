"""Weights: first values, files, names, norms, optimizer states, and weights that several stages share."""

from __future__ import annotations

from penstock.weights.files import WeightFiles
from penstock.weights.folders import (
    load_partition,
    parameters_on_meta,
    read_weights,
    save_index,
    save_stage,
)
from penstock.weights.initialise import Init, init_weights, initialise
from penstock.weights.norms import gradient_norms, scale_gradients, total_norm

__all__ = [
    "Init",
    "WeightFiles",
    "gradient_norms",
    "init_weights",
    "initialise",
    "load_partition",
    "parameters_on_meta",
    "read_weights",
    "save_index",
    "save_stage",
    "scale_gradients",
    "total_norm",
]
