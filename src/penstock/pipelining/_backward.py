"""The two halves of a backward pass, in the module where torch has them."""

from penstock.backward import _get_grad_fn_or_grad_acc as _get_grad_fn_or_grad_acc
from penstock.backward import _null_coalesce_accumulate as _null_coalesce_accumulate
from penstock.backward import construct_reverse_graph as construct_reverse_graph
from penstock.backward import get_param_groups as get_param_groups
from penstock.backward import reverse_closure as reverse_closure
from penstock.backward import stage_backward as stage_backward
from penstock.backward import stage_backward_input as stage_backward_input
from penstock.backward import stage_backward_weight as stage_backward_weight
