"""What each stage of a graph takes from others and gives to others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from penstock.errors import PartitionError
from penstock.partition.traced.aliasing import Aliases
from penstock.partition.traced.layout import is_size
from penstock.schedule import Edge

_ARGUMENT = "argument."


def argument_in(value: str) -> int | None:
    """Which of the model's arguments a value is that the first stage hands on."""
    return int(value.removeprefix(_ARGUMENT)) if value.startswith(_ARGUMENT) else None


@dataclass
class Slice:
    """The part of a graph that a stage runs.

    Attributes:
        nodes: what it computes, in order.
        takes: values of earlier stages, by the node that made them, with the value's name.
        inputs: arguments of the model that it uses itself.
        copied: of both, those that are changed in place, which others shall not see.
        gives: values for later stages, or the leaves of the model's output for the last stage.
    """

    nodes: list[fx.Node] = field(default_factory=list)
    takes: dict[fx.Node, str] = field(default_factory=dict)
    inputs: dict[fx.Node, int] = field(default_factory=dict)
    copied: set[fx.Node] = field(default_factory=set)
    gives: dict[fx.Node, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Wiring:
    """The slices of a graph and the edges between them.

    Args:
        slices: one per stage.
        edges: ``gradient`` is left true; whoever knows the specs decides it.
        outputs: the leaves of the model's output, as the graph's output node holds them.
    """

    slices: tuple[Slice, ...]
    edges: tuple[Edge, ...]
    outputs: tuple[object, ...]


def wire(
    graph: fx.Graph,
    stage_of: Mapping[fx.Node, int],
    stages: int,
    aliases: Aliases,
    *,
    arguments_travel: bool = False,
) -> Wiring:
    """Work out the slices of a graph.

    Args:
        graph: the graph.
        stage_of: the stage of each of its nodes.
        stages: how many there are.
        aliases: which of its values share memory.
        arguments_travel: whether the first stage hands on the arguments that later ones use.

    Raises:
        PartitionError: what is changed in place in one stage is needed in another in a way that cannot be
            kept apart.
    """
    return _Wirer(graph, stage_of, stages, aliases, arguments_travel).wiring()


class _Wirer:
    """Goes through the stages in order and keeps whose version of a value counts.

    A value's home is the stage that made it; where a later stage changes it in place, that one.
    """

    def __init__(
        self,
        graph: fx.Graph,
        stage_of: Mapping[fx.Node, int],
        stages: int,
        aliases: Aliases,
        arguments_travel: bool,
    ) -> None:
        self._arguments_travel = arguments_travel
        self._stage_of = stage_of
        self._aliases = aliases
        self._slices = tuple(Slice() for _ in range(stages))
        for node, stage in stage_of.items():
            self._slices[stage].nodes.append(node)
        self._output = next(node for node in graph.nodes if node.op == "output")
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self._inputs = {node: position for position, node in enumerate(inputs)}
        self._home: dict[fx.Node, int] = {}
        self._targets: dict[tuple[int, str], list[int]] = {}

    def wiring(self) -> Wiring:
        self._check_held()
        for stage in range(len(self._slices)):
            self._enter(stage)
            self._change(stage)
        outputs = self._output.args[0]
        leaves = tuple(outputs) if isinstance(outputs, list | tuple) else (outputs,)
        return Wiring(self._slices, tuple(self._edges()), leaves)

    def _used(self, stage: int) -> Iterator[fx.Node]:
        """What a stage uses of others; each as often as it does."""
        last = [self._output] if stage == len(self._slices) - 1 else []
        for node in (*self._slices[stage].nodes, *last):
            for used in node.all_input_nodes:
                if used.op == "get_attr" or is_size(used):
                    continue
                if used.op == "placeholder" or self._stage_of[used] != stage:
                    yield used

    def _enter(self, stage: int) -> None:
        entering = dict.fromkeys(self._used(stage))
        for node in entering:
            home = self._home.get(node, self._stage_of.get(node, -1))
            travels = home < 0 < stage and self._arguments_travel
            if home < 0:
                home = 0 if travels else stage
                self._slices[home].inputs.setdefault(node, self._inputs[node])
                if not travels:
                    continue
            given = self._slices[home].gives
            # By number, so that the graphs of training and evaluation give the same names.
            called = f"{_ARGUMENT}{self._inputs[node]}" if travels else f"stage{home}.{len(given)}"
            name = given.setdefault(node, called)
            self._slices[stage].takes[node] = name
            self._targets.setdefault((home, name), []).append(stage)

    def _edges(self) -> Iterator[Edge]:
        for (home, name), targets in sorted(self._targets.items()):
            yield Edge(name, home, tuple(targets))

    # ---- changes in place

    def _change(self, stage: int) -> None:
        part = self._slices[stage]
        for node in part.nodes:
            for changed in self._aliases.written(node):
                same = self._before(self._aliases.of(changed), stage)
                entered = [n for n in same if n in part.takes or n in part.inputs]
                self._check_apart(node, stage, same, entered)
                part.copied.update(entered)
                self._home.update(dict.fromkeys(entered, stage))

    def _before(self, nodes: Iterable[fx.Node], stage: int) -> list[fx.Node]:
        return [n for n in nodes if n in self._inputs or self._stage_of.get(n, stage) < stage]

    def _check_apart(
        self, node: fx.Node, stage: int, same: Sequence[fx.Node], entered: Sequence[fx.Node]
    ) -> None:
        """A change must be seen through each value that shares the memory; copies do not show it."""
        later = [n for n in same if n not in entered and self._used_after(n, stage)]
        if (entered and later) or len(entered) > 1:
            raise PartitionError(
                f"{node.target} in stage {stage} changes {entered[0]} in place, which shares its memory "
                f"with {', '.join(str(n) for n in (*entered[1:], *later))} of an earlier stage; "
                "cut elsewhere, or make the change out of place"
            )

    def _used_after(self, node: fx.Node, stage: int) -> bool:
        last = len(self._slices) - 1
        return any(self._stage_of.get(user, last) > stage for user in node.users)

    def _check_held(self) -> None:
        """Refuse a buffer or parameter that one stage changes and another one uses."""
        for node, stage in self._stage_of.items():
            for changed in self._aliases.written(node):
                for held in self._aliases.of(changed):
                    self._check_users(held, stage)

    def _check_users(self, held: fx.Node, stage: int) -> None:
        if held.op != "get_attr":
            return
        others = {self._stage_of[n] for n in held.users if n in self._stage_of} - {stage}
        if others:
            raise PartitionError(
                f"{held.target} is changed by stage {stage} and used by stage {min(others)} too; "
                "put the modules that use it into one stage"
            )
