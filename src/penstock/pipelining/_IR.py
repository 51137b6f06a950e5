"""Models that are traced and cut into stages, under torch's names."""

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
from penstock.pipelining._utils import CutError, PathError, PipeInfo
from penstock.pipelining.stage import PipelineStage, build_stage

# As in ``microbatch``: it knows the types that users register as trees.


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
        """Run all stages; each value goes to the stages that use it."""
        values: dict[str, Any] = {}
        for index in range(self._count - 1):
            values.update(self.get_submodule(get_submod_name(index))(values, args, kwargs))
        return self.get_submodule(get_submod_name(self._count - 1))(values, args, kwargs)


class Pipe(nn.Module):
    """A model cut into stages, called with the model's arguments.

    Args:
        cut: the traced and cut model.
        name: the model's name.

    Attributes:
        split_gm: the stages as one module, whose output has the same structure as the model's.
        num_stages: the number of stages.
        has_loss_and_backward: always false, since the loss belongs to the schedule.
        replicated_params: for each parameter that several stages use, its name in each of them, by
            ``submod_pp_<stage>``.
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
        """Whether several stages use it, and it is a parameter."""
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
        """Trace a model, and cut it at each ``pipe_split()`` in its code or from a policy.

        Args:
            mod: the model, which is not changed.
            example_args: the positional arguments of a call with one microbatch.
            example_kwargs: its arguments by name.
            split_policy: is given the traced graph, and returns it with calls of :func:`pipe_split` put in.

        Raises:
            CutError: the model cannot be traced, or cannot be cut there.
        """
        return _traced(mod, example_args, example_kwargs, Cuts(policy=split_policy))

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The values of the model's output as a flat tuple, computed stage by stage.

        ``split_gm`` gives the output in the model's own structure.
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
    """Trace and cut a model. As in torch, ranks after the first need not be given the batch."""
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

    It is cut at each ``pipe_split()`` in its code, and where ``split_spec`` or ``split_policy`` says. If
    there is no place to cut, it becomes one stage, with a warning.

    Args:
        module: the model, which is not changed.
        mb_args: the positional arguments of a call with one microbatch.
        mb_kwargs: its arguments by name.
        split_spec: by module path, whether to cut before or after the module. ``{}`` means one stage.
        split_policy: is given the traced graph, and returns it with calls of :func:`pipe_split` put in.

    Raises:
        UsageError: both ``split_spec`` and ``split_policy`` are given, or an argument is of another type.
        PathError: there is no module of a path.
        CutError: the model cannot be traced, or cannot be cut there.
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
            "such as {'layers.4': SplitPoint.BEGINNING}, call pipe_split() in forward, or give a "
            "split_policy",
            stacklevel=2,
        )
    return pipe


def annotate_split_points(mod: nn.Module, spec: Mapping[str, SplitPoint]) -> None:
    """Call :func:`pipe_split` before or after the forward of modules.

    Args:
        mod: the model; hooks are added to its modules.
        spec: by module path, whether to cut before or after the module.

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
    # By name, so that torch's own SplitPoint is accepted too.
    name = getattr(where, "name", where)
    if name not in SplitPoint.__members__:
        raise UsageError(
            f"split_spec[{path!r}] is {where!r}: must be SplitPoint.BEGINNING or SplitPoint.END"
        )
    return Point(path, SplitPoint[name])


# ---- what else torch has here


# The call that a split policy puts into a graph, or finds in one.
aten_pipe_split_alias = torch.ops.penstock.split.default


class PipeSplitWrapper:
    """The former home of :class:`SplitPoint`."""

    SplitPoint = SplitPoint


class PipeSequential(nn.Sequential):
    """A sequence of modules with a cut between each two."""

    @staticmethod
    def from_sequential(sequential_instance: nn.Sequential) -> PipeSequential:
        """Make one of the modules of an ``nn.Sequential``."""
        return PipeSequential(*sequential_instance)

    def forward(self, input: Any) -> Any:
        """Call each module with the output of the one before."""
        for place, module in enumerate(self):
            if place:
                pipe_split()
            input = module(input)
        return input


class LossWrapper(nn.Module):
    """A model together with its loss; a subclass writes the ``forward`` that calls both.

    Args:
        module: the model.
        loss_fn: its loss.
    """

    def __init__(self, module: nn.Module, loss_fn: Callable[..., Tensor]) -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """To be written by a subclass.

        Raises:
            NotImplementedError: it was not.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no forward; write one that calls self.module and self.loss_fn"
        )


class TrivialLossWrapper(LossWrapper):
    """A model with one input, whose loss compares its output with targets."""

    loss_spec = True

    def forward(self, x: Any, targets: Any) -> Any:
        """The loss."""
        return self.loss_fn(self.module(x), targets)


class MultiUseParameterConfig(Enum):
    """What becomes of a parameter that several stages use; Penstock always replicates it."""

    TRANSMIT = 1
    REPLICATE = 2
