"""What the runs of an author's forward know of PyTorch's functions: one table of rules, by function."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from penstock.partition.names import PROPERTIES, Operations, pack, pad

_TENSOR: Any = Tensor
_GIVE_TENSORS = {"T", "mT", "H", "mH", "real", "imag", "data", "grad", "_grad", "grad_fn", "_base"}
METADATA = frozenset(
    prop.__get__
    for name, prop in vars(PROPERTIES).items()
    if inspect.isgetsetdescriptor(prop) and name not in _GIVE_TENSORS
)
"""Reads of properties that a tensor shares with its placeholder."""
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
    "gumbel_softmax multi_head_attention_forward scaled_dot_product_attention rrelu rrelu_ dropout1d "
    "dropout2d dropout3d feature_alpha_dropout alpha_dropout fractional_max_pool2d fractional_max_pool3d "
    "uniform_ normal_ trunc_normal_ kaiming_uniform_ kaiming_normal_ xavier_uniform_ xavier_normal_"
)
"""Functions that draw by others, which a mode does not see."""


_READERS = frozenset(_READ_NUMBERS.split())


def reads_numbers(function: Any) -> bool:
    """Tell whether a function reads a tensor's numbers, on which the author's code may then depend."""
    return getattr(function, "__name__", "") in _READERS


@functools.cache
def is_ours(function: Any) -> bool:
    """Tell whether it is a function of Penstock, such as ``add_loss``, that modes see like PyTorch's."""
    return str(getattr(function, "__module__", "")).startswith("penstock.")


@functools.cache
def may_draw(function: Any) -> bool:
    """Tell whether a function of PyTorch may draw random numbers."""
    name = getattr(function, "__name__", "")
    if name in _DRAW_INSIDE.split():
        return True
    packet = getattr(torch.ops.aten, name, None)
    return isinstance(packet, Operations) and any(
        torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags
        for overload in packet.overloads()
    )


NORMS = frozenset({"batch_norm", "instance_norm", "sync_batch_norm"})
"""Functions that write into running statistics without moving a version."""


def name_of(function: Any) -> str:
    """The name of a function, or of the property that it reads or sets."""
    name = getattr(function, "__name__", str(function))
    if name in ("__get__", "__set__"):
        name = getattr(getattr(function, "__self__", None), "__name__", name)
    return str(name)


# ---- calls with a result that depends on the lengths of sequences alone


def packed(data: Tensor, *lengths_and_order: Any) -> Tensor:
    """The rows of a batch of sequences, one after the other, as ``pack_padded_sequence`` makes them."""
    rows: Tensor = pack(data, *lengths_and_order)[0]
    return rows


def padded(data: Tensor, *lengths_and_order: Any) -> Tensor:
    """The sequences of such rows, padded to one length, as ``pad_packed_sequence`` makes them."""
    sequences: Tensor = pad(data, *lengths_and_order)[0]
    return sequences


BY_LENGTHS: dict[Any, Any] = {pack: packed, pad: padded}
"""Functions of data and lengths, with what gives their first result; the second one needs no data."""

# ---- calls that need only the shape of an argument

_LIKES = "zeros_like ones_like empty_like full_like rand_like randn_like"
_NEWS = "new_zeros new_ones new_empty new_full new_tensor"
AS_SHAPES: dict[Any, int] = {
    **{getattr(torch, name): 0 for name in _LIKES.split()},
    **{getattr(_TENSOR, name): 0 for name in _NEWS.split()},
    _TENSOR.expand_as: 1,
    _TENSOR.type_as: 1,
    _TENSOR.view_as: 1,
    _TENSOR.reshape_as: 1,
    _TENSOR.to: 1,
}
"""Functions of which one argument, at this place, counts only by its shape, type and device."""
