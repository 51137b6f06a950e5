"""How values come into a stage: what the stage does to a tensor touches nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from penstock.errors import SpecError
from penstock.specs import flatten, paths, unflatten

Call = tuple[tuple[Any, ...], dict[str, Any]]
_Kind = tuple[bool, bool, tuple[torch.Size, ...]]
_REMEMBERED = 1024


@dataclass
class Entered:
    """The arguments of one call of a stage.

    Args:
        call: what the module is called with.
        leaves: for each of its tensors the leaf below it, where gradients arrive; or the tensor itself.
    """

    call: Call
    leaves: list[Tensor]
    structure: Any
    tensors: list[Tensor]
    versions: list[int]
    copied: frozenset[int]
    kind: _Kind


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

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, training: bool) -> Entered:
        """Make the arguments that the module gets.

        Args:
            args: by position.
            kwargs: by name.
            training: whether the module is in training, where it may do other things.
        """
        tensors, structure = flatten((args, kwargs) if kwargs else args)
        learning = torch.is_grad_enabled()
        kind = (training, learning, tuple([tensor.shape for tensor in tensors]))
        known = self._changes.get(kind)
        copied = frozenset(range(len(tensors))) if known is None else known
        leaves: list[Tensor] = []
        entered: list[Tensor] = []
        for index, tensor in enumerate(tensors):
            # Nobody counts the changes of a tensor that was made in inference mode.
            own = _copy(tensor) if index in copied or tensor.is_inference() else tensor
            leaf, inner = _fresh(own, learning=learning)
            leaves.append(leaf)
            entered.append(inner)
        call = unflatten(structure, entered)
        versions = [_version(tensor) for tensor in entered]
        return Entered(
            call if kwargs else (call, {}), leaves, structure, entered, versions, copied, kind
        )

    def leave(self, entered: Entered) -> Sequence[int]:
        """Look back after the call.

        Returns:
            Which of the tensors the module has changed in place.

        Raises:
            SpecError: it changed one that it had left alone before.
        """
        pairs = zip(entered.tensors, entered.versions, strict=True)
        changed = [index for index, (t, before) in enumerate(pairs) if _version(t) != before]
        if not entered.copied.issuperset(changed):
            where = list(paths(entered.structure))
            told = ", ".join(where[index] for index in changed if index not in entered.copied)
            raise SpecError(
                f"stage {self._stage} changed {told} of its arguments in place, which it did not do in "
                "earlier calls of this shape; the memory may be shared with others: use an operation that "
                "is not in place, or clone the tensor first"
            )
        if entered.kind not in self._changes:
            self._learn(entered.kind, frozenset(changed))
        return changed

    def _learn(self, kind: _Kind, changed: frozenset[int]) -> None:
        if len(self._changes) >= _REMEMBERED:
            self._changes.clear()
        self._changes[kind] = changed


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _fresh(tensor: Tensor, *, learning: bool) -> tuple[Tensor, Tensor]:
    """A leaf over a tensor's data, and what the module gets: a non-leaf over that, without hooks."""
    if tensor.requires_grad and learning:
        leaf = tensor.detach().requires_grad_()
        return leaf, cast("Any", _Enter).apply(leaf)
    if tensor.requires_grad:
        return tensor, tensor
    # An object of its own: what the module does with it, such as to make it require grad by writing into it
    # what does, is done to no other.
    return tensor, tensor.detach()


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
