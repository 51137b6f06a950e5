"""A stage's backward pass, in one piece or in two halves: the inputs' gradients, then the weights'.

The halves work on any autograd graph and need nothing but its outputs, inputs and weights.
"""

from penstock.backward.deferred import DeferredBackward, SplitFunction
from penstock.backward.engines import ENGINES, Apart, BackwardEngine
from penstock.backward.full import backward_from, stage_backward
from penstock.backward.graph import (
    ParamGroup,
    _get_grad_fn_or_grad_acc,
    _null_coalesce_accumulate,
    construct_reverse_graph,
    get_param_groups,
    reverse_closure,
)
from penstock.backward.split import stage_backward_input, stage_backward_weight
from penstock.backward.store import WeightGradStore

__all__ = [
    "ENGINES",
    "Apart",
    "BackwardEngine",
    "DeferredBackward",
    "ParamGroup",
    "SplitFunction",
    "WeightGradStore",
    "_get_grad_fn_or_grad_acc",
    "_null_coalesce_accumulate",
    "backward_from",
    "construct_reverse_graph",
    "get_param_groups",
    "reverse_closure",
    "stage_backward",
    "stage_backward_input",
    "stage_backward_weight",
]
