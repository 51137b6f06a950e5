"""What weights need of the ranks of a pipeline, and nothing else of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.errors import AgreementError
from penstock.parallel import whole


class Ranks(Protocol):
    """This process's place among the ranks of a pipeline."""

    @property
    def rank(self) -> int:
        """The rank that this process is; the first of them if it is all."""

    def gather(self, value: Any) -> list[Any]:
        """The JSON values of all processes, by rank; all of them call this."""

    def open(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Prepare :meth:`swap` from one rank to another, for some pairs; all processes call this."""

    def swap(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]]
    ) -> None:
        """Send tensors to ranks and fill others with what these send; they call this with the same shapes."""


def exchange(ranks: Ranks, value: Any) -> list[Any]:
    """The JSON values of all processes of a pipeline, by rank; all of them call this."""
    return ranks.gather(value)


def check_same(ranks: Ranks, value: Any, what: str) -> None:
    """Check that all processes have the same JSON value.

    Raises:
        AgreementError: they have not.
    """
    values = exchange(ranks, value)
    if any(one != values[0] for one in values):
        raise AgreementError(f"ranks were given different {what}, by rank: {values}")


def collect(ranks: Ranks, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of all ranks by name on rank 0, whole, as copies on the CPU; nothing on other ranks."""
    described = exchange(
        ranks,
        [
            [name, list(of.shape), str(of.dtype).removeprefix("torch.")]
            for name, of in tensors.items()
        ],
    )
    ranks.open([(other, 0) for other in range(1, len(described))])
    wholes = ((name, whole(tensor)) for name, tensor in tensors.items())
    if ranks.rank:
        for _, tensor in wholes:
            ranks.swap({0: [tensor]}, {})
        return {}
    collected = {name: tensor.cpu().clone() for name, tensor in wholes}
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    for other, of_other in list(enumerate(described))[1:]:
        for name, shape, dtype in of_other:
            buffer = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            ranks.swap({}, {other: [buffer]})
            collected[name] = buffer.cpu()
    return collected
