"""Models that are traced and cut into stages, under torch's names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

# Unlike other pytrees, it includes the types that users register.
from torch.utils import _pytree as pytree

from penstock.errors import UsageError
from penstock.pipelining._utils import PipeInfo
from penstock.pipelining.stage import PipelineStage, build_stage
from penstock.pipelining.traced import (
    SplitPoint,
    TracedStage,
    aten_pipe_split_alias,
    cut_traced,
    pipe_split,
    points_of,
)
from penstock.schedule import Edge

__all__ = ["Pipe", "PipeInfo", "SplitPoint", "aten_pipe_split_alias", "pipe_split", "pipeline"]


class SplitModel(nn.Module):
    """The stages ``submod_pp_0``, ``submod_pp_1``, …, called one after the other."""

    def __init__(self, stages: Sequence[TracedStage], edges: Sequence[Edge] | None) -> None:
        super().__init__()
        self._edges = edges
        for index, module in enumerate(stages):
            self.add_module(f"submod_pp_{index}", module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages; each value goes to the stages that use it."""
        first, *others = self.children()
        output = first(*args, **kwargs)
        values: dict[str, Any] = {}
        for index, stage in enumerate(others, start=1):
            if self._edges is None:
                output = stage(*output) if isinstance(output, tuple) else stage(output)
                continue
            gives = [edge.value for edge in self._edges if edge.source == index - 1]
            values |= {gives[0]: output} if len(gives) == 1 else output if gives else {}
            output = stage(**{e.value: values[e.value] for e in self._edges if index in e.targets})
        return output


class Pipe(nn.Module):
    """A model cut into stages, called with the model's arguments.

    Args:
        stages: the stages.
        info: the number of stages, and what travels between them and is shared.
        name: the model's name.

    Attributes:
        split_gm: the stages as one module, whose output has the same structure as the model's.
        num_stages: the number of stages.
        has_loss_and_backward: always false, since the loss belongs to the schedule.
        replicated_params: for each parameter that several stages use, its name in each, keyed by
            ``submod_pp_<stage>``.
    """

    has_loss_and_backward = False

    def __init__(self, stages: Sequence[TracedStage], info: PipeInfo, name: str) -> None:
        super().__init__()
        self._stages, self._info, self._name = stages, info, name
        self.split_gm = SplitModel(stages, info.edges)
        self.num_stages = info.num_stages
        self.replicated_params = [
            {f"submod_pp_{stage}": path for stage, path in shared.holders}
            for shared in info.shared
            if len(shared.stages) > 1
        ]

    @staticmethod
    def from_tracing(
        mod: nn.Module,
        example_args: tuple[Any, ...],
        example_kwargs: dict[str, Any] | None = None,
        split_policy: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
    ) -> Pipe:
        """Like :func:`pipeline` without ``split_spec``, and without a warning about a single stage."""
        traced = cut_traced(mod, example_args, example_kwargs, {}, split_policy)
        return Pipe(*traced, type(mod).__name__)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Run all stages and return the model's output as a flat tuple.

        ``split_gm`` returns the output in the model's own structure.
        """
        return tuple(pytree.tree_leaves(self.split_gm(*args, **kwargs)))

    def get_stage_module(self, stage_idx: int) -> nn.Module:
        """The module of a stage.

        Raises:
            UsageError: there is no stage of this index.
        """
        if not 0 <= stage_idx < self.num_stages:
            raise UsageError(f"stage {stage_idx} of {self.num_stages}: stages count from 0")
        return self._stages[stage_idx]

    def info(self) -> PipeInfo:
        """Return what :func:`build_stage` needs."""
        return self._info

    def build_stage(
        self, stage_index: int, device: torch.device | str, group: Any = None
    ) -> PipelineStage:
        """Build a stage on a device; see :func:`build_stage`."""
        return build_stage(
            self.get_stage_module(stage_index), stage_index, self.info(), device, group
        )

    def print_readable(self) -> None:
        """Print the code of each stage."""
        for stage in self._stages:
            stage.print_readable()

    def __repr__(self) -> str:
        sizes = [sum(p.numel() for p in stage.parameters()) for stage in self._stages]
        rows = [f"  stage {index}: {size} parameters" for index, size in enumerate(sizes)]
        edges = self._info.edges or ()
        skips = [f"  stage {e.source} gives {e.value} to {list(e.targets)}" for e in edges]
        return "\n".join([f"Pipe of {self._name}, {self.num_stages} stages", *rows, *skips])


def pipeline(
    module: nn.Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: dict[str, Any] | None = None,
    split_spec: Mapping[str, SplitPoint] | None = None,
    split_policy: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
) -> Pipe:
    """Trace a model and cut it into stages.

    The model is cut at each ``pipe_split()`` in its code, and where ``split_spec`` or ``split_policy``
    says. Without any cut it becomes one stage, with a warning.

    Args:
        module: the model, which is not changed.
        mb_args: the positional arguments for one microbatch.
        mb_kwargs: the keyword arguments for one microbatch.
        split_spec: by module path, whether to cut before or after the module. ``{}`` avoids the warning.
        split_policy: takes the traced graph and returns it with calls to :func:`pipe_split` inserted.

    Raises:
        UsageError: both ``split_spec`` and ``split_policy`` are given, or an argument has the wrong type.
        PathError: the model has no module at a path.
        CutError: the model cannot be traced, or cannot be cut as requested.
    """
    if split_spec is not None and split_policy is not None:
        raise UsageError("split_spec and split_policy cannot both be given; use one of them")
    if not isinstance(mb_args, tuple):
        raise UsageError(f"mb_args must be a tuple of arguments, not a {type(mb_args).__name__}")
    points = points_of(module, split_spec or {})
    traced = cut_traced(module, mb_args, mb_kwargs, points, split_policy)
    pipe = Pipe(*traced, type(module).__name__)
    if split_spec is None and pipe.num_stages == 1:
        warnings.warn(
            f"no split point in the {type(module).__name__}: it is one stage. Name modules in split_spec, "
            "such as {'layers.4': SplitPoint.BEGINNING}, call pipe_split() in forward, or give a "
            "split_policy",
            stacklevel=2,
        )
    return pipe
