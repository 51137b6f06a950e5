"""How the values that a stage uses and the batch become the arguments of its module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import SpecError
from penstock.schedule import Edge
from penstock.stage import PipelineStage
from penstock.values import Microbatch

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Inputs:
    """Which of the model's arguments each stage is given.

    Args:
        named: for each stage the names of its module's arguments; ``None`` for a wired one, which is given
            the whole call.
        by_hand: for each stage the arguments by name that it is given, where its rank was given them for
            just that; then they go by no names.
        aside: what this process keeps to itself of a microbatch like those of the call.
    """

    named: Mapping[int, Sequence[str] | None]
    by_hand: Mapping[int, frozenset[str]] | None = None
    aside: Mapping[str, Any] = field(default_factory=dict)

    def by_name(self, stage: int, names: Sequence[str], *, first: bool) -> list[str]:
        """The arguments by name that go to a stage.

        Args:
            stage: which one.
            names: of all arguments by name.
            first: whether the batch enters there: it also gets what no other stage takes.
        """
        if self.by_hand is not None:
            return [name for name in names if name in self.by_hand[stage]]
        if not first:
            # The first of its own arguments is the value that it uses.
            own = (self.named.get(stage) or ())[1:]
            return [name for name in names if name in own]
        own = self.named.get(stage) or ()
        others = {name for s, of in self.named.items() if s != stage for name in (of or ())[1:]}
        return [name for name in names if name in own or name not in others]

    def arguments(
        self,
        stage: PipelineStage,
        taken: Sequence[Edge],
        values: Mapping[str, Any],
        part: Microbatch,
    ) -> Arguments:
        """What a stage's module is called with; the values come first, then what is the batch's."""
        if stage.wired:
            return (dict(values), part.args, part.kwargs), {}
        names = self.by_name(stage.index, list(part.kwargs), first=not taken)
        own = {name: part.kwargs[name] for name in names}
        if not taken:
            return part.args, own
        args, by_value = as_arguments(taken, values, spread=stage.spreads)
        return args, {**by_value, **own}

    def batch_part(
        self, stage: PipelineStage, taken: Sequence[Edge], part: Microbatch
    ) -> Arguments:
        """The part of a stage's arguments that is the batch's."""
        if stage.wired:
            return part.args, part.kwargs
        names = self.by_name(stage.index, list(part.kwargs), first=not taken)
        return () if taken else part.args, {name: part.kwargs[name] for name in names}


def as_arguments(
    taken: Sequence[Edge], values: Mapping[str, Any], *, spread: Sequence[type] = (tuple,)
) -> Arguments:
    """The arguments of a plain stage that uses these values.

    One value is passed by position, one of a type in ``spread`` as several arguments; several values are
    passed by name.
    """
    if len(taken) > 1:
        return (), {edge.value: values[edge.value] for edge in taken}
    value = values[taken[0].value]
    return (tuple(value) if type(value) in spread else (value,)), {}


def chosen(given: Sequence[Edge], output: Any, *, wired: bool = False) -> list[Any]:
    """The values that a stage's output holds, in the order of the edges; none where none is used."""
    return list(as_values(given, output, wired=wired).values()) if given else []


def as_values(given: Sequence[Edge], output: Any, *, wired: bool = False) -> dict[str, Any]:
    """The values that a stage's output holds: the whole output, or several by name from a dict.

    Raises:
        SpecError: several are needed and the output is no dict that has them all.
    """
    if len(given) == 1 and not wired:
        return {given[0].value: output}
    names = [edge.value for edge in given]
    if not isinstance(output, dict) or not output.keys() >= set(names):
        found = list(output) if isinstance(output, dict) else f"a {type(output).__name__}"
        raise SpecError(
            f"stage {given[0].source} must give a dict with {names}; it returned {found}"
        )
    return {name: output[name] for name in names}
