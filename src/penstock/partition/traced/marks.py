"""Marks in a traced graph: where it is cut, and where what draws random numbers finds its seed."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import fx, nn

from penstock.errors import PartitionError
from penstock.rng import Place, Streams, can_draw, has_drawn, noticed

# ---- marks in a model's code and around its modules, which survive tracing as nodes of the graph


torch.library.define("penstock::split", "(str tag) -> ()")


@torch.library.impl("penstock::split", "CompositeExplicitAutograd")
def _do_nothing(tag: str) -> None:
    del tag  # The node in the graph is all that matters.


IN_CODE = "pipe_split()"


def pipe_split() -> None:
    """Mark the border between two stages in the code of a model's forward.

    In an ordinary run it does nothing.
    """
    torch.ops.penstock.split(IN_CODE)


class SplitPoint(Enum):
    """Where a model is cut, seen from one of its modules."""

    BEGINNING = 1
    """Before the module runs."""
    END = 2
    """After the module ran."""


@dataclass(frozen=True)
class Point:
    """A place to cut at.

    Args:
        path: a module of the model.
        where: before or after it.
        call: which of its calls, from 0; ``None`` means each of them.
    """

    path: str
    where: SplitPoint = SplitPoint.BEGINNING
    call: int | None = None

    def __str__(self) -> str:
        nth = "" if self.call is None else f", call {self.call}"
        return f"{self.path} ({self.where.name}{nth})"

    def covers(self, met: Point) -> bool:
        """Whether this means a point that was met while tracing, which names a single call."""
        same = self.path == met.path and self.where is met.where
        return same and self.call in (None, met.call)


@contextmanager
def marked(model: nn.Module, paths: Iterable[str]) -> Iterator[None]:
    """Mark each call of some modules, at its beginning and its end, while the context is open."""
    calls: Counter[str] = Counter()
    with ExitStack() as hooks:
        for path in dict.fromkeys(paths):
            module = model.get_submodule(path)
            before, after = _hooks(path, calls)
            hooks.callback(module.register_forward_pre_hook(before, prepend=True).remove)
            hooks.callback(module.register_forward_hook(after).remove)
        yield


def _hooks(path: str, calls: Counter[str]) -> tuple[Callable[..., None], Callable[..., None]]:
    open_calls: list[int] = []

    def before(module: nn.Module, args: Any) -> None:
        del module, args
        open_calls.append(calls[path])
        calls[path] += 1
        _mark(Point(path, SplitPoint.BEGINNING, open_calls[-1]))

    def after(module: nn.Module, args: Any, output: Any) -> None:
        del module, args, output
        _mark(Point(path, SplitPoint.END, open_calls.pop()))

    return before, after


def _mark(point: Point) -> None:
    torch.ops.penstock.split(f"{point.path}|{point.where.name}|{point.call}")


def mark_of(node: fx.Node) -> Point | str | None:
    """The point of a mark around a module, the text of a mark in the code, or ``None`` for any other node."""
    split = torch.ops.penstock.split
    if node.op != "call_function":
        return None
    if node.target not in (split, split.default, pipe_split):
        # Models marked with torch's own function are cut there too.
        return IN_CODE if str(node.target).startswith("pippy._pipe_split") else None
    tag = str(node.args[0]) if node.args else IN_CODE
    if tag.count("|") != 2:
        return IN_CODE
    path, where, call = tag.split("|")
    return Point(path, SplitPoint[where], int(call))


# ---- which stage each node of a graph belongs to


Wanted = Callable[[Point | str], bool]


@dataclass(frozen=True)
class Layout:
    """How the regions between the marks of a graph make up stages; the same for every call.

    Args:
        marks: the marks that are cut at, in the order in which they were met.
        stage_of: the stage of each region; there is one region more than there are marks.
    """

    marks: tuple[str, ...]
    stage_of: tuple[int, ...]

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return self.stage_of[-1] + 1


def lay_out(graph: fx.Graph, wanted: Wanted) -> Layout:
    """Make each region that computes something a stage.

    Two marks with nothing between them are one cut.
    """
    marks, regions = _regions(graph, wanted)
    full = [any(map(computes, region)) for region in regions]
    stage_of = [max(sum(full[: i + 1]) - 1, 0) for i in range(len(full))]
    return Layout(tuple(marks), tuple(stage_of))


def stages_of(graph: fx.Graph, wanted: Wanted, layout: Layout) -> dict[fx.Node, int]:
    """The stage of each node that computes something.

    Raises:
        PartitionError: the marks of this graph are not those of the layout.
    """
    marks, regions = _regions(graph, wanted)
    if tuple(marks) != layout.marks:
        raise PartitionError(
            f"this call meets the cuts {marks}, but the call that the model "
            f"was cut with met {list(layout.marks)}; "
            "cut at modules that every call reaches"
        )
    found: dict[fx.Node, int] = {}
    for stage, region in zip(layout.stage_of, regions, strict=True):
        for node in filter(computes, region):
            source = node.args[0] if node.target is operator.getitem else None
            # What takes a tuple apart stays with what made it.
            found[node] = found.get(source, stage) if isinstance(source, fx.Node) else stage
    return found


def _regions(graph: fx.Graph, wanted: Wanted) -> tuple[list[str], list[list[fx.Node]]]:
    marks: list[str] = []
    regions: list[list[fx.Node]] = [[]]
    for node in graph.nodes:
        mark = mark_of(node)
        if mark is None:
            regions[-1].append(node)
        elif wanted(mark):
            marks.append(str(mark))
            regions.append([])
    return marks, regions


def computes(node: fx.Node) -> bool:
    """Whether a node is work for some stage."""
    return node.op == "call_function" and not is_size(node) and not is_check(node)


def is_check(node: fx.Node) -> bool:
    """Whether a node only checks what is known since tracing."""
    return node.target is torch.ops.aten._assert_tensor_metadata.default


def is_size(node: fx.Node) -> bool:
    """Whether a node is a number that follows from the sizes of the model's arguments."""
    if node.op != "call_function" or not _is_number(node):
        return False
    return all(n.op == "placeholder" or is_size(n) for n in node.all_input_nodes)


def _is_number(node: fx.Node) -> bool:
    numbers = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
    return isinstance(node.meta.get("val"), numbers)


def points_in(graph: fx.Graph) -> Iterator[Point | str]:
    """The marks of a graph, in order."""
    return (mark for node in graph.nodes if (mark := mark_of(node)) is not None)


def check_met(points: Sequence[Point], graph: fx.Graph, regions: Sequence[fx.GraphModule]) -> None:
    """Check that each point was reached, and at a place where a graph can be cut.

    Raises:
        PartitionError: a module that was not called, or was called where no cut can be.
    """
    met = [mark for mark in points_in(graph) if isinstance(mark, Point)]
    inside = [m for region in regions for m in points_in(region.graph) if isinstance(m, Point)]
    for point in points:
        if any(map(point.covers, met)):
            continue
        if any(map(point.covers, inside)):
            raise PartitionError(
                f"{point} lies within a region under torch.no_grad(), torch.autocast or the like, which is "
                'one piece in a traced graph; cut before or after it, or by module calls (how="calls")'
            )
        raise PartitionError(
            f"{point}: the module was not called with these arguments; cut at one that was"
        )


# ---- seeds before what draws, made of the place in the model where it stands


torch.library.define("penstock::draw", "(str address, bool after, int draws) -> ()")


@torch.library.impl("penstock::draw", "CompositeExplicitAutograd")
def _draw(address: str, after: bool, draws: int) -> None:
    Streams.go_to(address, draws, after=after)


@contextmanager
def seeded(model: nn.Module, modules: Mapping[nn.Module, tuple[str, ...]]) -> Iterator[None]:
    """Note in the graph where the calls of modules that may draw begin and end.

    Args:
        model: what is traced.
        modules: the modules that may draw, with their paths.

    Raises:
        PartitionError: the model draws in a way that no graph shows.
    """
    notes = _Notes()
    with ExitStack() as hooks:
        hooks.enter_context(noticed(notes.drew))
        for module, paths in {model: (), **modules}.items():
            before, after = notes.hooks(paths)
            # After the marks of cuts: what is drawn from a border on belongs to the later stage.
            hooks.callback(module.register_forward_pre_hook(before).remove)
            hooks.callback(module.register_forward_hook(after).remove)
        yield
    if notes.unseen:
        raise PartitionError(
            f"the {type(model).__name__} {notes.unseen} in its forward, which torch.export would drop; "
            'cut it by module calls instead, with how="calls"'
        )


class _Notes:
    """The module calls that are open while a model is traced."""

    def __init__(self) -> None:
        self._open = [Place()]
        self._state = 0
        self.unseen = ""

    def hooks(self, paths: tuple[str, ...]) -> tuple[Any, Any]:
        """What to call before and after a module that has these paths; the model itself has none."""

        def before(*_: Any) -> None:
            self._open.append(self._open[-1].next(paths) if paths else Place())
            self._note(after=False)

        def after(*_: Any) -> None:
            self._note(after=True)
            self._open.pop()

        return before, after

    def _note(self, *, after: bool) -> None:
        torch.ops.penstock.draw(self._open[-1].address, after, 0)
        if not torch.compiler.is_dynamo_compiling():
            self._set_state()

    def _set_state(self) -> None:
        self._state += 1
        torch.default_generator.manual_seed(self._state)

    def drew(self, generator: torch.Generator | None) -> None:
        """Note a draw. Drawing while tracing leaves the state alone, so any change was made by the model."""
        if generator is not None:
            self.unseen = "draws from a torch.Generator of its own"
        elif torch.default_generator.initial_seed() != self._state:
            self.unseen = "sets the state of torch's random numbers"
        self._set_state()


def place_seeds(module: fx.GraphModule) -> None:
    """Replace the notes at the module calls by a seed before each node that draws."""
    _place_seeds(module, ("", False, 0))


def _place_seeds(module: fx.GraphModule, place: tuple[str, bool, int]) -> tuple[str, bool, int]:
    graph = module.graph
    for node in list(graph.nodes):
        regions = list(regions_of(node, module))
        if _is_note(node):
            place = node.args
            graph.erase_node(node)
        elif regions:
            for region in regions:
                place = _place_seeds(region, place)
        elif _draws(node):
            with graph.inserting_before(node):
                graph.call_function(torch.ops.penstock.draw.default, place)
            if node.target.overloadpacket is torch.ops.aten.randint_like:
                _detach_argument(node)
            address, after, draws = place
            place = address, after, draws + 1
    module.recompile()
    return place


def _detach_argument(node: fx.Node) -> None:
    """Detach what it takes its shape from: in a graph autograd would ask for a derivative of it."""
    given = node.args[0]
    assert isinstance(given, fx.Node)
    with node.graph.inserting_before(node):
        plain = node.graph.call_function(torch.ops.aten.detach.default, (given,))
    plain.meta.update(given.meta)
    node.update_arg(0, plain)


def _is_note(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is torch.ops.penstock.draw.default


def regions_of(node: fx.Node, root: nn.Module) -> Iterator[fx.GraphModule]:
    """The graphs that a node runs, such as what is under ``torch.no_grad()``; ``root`` holds them."""
    for used in node.args if node.op == "call_function" else ():
        if isinstance(used, fx.Node) and used.op == "get_attr":
            held = attribute(root, str(used.target))
            if isinstance(held, fx.GraphModule):
                yield held


def attribute(root: nn.Module, path: str) -> Any:
    """What stands at a path in a module."""
    return operator.attrgetter(path)(root)


def _draws(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    return can_draw(node.target) and has_drawn(node.target, node.args, node.kwargs)
