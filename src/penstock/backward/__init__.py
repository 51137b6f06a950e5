"""A stage's backward pass, in one piece or in two halves: the inputs' gradients, then the weights'.

The halves work on any autograd graph and need nothing but its outputs and inputs.
"""

from penstock.backward.pending import PendingGradients
from penstock.backward.split import SharedGradients, SplitBackward
from penstock.backward.torch_names import (
    ParamGroup,
    _get_grad_fn_or_grad_acc,
    _null_coalesce_accumulate,
    construct_reverse_graph,
    get_param_groups,
    reverse_closure,
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)

__all__ = [
    "ParamGroup",
    "PendingGradients",
    "SharedGradients",
    "SplitBackward",
    "_get_grad_fn_or_grad_acc",
    "_null_coalesce_accumulate",
    "construct_reverse_graph",
    "get_param_groups",
    "reverse_closure",
    "stage_backward",
    "stage_backward_input",
    "stage_backward_weight",
]
