"""Trace a model and cut it into stages, under torch's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx, nn

from penstock.errors import PartitionError, UsageError
from penstock.partition.traced import Cuts, Point, SplitPoint, cut_traced, pipe_split
from penstock.pipelining.pipe import Pipe

__all__ = ["SplitPoint", "pipe_split", "pipeline"]


def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None = None,
    split_spec: Mapping[str, SplitPoint] | None = None,
    split_policy: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
) -> Pipe:
    """Trace a model and cut it into stages.

    It is cut at each ``pipe_split()`` in its code, and where ``split_spec`` or ``split_policy`` say.

    Args:
        module: the model, which is not changed.
        mb_args: the positional arguments of a call with one microbatch.
        mb_kwargs: its arguments by name.
        split_spec: for a module's path, whether the cut is before or after it. ``{}`` allows one stage.
        split_policy: gets the traced graph and gives it with calls of :func:`pipe_split` put in.

    Raises:
        UsageError: both ``split_spec`` and ``split_policy`` are given, or arguments are not as above.
        PartitionError: the model cannot be traced, or not be cut there, or no cut is asked for.
    """
    if split_spec is not None and split_policy is not None:
        raise UsageError("split_spec and split_policy cannot both be given; use one of them")
    if not isinstance(mb_args, tuple):
        raise UsageError(f"mb_args must be a tuple of arguments, not a {type(mb_args).__name__}")
    points = tuple(_point(path, where) for path, where in (split_spec or {}).items())
    cuts = Cuts(points, policy=split_policy, arguments_travel=True)
    cut = cut_traced(module, mb_args, mb_kwargs, cuts)
    if split_spec is None and not cut.traces.layout.marks:
        raise PartitionError(
            f"no split point in the {type(module).__name__}; name modules in split_spec, such as "
            "{'layers.4': SplitPoint.BEGINNING}, put pipe_split() into forward, or give a split_policy"
        )
    return Pipe(cut, type(module).__name__)


def _point(path: str, where: Any) -> Point:
    # By name, so that torch's own SplitPoint is understood too.
    name = getattr(where, "name", where)
    if name not in SplitPoint.__members__:
        raise UsageError(
            f"split_spec[{path!r}] is {where!r}: must be SplitPoint.BEGINNING or SplitPoint.END"
        )
    return Point(path, SplitPoint[name])
