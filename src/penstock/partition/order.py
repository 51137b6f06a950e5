"""Stages of equal work, from the score of one call: the order of the units, and where to cut it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import nn

from penstock.partition.balance import Room, choose_cuts
from penstock.partition.base import named_tensors
from penstock.partition.planning import Owners
from penstock.partition.score import Line
from penstock.partition.templates import Number
from penstock.schedule import Placement

_LIGHT = 0.02
"""A call that is at most this part of a stage may be where it adds nothing to what travels."""
_MORE_EVEN = 0.9
"""How much lighter the heaviest stage must get before a unit is shared by several stages for it."""
COPIES = 4
"""The copies of a trained weight in memory: itself, its gradient and the two moments of AdamW."""


class Item(NamedTuple):
    """A place in the order of the calls, before which a model can be cut.

    Attributes:
        path: the unit.
        call: the number of its call there; None where only its weights are read, or nothing is.
        weight: how heavy it is.
        held: the bytes of the unit's weights, with their gradients and an optimizer's state.
        activations: the bytes that it makes for one microbatch.
    """

    path: str
    call: int | None
    weight: float = 0.0
    held: float = 0.0
    activations: float = 0.0


class CallOrder:
    """The units of a model in the order of their calls, with the work of each.

    Args:
        model: the model.
        units: the paths of its units, in the order in which the model holds them.
        lines: those of a score.
    """

    def __init__(self, model: nn.Module, units: Sequence[str], lines: Sequence[Line]) -> None:
        self._model, self._units, self._lines = model, units, lines
        self._owners: dict[int, list[str]] = defaultdict(list)
        for path in units:
            for tensor in {id(t) for _, t in named_tensors(model.get_submodule(path))}:
                self._owners[tensor].append(path)
        named = named_tensors(model)
        self._readers = {name: self._owners.get(id(tensor), []) for name, tensor in named}
        self.calls = Counter(line.what for line in lines if line.unit)
        self.items = self._all_items()
        self.total = sum(item.weight for item in self.items)

    def _all_items(self) -> list[Item]:
        """Every call of a unit, and every place where a unit's weights are read before it is called.

        What happens between two calls counts for the first of them.
        """
        items: list[Item] = []
        met: set[str] = set()
        work = nbytes = 0.0
        for index, line in enumerate(self._lines):
            new = [self._item(path, None) for path in self._read_by(line, met)]
            new = [item for item in new if self._is_early(index, item.path)]
            if line.unit:
                new.append(self._item(line.what, line.call))
            met.update(item.path for item in new)
            items += new
            work, nbytes = work + line.work, nbytes + line.nbytes
            if items:
                last = items[-1]
                items[-1] = last._replace(
                    weight=last.weight + work, activations=last.activations + nbytes
                )
                work = nbytes = 0.0
        return self._with_idle(items)

    def _item(self, path: str, call: int | None) -> Item:
        module = self._model.get_submodule(path)
        tensors = {id(tensor): tensor for _, tensor in named_tensors(module)}.values()
        trained = sum(tensor.nbytes for tensor in tensors if tensor.requires_grad)
        return Item(path, call, held=sum(t.nbytes for t in tensors) + (COPIES - 1) * trained)

    def _read_by(self, line: Line, met: set[str]) -> list[str]:
        """The units whose weights a line reads, if none of those that have these was there before."""
        names = sorted(number for number in line.reads if isinstance(number, str))
        having = [self._readers.get(name, []) for name in names]
        having = [of for of in having if line.what not in of and met.isdisjoint(of)]
        return list(dict.fromkeys(of[0] for of in having if of))

    def _is_early(self, index: int, path: str) -> bool:
        """Tell whether a unit, whose weights a line reads, is needed before it is called, if it ever is."""
        if self._lines[index].unit:
            return True
        followers = {index}
        for later in self._lines[index + 1 :]:
            if later.what == path:
                return False
            if any(number[0] in followers for number in later.reads if isinstance(number, tuple)):
                if later.unit:
                    return True
                followers.add(later.index)
        return True

    def _with_idle(self, items: list[Item]) -> list[Item]:
        """The items, and units that the call does not use, each behind the one before it in the model."""
        there = {item.path for item in items}
        for before, path in pairwise(["", *self._units]):
            if path not in there:
                places = [place for place, item in enumerate(items) if item.path == before]
                items.insert(places[0] + 1 if places else 0, self._item(path, None))
        return items

    # ---- the places before which to cut

    def once(self) -> list[Item]:
        """An item for each unit, at its first place, with the work of all its calls."""
        return self._merged({item.path for item in self.items})

    def again(self, stages: int) -> list[Item]:
        """An item for each call, except for units whose later calls are light."""
        least = _LIGHT * self.total / stages
        heavy = {item.path for item in self.items if item.call and item.weight > least}
        return self._merged({item.path for item in self.items} - heavy)

    def _merged(self, paths: set[str]) -> list[Item]:
        """The items, with one item for each of the units at these paths."""
        merged: list[Item] = []
        places: dict[str, int] = {}
        for item in self.items:
            place = places.get(item.path) if item.path in paths else None
            if place is None:
                places[item.path] = len(merged)
                merged.append(item)
            else:
                first = merged[place]
                merged[place] = first._replace(
                    weight=first.weight + item.weight,
                    activations=first.activations + item.activations,
                )
        return merged

    # ---- the stages

    def homes(
        self, items: Sequence[Item], starts: Sequence[int]
    ) -> tuple[dict[str, list[int]], list[float]]:
        """The stages of each unit, and the work of each stage, for items cut before some of them.

        A later call that is no item is made in the first stage that has the unit and all that the call needs;
        if there is none, in the first stage that has what it needs, which then has the unit too.
        """
        stage_of = [
            s for s, (a, b) in enumerate(pairwise([*starts, len(items)])) for _ in range(a, b)
        ]
        wanted = {(i.path, i.call): s for i, s in zip(items, stage_of, strict=True)}
        homes: dict[str, list[int]] = {i.path: [] for i in items}
        for item, stage in zip(items, stage_of, strict=True):
            if item.call is None:
                homes[item.path].append(stage)
        owners = _TriedOwners(self._lines, homes, wanted, self._readers).find()
        loads = [0.0] * len(starts)
        for line, owner in zip(self._lines, owners.stages, strict=True):
            loads[owner] += line.work
        one = {path for path, stages in homes.items() if len({*stages}) == 1}
        return {p: s[:1] if p in one else sorted(s) for p, s in homes.items()}, loads

    def even(
        self, stages: int, placement: Placement | None = None, room: Room | None = None
    ) -> dict[str, list[int]] | None:
        """The stages of each unit, so that the stages are equally heavy; None if there are too few units.

        Of units that are called again and again, each call may be in another stage, if that is more even.
        """
        best: tuple[dict[str, list[int]], float] | None = None
        for items in (self.once(), self.again(stages)):
            if len(items) < stages:
                continue
            weights = [item.weight for item in items]
            memory = [(item.held, item.activations) for item in items]
            homes, loads = self.homes(
                items, choose_cuts(weights, stages, placement, memory=memory, room=room)
            )
            full = len({stage for of in homes.values() for stage in of}) == stages
            if full and (best is None or max(loads) < _MORE_EVEN * best[1]):
                best = homes, max(loads)
        return None if best is None else best[0]

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Let each unit be as heavy as is given, shared equally by its calls."""
        count = Counter(item.path for item in self.items)
        self.items = [i._replace(weight=weights[i.path] / count[i.path]) for i in self.items]
        self.total = sum(item.weight for item in self.items)


class _TriedOwners(Owners):
    """The stage of each line under a cut, which decides where calls of units are; notes their stages.

    Args:
        lines: the lines.
        homes: gets the stage of each call of a unit, by path.
        wanted: the stages of the calls before which the model can be cut, by path and number.
        readers: the units that hold a parameter, by its name.
    """

    def __init__(
        self,
        lines: Sequence[Line],
        homes: dict[str, list[int]],
        wanted: Mapping[tuple[str, int | None], int],
        readers: Mapping[str, Sequence[str]],
    ) -> None:
        super().__init__(lines, homes)
        self._homes, self._wanted, self._readers = homes, wanted, readers

    def home(self, line: Line, earliest: int) -> int | None:
        if not line.unit or line.what not in self._homes:
            return None
        stage = self._wanted.get((line.what, line.call))
        if stage is None:
            known = (known for known in self._homes[line.what] if known >= earliest)
            stage = next(known, earliest)
        self._homes[line.what].append(stage)
        return stage

    def holders(self, number: Number) -> Sequence[int]:
        paths = self._readers.get(number, ()) if isinstance(number, str) else ()
        return [s for path in paths for s in self._homes[path]] or super().holders(number)
