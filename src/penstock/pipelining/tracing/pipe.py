"""A model that was traced and cut into stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

# What a model gives may hold types that only users' registrations know, as in ``microbatch``.
from torch.utils import _pytree as pytree

from penstock.errors import PartitionError, UsageError
from penstock.partition import Partition, Shared
from penstock.partition.traced import Cuts, TracedCut, cut_traced, summary
from penstock.pipelining._utils import PipeInfo
from penstock.pipelining.refusals import CutError
from penstock.pipelining.stage import PipelineStage, build_stage

SUBMODULE = "submod_pp"


def submodule_name(stage_idx: int) -> str:
    """The name of a stage's module in a pipe."""
    return f"{SUBMODULE}_{stage_idx}"


class SplitModel(nn.Module):
    """The stages ``submod_pp_0``, ``submod_pp_1``, …, called one after the other."""

    def __init__(self, cut: TracedCut) -> None:
        super().__init__()
        self._count = len(cut.modules)
        for index, module in enumerate(cut.modules):
            self.add_module(submodule_name(index), module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages; each value goes to those that use it."""
        values: dict[str, Any] = {}
        for index in range(self._count - 1):
            values.update(self.get_submodule(submodule_name(index))(values, args, kwargs))
        return self.get_submodule(submodule_name(self._count - 1))(values, args, kwargs)


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
        return {submodule_name(stage): name for stage, name in shared.holders}

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
        return trace(mod, example_args, example_kwargs, Cuts(policy=split_policy))

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


def trace(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None, cuts: Cuts
) -> Pipe:
    """Trace a model and cut it.

    Args:
        model: the model, which is not changed.
        args: the positional arguments of a call with one microbatch.
        kwargs: its arguments by name.
        cuts: where.

    Raises:
        CutError: the model cannot be traced, or not be cut there.
    """
    cuts = replace(cuts, arguments_travel=True)
    try:
        return Pipe(cut_traced(model, args, kwargs, cuts), type(model).__name__)
    except PartitionError as error:
        raise CutError(str(error)) from error
