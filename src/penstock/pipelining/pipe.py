"""A model that was traced and cut into stages."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from penstock.errors import UsageError
from penstock.partition import Partition
from penstock.partition.traced import TracedCut, summary
from penstock.pipelining.stage import PipeInfo, PipelineStage, build_stage


class SplitModel(nn.Module):
    """The stages ``submod_0``, ``submod_1``, …, called one after the other."""

    def __init__(self, cut: TracedCut) -> None:
        super().__init__()
        self._count = len(cut.modules)
        for index, module in enumerate(cut.modules):
            self.add_module(f"submod_{index}", module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages; each value goes to those that use it."""
        values: dict[str, Any] = {}
        for index in range(self._count - 1):
            values.update(self.get_submodule(f"submod_{index}")(values, args, kwargs))
        return self.get_submodule(f"submod_{self._count - 1}")(values, args, kwargs)


class Pipe(nn.Module):
    """A model cut into stages, callable like the model itself.

    Args:
        cut: the traced and cut model.
        name: of the model.

    Attributes:
        split_gm: the stages as one module.
        num_stages: how many there are.
    """

    def __init__(self, cut: TracedCut, name: str) -> None:
        super().__init__()
        self._cut, self._of = cut, name
        self.split_gm = SplitModel(cut)
        self.num_stages = len(cut.modules)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output, computed stage by stage."""
        return self.split_gm(*args, **kwargs)

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
