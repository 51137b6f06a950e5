"""What a rank holds between actions: values on their way to users, and gradients on their way back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import InternalError

Gradients = Sequence[Tensor | None]
_Key = tuple[str, int]
"""The name of a value, and a microbatch."""


class Held(NamedTuple):
    """A value, and the tensors in it."""

    value: Any
    tensors: Sequence[Tensor]


class Values:
    """Values by name and microbatch, each kept until it was read as often as announced."""

    def __init__(self) -> None:
        self._held: dict[_Key, tuple[Any, int]] = {}

    def put(self, name: str, microbatch: int, value: Any, uses: int) -> None:
        """Keep a value for ``uses`` reads."""
        if uses:
            self._held[name, microbatch] = (value, uses)

    def take(self, name: str, microbatch: int) -> Any:
        """Read a value; the last read lets go of it."""
        try:
            value, uses = self._held.pop((name, microbatch))
        except KeyError:
            raise InternalError(f"value {name!r} of microbatch {microbatch} is not here") from None
        if uses > 1:
            self._held[name, microbatch] = (value, uses - 1)
        return value

    def __len__(self) -> int:
        return len(self._held)


class GradientSums:
    """The gradients that the users of a value owe for it."""

    def __init__(self) -> None:
        self._held: dict[_Key, dict[int, Gradients]] = {}

    def put(self, name: str, microbatch: int, user: int, gradients: Gradients) -> None:
        """Keep what stage ``user`` owes: a gradient or ``None`` for each tensor of the value."""
        self._held.setdefault((name, microbatch), {})[user] = gradients

    def take(self, name: str, microbatch: int) -> list[Tensor | None]:
        """The sum over users, from the last stage to the first whatever the order they came in."""
        owed = self._held.pop((name, microbatch), {})
        columns = zip(*(owed[user] for user in sorted(owed, reverse=True)), strict=True)
        return [_add(column) for column in columns]

    def __len__(self) -> int:
        return len(self._held)


def _add(gradients: Sequence[Tensor | None]) -> Tensor | None:
    present = [gradient for gradient in gradients if gradient is not None]
    return reduce(torch.add, present) if present else None
