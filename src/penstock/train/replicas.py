"""Several pipelines side by side: which is this process's, and what it has of each batch."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn

from penstock.parallel import over_replicas, replicated_mesh, text_of_first
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
        self._device = torch.device(config.device).type
        if self.count > 1:
            self._mesh = replicated_mesh(self._device, self.count, ranks_of(config))
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

    def of_first(self, value: dict[str, str]) -> dict[str, str]:
        """What the first replica has; all of them ask at once."""
        if self._mesh is None:
            return value
        text = text_of_first(self._mesh.get_group("dp"), json.dumps(value), self._device)
        found: dict[str, str] = json.loads(text)
        return found
