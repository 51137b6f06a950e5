"""The messages between a pipeline's ranks that weights need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.parallel import whole
from penstock.weights.trees import decode, encode


class Ranks(Protocol):
    """This process, as one of a pipeline's ranks."""

    @property
    def rank(self) -> int:
        """This process's rank; the first one if it holds all."""

    def gather(self, value: Any) -> list[Any]:
        """The JSON values of all processes, by rank; all processes call this."""

    def open(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Prepare :meth:`swap` for pairs of a sending and a receiving rank; all processes call this."""

    def swap(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]]
    ) -> None:
        """Send tensors to ranks, and fill others from ranks; those call this with the same shapes."""


def collect(ranks: Ranks, state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The states of all ranks on rank 0, with whole tensors as copies on the CPU; empty on other ranks."""
    tensors: dict[str, Tensor] = {}
    trees = {name: encode(value, name, tensors) for name, value in state.items()}
    about = [[key, list(one.shape), encode(one.dtype, key, None)] for key, one in tensors.items()]
    replies = ranks.gather([trees, about])
    ranks.open([(other, 0) for other in range(1, len(replies))])
    if ranks.rank:
        for tensor in tensors.values():
            ranks.swap({0: [whole(tensor)]}, {})
        return []
    device = next((one.device for one in tensors.values()), torch.device("cpu"))
    states = []
    for rank, (trees, about) in enumerate(replies):
        arrived = {}
        for key, shape, dtype in about:
            if rank:
                buffer = torch.empty(shape, dtype=decode(dtype), device=device)
                ranks.swap({}, {rank: [buffer]})
                arrived[key] = buffer.cpu()
            else:
                arrived[key] = whole(tensors[key]).cpu().clone()
        states.append({name: decode(tree, arrived.__getitem__) for name, tree in trees.items()})
    return states
