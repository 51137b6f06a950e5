"""The messages between a pipeline's ranks that weights need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock._engine.parallel import whole
from penstock._engine.weights.team import Team
from penstock._engine.weights.trees import decode, encode


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


def collect(
    team: Team, ranks: Ranks, bring: Callable[[], tuple[Any, Mapping[str, Any]]]
) -> tuple[list[Any], list[dict[str, Any]]]:
    """Collect the states of all ranks on rank 0, with whole tensors as copies on the CPU.

    They travel where the ranks are connected already; no channel is opened for them.

    Args:
        team: the ranks of the pipeline.
        ranks: how this process reaches the others.
        bring: returns JSON data about this process's state, and the state.

    Returns:
        The data about all states, and the states, in the order of the ranks; none on other ranks than 0.
    """
    tensors: dict[str, Tensor] = {}
    replies: list[Any] = []

    def tell() -> list[Any]:
        head, state = bring()
        trees = {name: encode(value, name, tensors) for name, value in state.items()}
        about = [[key, list(t.shape), encode(t.dtype, key, None)] for key, t in tensors.items()]
        return [head, trees, about]

    def take(of_all: list[Any]) -> list[None]:
        replies.extend(of_all)
        return [None] * len(of_all)

    team.meet("gather", tell, take)
    if not team.leads:
        for tensor in tensors.values():
            ranks.swap({0: [whole(tensor)]}, {})
        return [], []
    device = next((one.device for one in tensors.values()), torch.device("cpu"))
    states = []
    for rank, (_, trees, about) in enumerate(replies):
        arrived = {}
        for key, shape, dtype in about:
            if rank:
                buffer = torch.empty(shape, dtype=decode(dtype), device=device)
                ranks.swap({}, {rank: [buffer]})
                arrived[key] = buffer.cpu()
            else:
                arrived[key] = whole(tensors[key]).cpu().clone()
        states.append({name: decode(tree, arrived.__getitem__) for name, tree in trees.items()})
    return [head for head, *_ in replies], states
