"""The plan of a call signature: which stage plays which line of a score, and the values that travel."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from penstock._engine.values import is_container, storage_key
from penstock.errors import PartitionError
from penstock.partition.functions import is_ours
from penstock.partition.interception import reads_noted
from penstock.partition.names import FakeTensor, FakeTensorMode
from penstock.partition.score import Line, Score
from penstock.partition.snapshot import Snapshot
from penstock.partition.templates import (
    BATCH,
    CONST,
    KNOWN,
    NEW,
    TUPLE,
    VALUE,
    Number,
    Template,
    fill,
    is_leaf,
    leaves_of,
)
from penstock.partition.tree import ScoreTree
from penstock.schedule import Edge

Homes = Mapping[str, Sequence[int]]
"""The stages of each unit by path, and of each weight by name."""


@dataclass(eq=False)
class CallPlan:
    """What the stages do in calls of one signature.

    Attributes:
        edges: the values that travel.
        owners: the stage of each line.
        mine: for each stage, the places of its lines.
        arrives: for each stage, the values that it gets, by their edges.
        sends: for each stage, the edges of the values that it sends, by value.
        output: the template of what the last stage returns.
        copied: the values that travel, and are written into once they were made.
        drops: for each stage, the values that nothing needs after one of its lines, by the line's place.
        kept: the places of units whose arguments are changed in place later, so that they cannot run again.
        flops: the floating-point operations of the forward.
        work: the operations of each stage.
        attributes: the modules, names and units of the attributes set in stages before the last.
    """

    edges: tuple[Edge, ...] = ()
    owners: Sequence[int] = ()
    mine: Sequence[Sequence[int]] = ()
    arrives: Sequence[Mapping[str, Number]] = ()
    sends: Sequence[Mapping[Number, str]] = ()
    output: Template = (CONST, type(None), None)
    copied: frozenset[Number] = frozenset()
    drops: Sequence[Mapping[int, Sequence[Number]]] = ()
    kept: frozenset[int] = frozenset()
    flops: float = 0.0
    work: Sequence[float] = ()
    heaviest: tuple[str, float] = ("", 0.0)
    attributes: Sequence[tuple[nn.Module, str, str]] = ()
    _example: Any = field(default=None, repr=False)
    _mode: FakeTensorMode | None = field(default=None, repr=False)

    def apart(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function of the last stage, such as a loss, that may not read other stages' attributes.

        Raises:
            PartitionError: it reads one.
        """
        if not self.attributes:
            return function(*args)
        with _hidden(self.attributes):
            return function(*args)

    def with_output(self, function: Callable[[Any], Any], counts: Any = None) -> Any:
        """Call a function with the model's output without data; restore what ``counts`` holds."""
        if self._mode is None:
            return None  # the model was not run without data
        kept = Snapshot((), [counts], code=True, data=False)
        try:
            with self._mode:
                return function(self._example)
        finally:
            kept.restore()


def _hidden(attributes: Sequence[tuple[nn.Module, str, str]]) -> AbstractContextManager[None]:
    """Refuse to use some attributes, given with their units' names: the last stage has other values."""

    def refuse(attribute: tuple[str, str]) -> None:
        name, unit = attribute
        raise PartitionError(
            f"the loss uses the attribute {name!r} of {unit}, which is in another stage; return it from "
            "there, or add it as a loss (penstock.add_loss)"
        )

    return reads_noted([(module, name, (name, unit)) for module, name, unit in attributes], refuse)


class Owners:
    """The stage of each line, by one rule.

    A unit's call is in a stage of the unit. Any other line is in the latest stage among those of its
    arguments; one without such arguments stays where the line before it is. A weight that no unit holds is in
    the stage that uses it first.

    Args:
        lines: the lines.
        homes: the stages of the units and of their weights.

    Attributes:
        stages: the stage of each line.
        loose: the stages of the weights that are in no ``homes``, by name.
    """

    def __init__(self, lines: Sequence[Line], homes: Homes) -> None:
        self.lines, self.homes = lines, homes
        self.stages: list[int] = []
        self.loose: dict[str, int] = {}
        self._calls = Counter(line.what for line in lines if line.unit)

    def find(self) -> Owners:
        """Find the stages of all lines, one after the other."""
        for line in self.lines:
            self.stages.append(self._stage_of(line))
        return self

    def _stage_of(self, line: Line) -> int:
        reads = [number for number in line.reads if number[0] != BATCH]
        makers = [self.stages[number[0]] for number in reads if isinstance(number, tuple)]
        weights = sorted(number for number in reads if isinstance(number, str))
        stage = self.home(line, max(makers, default=0))
        if stage is None:
            having = [min(stages) for name in weights if (stages := self.holders(name))]
            before = self.stages[-1] if self.stages and not is_ours(line.what) else 0
            stage = max([*makers, *having], default=before)
        for name in weights:
            if not self.holders(name):
                self.loose[name] = stage
        return stage

    def home(self, line: Line, earliest: int) -> int | None:
        """The stage of a unit's call, of which the unit's stages share all; None for other lines.

        Args:
            line: the line.
            earliest: the latest stage among those that make its arguments.
        """
        stages = self.homes.get(line.what) if line.unit else None
        if stages is None:
            return None
        share = line.call * len(stages) // self._calls[line.what]
        mine = stages[min(share, len(stages) - 1)]
        return max(mine, next((stage for stage in stages if stage >= earliest), mine))

    def holders(self, number: Number) -> Sequence[int]:
        """The stages that hold a weight, or the one that makes a value."""
        if isinstance(number, tuple):
            return (self.stages[number[0]],)
        known = self.homes.get(number)
        if known is None and number in self.loose:
            return (self.loose[number],)
        path = number
        while known is None and path:
            path = path.rpartition(".")[0]
            known = self.homes.get(path)
        return () if known is None else known


def deciding_early(lines: Sequence[Line], homes: Homes, stages: int) -> list[Line]:
    """The lines that read numbers between units before the last stage has all that comes after.

    Args:
        lines: those of a score.
        homes: the stages of the units and of their weights.
        stages: the number of stages.
    """
    if not any(line.decides for line in lines):
        return []
    owners = Owners(lines, homes).find().stages
    last = max((at for at, stage in enumerate(owners) if stage != stages - 1), default=-1)
    return [line for line in lines[: last + 1] if line.decides]


def lines_of(score: Score) -> list[Line]:
    """The lines of a score."""
    return [note.line for note in score.notes]


def first_uses(score: Score, homes: Homes) -> Mapping[str, int]:
    """The first stage that uses each of the weights that no unit holds."""
    return Owners(lines_of(score), homes).find().loose


def plan_of(score: Score, homes: Homes, stages: int, tree: ScoreTree) -> CallPlan:
    """The plan of a score; it is made once for all microbatches that went the same way.

    Args:
        score: the score.
        homes: the stages of the units and of their weights.
        stages: the number of stages.
        tree: the lines of the author's forward, and its weights.

    Raises:
        PartitionError: the model cannot be cut this way; the message names the module and the line.
    """
    plans = score.end.plans
    if score.digest not in plans:
        plans[score.digest] = _Planner(score, homes, stages, tree).plan()
    plan: CallPlan = plans[score.digest]
    return plan


class _Planner:
    def __init__(self, score: Score, homes: Homes, stages: int, tree: ScoreTree) -> None:
        self._score, self._stages, self._tree = score, stages, tree
        self._lines = lines_of(score)
        self._owners = Owners(self._lines, homes).find()
        self._shown: dict[Number, Tensor] = {}
        self._makers: dict[Number, int] = {}
        self._old: dict[Number, Number | None] = {}
        self._shown.update(((BATCH, at), tensor) for at, tensor in enumerate(score.batch))
        for line in self._lines:
            self._shown |= {**line.shown, **line.first}
            for number in line.looks:
                self._makers[number] = line.index
            for target, number in line.changes:
                self._old[number] = target[1] if target[0] is VALUE else None
                if target[0] is VALUE and target[1] in self._shown:
                    self._shown[number] = self._shown[target[1]]
        self._memory = {n: storage_key(t) for n, t in self._shown.items() if isinstance(t, Tensor)}

    def plan(self) -> CallPlan:
        lines, stages = self._lines, self._owners.stages
        self._check()
        output, returned = self._output()
        uses = self._uses(returned)
        copied = self._check_memory(uses, returned)
        reached = self._reached(returned)
        names = self._names()
        edges: list[Edge] = []
        arrives: list[dict[str, Number]] = [{} for _ in range(self._stages)]
        sends: list[dict[Number, str]] = [{} for _ in range(self._stages)]
        for number, users in uses.items():
            if number[0] == BATCH:
                continue
            holders = self._owners.holders(number)
            others = sorted(users - {*holders})
            if not others:
                continue
            source = min(holders)
            name = number if isinstance(number, str) else names[number]
            learns = self._learns(number)
            edges.append(Edge(name, source, tuple(others), learns and number in reached))
            sends[source][number] = name
            for user in others:
                arrives[user][name] = number
        edges.sort(key=lambda edge: (edge.source, edge.value))
        work = [0.0] * self._stages
        by_unit: defaultdict[str, float] = defaultdict(float)
        for line, owner in zip(lines, stages, strict=True):
            work[owner] += line.work
            by_unit[line.what if line.unit else ""] += line.work
        total = sum(work) or 1.0
        path, most = max(by_unit.items(), key=lambda p: (bool(p[0]), p[1]), default=("", 0.0))
        units = self._tree.units
        return CallPlan(
            tuple(edges),
            tuple(stages),
            [[at for at, owner in enumerate(stages) if owner == s] for s in range(self._stages)],
            arrives,
            sends,
            output,
            frozenset(copied),
            self._drops(returned),
            self._kept(),
            sum(line.flops for line in lines),
            [of / total for of in work],
            (path, most / total),
            [
                (units[line.what].get_submodule(path), name, line.what)
                for line, owner in zip(lines, stages, strict=True)
                for path, name, _ in (*line.attributes, *line.numbers)
                if owner < self._stages - 1
            ],
            fill(_anew(output), {**self._tree.tensors, **self._shown}, self._score.given),
            self._tree.mode,
        )

    def _drops(self, returned: Sequence[Number]) -> list[dict[int, list[Number]]]:
        """For each stage, the values that it needs no more after each of its lines."""
        last: list[dict[Number, int]] = [{} for _ in range(self._stages)]
        for line, owner in zip(self._lines, self._owners.stages, strict=True):
            of_stage = last[owner]
            of_stage |= dict.fromkeys([*line.looks, *line.reads], line.index)
        for number in returned:
            last[-1].pop(number, None)
        drops: list[dict[int, list[Number]]] = [{} for _ in range(self._stages)]
        for of_stage, dropped in zip(last, drops, strict=True):
            for number, index in of_stage.items():
                dropped.setdefault(index, []).append(number)
        return drops

    def _kept(self) -> frozenset[int]:
        """The units that read memory into which later lines write."""
        memory, written = self._memory, set[int]()
        kept = set[int]()
        for line in reversed(self._lines):
            if line.unit and any(memory.get(number) in written for number in line.reads):
                kept.add(line.index)
            written |= {memory[number] for _, number in line.changes if number in memory}
        return frozenset(kept)

    def _names(self) -> dict[Number, str]:
        """A name for each value, unique in the score."""
        names: dict[Number, str] = {}
        used = Counter[str]()
        for line in self._lines:
            for at, number in enumerate(line.looks):
                name = f"{line.label}[{at}]" if at else line.label
                used[name] += 1
                names[number] = name if used[name] == 1 else f"{name}#{used[name]}"
        return names

    def _learns(self, number: Number) -> bool:
        if isinstance(number, str):
            return self._tree.tensors[number].requires_grad
        return bool(self._lines[number[0]].looks[number][4])

    def _uses(self, returned: Sequence[Number]) -> dict[Number, set[int]]:
        uses: defaultdict[Number, set[int]] = defaultdict(set)
        for line, owner in zip(self._lines, self._owners.stages, strict=True):
            for number in line.reads:
                uses[number].add(owner)
        for number in returned:
            if isinstance(number, str) and not self._owners.holders(number):
                self._owners.loose[number] = self._stages - 1
            uses[number].add(self._stages - 1)
        return dict(uses)

    def _reached(self, returned: Sequence[Number]) -> set[Number]:
        """The values that lead to the output or an added loss: a gradient may come back to them."""
        reached = {*returned}
        for line in reversed(self._lines):
            counts = line.unit or is_ours(line.what)
            counts = counts or any(n in reached and look[4] for n, look in line.looks.items())
            if counts:
                reached |= line.reads
        return reached

    # ---- the output

    def _output(self) -> tuple[Template, list[Number]]:
        """The template of what the last stage returns, and the values in it."""
        template = self._score.output
        if template[0] is KNOWN and not is_container(template[2]):
            return template, [t[1] for t in leaves_of(template) if t[0] is VALUE]
        returned: list[Number] = []

        def look(of: Template) -> Template:
            if of[0] is VALUE:
                returned.append(of[1])
            elif of[0] is CONST and of[1] is FakeTensor:
                raise self._unknown_output()
            elif not is_leaf(of):
                if of[0] is TUPLE or is_container(of[2]):
                    return (*of[:4], tuple(map(look, of[4])))
                leaves = list(leaves_of(of))
                inside = [t[1] for t in leaves if t[0] is VALUE]
                lost = any(t[0] is CONST and t[1] is FakeTensor for t in leaves)
                if lost or any(self._stages - 1 not in self._owners.holders(n) for n in inside):
                    # An object such as a cache, of which no stage has all.
                    return (CONST, type(None), None)
                returned.extend(inside)
            return of

        return look(template), returned

    def _unknown_output(self) -> PartitionError:
        name = type(self._tree.model).__name__
        return PartitionError(
            f"the output of the {name} has a tensor that no call of a unit or of a "
            "function between them gives. Values that hooks collect inside of units, such as hidden states, "
            "are not available here; return them from the units, or leave out the option that asks for them"
        )

    # ---- what cannot be done in stages

    def _check(self) -> None:
        for line in deciding_early(self._lines, self._owners.homes, self._stages):
            stage = self._owners.stages[line.index]
            raise PartitionError(
                f"{line.where}: the model's code needs numbers of a tensor of stage {stage} ({line.name}), "
                "which the other stages do not have; put that code into a module that is placed as a whole, "
                "by naming the module that contains it in stages="
            )
        drawn: dict[int, tuple[Line, int]] = {}
        first: dict[Any, int] = {}
        for line, stage in zip(self._lines, self._owners.stages, strict=True):
            if line.moves and first.setdefault(line.what, stage) != stage:
                raise PartitionError(
                    f"{line.name} is called in the stages {first[line.what]} and {stage}, and changes what "
                    f"it keeps in its attribute {line.moves!r}: they would do so in another order than the "
                    "model. Place a module that makes all of these calls as a whole, by naming it in "
                    "stages=, or keep that in a module that one stage has"
                )
            for number in sorted(line.reads, key=str):
                if number[0] == BATCH:
                    continue
                holders = self._owners.holders(number)
                if number in line.borrowed and stage not in holders:
                    raise PartitionError(
                        f"{line.where}: {line.name} in stage {stage} uses {number}, which it does not "
                        f"hold and stage {min(holders)} has; make the module of this weight a part of "
                        f"{line.name} (one module may be a part of several), or call it in the model's "
                        "forward and pass on what it gives"
                    )
                source = min(holders, default=stage)
                made = self._shown.get(number)
                if stage not in holders and made is not None and not isinstance(made, Tensor):
                    raise PartitionError(
                        f"{line.where}: {line.name} in stage {stage} reads a value that {self._name(number)} "
                        f"in stage {source} makes, a {type(made).__name__}, which cannot travel between "
                        "stages; return tensors, or put both into one stage"
                    )
                if stage not in holders and source > stage:
                    raise PartitionError(
                        f"{line.where}: {line.name} in stage {stage} uses {self._name(number)} of stage "
                        f"{source}, but values go to later stages only; list the modules in the order of "
                        "their calls, or name the one that is called again in both lists of stages="
                    )
            for maker in sorted(line.foreign):
                if self._owners.stages[maker] != stage:
                    raise PartitionError(
                        f"{line.where}: {line.name} in stage {stage} reads a value that "
                        f"{self._lines[maker].name} in stage {self._owners.stages[maker]} left somewhere, as "
                        "in an attribute, a hook's list or an object that both are given; return it and pass "
                        "it on as an argument (a loss: penstock.add_loss), or put both into one stage"
                    )
            for name in line.writes:
                self._check_write(line, stage, name)
            for generator in line.generators:
                other, known = drawn.setdefault(id(generator), (line, stage))
                if known != stage:
                    raise PartitionError(
                        f"{line.name} in stage {stage} draws from a torch.Generator from which {other.name} "
                        f"in stage {known} draws too, so that the numbers would depend on the schedule; draw "
                        "from torch's own, which is seeded for each call"
                    )

    def _name(self, number: Number) -> str:
        if isinstance(number, str):
            return number
        return self._lines[number[0]].name

    def _check_memory(
        self, uses: Mapping[Number, set[int]], returned: Sequence[Number]
    ) -> set[Number]:
        """Refuse changes in place that another stage would not see; returns the values to copy before."""
        owners, memory, copied = self._owners, self._memory, set[Number]()
        for line in self._lines:
            stage = owners.stages[line.index]
            for target, _ in line.changes:
                if target[0] is not VALUE:
                    continue
                old = target[1]
                if isinstance(old, str):
                    self._check_weight(line, stage, old)
                    continue
                if old[0] == BATCH:
                    continue
                where = memory.get(self._root(old), -1)
                same = [
                    n for n, m in memory.items() if m == where and self._makers[n] <= line.index
                ]
                news = {number for _, number in line.changes}
                for number in same:
                    if number in news:
                        continue
                    mine = owners.stages[self._makers[number]]
                    readers = [other for other in self._lines if number in other.reads]
                    later = [other for other in readers if other.index > line.index]
                    elsewhere = any(owners.stages[other.index] != mine for other in later)
                    if number in uses and uses[number] - {mine} and not elsewhere:
                        copied.add(number)
                    before = [other for other in readers if other.index <= line.index]
                    if elsewhere and any(owners.stages[o.index] != mine for o in before):
                        raise PartitionError(
                            f"{line.where}: {line.name} in stage {stage} changes {self._name(number)} in "
                            f"place, which stage {owners.stages[before[0].index]} uses as it was before, or "
                            "in another shape; use the operation that is not in place, or write into a clone"
                        )
                    if mine != stage and (later or number in returned):
                        reads = later[0].where if later else "the output"
                        raise PartitionError(
                            f"{line.where}: {line.name} in stage {stage} writes into memory that "
                            f"{self._name(number)} of another stage shares, and {reads} reads that; write "
                            "into a clone, or put both into one stage"
                        )
        return copied

    def _check_write(self, line: Line, stage: int, name: str) -> None:
        """Refuse a unit that writes into a weight of its own which others have, or use as it was before."""
        others = [
            other
            for other in self._lines[: line.index]
            if name in other.reads and self._owners.stages[other.index] != stage
        ]
        self._check_not_shared(line, stage, name)
        if others:
            raise PartitionError(
                f"{line.where}: {line.name} in stage {stage} changes {name} in place, which stage "
                f"{self._owners.stages[others[0].index]} uses as it was before, or in another shape; use the "
                "operation that is not in place, or write into a clone"
            )

    def _root(self, number: Number) -> Number:
        old = self._old.get(number)
        return number if old is None else self._root(old)

    def _check_weight(self, line: Line, stage: int, name: str) -> None:
        self._check_not_shared(line, stage, name)
        holders = self._owners.holders(name)
        if stage not in holders:
            raise PartitionError(
                f"{line.where}: {line.name} in stage {stage} changes {name} of stage "
                f"{min(holders, default=0)}; put both into one module that is placed as a whole"
            )

    def _check_not_shared(self, line: Line, stage: int, name: str) -> None:
        holders = self._owners.holders(name)
        if len(holders) > 1 and isinstance(self._tree.tensors[name], nn.Parameter):
            raise PartitionError(
                f"{line.where}: {line.name} in stage {stage} changes {name} in place, which stages "
                f"{', '.join(map(str, holders))} share, each with its own copy; put all of its modules "
                "into one stage"
            )


def _anew(template: Template) -> Template:
    """A template that makes containers of its own."""
    if is_leaf(template):
        return template
    made = (NEW, None) if template[0] is KNOWN else template[:2]
    return (*made, *template[2:4], tuple(map(_anew, template[4])))
