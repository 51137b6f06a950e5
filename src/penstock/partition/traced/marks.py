"""Marks in a model's code and around its modules, which survive tracing as nodes of the graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from typing import Any

import torch
from torch import fx, nn

from penstock.errors import PartitionError

torch.library.define("penstock::split", "(str tag) -> ()")


@torch.library.impl("penstock::split", "CompositeExplicitAutograd")
def _do_nothing(tag: str) -> None:
    del tag  # Only the node in the graph matters.


IN_CODE = "pipe_split()"


def pipe_split() -> None:
    """Mark the border between two stages in the code of a model's forward.

    Run as usual, it does nothing.
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
        """Whether a point that was met while tracing is meant."""
        same = self.path == met.path and self.where is met.where
        return same and self.call in (None, met.call)


def check_points(model: nn.Module, points: Iterable[Point]) -> None:
    """Check that each point is at a module of the model.

    Raises:
        PartitionError: an unknown path; the message names the nearest ones.
    """
    known = [path for path, _ in model.named_modules(remove_duplicate=False) if path]
    for point in points:
        if point.path not in known:
            near = get_close_matches(point.path, known, 3) or known[:3]
            raise PartitionError(
                f"no module {point.path!r} in the {type(model).__name__}; "
                f"the nearest are {', '.join(map(repr, near))}"
            )


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
    """The point of a mark around a module, the text of one in the code, or ``None``."""
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
