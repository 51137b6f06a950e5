"""How an argument, or a whole call, is split."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from penstock.microbatch.batch import Microbatches


@dataclass(frozen=True)
class Split:
    """Split every tensor of an argument along a dimension."""

    dim: int = 0


@dataclass(frozen=True)
class Replicate:
    """Give every microbatch the whole argument."""


REPLICATE = Replicate()
Splitter = Callable[[Any, Sequence[int]], Sequence[Any]]
"""From an argument and the number of samples of each microbatch: its part in each."""
Rule: TypeAlias = "Split | Replicate | Splitter | Mapping[Any, Rule]"
"""How an argument is split; a mapping says it of its items, fields or positions one by one."""
CallSplitter = Callable[[tuple[Any, ...], dict[str, Any], Any, int], Microbatches]
"""From the arguments, those by name, the target and a number: so many microbatches, or fewer."""
Rules: TypeAlias = Mapping[int | str, Rule] | CallSplitter
"""For an argument, by position or name, how it is split; or a function that splits the whole call.

Without a rule a tensor is split along dimension 0, and one without dimensions goes to every microbatch
whole. ``"target"`` says it of the target, and ``"output"`` along which dimension outputs are put together.
"""
TARGET = "target"
OUTPUT = "output"
