"""Which stage each node of a graph belongs to."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from penstock.errors import PartitionError
from penstock.partition.traced.marks import Point, mark_of

Wanted = Callable[[Point | str], bool]


@dataclass(frozen=True)
class Layout:
    """How the regions between the marks of a graph make up stages; the same for every call.

    Args:
        marks: those that were met and are cut at, in order.
        stage_of: the stage of each region; there is one more than marks.
    """

    marks: tuple[str, ...]
    stage_of: tuple[int, ...]

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return self.stage_of[-1] + 1


def lay_out(graph: fx.Graph, wanted: Wanted) -> Layout:
    """Make each region that computes something a stage.

    Two marks with nothing in between are one cut.
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
            f"this call meets the cuts {marks}, the one the model was cut with met {list(layout.marks)}; "
            "cut where every call comes by"
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
    """Whether a node only checks what tracing already knows."""
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
    """Check that each point was come by, and where a graph can be cut.

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
