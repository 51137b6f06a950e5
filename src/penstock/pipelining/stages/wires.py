"""How a stage that is driven by hand reaches the ranks of its neighbours."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import P2POp

from penstock.values import ValueSpec

__all__ = ["P2POp", "Wires", "start", "start_by_peer", "wait_all"]


class Wires:
    """The group of a pipeline as one stage sees it.

    Args:
        group: the process group.
        rank: this process's place there.
        rank_of: the rank of a stage.
        device: where messages lie.
    """

    def __init__(
        self, group: Any, rank: int, rank_of: Callable[[int], int], device: torch.device
    ) -> None:
        self._group, self._rank, self._rank_of, self._device = group, rank, rank_of, device

    def is_here(self, stage: int) -> bool:
        """Whether a stage is in this process."""
        return self._rank_of(stage) == self._rank

    def outgoing(self, tensor: Tensor, stage: int) -> P2POp:
        """A send to the rank of a stage."""
        return P2POp(dist.isend, tensor, group=self._group, group_peer=self._rank_of(stage))

    def incoming(self, buffer: Tensor, stage: int) -> P2POp:
        """A receive from the rank of a stage."""
        return P2POp(dist.irecv, buffer, group=self._group, group_peer=self._rank_of(stage))

    def tell(self, stage: int, spec: ValueSpec) -> None:
        """Tell a stage what it will be sent."""
        text = json.dumps(spec.to_json()).encode()
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._device)
        size = torch.tensor([len(text)], device=self._device)
        for message in (size, data):
            dist.send(message, group=self._group, group_dst=self._rank_of(stage))

    def told(self, stage: int) -> ValueSpec:
        """What a stage tells that it will send."""
        size = torch.zeros(1, dtype=torch.int64, device=self._device)
        dist.recv(size, group=self._group, group_src=self._rank_of(stage))
        data = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        dist.recv(data, group=self._group, group_src=self._rank_of(stage))
        return ValueSpec.from_json(json.loads(bytes(data.tolist()).decode()))


def start(p2p_ops: Sequence[P2POp], desc: str | None = None) -> list[Any]:
    """Start sends and receives; what to wait for."""
    return dist.batch_isend_irecv(list(p2p_ops)) if p2p_ops else []


def start_by_peer(p2p_ops: Sequence[P2POp], desc: str | None = None) -> dict[int, list[Any]]:
    """Start them peer by peer, in the order of the peers; what to wait for, by peer."""
    peers = sorted({operation.peer for operation in p2p_ops})
    return {peer: start([one for one in p2p_ops if one.peer == peer]) for peer in peers}


def wait_all(work: Sequence[Any]) -> None:
    """Wait for communication."""
    for item in work:
        item.wait()
