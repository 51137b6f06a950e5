"""Merge the outputs of microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock._engine.microbatches.rules import OUTPUT, ItemRule, Replicate, Rule, Split
from penstock._engine.values import Place, flatten, items_of, leaves_in, path_of, unflatten
from penstock.errors import MicrobatchError

Ways: TypeAlias = Sequence[tuple[int, Sequence[int]]]
"""Dimensions, each with the size that a tensor has there in each microbatch if its entries are joined."""


def merge(
    parts: Sequence[Any],
    rule: Rule | None,
    ways: Ways,
    *,
    alike: bool = False,
    what: str = OUTPUT,
) -> Any:
    """Merge the outputs of microbatches, or their targets.

    Without a rule, tensors are concatenated along the first dimension in which they have the sizes that
    ``ways`` says, and other values must be equal in all microbatches.

    Args:
        parts: one for each microbatch; without a function as the rule, all have the same structure.
        rule: how they are merged, as in :data:`~penstock._engine.microbatches.Rules`.
        ways: what the entries of a tensor may be; the first way is by the samples of each microbatch.
        alike: whether a tensor that does not count samples may be the same in all microbatches.
        what: the name in rules of what is merged.

    Raises:
        MicrobatchError: there is no way, the structures differ, or values that must be equal do.
    """
    rule = _with_known_items(rule, parts[0])
    sizes = ways[0][1]
    join = partial(_joined, ways=ways, alike=alike)
    if not isinstance(rule, Mapping):
        return _merge_item(parts, rule, sizes, join, (what,))
    items = [of for of in map(items_of, parts) if of is not None]
    if not items:
        kind = type(parts[0]).__name__
        raise MicrobatchError(f"the {what} is a {kind} without items, but its rule is {dict(rule)}")
    if len(items) < len(parts) or len({(*of.of,) for of in items}) > 1:
        raise _unlike(parts, (what,))
    unknown = [key for key in rule if key not in items[0].of]
    if unknown:
        raise MicrobatchError(
            f"split= has rules for {unknown} of the {what}, which has {[*items[0].of]}"
        )
    return items[0].build(
        [
            _merge_item([of.of[key] for of in items], rule.get(key), sizes, join, (what, key))
            for key in items[0].of
        ]
    )


_Join: TypeAlias = Callable[[Sequence[Any], Split | None, Place], Any]
"""Joins values of all microbatches by a rule; the place is for messages."""


def _merge_item(
    parts: Sequence[Any], rule: ItemRule | None, sizes: Sequence[int], join: _Join, at: Place
) -> Any:
    if not isinstance(rule, Split | Replicate | None):
        return rule(parts, sizes)
    if len(parts) == 1:
        return parts[0]
    if isinstance(rule, Split) and rule.dim is None:
        if not all(isinstance(part, list | tuple) for part in parts):
            raise MicrobatchError(
                f"{_named(at)} is a {type(parts[0]).__name__}, but its rule Split(None) is for a list or "
                "tuple"
            )
        return type(parts[0])(chain(*parts))
    flattened = [flatten(part) for part in parts]
    tree = flattened[0][1]
    if any(other != tree for _, other in flattened):
        raise _unlike(parts, at)
    columns = zip(*(leaves for leaves, _ in flattened), strict=True)
    places = [(*at, *place) for place, _ in leaves_in(parts[0])]
    merged = [
        _the_same(column, place) if isinstance(rule, Replicate) else join(column, rule, place)
        for column, place in zip(columns, places, strict=True)
    ]
    return unflatten(merged, tree)


def _the_same(leaves: Sequence[Any], at: Place) -> Any:
    first = leaves[0]
    if not _equal(leaves):
        raise MicrobatchError(
            f"{_named(at)} is not the same in all microbatches, although its rule is REPLICATE"
        )
    return first.clone() if isinstance(first, Tensor) else first


def _joined(
    leaves: Sequence[Any], rule: Split | None, at: Place, *, ways: Ways, alike: bool
) -> Any:
    """Values of all microbatches, joined along a dimension."""
    first = leaves[0]
    if not isinstance(first, Tensor):
        if not _equal(leaves):
            kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves}))
            raise MicrobatchError(
                f"microbatches gave outputs that are not tensors and differ ({kinds}), in {_named(at)}; "
                f"let the model return tensors, or say how to put them together: "
                f"{_rule_for(at, 'function')} with function(parts, sizes) -> whole"
            )
        return first
    if rule is None:
        dim = next((d for d, sizes in ways if _has(leaves, d, sizes)), None)
    else:
        dim = rule.dim or 0
        dim = dim if all(-leaf.dim() <= dim < leaf.dim() for leaf in leaves) else None
    if dim is None and alike and _equal(leaves):
        return first.clone()  # what comes out may be changed in place
    if dim is None:
        raise MicrobatchError(_refusal(leaves, rule, at, ways))
    try:
        return _concatenated(leaves, dim, 1 if rule is None else rule.chunks)
    except RuntimeError as error:
        shapes = [list(leaf.shape) for leaf in leaves]
        raise MicrobatchError(
            f"{_named(at)} has the shapes {shapes} in the microbatches, which cannot be joined along "
            f"dimension {dim}; pass Microbatches(...) instead of a batch to get them one by one, or say how "
            f"to put them together: {_rule_for(at, 'function')} with function(parts, sizes) -> whole"
        ) from error


def _concatenated(leaves: Sequence[Tensor], dim: int, chunks: int) -> Tensor:
    if chunks == 1:
        return torch.cat(list(leaves), dim)
    dim %= leaves[0].dim()
    blocks = [leaf.unflatten(dim, (chunks, -1)) for leaf in leaves]
    return torch.cat(blocks, dim + 1).flatten(dim, dim + 1)


def _equal(leaves: Sequence[Any]) -> bool:
    first = leaves[0]
    if isinstance(first, Tensor):
        return all(isinstance(leaf, Tensor) and torch.equal(leaf, first) for leaf in leaves[1:])
    return all(not isinstance(leaf, Tensor) and leaf == first for leaf in leaves[1:])


def _has(leaves: Sequence[Any], dim: int, sizes: Sequence[int]) -> bool:
    """Tell whether all tensors have these sizes in a dimension."""
    return all(
        isinstance(leaf, Tensor) and leaf.dim() > dim and leaf.shape[dim] == size
        for leaf, size in zip(leaves, sizes, strict=True)
    )


def _rows_each(leaves: Sequence[Any], ways: Ways) -> int:
    """Return how many rows tensors have for each sample, if that is a number; else 0."""
    dim, sizes = ways[0]
    pairs = zip(leaves, sizes, strict=True)
    rows = {
        leaf.shape[dim] / n if n and isinstance(leaf, Tensor) and leaf.dim() > dim else 0.0
        for leaf, n in pairs
    }
    number = rows.pop()
    return int(number) if not rows and number.is_integer() else 0


# ---- items whose names are known

_KNOWN = {
    "mems": Split(1),
    **dict.fromkeys(
        (
            "router_logits", "encoder_router_logits", "decoder_router_logits",
            "image_hidden_states", "video_hidden_states", "audio_hidden_states",
        ),
        Split(0),
    ),
}  # fmt: skip
"""Items of the outputs of transformers that do not count samples: a row for each token, image or clip."""


def _with_known_items(rule: Rule | None, output: Any) -> Rule | None:
    """A rule, with those for items of the outputs of transformers that need none from the user."""
    if not isinstance(rule, Mapping | None) or not isinstance(output, Mapping):
        return rule
    if not any(base.__name__ == "ModelOutput" for base in type(output).__mro__):
        return rule
    known = {name: of for name, of in _KNOWN.items() if output.get(name) is not None}
    return {**known, **(rule or {})} if known else rule


# ---- what is said about outputs that cannot be merged


def _named(at: Place) -> str:
    return f"the {at[0]}{path_of(at[1:])}"


def _rule_for(at: Place, rule: str) -> str:
    """The line that gives the rule for an item."""
    if at[1:]:
        key = str(at[1]) if isinstance(at[1], str) else at[1]
        rule = f"{{{key!r}: {rule}}}"
    return f"split={{{at[0]!r}: {rule}}}"


def _unlike(parts: Sequence[Any], at: Place) -> MicrobatchError:
    kinds = sorted({type(part).__name__ for part in parts})
    return MicrobatchError(
        f"microbatches gave {_named(at)} in different structures ({', '.join(kinds)}); if it "
        f"is a list with an entry for each sample, say {_rule_for(at, 'Split(None)')}; else put them "
        f"together by a function, {_rule_for(at, 'function')} with function(parts, sizes) -> whole, or pass "
        "Microbatches(...) instead of a batch to get them one by one"
    )


def _refusal(leaves: Sequence[Tensor], rule: Split | None, at: Place, ways: Ways) -> str:
    dim, sizes = ways[0]
    shapes = [list(leaf.shape) for leaf in leaves]
    if rule is not None:
        return (
            f"{_named(at)} has the shapes {shapes} in the microbatches, and so no dimension {rule.dim} along "
            "which to join them"
        )
    advice = [
        f"Split({d}) joins along dimension {d}"
        for d in range(min(leaf.dim() for leaf in leaves))
        if _has(leaves, d, sizes)
    ]
    if not advice:
        advice += [
            "if it is a mean over the samples, lambda parts, sizes: sum(p * n for p, n in zip(parts, sizes)) "
            "/ sum(sizes)",
            "if it is a sum, lambda parts, sizes: sum(parts)",
        ]
    rows = _rows_each(leaves, ways)
    if rows > 1:
        advice += [
            f"Split({dim}) if the {rows} rows of each sample lie together",
            f"Split({dim}, chunks={rows}) if it is {rows} blocks, each with a row for every sample",
        ]
    advice += ["REPLICATE if it is the same in all microbatches"]
    return (
        f"{_named(at)} has the shapes {shapes} in microbatches of {list(sizes)} samples, so that dimension "
        f"{dim} does not count samples and they cannot be put together; say how in "
        f"{_rule_for(at, 'rule')}: {'; '.join(advice)}; or another function (parts, sizes) -> whole"
    )
