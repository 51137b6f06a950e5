"""Trace a model and cut it into stages, under torch's names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx, nn

from penstock.errors import PartitionError, UsageError
from penstock.partition.traced import Cuts, Point, SplitPoint, pipe_split
from penstock.partition.traced.layout import check_points
from penstock.pipelining.refusals import PathError
from penstock.pipelining.tracing.pipe import Pipe, trace

__all__ = ["SplitPoint", "annotate_split_points", "pipe_split", "pipeline"]


def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None = None,
    split_spec: Mapping[str, SplitPoint] | None = None,
    split_policy: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
) -> Pipe:
    """Trace a model and cut it into stages.

    It is cut at each ``pipe_split()`` in its code, and where ``split_spec`` or ``split_policy`` say. Where
    none of these says a place, it is one stage, with a warning.

    Args:
        module: the model, which is not changed.
        mb_args: the positional arguments of a call with one microbatch.
        mb_kwargs: its arguments by name.
        split_spec: for a module's path, whether the cut is before or after it. ``{}`` means one stage.
        split_policy: gets the traced graph and gives it with calls of :func:`pipe_split` put in.

    Raises:
        UsageError: both ``split_spec`` and ``split_policy`` are given, or arguments are not as above.
        PathError: there is no module of a path.
        CutError: the model cannot be traced, or not be cut there.
    """
    if split_spec is not None and split_policy is not None:
        raise UsageError("split_spec and split_policy cannot both be given; use one of them")
    if not isinstance(mb_args, tuple):
        raise UsageError(f"mb_args must be a tuple of arguments, not a {type(mb_args).__name__}")
    points = points_of(module, split_spec or {})
    pipe = trace(module, mb_args, mb_kwargs, Cuts(points, policy=split_policy))
    if split_spec is None and pipe.num_stages == 1:
        warnings.warn(
            f"no split point in the {type(module).__name__}: it is one stage. Name modules in split_spec, "
            "such as {'layers.4': SplitPoint.BEGINNING}, put pipe_split() into forward, or give a "
            "split_policy",
            stacklevel=2,
        )
    return pipe


def annotate_split_points(mod: nn.Module, spec: Mapping[str, SplitPoint]) -> None:
    """Put a :func:`pipe_split` before or after modules' forwards.

    Args:
        mod: the model; its modules get hooks.
        spec: for a module's path, whether the cut is before or after it.

    Raises:
        PathError: there is no module of that path.
        UsageError: something else than a :class:`SplitPoint`.
    """
    for point in points_of(mod, spec):
        module = mod.get_submodule(point.path)
        if point.where is SplitPoint.BEGINNING:
            module.register_forward_pre_hook(_split_here, prepend=True)
        else:
            module.register_forward_hook(_split_here)


def _split_here(*_: Any) -> None:
    pipe_split()


def points_of(model: nn.Module, spec: Mapping[str, SplitPoint]) -> tuple[Point, ...]:
    """The places that a split spec names.

    Raises:
        PathError: there is no module of that path.
        UsageError: something else than a :class:`SplitPoint`.
    """
    points = tuple(_point(path, where) for path, where in spec.items())
    try:
        check_points(model, points)
    except PartitionError as error:
        raise PathError(str(error)) from error
    return points


def _point(path: str, where: Any) -> Point:
    # By name, so that torch's own SplitPoint is understood too.
    name = getattr(where, "name", where)
    if name not in SplitPoint.__members__:
        raise UsageError(
            f"split_spec[{path!r}] is {where!r}: must be SplitPoint.BEGINNING or SplitPoint.END"
        )
    return Point(path, SplitPoint[name])
