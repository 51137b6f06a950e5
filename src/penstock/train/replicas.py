"""Several pipelines side by side: which is this process's, and what it has of each batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from penstock.parallel import over_replicas, replicated_mesh
from penstock.train.config import TrainConfig
from penstock.train.plan import ranks_of


class Side:
    """This process's place among the replicas of a run.

    Args:
        config: the settings.
    """

    def __init__(self, config: TrainConfig) -> None:
        self.count, self.index = config.replicas, 0
        self._shard = config.shard
        self._mesh: Any = None
        if self.count > 1:
            device = torch.device(config.device).type
            self._mesh = replicated_mesh(device, self.count, ranks_of(config))
            self.index = self._mesh.get_local_rank("dp")

    @property
    def options(self) -> dict[str, Any]:
        """What a Pipeline is told of the replicas."""
        if self._mesh is None:
            return {}
        return {"mesh": self._mesh, "replicas": self._mesh["dp"], "wrap": self._wrap}

    def _wrap(self, module: nn.Module, stage: int) -> nn.Module:
        return over_replicas(module, self._mesh, shard=self._shard)

    def part(self, batch: Tensor) -> Tensor:
        """The samples of this replica."""
        return batch.tensor_split(self.count)[self.index]
