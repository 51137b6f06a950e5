"""First weights that do not depend on how the model is cut."""

from __future__ import annotations

from penstock.initial.initialise import Init, initialise
from penstock.initial.target import init_weights

__all__ = ["Init", "init_weights", "initialise"]
