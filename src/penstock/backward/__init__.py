"""A stage's backward pass, in one piece or in two halves: the inputs' gradients, then the weights'.

The halves work on any autograd graph and need nothing but its outputs and inputs.
"""

from penstock.backward.offload import OffloadedForward
from penstock.backward.pending import PendingGradients
from penstock.backward.split import SharedGradients, SplitBackward

__all__ = ["OffloadedForward", "PendingGradients", "SharedGradients", "SplitBackward"]
