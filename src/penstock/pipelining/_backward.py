"""A backward pass in two halves, where torch has it."""

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
