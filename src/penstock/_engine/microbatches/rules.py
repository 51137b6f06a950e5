"""Rules: how each argument is split, and how outputs are merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from penstock._engine.microbatches.batch import Microbatches
from penstock.errors import MicrobatchError


@dataclass(frozen=True)
class Split:
    """Split every tensor of an argument along a dimension; of an output, join those of microbatches there.

    Args:
        dim: the dimension; None splits a list or tuple by its entries, each of which is one sample.
        by: what microbatches have about the same number of: ``"samples"`` or ``"tokens"``. The tokens of
            padded sequences are those in ``attention_mask``, or in the argument if it is such a mask;
            what is padding in all sequences of a microbatch is left out. The tokens of entries of a list are
            their lengths. Sequences that are packed into one row are always split by tokens.
        chunks: of how many blocks of one size the dimension consists, each with an entry for every sample:
            2 for the chosen answers of all samples followed by the rejected ones.
    """

    dim: int | None = 0
    by: Literal["samples", "tokens"] = "samples"
    chunks: int = 1


@dataclass(frozen=True)
class Replicate:
    """Give every microbatch the whole argument."""


BY_ENTRY = Split(None)
REPLICATE = Replicate()
"""Give every microbatch the whole argument: a rule for ``Pipeline(split=...)``.

For an output: it is the same in all microbatches.
"""
Splitter = Callable[[Any, Sequence[int]], Any]
"""``(value, sizes)`` -> the value's part in each microbatch, from the number of samples of each.

For an output ``(parts, sizes)`` -> the whole, from what the microbatches gave.
"""
ItemRule: TypeAlias = Split | Replicate | Splitter
"""How an argument, or one of its items, is split, or an output put together."""
Rule: TypeAlias = ItemRule | Mapping[Any, ItemRule]
"""How an argument is split. A mapping gives the rules of its items, fields or positions one by one."""
CallSplitter = Callable[[tuple[Any, ...], dict[str, Any], Any, int], Microbatches]
"""``(args, kwargs, target, count)`` -> that number of microbatches, or fewer."""
Rules: TypeAlias = Mapping[int | str, Rule] | CallSplitter
"""How each argument, by position or name, is split; or a function that splits the whole call.

Without a rule a tensor is split along dimension 0, and a tensor without dimensions goes to every microbatch.
The rule for ``"target"`` splits the target, and the one for ``"output"`` says how those of microbatches are
put together; without one, dimension 0 of each tensor must count the samples.
"""
RulesGiven: TypeAlias = (
    Mapping[int | str, Any] | Mapping[int, Any] | Mapping[str, Any] | CallSplitter
)
"""Rules as a user gives them: a plain number stands for ``Split`` along that dimension."""
TARGET = "target"
"""The name of ``target=`` in rules."""
OUTPUT = "output"
"""The name of what the model returns in rules."""


def read_rules(rules: RulesGiven | None) -> Rules | None:
    """The rules as a user gives them, with ``Split(dim)`` in place of plain dimensions.

    Raises:
        MicrobatchError: something is not a rule; the message names the argument that it is for.
    """
    if rules is None or callable(rules):
        return rules
    if not isinstance(rules, Mapping):
        raise MicrobatchError(
            f"split={rules!r}: must be a mapping from arguments, by position or name, to how each is split, "
            "or a function that splits the whole call"
        )
    rules = {name: _read_rule(rule) for name, rule in rules.items()}
    for name, rule in rules.items():
        for item in rule.values() if isinstance(rule, Mapping) else (rule,):
            if isinstance(item, type) or not (
                isinstance(item, Split | Replicate) or callable(item)
            ):
                function = (
                    "(parts, sizes) -> whole" if name == OUTPUT else "(value, sizes) -> parts"
                )
                raise MicrobatchError(
                    f"split={{{name!r}: {rule!r}}}: must be a dimension, Split(dim), REPLICATE, a "
                    f"function {function}, or a mapping of these by item"
                )
            if isinstance(item, Split) and item.by not in ("samples", "tokens"):
                raise MicrobatchError(
                    f"split={{{name!r}: {rule!r}}}: by= must be 'samples' or 'tokens'"
                )
            if isinstance(item, Split) and item.chunks != 1:
                _check_chunks(f"split={{{name!r}: {rule!r}}}", item)
    return rules


def _read_rule(rule: Any) -> Any:
    if isinstance(rule, Mapping):
        return {name: _read_rule(item) for name, item in rule.items()}
    return Split(rule) if type(rule) is int else rule


def _check_chunks(said: str, rule: Split) -> None:
    if type(rule.chunks) is not int or rule.chunks < 1:
        raise MicrobatchError(f"{said}: chunks= must be a whole number, at least 1")
    if rule.dim is None or rule.by != "samples":
        raise MicrobatchError(f"{said}: chunks= is for a dimension that is split by samples")


def output_rule(rules: Rules | None, *, packed: bool = False) -> Rule | None:
    """The rule by which outputs are merged; None if each tensor counts the samples in dimension 0.

    Args:
        rules: the rules by which batches are split.
        packed: whether the batch is a packed row, so that tensors count its tokens or sequences instead.

    Raises:
        MicrobatchError: an argument is split along another dimension than 0, and there is no rule for
            outputs.
    """
    if not isinstance(rules, Mapping):
        return None
    if OUTPUT in rules or packed:
        return rules.get(OUTPUT)
    dims = sorted({entry.dim or 0 for entry in rules.values() if isinstance(entry, Split)} - {0})
    if dims:
        raise MicrobatchError(
            f"arguments are split along dimension {dims[0]}; say along which dimension to merge outputs: "
            f"split={{'output': Split({dims[0]})}} or Split(0)"
        )
    return None
