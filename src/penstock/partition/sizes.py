"""What units give at sizes like those seen before, so that a new length needs no run of the units."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import gcd
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from penstock.values import PLAIN, Structure, flatten, unflatten

_ENOUGH = 8
"""How often a call must have been seen, each time with other sizes, before it is foretold."""
_MOST_SIZES = 64
"""How many sizes of a unit's arguments are remembered, with those that it gave."""
_MOST_STATES = 8


class _Look(NamedTuple):
    """How a value looks.

    Attributes:
        facts: all but its sizes; calls of one unit with equal facts are compared.
        sizes: the sizes of its tensors, and its whole numbers, in order.
    """

    facts: tuple[Any, ...]
    sizes: tuple[int, ...]


def _look_at(value: Any) -> _Look | None:
    """How a value looks; None if it holds anything but tensors and plain values."""
    leaves, tree = flatten(value)
    facts: list[Any] = [tree]
    sizes: list[int] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.layout is not torch.strided:
                return None
            contiguous = leaf.is_contiguous()
            facts.append((leaf.dtype, leaf.device, leaf.requires_grad, leaf.dim(), contiguous))
            sizes += leaf.shape
        elif type(leaf) is int:
            facts.append(int)
            sizes.append(leaf)
        elif type(leaf) in PLAIN:
            facts.append((type(leaf), leaf))
        else:
            return None
    return _Look(tuple(facts), tuple(sizes))


class _Calls:
    """The calls of one unit that differ in sizes alone.

    Args:
        sizes: the sizes of the first one's arguments.
        result: how its result looked.

    Attributes:
        facts: all but the sizes of a result.
        needs_data: whether one of them has read numbers of its tensors.
    """

    def __init__(self, sizes: Sequence[int], result: _Look) -> None:
        self.facts, self.needs_data = result.facts, False
        self._first = tuple(sizes), result.sizes
        self._seen = dict([self._first])
        self._low, self._high = list(sizes), list(sizes)
        self._steps = [0] * len(sizes)
        # For each size of the result, the sizes of arguments that it has always been in proportion to.
        self._like = [{i for i, size in enumerate(sizes) if size} for _ in result.sizes]
        self._constant = [True] * len(result.sizes)

    def add(self, sizes: tuple[int, ...], result: _Look) -> bool:
        """Add a call; False if nothing can be foretold from now on."""
        if result.facts != self.facts:
            return False
        if len(self._seen) < _MOST_SIZES:
            self._seen[sizes] = result.sizes
        for place, size in enumerate(sizes):
            self._steps[place] = gcd(self._steps[place], size - self._low[place])
            self._low[place] = min(self._low[place], size)
            self._high[place] = max(self._high[place], size)
        before, gave = self._first
        for place, size in enumerate(result.sizes):
            like, once = self._like[place], gave[place]
            self._like[place] = {i for i in like if sizes[i] * once == size * before[i]}
            self._constant[place] = self._constant[place] and size == once
        return all(like or same for like, same in zip(self._like, self._constant, strict=True))

    def foretell(self, sizes: tuple[int, ...]) -> Sequence[int] | None:
        """The sizes of a result, if the arguments' were seen, or lie between those seen and on their grid."""
        if sizes in self._seen:
            return self._seen[sizes]
        if len(self._seen) < _ENOUGH:
            return None
        rows = zip(sizes, self._low, self._high, self._steps, strict=True)
        for size, low, high, step in rows:
            if not low <= size <= high or (step and (size - low) % step):
                return None
        before, gave = self._first
        foretold: list[int] = []
        for once, constant, like in zip(gave, self._constant, self._like, strict=True):
            ways = {(once, 0)} if constant else {divmod(sizes[i] * once, before[i]) for i in like}
            size, rest = ways.pop()
            if ways or rest:
                return None
            foretold.append(size)
        return foretold


class UnitSizes:
    """Foretells what units give without data from what they gave at other sizes.

    A result at sizes that were seen is as it was. Another is foretold if each of its sizes has always been
    the same, or in proportion to one size of an argument. That a unit has a threshold, such as a longest
    length, or rounds lengths up, shows in the sizes seen: only sizes between those, and on their grid, are
    foretold. Whether it was right shows when the unit runs, and is held against the plan.
    """

    def __init__(self) -> None:
        self._of_state: dict[Any, dict[Any, _Calls | None]] = {}
        self._calls: dict[Any, _Calls | None] = {}

    def enter(self, state: Any) -> None:
        """Begin a run in which modules are in a state, as a hashable value."""
        self._calls = self._of_state.pop(state, {})
        self._of_state[state] = self._calls
        if len(self._of_state) > _MOST_STATES:
            del self._of_state[next(iter(self._of_state))]

    def clear(self) -> None:
        """Forget all that was seen."""
        self._of_state.clear()
        self._calls = {}

    def result(
        self, unit: Any, args: Any, kwargs: Mapping[str, Any], mode: FakeTensorMode
    ) -> tuple[Callable[[], Any], bool] | None:
        """What makes the result of a call, of fake tensors of a mode, and whether the unit reads numbers.

        None if the unit is to be run.
        """
        look = _look_at((args, kwargs))
        calls = None if look is None else self._calls.get((unit, look.facts))
        sizes = None if calls is None or look is None else calls.foretell(look.sizes)
        if calls is None or sizes is None:
            return None
        facts = calls.facts

        def make() -> Any:
            rest = iter(sizes)
            tree: Structure = facts[0]
            return unflatten([_leaf_of(fact, rest, mode) for fact in facts[1:]], tree)

        return make, calls.needs_data

    def add(self, unit: Any, call: Any, result: Any, *, needs_data: bool = False) -> None:
        """Note what a call of a unit gave; anything but tensors and plain values says that it did more."""
        look, gave = _look_at(call), _look_at(result)
        if look is None:
            return
        key = unit, look.facts
        calls = self._calls.get(key)
        if key not in self._calls:
            self._calls[key] = None if gave is None else _Calls(look.sizes, gave)
        elif calls is not None and (gave is None or not calls.add(look.sizes, gave)):
            self._calls[key] = None
        if (now := self._calls[key]) is not None:
            now.needs_data |= needs_data


def _leaf_of(fact: Any, sizes: Iterator[int], mode: FakeTensorMode) -> Any:
    """The leaf of a result that looks like this; takes its sizes."""
    if fact is int:
        return next(sizes)
    if len(fact) == 2:
        return fact[1]
    dtype, device, learns, dims, _ = fact
    shape = [next(sizes) for _ in range(dims)]
    with _disable_current_modes():
        like = torch.empty(shape, dtype=dtype, device="meta")
    tensor = without_data(mode, like, device, learns=learns)
    # Code between units may change it in place, which a leaf does not allow.
    return tensor.clone() if learns else tensor


def without_data(
    mode: FakeTensorMode, like: Tensor, device: torch.device, *, learns: bool
) -> FakeTensor:
    """A fake tensor; made at once, since each operation on one takes a fraction of a millisecond."""
    with _disable_current_modes():
        shape = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
        return FakeTensor(mode, shape.requires_grad_(learns), device)
