"""Images and videos of a batch, as the processors of transformers lay them out: how microbatches share them.

All images of a batch lie one after the other, whichever sample they belong to; a sample has a run of tokens
in their places. So the tokens tell how many images, and how many patches, belong to each sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock._engine.microbatches.rules import Rule, Rules
from penstock.errors import MicrobatchError

_TOKENS, _TYPES = "input_ids", "mm_token_type_ids"
_IN_ROWS = 5
"""The dimensions of pixels, at least, if each sample has a row of images, filled up with empty ones."""


class _Medium(NamedTuple):
    """What the arguments about images, or about videos, are called.

    Attributes:
        token: the name in a model's configuration of the token that stands in their places.
        type: their number in ``mm_token_type_ids``.
        pixels: the pixels or patches.
        grid: how many patches each has: time, height and width.
        others: arguments with an entry for each.
    """

    token: str
    type: int
    pixels: str
    grid: str
    others: tuple[str, ...]


_MEDIA = (
    _Medium(
        "image_token_id",
        1,
        "pixel_values",
        "image_grid_thw",
        ("image_sizes", "pixel_attention_mask"),
    ),
    _Medium("video_token_id", 2, "pixel_values_videos", "video_grid_thw", ("second_per_grid_ts",)),
)


_PIXELS = frozenset(medium.pixels for medium in _MEDIA)


def image_tokens(model: nn.Module | None) -> dict[str, int]:
    """The tokens that stand in the places of images and videos, as the model's configuration says."""
    tokens: dict[str, int] = {}
    for part in () if model is None else model.modules():
        config = getattr(part, "config", None)
        for medium in _MEDIA:
            token = getattr(config, medium.token, None)
            if type(token) is int:
                tokens.setdefault(medium.token, token)
    return tokens


@dataclass(frozen=True)
class ByImages:
    """A rule for splitting: the entries that belong to each sample.

    Args:
        counts: the entries of each sample.
    """

    counts: Sequence[int]

    def __call__(self, value: Any, sizes: Sequence[int]) -> list[Any]:
        """A value's part in each microbatch, from the number of samples of each; None if it is empty."""
        ends = [0, *accumulate(self.counts)]
        of_parts = pairwise([0, *accumulate(sizes)])
        return [value[ends[a] : ends[b]] if ends[b] > ends[a] else None for a, b in of_parts]


def rules_with_images(
    rules: Rules | None, named: Mapping[str, Any], tokens: Mapping[str, int]
) -> Rules | None:
    """Rules for splitting a batch, with those for images and videos that need none from the user.

    Args:
        rules: the user's.
        named: the model's arguments by name.
        tokens: see :func:`image_tokens`.

    Raises:
        MicrobatchError: nothing tells how many images belong to each sample.
    """
    if _PIXELS.isdisjoint(named) or not isinstance(rules, Mapping | None):
        return rules
    more: dict[int | str, Rule] = {**(rules or {})}
    for medium in _MEDIA:
        pixels = named.get(medium.pixels)
        places = _places(named, medium, tokens)
        if isinstance(pixels, Tensor) and places is not None and medium.pixels not in more:
            for name, rule in _rules(named, medium, pixels, places).items():
                more.setdefault(name, rule)
    return more


def _places(named: Mapping[str, Any], medium: _Medium, tokens: Mapping[str, int]) -> Tensor | None:
    """Which tokens of each sample stand in the places of images."""
    types, words = named.get(_TYPES), named.get(_TOKENS)
    if isinstance(words, Tensor) and words.dim() > 1 and medium.token in tokens:
        places = words == tokens[medium.token]
    elif isinstance(types, Tensor) and types.dim() > 1:
        places = types == medium.type
    else:
        return None
    return places


def _rules(
    named: Mapping[str, Any], medium: _Medium, pixels: Tensor, places: Tensor
) -> dict[str, ByImages]:
    tokens: list[int] = places.sum(1).tolist()
    grid, sizes = named.get(medium.grid), named.get("image_sizes")
    patches = [1] * len(pixels)
    if isinstance(grid, Tensor):
        patches = grid.prod(-1).tolist()
    elif pixels.dim() >= _IN_ROWS and len(pixels) == len(tokens) and sizes is None:
        return {}
    alike = sizes is None or len({tuple(map(int, one)) for one in sizes}) == 1
    images = _by_lengths(patches, tokens) if alike else None
    images = images or _by_runs(places, len(patches))
    if images is None and grid is None and len(pixels) == len(tokens):
        return {}  # an image for each sample
    if images is None:
        raise MicrobatchError(
            f"the samples have {tokens} tokens in the places of images, which does not tell which of the "
            f"{len(patches)} images of argument {medium.pixels!r} belong to which sample; say it in "
            f"split={{{medium.pixels!r}: function}}: function(value, sizes) gives the part of each "
            "microbatch, from its number of samples"
        )
    rows = [sum(patches[a:b]) for a, b in pairwise([0, *accumulate(images)])]
    lengths = {sum(patches): ByImages(rows), len(patches): ByImages(images)}
    names = (medium.pixels, medium.grid, *medium.others)
    present = {name: named[name] for name in names if isinstance(named.get(name), Tensor | list)}
    return {name: lengths[len(value)] for name, value in present.items() if len(value) in lengths}


def _by_lengths(patches: Sequence[int], tokens: Sequence[int]) -> list[int] | None:
    """Return how many images each sample has, by their patches, which are some number for each token."""
    if not sum(tokens):
        return None
    ends = {end * sum(tokens): number for number, end in enumerate([0, *accumulate(patches)])}
    numbers = [ends.get(end * sum(patches)) for end in [0, *accumulate(tokens)]]
    pairs = pairwise(number for number in numbers if number is not None)
    return None if None in numbers else [b - a for a, b in pairs]


def _by_runs(places: Tensor, count: int) -> list[int] | None:
    """Return how many images each sample has, if the tokens of each lie apart from those of the others."""
    starts = places & ~torch.nn.functional.pad(places, (1, 0))[:, :-1]
    runs: list[int] = starts.sum(1).tolist()
    return runs if sum(runs) == count else None
