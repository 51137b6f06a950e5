"""A backward pass in two halves, where torch has it."""

from penstock.backward import stage_backward, stage_backward_input, stage_backward_weight

__all__ = ["stage_backward", "stage_backward_input", "stage_backward_weight"]
