"""Gradients that are collected beside ``.grad``, stage by stage.

A weight that several stages use has one gradient, the sum of their shares. In one process those stages hold
one parameter; if each added straight into its ``.grad``, the bits of the sum would depend on which stages
live together and on whose backward runs first. So each stage collects its own share, and whoever knows all
shares adds them up.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class Apart:
    """A context in which gradients of some parameters add up here and not in their ``.grad``.

    What stood in ``.grad`` is back there when the context ends, also after an error.

    Args:
        parameters: which ones.
    """

    def __init__(self, parameters: Sequence[Tensor] = ()) -> None:
        self._parameters = tuple(parameters)
        self._shares: list[Tensor | None] = [None] * len(self._parameters)
        self._outside: list[Tensor | None] = []

    def __enter__(self) -> None:
        if self._parameters:
            self._outside = [parameter.grad for parameter in self._parameters]
            _put(self._parameters, self._shares)

    def __exit__(self, *_: object) -> None:
        if self._parameters:
            self._shares = [parameter.grad for parameter in self._parameters]
            _put(self._parameters, self._outside)
            self._outside = []

    def take(self) -> list[Tensor | None]:
        """What was collected of each parameter since the last call."""
        shares, self._shares = self._shares, [None] * len(self._parameters)
        return shares


def _put(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
