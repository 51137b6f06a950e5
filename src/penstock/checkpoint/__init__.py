"""A run saved whole, and resumed in any layout."""

from penstock.checkpoint.checkpoints import Checkpoints, Saved

__all__ = ["Checkpoints", "Saved"]
