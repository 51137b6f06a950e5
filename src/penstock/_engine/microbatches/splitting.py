"""Split a batch into microbatches of about as many samples or tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from penstock._engine.masks import BlockMask
from penstock._engine.microbatches.batch import (
    MISSING,
    Batch,
    Microbatch,
    Microbatches,
    count_samples,
    samples_by_targets,
)
from penstock._engine.microbatches.pieces import (
    SplitPiece,
    SplitPieces,
    columns_of,
    pieces_of,
    pieces_of_leaves,
)
from penstock._engine.microbatches.rules import (
    OUTPUT,
    TARGET,
    Replicate,
    Rule,
    Rules,
    Split,
)
from penstock._engine.microbatches.tokens import (
    BOUNDS,
    MASK,
    ORDINALS,
    POSITIONS,
    Row,
    Share,
    bounds_by_rows,
    even_sizes,
    find_row,
    labels_that_count,
    narrowed,
    trimmed,
)
from penstock._engine.values import PLAIN, Place, Structure, flatten, leaves_in, path_of
from penstock.errors import MicrobatchError

_TARGET_KEY = "target="  # no argument can have this name
_Arguments: TypeAlias = "dict[int | str, tuple[Any, Rule | None]]"
"""The value and the rule of each argument; the rule may be None."""
_MOST_CUTS = 1024


class Cuts(NamedTuple):
    """How batches that look the same are cut: all of it but their data.

    Attributes:
        pieces: the pieces of each argument and of the target, without their values.
        sizes: the samples of each microbatch.
    """

    pieces: Mapping[int | str, SplitPieces]
    sizes: Sequence[int]


KnownCuts: TypeAlias = dict[Hashable, Cuts]
"""The cuts of batches that one set of rules has split, by how the batches look."""


def split_batch(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: Any,
    rules: Rules | None,
    count: int,
    *,
    fewer: bool = False,
    known: KnownCuts | None = None,
) -> Batch:
    """Split those arguments of a call, and its target, that this process was given.

    The sizes of microbatches differ by at most one. Tensors, also nested ones, are split along dimension 0,
    or as ``rules`` say. Other values, and tensors without dimensions, go to every microbatch.

    Args:
        args: positional arguments; or :class:`Microbatches` as the only one.
        kwargs: keyword arguments.
        target: what the loss compares with; :data:`MISSING` if there is none.
        rules: by argument, also for :data:`TARGET`; or a function that splits the whole call.
        count: the number of microbatches.
        fewer: whether there may be fewer microbatches, if there are fewer samples.
        known: the cuts that are known for these rules; gets that of the batch, if batches that look the same
            are cut the same.

    Raises:
        MicrobatchError: a rule is for no argument, a tensor lacks the dimension to split, tensors disagree
            about the number of samples, there are fewer samples than microbatches, or ``count`` is below 1.
    """
    look = None if known is None else _look_of(args, kwargs, target, count)
    cuts = None if known is None else known.get(look)
    if cuts is not None:
        values: dict[int | str, Any] = dict([*enumerate(args), *kwargs.items()])
        values[_TARGET_KEY] = target
        return _cut(len(args), values, cuts, look)
    if any([isinstance(value, Microbatches) for value in (*args, *kwargs.values(), target)]):
        return _presplit(args, kwargs, target)
    if count < 1:
        raise MicrobatchError(f"a batch cannot be split into {count} microbatches; use at least 1")
    if not args and not kwargs and target is MISSING:
        return Batch()
    if rules is not None and not isinstance(rules, Mapping):
        return _split_by(rules(tuple(args), dict(kwargs), target, count), target, count)
    arguments = _ruled(args, kwargs, target, rules or {})
    row = _row_in(arguments)
    if row is not None:
        return _split_row(len(args), arguments, row, count, fewer)
    for key in BOUNDS & arguments.keys():
        value, rule = arguments[key]
        arguments[key] = value, rule or (bounds_by_rows if isinstance(value, Tensor) else None)
    batch, pieces = _split_samples(len(args), arguments, count, fewer)
    if known is None or look is None or not all(map(_is_cut_by_look, arguments.items())):
        return batch
    without_values = {
        key: of._replace(pieces=[piece._replace(value=None) for piece in of.pieces])
        for key, of in pieces.items()
    }
    if len(known) == _MOST_CUTS:
        known.clear()
    known[look] = Cuts(without_values, batch.samples or ())
    return replace(batch, look=look)


def _presplit(args: Sequence[Any], kwargs: Mapping[str, Any], target: Any) -> Batch:
    targets = target.calls if isinstance(target, Microbatches) else target
    if not args and not kwargs:
        return Batch(
            None, targets, samples_by_targets(targets, ()) or None, len(targets), presplit=True
        )
    calls = args[0] if args else None
    if not isinstance(calls, Microbatches) or len(args) > 1 or kwargs:
        raise MicrobatchError(
            "Microbatches(...) hold all arguments of the model, including keyword arguments; pass no "
            "others beside them"
        )
    return calls.batch(targets)


def _split_by(calls: Any, target: Any, count: int) -> Batch:
    said = "the split= function that splits a call returned"
    if not isinstance(calls, Microbatches):
        raise MicrobatchError(f"{said} a {type(calls).__name__}; it must return Microbatches")
    if len(calls) > count:
        raise MicrobatchError(f"{said} {len(calls)} microbatches of at most {count}")
    return calls.batch(MISSING if target is MISSING else None)


def _ruled(
    args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, rules: Mapping[int | str, Rule]
) -> _Arguments:
    named: dict[int | str, Any] = dict([*enumerate(args), *kwargs.items()])
    unknown = [key for key in rules if key not in named and key not in (TARGET, OUTPUT)]
    if unknown and named:
        raise MicrobatchError(
            f"split= has rules for {unknown}, but the call has the arguments {list(named)}: an argument "
            "that is given by position is named by its number, as in split={0: 1}, and one that is given by "
            "name by that"
        )
    arguments = {name: (value, rules.get(name)) for name, value in named.items()}
    if target is not MISSING:
        arguments[_TARGET_KEY] = target, rules.get(TARGET)
    return arguments


def _shown(key: int | str) -> str:
    return "the target" if key == _TARGET_KEY else f"argument {key!r}"


def _microbatches(
    positional: int, columns: Mapping[int | str, Sequence[Any]], sizes: Sequence[int]
) -> list[Microbatch]:
    names = [key for key in columns if isinstance(key, str)]
    every = [columns[key] for key in (*range(positional), *names)]
    parts = []
    for size, *values in zip(sizes, *every, strict=True):
        kwargs = dict(zip(names, values[positional:], strict=True))
        parts.append(Microbatch(tuple(values[:positional]), kwargs, size))
    return parts


# ---- batches whose like was split before


def _look_of(
    args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, count: int
) -> Hashable | None:
    """Return how a batch looks; None if it holds something whose looks do not say how it is cut."""
    leaves, structure = flatten([args, kwargs, target], with_whole_masks=True)
    looks: list[Any] = [count]
    if not _add_form(structure, looks):
        return None
    for leaf in leaves:
        if type(leaf) is Tensor and leaf.layout is torch.strided:
            if leaf.is_nested or leaf.is_meta:
                return None
            looks += [leaf.shape, leaf.dtype, leaf.stride(), leaf.requires_grad]
        elif isinstance(leaf, Tensor | BlockMask):
            return None
        else:
            looks += [type(leaf), repr(leaf) if type(leaf) in PLAIN else None]
    return tuple(looks)


def _add_form(structure: Structure, looks: list[Any]) -> bool:
    """Add how containers are nested, if all are Python's own: what others hold need not be comparable."""
    kind, context, children = structure
    if kind is dict:
        if not PLAIN.issuperset(map(type, context)):
            return False
        looks.append((dict, *((type(key), key) for key in context)))
    elif kind in (None, list, tuple):
        looks.append((kind, len(children)))
    else:
        return False
    return all([_add_form(child, looks) for child in children])


def _is_cut_by_look(argument: tuple[int | str, tuple[Any, Rule | None]]) -> bool:
    """Tell if an argument, with its value and its rule, is cut in a way that does not depend on numbers."""
    key, (value, rule) = argument
    if not isinstance(rule, Split | Replicate | None) or _is_by_tokens(rule):
        return False
    return _TELLING.isdisjoint(_last_name(key, place) for place, _ in leaves_in(value))


def _cut(positional: int, values: Mapping[int | str, Any], cuts: Cuts, look: Hashable) -> Batch:
    """Split a batch as those that look the same."""
    pieces, sizes = cuts
    arguments = {key: (values[key], of) for key, of in pieces.items()}
    columns = columns_of(arguments, sizes)
    targets = columns.pop(_TARGET_KEY, None)
    parts = _microbatches(positional, columns, sizes) if columns else None
    return Batch(parts, targets, sizes, len(sizes), look=look)


# ---- microbatches of about as many samples


def _split_samples(
    positional: int, arguments: _Arguments, count: int, fewer: bool
) -> tuple[Batch, dict[int | str, SplitPieces]]:
    """The batch, and the pieces of its arguments."""
    pieces = {key: pieces_of(value, rule, _shown(key)) for key, (value, rule) in arguments.items()}
    _check_lists(arguments, pieces)
    every = [piece for of_one in pieces.values() for piece in of_one.pieces]
    samples = _agreed_samples(every)
    by_function = any(callable(piece.rule) for piece in every)
    if samples == 0:
        raise MicrobatchError("the batch is empty; give it at least one sample per microbatch")
    if fewer:
        # If nothing is split there is one microbatch, unless a function of the user's may split something.
        count = min(count, samples or (count if by_function else 1))
    if samples is not None and samples < count:
        raise MicrobatchError(
            f"{samples} samples cannot be split into {count} microbatches; "
            f"use at most {samples} microbatches or a larger batch"
        )
    if samples is None and by_function:
        # Nothing but functions split the batch: what they split says how much there is.
        ruled = [piece.value for piece in reversed(every) if callable(piece.rule)]
        samples = next(filter(None, map(_length, ruled)), None)
    sizes, tokens, masks = _sizes(every, arguments, samples or 0, count)
    if masks:
        pieces = {
            key: of._replace(pieces=[_trimming(piece, masks) for piece in of.pieces])
            for key, of in pieces.items()
        }
    columns = columns_of({key: (arguments[key][0], of) for key, of in pieces.items()}, sizes)
    targets = columns.pop(_TARGET_KEY, None)
    weights = _weights(targets, columns, tokens) if tokens else None
    counted = by_function and all(piece.samples is None for piece in every)
    if counted:
        of_parts = [count_samples(of_one) for of_one in zip(*columns.values(), strict=True)]
        sizes = samples_by_targets(targets or (), of_parts or [0] * count)
    parts = _microbatches(positional, columns, sizes) if columns else None
    return Batch(parts, targets, sizes, count, counted=counted, weights=weights), pieces


def _check_lists(arguments: _Arguments, pieces: Mapping[int | str, SplitPieces]) -> None:
    """Check that no list or tuple without a rule holds a sample in each entry.

    Like a dict, it is a structure, whose tensors hold all samples in dimension 0.
    """
    lists = [
        (key, value)
        for key, (value, rule) in arguments.items()
        if rule is None and type(value) in (list, tuple)
    ]
    if not lists:
        return
    sizes = {
        key: {piece.samples for piece in of_one.pieces if piece.samples is not None}
        for key, of_one in pieces.items()
    }
    for key, value in lists:
        if not sizes[key]:
            continue
        others = {size for other, of in sizes.items() if other != key for size in of}
        fits = len(value) in others if others else len(value) > _MOST_CHANNELS
        if len(sizes[key]) > 1 or (
            fits and (not sizes[key] <= others or all(map(_is_image, value)))
        ):
            name = TARGET if key == _TARGET_KEY else key
            raise MicrobatchError(
                f"{_shown(key)} is a {type(value).__name__} of {len(value)}, and looks like one of as many "
                f"samples: {'; '.join(map(str, pieces[key].pieces[:2]))}. Without a rule, dimension 0 "
                f"of each tensor in it counts the samples. split={{{name!r}: Split(None)}} splits it by its "
                f"entries, each a sample; Split(0) splits each tensor in it, and a mapping such as "
                f"{{{name!r}: {{1: REPLICATE}}}} gives each entry a rule of its own"
            )


_MOST_CHANNELS = 3


def _is_image(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 3 and len(value) == _MOST_CHANNELS


def _agreed_samples(pieces: Sequence[SplitPiece]) -> int | None:
    """The size that all split pieces share, or ``None`` if none is split."""
    split = [piece for piece in pieces if piece.samples is not None]
    if len({piece.samples for piece in split}) < 2:
        return split[0].samples if split else None
    # SplitPieces with a rule are right; without rules, the size of most pieces, or of the first one.
    trusted = [piece for piece in split if piece.rule is not None] or split
    samples = Counter([piece.samples for piece in trusted]).most_common(1)[0][0]
    unlike = [piece for piece in split if piece.samples != samples]
    example = next(piece for piece in trusted if piece.samples == samples)
    raise MicrobatchError(
        f"the batch has {samples} samples ({example}), but {'; '.join(map(str, unlike))}; use split= to "
        "split it along another dimension, Split(dim), to keep it whole, REPLICATE, or to split it by a "
        "function (value, sizes) -> parts"
    )


def _length(value: Any) -> int:
    """Return how many samples a value holds that a function splits."""
    if isinstance(value, list | tuple) and not all(isinstance(item, Tensor) for item in value):
        return len(value)
    return count_samples(value)


# ---- microbatches of about as many tokens


def _is_by_tokens(rule: Any) -> bool:
    return isinstance(rule, Split) and rule.by == "tokens"


def _sizes(
    pieces: Sequence[SplitPiece], arguments: _Arguments, samples: int, count: int
) -> tuple[list[int], list[int], list[Tensor]]:
    """The samples of each microbatch; and, if they are split by tokens, its tokens and its mask."""
    by_tokens = [piece for piece in pieces if _is_by_tokens(piece.rule)]
    if not by_tokens:
        size, rest = divmod(samples, count)
        return [size + (index < rest) for index in range(count)], [], []
    lengths, mask = _tokens_of(by_tokens[0], arguments)
    sizes = even_sizes(lengths, count)
    tokens = [sum(lengths[a:b]) for a, b in pairwise([0, *accumulate(sizes)])]
    return sizes, tokens, [] if mask is None else [*mask.split(sizes)]


def _tokens_of(piece: SplitPiece, arguments: _Arguments) -> tuple[list[int], Tensor | None]:
    """The tokens of each sample, and the mask of those that are not padding, if there is one."""
    if isinstance(piece.value, list | tuple):
        return [max(1, _length(entry)) for entry in piece.value], None
    mask = next((v for key, (v, _) in arguments.items() if key == MASK), piece.value)
    is_mask = isinstance(mask, Tensor) and mask.dim() == 2
    if not is_mask or (mask is piece.value and mask.dtype is not torch.bool and mask.max() > 1):
        raise MicrobatchError(
            f"{piece.path} is to be split by tokens, but nothing says which of its entries are padding; "
            "give attention_mask=, or the rule Split(by='tokens') to a mask [samples, length]"
        )
    mask = mask != 0
    return mask.sum(1).clamp(min=1).tolist(), mask


def _trimming(piece: SplitPiece, masks: Sequence[Tensor]) -> SplitPiece:
    """A padded piece, cut without what is padding in a whole microbatch."""
    if not isinstance(piece.value, Tensor) or piece.samples is None:
        return piece
    dim = piece.dim % piece.value.dim() + 1
    if piece.value.shape[dim : dim + 1] != masks[0].shape[1:]:
        return piece

    def cut(value: Any, sizes: Sequence[int]) -> Sequence[Any]:
        parts = zip(piece.cut(value, sizes), masks, strict=True)
        return [narrowed(part, dim, *trimmed(mask)) for part, mask in parts]

    return piece._replace(cut=cut)


def _weights(targets: Sequence[Any] | None, columns: Any, tokens: Sequence[int]) -> Sequence[int]:
    """How much microbatches count: by their labels that count, or where there are none, by their tokens."""
    labels = targets if targets is not None else columns.get("labels")
    counts = [labels_that_count(of) for of in labels or ()]
    known = [number for number in counts if number is not None]
    return known if len(known) == len(tokens) else tokens


# ---- microbatches of sequences that are packed into one row

_TELLING = {POSITIONS, ORDINALS, *BOUNDS}
"""The arguments that tell how a row is packed."""


def _row_in(arguments: _Arguments) -> Row | None:
    """The packed row that a batch is, unless a rule says how what tells that is split."""
    if not any([key in _TELLING or type(x) is not Tensor for key, (x, _) in arguments.items()]):
        return None
    rules = {key: rule for key, (_, rule) in arguments.items() if rule is not None}
    if any(key in _TELLING and not _is_by_tokens(rule) for key, rule in rules.items()):
        return None
    return find_row(
        (_last_name(key, place), leaf)
        for key, (value, _) in arguments.items()
        if key != _TARGET_KEY
        for place, leaf in leaves_in(value, with_whole_masks=True)
    )


def _last_name(key: int | str, place: Place) -> str:
    """The last of the names that lead to a leaf of an argument."""
    return str(next((name for name in reversed(place) if isinstance(name, str)), key))


def _split_row(positional: int, arguments: _Arguments, row: Row, count: int, fewer: bool) -> Batch:
    """Split sequences that are packed into one row, with about as many tokens for each microbatch."""
    if row.sequences < count and not fewer:
        raise MicrobatchError(
            f"{row.sequences} packed sequences cannot be split into {count} microbatches; use at most "
            f"{row.sequences} microbatches or more sequences"
        )
    shares = row.shares(count)
    tokens = [share.end - share.begin for share in shares]
    sequences = [share.after - share.first for share in shares]
    pieces = {
        key: pieces_of(value, rule, _shown(key))
        if rule is not None and not _is_by_tokens(rule)
        else pieces_of_leaves(value, partial(_piece_of_row, row, shares, key))
        for key, (value, rule) in arguments.items()
    }

    def sized(piece: SplitPiece) -> SplitPiece:
        sizes = tokens if piece.samples == row.length else sequences
        return piece._replace(cut=lambda value, _: piece.cut(value, sizes))

    ready = {key: of._replace(pieces=[*map(sized, of.pieces)]) for key, of in pieces.items()}
    columns = columns_of({key: (arguments[key][0], of) for key, of in ready.items()}, tokens)
    targets = columns.pop(_TARGET_KEY, None)
    parts = _microbatches(positional, columns, tokens)
    weights = _weights(targets, columns, tokens)
    return Batch(
        parts, targets, tokens, len(shares), weights=weights, dim=row.dim, sequences=sequences
    )


def _piece_of_row(
    row: Row, shares: Sequence[Share], key: int | str, place: Place, leaf: Any
) -> SplitPiece:
    """A leaf of an argument without a rule, of which the row knows each share's part."""
    path, name = _shown(key) + path_of(place), _last_name(key, place)
    return SplitPiece(
        path, leaf, None, lambda leaf, _: [row.part(path, share, name, leaf) for share in shares]
    )
