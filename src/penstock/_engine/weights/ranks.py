"""The states of all ranks, collected on the first one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from penstock._engine.parallel import whole
from penstock._engine.transport import Job
from penstock._engine.weights.trees import decode, encode


def collect(
    job: Job, bring: Callable[[], tuple[Any, Mapping[str, Any]]]
) -> tuple[list[Any], list[dict[str, Any]]]:
    """Collect the states of all ranks on rank 0, with whole tensors as copies on the CPU.

    They travel where the ranks are connected already; no channel is opened for them.

    Args:
        job: the ranks of the pipeline.
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

    job.meet(tell, replies.extend, "gather", among=job.pipeline)
    if job.rank:
        for tensor in tensors.values():
            job.swap({0: [whole(tensor)]}, {})
        return [], []
    device = next((one.device for one in tensors.values()), torch.device("cpu"))
    states = []
    for rank, (_, trees, about) in enumerate(replies):
        arrived = {}
        for key, shape, dtype in about:
            if rank:
                buffer = torch.empty(shape, dtype=decode(dtype), device=device)
                job.swap({}, {rank: [buffer]})
                arrived[key] = buffer.cpu()
            else:
                arrived[key] = whole(tensors[key]).cpu().clone()
        states.append({n: decode(tree, arrived.__getitem__, n) for n, tree in trees.items()})
    return [head for head, *_ in replies], states
