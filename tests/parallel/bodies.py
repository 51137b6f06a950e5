"""What tests of wrapped stages share: a small model and its batch, meshes, wrappers, and comparisons."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.testing import Case

X = torch.linspace(-1, 1, 16 * 3 * 4, dtype=torch.float64).reshape(16, 3, 4)
Y = X.flip(0)


class Collectives(TorchDispatchMode):
    """Counts what goes to process groups."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "c10d" in name:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, hidden: Tensor) -> Any:
        return hidden + self.down(torch.tanh(self.up(hidden)))


def chain(count: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Mlp() for _ in range(count)]).double()


def mesh_of(*names: str) -> DeviceMesh:
    """Two processes along each dimension."""
    return init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)


def half_of(mesh: DeviceMesh, samples: int = 16) -> slice:
    """The samples of this process's replica."""
    replica = mesh.get_local_rank("dp")
    return slice(replica * samples // 2, (replica + 1) * samples // 2)


def wrap(module: Any, how: str, mesh: DeviceMesh) -> Any:
    """As a user would write it; some give the module back and some do not."""
    blocks = [part for part in module.modules() if isinstance(part, Mlp)]
    if how in ("ddp", "ddp in buckets"):
        options: dict[str, Any] = {"bucket_cap_mb": 0.0001} if how == "ddp in buckets" else {}
        return DistributedDataParallel(module, process_group=mesh.get_group("dp"), **options)
    if how in ("tp", "tp and fsdp"):
        for block in blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
        return None if how == "tp" else fully_shard(module, mesh=mesh["dp"])
    if how == "mixed":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        return fully_shard(module, mesh=mesh["dp"], mp_policy=policy)
    for block in blocks if how == "blocks" else ():
        fully_shard(block, mesh=mesh["dp"])
    if how == "nameless fsdp":
        return fully_shard(module, mesh=DeviceMesh.from_group(mesh.get_group("dp"), "cpu"))
    return fully_shard(module, mesh=mesh["dp"])


def halves_of(case: Case, x: Tensor = X, y: Tensor = Y) -> list[Case]:
    """What each of two replicas has of a case."""
    parts = zip(x.chunk(2), y.chunk(2), strict=True)
    return [dataclasses.replace(case, args=(a,), target=b) for a, b in parts]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Each for itself, where only some weights are spread: torch's kernels for many take no mixture."""
    return torch.optim.AdamW([{"params": [p]} for p in parameters], lr=0.01)


def gap_of(parameters: Iterable[tuple[str, nn.Parameter]], whole: nn.Module) -> float:
    """How far gradients are from those of the same name."""
    pairs: list[Any] = [(p.grad, whole.get_parameter(name).grad) for name, p in parameters]
    parts = [(a.full_tensor() if isinstance(a, DTensor) else a, b) for a, b in pairs]
    return max(float((a - b).abs().max()) for a, b in parts)
