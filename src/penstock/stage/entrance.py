"""How values enter a stage, so that what its module does to a tensor touches nothing outside."""

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
    """The arguments of one call of a stage's module.

    Attributes:
        call: ``(args, kwargs)`` that the module is called with.
        leaves: for each tensor in them, the leaf at which its gradient arrives; or the tensor itself.
        structure: how the arguments are nested around their tensors.
        tensors: the tensors that the module gets.
        versions: the version of each before the call.
        copied: the positions of those that are copies; None if all are, to learn which the module changes.
        kind: the shapes, and what else may decide which tensors the module changes.
        learning: whether gradients are enabled.
        places: where the data of each given tensor lie in memory; empty if the module changes none.
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

    A tensor that the stage changes in place is copied for it first, since others may hold the same memory:
    the stage that made it, other stages that use it, or the caller of the pipeline. Which tensors it
    changes is learned from torch's version counters in the first call with tensors of the same shapes, for
    which all of them are copied.

    Args:
        stage: the index of the stage, for messages.
    """

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._changes: dict[_Kind, frozenset[int]] = {}

    def enter(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, training: bool) -> Entered:
        """Make the arguments that the module gets.

        Args:
            args: by position.
            kwargs: by name.
            training: whether the module is in training mode, in which it may change others.
        """
        tensors, structure = flatten((args, dict(kwargs)) if kwargs else args)
        learning = torch.is_grad_enabled()
        kind = (training, learning, *[tensor.shape for tensor in tensors])
        copied = self._changes.get(kind)
        leaves: list[Tensor] = []
        entered: list[Tensor] = []
        for index, tensor in enumerate(tensors):
            changes = copied is None or index in copied
            # A tensor that was made in inference mode has no version counter.
            own = _copy(tensor) if changes or tensor.is_inference() else tensor
            if own.requires_grad and learning:
                leaf = own.detach().requires_grad_()
                leaves.append(leaf)
                # A leaf cannot be changed in place, so the module gets a non-leaf if it changes this one.
                entered.append(cast("Any", _Enter).apply(leaf) if changes else leaf)
            else:
                leaves.append(own)
                # A new object: if the module writes something into it that requires grad, only this
                # object requires grad from then on.
                entered.append(own if own.requires_grad else own.detach())
        call = unflatten(structure, entered)
        versions = [version_of(tensor) for tensor in entered]
        if not kwargs:
            call = (call, {})
        places = [] if copied is not None and not copied else [_place(t) for t in tensors]
        return Entered(call, leaves, structure, entered, versions, copied, kind, learning, places)

    def leave(self, entered: Entered) -> Sequence[int]:
        """Look at the arguments after the call.

        Returns:
            The positions of the tensors that the module has changed in place.

        Raises:
            SpecError: it changed one that it left alone in earlier calls, or one that it was given twice.
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
                "argument shares its memory, but would not see the change here: clone one of them"
            )
        if entered.copied is None:
            self._learn(entered.kind, frozenset(changed))
        elif new := [index for index in changed if index not in entered.copied]:
            raise self._unexpected(entered, new)
        return changed

    def check_refused(self, entered: Entered, error: RuntimeError) -> None:
        """Look at an error that the call has raised.

        Raises:
            SpecError: the module tried to change an argument in place that it left alone in earlier calls.
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
            "earlier calls of this shape; the memory may be shared with others: use an out-of-place "
            "operation, or clone the tensor first"
        )

    def _learn(self, kind: _Kind, changed: frozenset[int]) -> None:
        if len(self._changes) >= _REMEMBERED:
            self._changes.clear()
        self._changes[kind] = changed


_OF_LEAVES = re.compile("leaf Variable that requires grad .*in-place")
"""Torch's error about an in-place operation on a leaf, or on a view of one."""


def _place(tensor: Tensor) -> Any:
    """Where a tensor's data lie in memory; ``None`` if it has none."""
    if not tensor.numel() or tensor.is_meta or tensor.layout is not torch.strided:
        return None
    return tensor.data_ptr(), tensor.shape, tensor.stride()


class _Enter(torch.autograd.Function):
    """Makes a non-leaf from a leaf, which is neither a copy nor a view."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        # No gradient is not the same as zeros.
        ctx.set_materialize_grads(False)
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0]


def _copy(tensor: Tensor) -> Tensor:
    """A copy with the same strides, so that the same kernels run on it."""
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
        # Its elements overlap in memory in another way than by expand().
        return tensor.clone()
