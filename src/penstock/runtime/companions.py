"""What goes along with a stage's microbatches through a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Companion(Protocol):
    """Told of each piece of a stage's work just before it begins."""

    def forward(self, microbatch: int) -> None:
        """A microbatch's forward begins."""

    def loss(self, microbatch: int) -> None:
        """Its loss begins, on the last stage."""

    def backward(self, microbatch: int) -> None:
        """Its backward begins, or a half of it."""

    def done(self, microbatch: int) -> None:
        """Its backward is over."""


Companions = Mapping[int, tuple[Companion, ...]]
"""Those of each stage."""
