"""What each stage of a traced model has, in lines to read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby

from torch import fx

from penstock.partition.traced.cutting import TracedCut
from penstock.partition.traced.export import ROOT
from penstock.partition.traced.wiring import Slice


def summary(cut: TracedCut) -> str:
    """A line for each stage: its modules, parameters, and what it takes and gives."""
    wiring = cut.traces.first.wiring
    users = {edge.value: ", ".join(map(str, edge.targets)) for edge in wiring.edges}
    return "\n".join(
        f"  stage {index}: {', '.join(_modules(part)) or 'no modules'}; "
        f"{sum(p.numel() for p in module.parameters()):,} parameters{_traffic(part, users)}"
        for index, (part, module) in enumerate(zip(wiring.slices, cut.modules, strict=True))
    )


def _traffic(part: Slice, users: dict[str, str]) -> str:
    takes = f"; takes {', '.join(part.takes.values())}" if part.takes else ""
    gives = [f"{name} to stage {users[name]}" for name in part.gives.values()]
    return takes + (f"; gives {', '.join(gives)}" if gives else "")


def _modules(part: Slice) -> list[str]:
    """The paths of the modules that run, those that differ in a number alone put together."""
    paths = dict.fromkeys(path for node in part.nodes if (path := _path(node)))
    return [_span(list(run)) for _, run in groupby(paths, lambda path: re.sub(r"\d+$", "", path))]


def _path(node: fx.Node) -> str:
    """The child of the model that a node is in; of a list of modules, its item."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    steps = stack[-1][0].removeprefix(ROOT.rstrip(".")).strip(".").split(".") if stack else [""]
    return ".".join(_until_number(steps))


def _until_number(steps: Iterable[str]) -> Iterator[str]:
    for index, step in enumerate(steps):
        if index and not step.isdigit():
            return
        yield step


def _span(paths: list[str]) -> str:
    if len(paths) == 1:
        return paths[0]
    return f"{paths[0]}-{paths[-1].rpartition('.')[2]}"
