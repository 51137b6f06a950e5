"""A model that is traced and cut into stages, under the names that torch has for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from penstock.errors import PartitionError, UsageError
from penstock.partition import Partition, Shared
from penstock.partition.base import check_paths
from penstock.partition.traced import (
    Cuts,
    Point,
    SplitPoint,
    TracedCut,
    cut_traced,
    pipe_split,
    summary,
)
from penstock.pipelining._utils import PipeInfo
from penstock.pipelining.refusals import CutError, PathError
from penstock.pipelining.stage import PipelineStage, build_stage

# What a model gives may hold types that only users' registrations know, as in ``microbatch``.


__all__ = [
    "PP_SUBMOD_PREFIX",
    "LossWrapper",
    "MultiUseParameterConfig",
    "Pipe",
    "PipeInfo",
    "PipeSequential",
    "PipeSplitWrapper",
    "SplitPoint",
    "TrivialLossWrapper",
    "annotate_split_points",
    "aten_pipe_split_alias",
    "get_submod_name",
    "pipe_split",
    "pipeline",
]

PP_SUBMOD_PREFIX = "submod_pp"


def get_submod_name(stage_idx: int) -> str:
    """The name of a stage's module in a pipe."""
    return f"{PP_SUBMOD_PREFIX}_{stage_idx}"


class SplitModel(nn.Module):
    """The stages ``submod_pp_0``, ``submod_pp_1``, …, called one after the other."""

    def __init__(self, cut: TracedCut) -> None:
        super().__init__()
        self._count = len(cut.modules)
        for index, module in enumerate(cut.modules):
            self.add_module(get_submod_name(index), module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages; each value goes to those that use it."""
        values: dict[str, Any] = {}
        for index in range(self._count - 1):
            values.update(self.get_submodule(get_submod_name(index))(values, args, kwargs))
        return self.get_submodule(get_submod_name(self._count - 1))(values, args, kwargs)


class Pipe(nn.Module):
    """A model cut into stages, called with the model's arguments.

    Args:
        cut: the traced and cut model.
        name: of the model.

    Attributes:
        split_gm: the stages as one module, whose output has the model's form.
        num_stages: how many there are.
        has_loss_and_backward: always false: the loss belongs to the schedule.
        replicated_params: for each parameter of several stages its names there, by ``submod_pp_<stage>``.
    """

    has_loss_and_backward = False

    def __init__(self, cut: TracedCut, name: str) -> None:
        super().__init__()
        self._cut, self._of = cut, name
        self.split_gm = SplitModel(cut)
        self.num_stages = len(cut.modules)
        self.replicated_params = [
            self._named(of) for of in self.partition.shared if self._spans(of)
        ]

    def _spans(self, shared: Shared) -> bool:
        """Whether it is a parameter of several stages."""
        stage, name = shared.holders[0]
        parameters = dict(self._cut.modules[stage].named_parameters(remove_duplicate=False))
        return len(shared.stages) > 1 and name in parameters

    @staticmethod
    def _named(shared: Shared) -> dict[str, str]:
        return {get_submod_name(stage): name for stage, name in shared.holders}

    @staticmethod
    def from_tracing(
        mod: nn.Module,
        example_args: tuple[Any, ...],
        example_kwargs: dict[str, Any] | None = None,
        split_policy: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
    ) -> Pipe:
        """Trace a model and cut it at each ``pipe_split()`` in its code, or where a policy puts one.

        Args:
            mod: the model, which is not changed.
            example_args: the positional arguments of a call with one microbatch.
            example_kwargs: its arguments by name.
            split_policy: gets the traced graph and gives it with calls of :func:`pipe_split` put in.

        Raises:
            CutError: the model cannot be traced, or not be cut there.
        """
        return _traced(mod, example_args, example_kwargs, Cuts(policy=split_policy))

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The values of the model's output in a flat tuple, computed stage by stage.

        ``split_gm`` gives the output in the model's own form.
        """
        return tuple(pytree.tree_leaves(self.split_gm(*args, **kwargs)))

    @property
    def partition(self) -> Partition:
        """The stages and the values between them, for ``penstock.Pipeline(stages=...)``."""
        return self._cut.partition

    def get_stage_module(self, stage_idx: int) -> nn.Module:
        """The module of a stage.

        Raises:
            UsageError: there is no such stage.
        """
        if not 0 <= stage_idx < self.num_stages:
            raise UsageError(f"stage {stage_idx} of {self.num_stages}: stages count from 0")
        return self._cut.modules[stage_idx]

    def info(self) -> PipeInfo:
        """What :func:`build_stage` needs to know."""
        graph = self._cut.traces.first.exported.graph
        return PipeInfo(graph, self.num_stages, shared=self.partition.shared)

    def build_stage(
        self, stage_index: int, device: torch.device | str, group: Any = None
    ) -> PipelineStage:
        """A stage on a device, see :func:`build_stage`."""
        return build_stage(
            self.get_stage_module(stage_index), stage_index, self.info(), device, group
        )

    def print_readable(self) -> None:
        """Print the code of each stage."""
        for module in self._cut.modules:
            module.graph_module.print_readable()

    def __repr__(self) -> str:
        return f"Pipe of {self._of}, {self.num_stages} stages\n{summary(self._cut)}"


def _traced(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None, cuts: Cuts
) -> Pipe:
    """The pipe of a model; as in torch, ranks after the first need not be given the batch."""
    try:
        cut = cut_traced(model, args, kwargs, replace(cuts, arguments_travel=True))
    except PartitionError as error:
        raise CutError(str(error)) from error
    return Pipe(cut, type(model).__name__)


# ---- where to cut


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
    pipe = _traced(module, mb_args, mb_kwargs, Cuts(points, policy=split_policy))
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
        check_paths(model, spec)
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


# ---- what else torch has here


# What a split policy puts into a graph, or finds in one.
aten_pipe_split_alias = torch.ops.penstock.split.default


class PipeSplitWrapper:
    """Where :class:`SplitPoint` was once."""

    SplitPoint = SplitPoint


class PipeSequential(nn.Sequential):
    """Modules one after the other, with a cut between each two of them."""

    @staticmethod
    def from_sequential(sequential_instance: nn.Sequential) -> PipeSequential:
        """The modules of a sequence, with their parameters."""
        return PipeSequential(*sequential_instance)

    def forward(self, input: Any) -> Any:
        """Call each module with what the one before gave."""
        for place, module in enumerate(self):
            if place:
                pipe_split()
            input = module(input)
        return input


class LossWrapper(nn.Module):
    """A model together with its loss; a subclass says in ``forward`` what is given to which.

    Args:
        module: the model.
        loss_fn: its loss.
    """

    def __init__(self, module: nn.Module, loss_fn: Callable[..., Tensor]) -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What a subclass says.

        Raises:
            NotImplementedError: it says nothing.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no forward; write one that calls self.module and self.loss_fn"
        )


class TrivialLossWrapper(LossWrapper):
    """A model of one input, whose loss compares its output with targets."""

    loss_spec = True

    def forward(self, x: Any, targets: Any) -> Any:
        """The loss."""
        return self.loss_fn(self.module(x), targets)


class MultiUseParameterConfig(Enum):
    """What becomes of a parameter that several stages use; Penstock always does the second."""

    TRANSMIT = 1
    REPLICATE = 2
