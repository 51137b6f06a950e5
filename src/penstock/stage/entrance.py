"""How values come into a stage: what it does to a tensor touches nothing else."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from penstock.errors import SpecError
from penstock.values import flatten, paths, unflatten, version_of

Call = tuple[tuple[Any, ...], dict[str, Any]]
_Kind: TypeAlias = tuple[Any, ...]
_REMEMBERED = 1024


class Entered(NamedTuple):
    """The arguments of one call of a stage.

    Attributes:
        call: what the module is called with.
        leaves: for each of its tensors the leaf below it, where gradients arrive; or the tensor itself.
        structure: of the arguments, around their tensors.
        tensors: that the module gets.
        versions: how often each had been changed before.
        copied: which of them are copies; None where that is all, to learn which it changes.
        kind: the shapes, and what else it may depend on which the module changes.
        learning: whether gradients are enabled.
        places: for each tensor that was given where its numbers are, where any may be changed.
    """

    call: Call
    leaves: list[Tensor]
    structure: Any
    tensors: list[Tensor]
    versions: list[int]
    copied: frozenset[int] | None
    kind: _Kind
    learning: bool
    places: list[Any]


class Entrance:
    """The way into one stage.

    A tensor that the stage changes in place is copied for it before: others may hold the same memory, such as
    the stage that made it, other stages that use it, or the caller of the pipeline. Which ones it changes is
    learned at the first call with tensors of the same shapes, for which all are copied; torch counts changes.

    Args:
        stage: its index, for messages.
    """

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._changes: dict[_Kind, frozenset[int]] = {}

    def enter(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, training: bool) -> Entered:
        """Make the arguments that the module gets.

        Args:
            args: by position.
            kwargs: by name.
            training: whether the module is in training, where it may do other things.
        """
        tensors, structure = flatten((args, dict(kwargs)) if kwargs else args)
        learning = torch.is_grad_enabled()
        kind = (training, learning, *[tensor.shape for tensor in tensors])
        copied = self._changes.get(kind)
        leaves: list[Tensor] = []
        entered: list[Tensor] = []
        for index, tensor in enumerate(tensors):
            changes = copied is None or index in copied
            # Nobody counts the changes of a tensor that was made in inference mode.
            own = _copy(tensor) if changes or tensor.is_inference() else tensor
            if own.requires_grad and learning:
                leaf = own.detach().requires_grad_()
                leaves.append(leaf)
                # A leaf cannot be changed in place; what nobody changes needs nothing around it.
                entered.append(cast("Any", _Enter).apply(leaf) if changes else leaf)
            else:
                leaves.append(own)
                # An object of its own: what the module does with it, such as to make it require grad by
                # writing into it what does, is done to no other.
                entered.append(own if own.requires_grad else own.detach())
        call = unflatten(structure, entered)
        versions = [version_of(tensor) for tensor in entered]
        if not kwargs:
            call = (call, {})
        places = [] if copied is not None and not copied else [_place(t) for t in tensors]
        return Entered(call, leaves, structure, entered, versions, copied, kind, learning, places)

    def leave(self, entered: Entered) -> Sequence[int]:
        """Look back after the call.

        Returns:
            Which of the tensors the module has changed in place.

        Raises:
            SpecError: it changed one that it had left alone before, or one that it was given twice.
        """
        changed = [
            index
            for index, (tensor, before) in enumerate(
                zip(entered.tensors, entered.versions, strict=True)
            )
            if version_of(tensor) != before
        ]
        twice = [
            i
            for i in changed
            if entered.places
            and entered.places[i] is not None
            and entered.places.count(entered.places[i]) > 1
        ]
        if twice:
            where = list(paths(entered.structure))
            raise SpecError(
                f"stage {self._stage} changes {where[twice[0]]} of its arguments in place, and another "
                "argument is the same memory, which would not see it here: clone one of them"
            )
        if entered.copied is None:
            self._learn(entered.kind, frozenset(changed))
        elif new := [index for index in changed if index not in entered.copied]:
            raise self._unexpected(entered, new)
        return changed

    def check_refused(self, entered: Entered, error: RuntimeError) -> None:
        """Look at what the call raised.

        Raises:
            SpecError: the module tried to change an argument in place, which it had left alone before.
        """
        if entered.copied is not None and _OF_LEAVES.search(str(error)):
            frames = {id(tensor) for tensor in entered.leaves}
            found = [i for i, tensor in enumerate(entered.tensors) if id(tensor) in frames]
            raise self._unexpected(entered, found) from error

    def _unexpected(self, entered: Entered, changed: Sequence[int]) -> SpecError:
        where = list(paths(entered.structure))
        told = ", ".join(where[index] for index in changed)
        return SpecError(
            f"stage {self._stage} changed {told} of its arguments in place, which it did not do in "
            "earlier calls of this shape; the memory may be shared with others: use an operation that "
            "is not in place, or clone the tensor first"
        )

    def _learn(self, kind: _Kind, changed: frozenset[int]) -> None:
        if len(self._changes) >= _REMEMBERED:
            self._changes.clear()
        self._changes[kind] = changed


_OF_LEAVES = re.compile("leaf Variable that requires grad .*in-place")
"""What torch says of an operation in place on a leaf, or on a view of one."""


def _place(tensor: Tensor) -> Any:
    """Where a tensor's numbers are; ``None`` where there are none."""
    if not tensor.numel() or tensor.is_meta or tensor.layout is not torch.strided:
        return None
    return tensor.data_ptr(), tensor.shape, tensor.stride()


class _Enter(torch.autograd.Function):
    """Makes a non-leaf of a leaf without copying it and without it being a view."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        # No gradient is not the same as zeros.
        ctx.set_materialize_grads(False)
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0]


def _copy(tensor: Tensor) -> Tensor:
    """The same numbers in memory of their own, with the same strides: the same operations run on them."""
    data = tensor.detach()
    if data.layout is not torch.strided or data.is_contiguous() or type(data) is not Tensor:
        copy = data.clone()
    else:
        once = data[tuple(_first if step == 0 else _all for step in data.stride())]
        copy = _in_strides(once).expand(data.shape)
    return copy.requires_grad_(tensor.requires_grad)


_first, _all = slice(1), slice(None)


def _in_strides(tensor: Tensor) -> Tensor:
    try:
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor)
    except RuntimeError:
        # Windows that overlap in another way than by being expanded.
        return tensor.clone()
