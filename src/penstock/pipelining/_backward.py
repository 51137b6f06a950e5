"""The two halves of a backward pass, in the module where torch has them."""

from penstock.backward import (
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
    "_get_grad_fn_or_grad_acc",
    "_null_coalesce_accumulate",
    "construct_reverse_graph",
    "get_param_groups",
    "reverse_closure",
    "stage_backward",
    "stage_backward_input",
    "stage_backward_weight",
]
