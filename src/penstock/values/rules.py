"""How an argument, or a whole call, is split."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from penstock.errors import MicrobatchError
from penstock.values.batch import Microbatches


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


def check_rules(rules: Any) -> None:
    """Check that batches can be split so.

    Raises:
        MicrobatchError: what was given is no rule; the message names the argument it is for.
    """
    if rules is None or callable(rules):
        return
    if not isinstance(rules, Mapping):
        raise MicrobatchError(
            f"rules={rules!r}: must be a mapping from arguments, by position or name, to how each is split, "
            "or a function that splits the whole call"
        )
    for name, rule in rules.items():
        if isinstance(rule, Mapping):
            check_rules(rule)
        elif isinstance(rule, type) or not (isinstance(rule, Split | Replicate) or callable(rule)):
            raise MicrobatchError(
                f"rules={{{name!r}: {rule!r}}}: must be Split(dim), REPLICATE, a function "
                "(value, sizes) -> parts, or a mapping of these"
            )


TARGET = "target"
OUTPUT = "output"
