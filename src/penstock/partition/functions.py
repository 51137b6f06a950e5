"""What the runs of an author's forward know of PyTorch's functions: one table of rules, by function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_TENSOR: Any = Tensor
_GIVE_TENSORS = {"T", "mT", "H", "mH", "real", "imag", "data", "grad", "_grad", "grad_fn", "_base"}
METADATA = frozenset(
    prop.__get__
    for name, prop in vars(torch._C.TensorBase).items()
    if inspect.isgetsetdescriptor(prop) and name not in _GIVE_TENSORS
)
"""Reads of properties that a tensor shares with its placeholder."""
SET_DATA = _TENSOR.data.__set__
"""Gives a tensor other data, which moves no version."""
SET_HOOKS = frozenset(
    {
        _TENSOR.register_hook,
        _TENSOR.register_post_accumulate_grad_hook,
        _TENSOR.retain_grad,
        # The node of the graph, on which hooks can be set as well.
        _TENSOR.grad_fn.__get__,
    }
)
"""Functions that return no tensor, but must run in the stage that has the tensor."""
TAKE_GRADIENTS = frozenset({torch.autograd.grad, torch.autograd.backward, _TENSOR.backward})
_READ_NUMBERS = (
    "__bool__ __contains__ __float__ __index__ __int__ allclose equal is_nonzero item masked_select nonzero "
    "numpy tolist unique"
)
_DRAW_INSIDE = (
    "gumbel_softmax multi_head_attention_forward scaled_dot_product_attention rrelu rrelu_ "
    "dropout1d dropout2d dropout3d feature_alpha_dropout alpha_dropout "
    "fractional_max_pool2d fractional_max_pool3d uniform_ normal_ trunc_normal_ kaiming_uniform_ "
    "kaiming_normal_ xavier_uniform_ xavier_normal_"
)
"""Functions that draw by others, which a mode does not see."""


_READERS = frozenset(_READ_NUMBERS.split())


def reads_numbers(function: Any) -> bool:
    """Whether a function reads a tensor's numbers, on which the author's code may then depend."""
    return getattr(function, "__name__", "") in _READERS


def is_ours(function: Any) -> bool:
    """Whether it is a function of Penstock, such as ``add_loss``, that modes see like PyTorch's."""
    return str(getattr(function, "__module__", "")).startswith("penstock.")


@functools.cache
def _drawing_names() -> frozenset[str]:
    names = {
        packet
        for packet in dir(torch._C._VariableFunctions) + dir(Tensor)
        if isinstance(
            operator := getattr(torch.ops.aten, packet, None), torch._ops.OpOverloadPacket
        )
        and any(
            torch.Tag.nondeterministic_seeded in getattr(operator, overload).tags
            for overload in operator.overloads()
        )
    }
    return frozenset(names | set(_DRAW_INSIDE.split()))


_DRAWS: dict[Any, bool] = {}


def may_draw(function: Any) -> bool:
    """Whether a function of PyTorch may draw random numbers."""
    answer = _DRAWS.get(function)
    if answer is None:
        name = getattr(function, "__name__", "")
        answer = _DRAWS[function] = name in _drawing_names()
    return answer


# ---- calls that are carried out as calls of another function


class Rewritten(NamedTuple):
    """A call in place of another: the function, its arguments, and what makes the result."""

    function: Any
    args: tuple[Any, ...]
    result: Callable[[Any], Any]


_ITERATE: Any = Tensor.__iter__
_EXPAND_AS: Any = Tensor.expand_as
REWRITTEN = frozenset({_ITERATE, _EXPAND_AS})
"""The functions that :func:`rewritten` knows."""


def rewritten(
    function: Any, args: tuple[Any, ...], is_followed: Callable[[Any], bool]
) -> Rewritten | None:
    """The call that every run makes in place of another, of what units made; None for that one itself.

    Args:
        function: one of ``REWRITTEN``.
        args: its arguments.
        is_followed: whether an argument comes from units or parameters.
    """
    if function is _ITERATE:
        return Rewritten(Tensor.unbind, args, iter)
    if len(args) == 2 and not is_followed(args[0]):
        # Only a shape is taken of what units made: every stage has the result, with its numbers.
        return Rewritten(Tensor.expand, (args[0], args[1].shape), lambda output: output)
    # In the stage of the first, the second may have no shape yet but a made-up one.
    return None
